"""What every test shares: no network, Triton's interpreter where there is no GPU, and the real command line."""

import csv
import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

# Read when a library is first imported, so before anything else.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, and one thread keeps sums in order
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

import pytest
import torch

from tests import warm
from training.command_line import launch
from training.config import Config, DataConfig

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import hasten

    hasten()

ROOT = Path(__file__).parents[1]
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="runs Triton's interpreter")
SERVERS = pytest.StashKey[warm.Servers]()


def pytest_configure(config: pytest.Config) -> None:
    """Have this process's children forked from servers that all workers share. A GPU allows no fork."""
    if torch.cuda.is_available() or sys.platform != "linux" or "COLD" in os.environ:
        return
    if warm.SERVERS not in os.environ:
        os.environ[warm.SERVERS] = config.stash.setdefault(SERVERS, warm.Servers()).folder
    warm.install(os.environ[warm.SERVERS])


def pytest_unconfigure(config: pytest.Config) -> None:
    if SERVERS in config.stash:
        config.stash[SERVERS].end()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU its tests are left out, not skipped one by one: they are 600. And of `one_in(n)` most are slow.

    With one, `-m gpu` takes also those that use it where it is there, of modules with a DEVICE.
    """
    if torch.cuda.is_available():
        for item in items:
            if getattr(item.module, "DEVICE", "cpu") == "cuda":
                item.add_marker("gpu")
    else:
        on_gpu = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=on_gpu)
        cases = Counter()
        for item in items:
            part = item.get_closest_marker("one_in")
            if part and not item.get_closest_marker("slow"):
                test = item.nodeid.partition("[")[0]
                if cases[test] % part.args[0]:
                    item.add_marker("slow")
                cases[test] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What this run left out."""
    if not torch.cuda.is_available():
        terminalreporter.write_line("No CUDA device: tests marked gpu were left out.")
    if config.option.markexpr == "not slow":
        terminalreporter.write_line('Tests marked slow were left out; pytest -m "" runs them too.')


def pytest_collection_finish() -> None:
    """Exempt everything imported by now from garbage collection: memory tests collect first, and each took 0.2 s."""
    gc.freeze()


@pytest.fixture(autouse=True)
def free_gpu_memory() -> Iterator[None]:
    """Workers share a GPU, and PyTorch keeps for one what its tests have freed: of seven, 10 GB and more each."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def environment_is_restored() -> Iterator[None]:
    """reproduce and benchmarks with `--device cpu` ask for Triton's interpreter by a variable, which would reach the
    GPU tests that follow."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little English-like text of 60 documents, one a paragraph."""
    words = "the quick brown fox jumps over a lazy dog while seven wizards box quite happily".split()  # noqa: SIM905
    paragraphs = [" ".join(words[(i * j) % len(words)] for j in range(1, 60)) for i in range(1, 61)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(paragraphs))
    return path


@pytest.fixture(scope="session")
def short_text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 24 bytes, for runs in the interpreter: to evaluate one of `text_file` took half of it."""
    path = tmp_path_factory.mktemp("short") / "text.txt"
    path.write_text("\n\n".join(f"{i * i} wizards, {i * 7919} quips" for i in range(1, 61)))
    return path


def text_data(text_file: Path) -> DataConfig:
    """Settings that read this text, with the prepared corpus in a folder beside it."""
    return DataConfig(
        source="text_files",
        files=str(text_file),
        separator="\n\n",
        cache_dir=str(text_file.parent / "cache"),
        val_fraction=0.1,
        workers=1,
    )


@pytest.fixture(scope="session")
def tiny(text_file: Path) -> list[str]:
    """Overrides for a run of seconds: a model of one layer on `text_file`."""
    return [
        *("model.seq_len=32", "model.n_layer=1", "model.n_head=2", "model.n_embd=32"),
        *("data=text_files", f"data.files={text_file}", r"data.separator='\n\n'", "data.val_fraction=0.1"),
        *(f"data.cache_dir={text_file.parent / 'cache'}", "data.workers=1"),
        *("trainer.batch_tokens=256", "trainer.steps=12", "trainer.log_every=1"),
        *("trainer.eval_every=0", "trainer.sample_tokens=10", "logger=none"),
    ]


def rows(run: Path) -> list[dict[str, str]]:
    """The rows of a run's metrics.csv."""
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def measured(run: Path, column: str) -> dict[int, float]:
    """Step -> the number in `column`, for the rows that have one."""
    return {int(row["step"]): float(row[column]) for row in rows(run) if row[column]}


def losses(run: Path) -> list[float]:
    return list(measured(run, "train/loss").values())


CommandLine = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def user_environment() -> dict[str, str]:
    """Environment variables as in a user's shell: without the interpreter that the tests switch on, an API key, or
    what wandb left in an earlier test of this process (a child would talk to that test's service)."""
    ours = ("TRITON_INTERPRET", "WANDB_API_KEY", "WANDB_SERVICE", "_WANDB", "PYTEST_")
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)}


@pytest.fixture
def command_line(tmp_path: Path, user_environment: dict[str, str]) -> CommandLine:
    """Run `python SCRIPT args...` in an empty directory, as a user would; `env` adds variables."""

    def run(script: str, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, str(ROOT / script), *args],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=tmp_path,
            env=user_environment | (env or {}),
        )

    return run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int | str | None]:
    """Like `command_line`, but in this process: launch a task in an empty directory, and return what the process
    would exit with, a status or an error message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def started(task: Callable[[Config, Path], object], *arguments: str) -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        try:
            launch(task, makes_run=True)
        except SystemExit as end:
            return end.code
        return 0

    return started
