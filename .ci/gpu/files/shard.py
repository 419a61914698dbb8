"""A pytest plugin: part $SHARD (such as 3/8) of the chosen tests, in blocks: neighbours share kernels to compile."""

import os

import pytest

BLOCK = 8


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    part, parts = map(int, os.environ["SHARD"].split("/"))
    items[:] = [item for at, item in enumerate(items) if at // BLOCK % parts == part - 1]
    # Whole runs take longest. At the end, where the order of files has them, most workers would wait for a few.
    items.sort(key=lambda item: not {"training", "reproduce"} & set(item.path.parts))
