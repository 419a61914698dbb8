"""Jobs of the experiments start as forks of one process that has imported torch, in place of 2 s of imports each."""

import multiprocessing
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from reproduce import fleet


@pytest.fixture(scope="session", autouse=True)
def jobs_are_forks() -> Iterator[None]:
    """Not with a GPU, which allows no fork, and of which each job sees its own."""
    if torch.cuda.is_available():
        yield
        return
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["torch._dynamo", "training.trainer", "tests.reproduce.hastened"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "multiprocessing", SimpleNamespace(get_context=lambda method: forking))
        yield
