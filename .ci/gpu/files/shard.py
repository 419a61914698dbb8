"""A pytest plugin: part $SHARD (such as 3/8) of the chosen tests, in blocks: neighbours share kernels to compile.

What fails is written at once to $JOB_OUT/failed.3.txt: a run that is cut may end without its summary. Memory that a
test has freed goes back to the GPU, which a dozen workers share.
"""

import os
from pathlib import Path

import pytest
import torch

BLOCK = 8


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    part, parts = map(int, os.environ["SHARD"].split("/"))
    items[:] = [item for at, item in enumerate(items) if at // BLOCK % parts == part - 1]
    # Whole runs take longest. At the end, where the order of files has them, most workers would wait for a few.
    items.sort(key=lambda item: not {"training", "reproduce"} & set(item.path.parts))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    torch.cuda.empty_cache()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        part, _, _ = os.environ["SHARD"].partition("/")
        with Path(os.environ["JOB_OUT"], f"failed.{part}.txt").open("a") as file:
            file.write(f"{report.nodeid}\n{report.longreprtext}\n\n")
