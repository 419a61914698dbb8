"""Preparation killed with SIGKILL, run twice at once, on a full disk: a corpus is complete or not used (15 s)."""

import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

# prepare(); optionally SIGKILL itself at the n-th report of a stage, or limit the size of the files it may write.
SCRIPT = """
import json, os, resource, signal, sys, time
import data.prepare
from data import DataError
from data.corpora import make_corpus

settings = json.loads(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where whoever runs the tests ignores it
data.prepare.SHARD_BYTES = data.prepare.WORTH_A_PROCESS = 1 << 14

class Progress:
    def __init__(self):
        self.reports = {}

    def say(self, text):
        print(text, flush=True)

    def advance(self, stage, done, total):
        self.reports[stage] = self.reports.get(stage, 0) + 1
        print(stage, flush=True)
        time.sleep(settings.get("delay", 0))
        if [stage, self.reports[stage]] == settings.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)

if "file_bytes" in settings:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (settings["file_bytes"], settings["file_bytes"]))
if "user" in settings:
    os.setuid(settings["user"])
try:
    source = make_corpus("text_files", files=settings["files"])
    corpus = data.prepare.prepare(
        source, "bytes", settings["cache"], val_fraction=0.05, workers=settings["workers"], progress=Progress()
    )
    print(corpus.directory)
except DataError as error:
    sys.exit(str(error))
"""


@pytest.fixture(scope="module")
def undisturbed(parquet: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    cache = tmp_path_factory.mktemp("undisturbed")
    assert run(parquet, cache).returncode == 0
    return content(cache)


def start(parquet: Path, cache: Path, workers: int = 1, **settings) -> subprocess.Popen:
    arguments = json.dumps({"files": str(parquet), "cache": str(cache), "workers": workers, **settings})
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def read_until(process: subprocess.Popen, said: str) -> None:
    """Read what it prints up to a line that contains `said`."""
    while said not in (line := process.stdout.readline()):
        assert line, process.stderr.read()


def run(parquet: Path, cache: Path, workers: int = 1, **settings) -> subprocess.CompletedProcess:
    process = start(parquet, cache, workers, **settings)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def content(cache: Path) -> dict[str, bytes]:
    """The whole corpus folder, which must hold nothing but the manifest and the shards."""
    (folder,) = cache.iterdir()
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def manifests(cache: Path) -> list[Path]:
    return list(cache.glob("*/manifest.json"))


def children(process: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("stage", "report", "workers"),
    [("tokenising", 1, 1), ("tokenising", 9, 1), ("tokenising", 9, 2), ("splitting", 1, 1), ("splitting", 9, 1),
     ("splitting", 21, 2)],
)  # fmt: skip
def test_preparation_killed_at_any_stage_resumes_to_identical_bytes(
    stage, report, workers, parquet, tmp_path, undisturbed
):
    killed = run(parquet, tmp_path, workers, kill=[stage, report])
    assert killed.returncode == -signal.SIGKILL
    assert not manifests(tmp_path)
    resumed = run(parquet, tmp_path, workers=1)
    assert resumed.returncode == 0, resumed.stderr
    if stage == "tokenising":  # one report at the start and one for each unit that is done
        units = sum(name.startswith("train") for name in undisturbed)
        assert resumed.stdout.split().count(stage) <= 1 + units - (report - 1)
    assert content(tmp_path) == undisturbed


def test_files_truncated_by_a_power_cut_are_rebuilt(
    parquet: Path, tmp_path: Path, undisturbed: dict[str, bytes]
):
    run(parquet, tmp_path, kill=["splitting", 9])
    (folder,) = tmp_path.iterdir()
    for short in ("train-00002.bin", "partial/00015.tokens", "partial/00016.tokens.json"):
        os.truncate(folder / short, 0)
    resumed = run(parquet, tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert content(tmp_path) == undisturbed


@pytest.mark.slow
def test_repeated_random_kills_still_end_in_identical_bytes(
    parquet: Path, tmp_path: Path, undisturbed: dict[str, bytes]
):
    moments = random.Random(0)
    kills = 0
    while True:
        process = start(parquet, tmp_path, delay=0.02)
        process.stdout.readline()  # preparation has begun; Python's start-up time does not count
        try:
            process.communicate(timeout=moments.uniform(0, 0.3) * (1 + kills / 10))
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
    assert kills > 1, "nothing was disturbed"
    assert process.returncode == 0
    assert content(tmp_path) == undisturbed


def test_workers_end_with_a_killed_parent(parquet: Path, tmp_path: Path):
    process = start(parquet, tmp_path, workers=2, delay=0.2)
    read_until(process, "tokenising")
    while len(workers := children(process)) < 2:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def large_units(tmp_path: Path) -> Path:
    """Three compressed files, each of which is one unit and seconds of work."""
    line = json.dumps({"text": "a document of some length " * 100}).encode() + b"\n"
    (tmp_path / "large").mkdir()
    for name in "abc":
        (tmp_path / "large" / f"{name}.jsonl.gz").write_bytes(gzip.compress(line * 40_000, 1))
    return tmp_path / "large"


def wait_for_half_written(cache: Path, count: int) -> None:
    while len(list(cache.glob("*/partial/*.tokens.*.tmp"))) < count:
        time.sleep(0.01)


@pytest.mark.slow
def test_resuming_removes_half_written_temporary_files(large_units: Path, tmp_path: Path):
    process = start(large_units, tmp_path / "cache")
    wait_for_half_written(tmp_path / "cache", 1)
    process.kill()
    process.communicate()
    assert list(tmp_path.rglob("*.tmp"))
    run(large_units, tmp_path / "cache", kill=["tokenising", 1])
    assert not list(tmp_path.rglob("*.tmp"))


def test_ctrl_c_ends_workers_in_the_middle_of_a_unit(large_units: Path, tmp_path: Path):
    process = start(large_units, tmp_path / "cache", workers=2)
    wait_for_half_written(tmp_path / "cache", 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1, err  # that of the script itself
    assert not list(tmp_path.rglob("*.tokens*"))


@pytest.mark.slow
def test_ctrl_c_while_workers_start_prints_no_traceback_of_a_worker(large_units: Path, tmp_path: Path):
    """A terminal sends the signal to all processes."""
    process = start(large_units, tmp_path / "cache", workers=4)
    while len(children(process)) < 4:
        time.sleep(0.01)
    time.sleep(0.05)  # they import what they need
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1, err  # that of the script itself


def test_a_killed_worker_is_an_error_and_not_a_hang(
    parquet: Path, tmp_path: Path, undisturbed: dict[str, bytes]
):
    process = start(parquet, tmp_path, workers=2, delay=0.2)
    for _ in range(3):
        read_until(process, "tokenising")
    for pid in children(process):
        with contextlib.suppress(ProcessLookupError):  # it may have ended the other workers for the first one
            os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "data.workers=1" in err
    assert not manifests(tmp_path)
    assert run(parquet, tmp_path).returncode == 0
    assert content(tmp_path) == undisturbed


@pytest.mark.slow
def test_of_two_simultaneous_preparations_one_works_and_one_waits(
    parquet: Path, tmp_path: Path, undisturbed: dict[str, bytes]
):
    first = start(parquet, tmp_path, delay=0.05)
    read_until(first, "tokenising")
    first.send_signal(signal.SIGSTOP)  # however long the second takes to start
    second = start(parquet, tmp_path)
    read_until(second, "waiting")
    first.send_signal(signal.SIGCONT)
    first.communicate(timeout=30)
    said, _ = second.communicate(timeout=30)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "tokenising" not in said
    assert content(tmp_path) == undisturbed


def test_a_full_disk_is_a_one_line_error_and_a_later_run_succeeds(
    parquet: Path, tmp_path: Path, undisturbed: dict[str, bytes]
):
    full = run(parquet, tmp_path, file_bytes=20_000)
    assert full.returncode == 1
    assert len(full.stderr.strip().splitlines()) == 1
    assert "no space to write" in full.stderr
    assert "data.cache_dir" in full.stderr
    assert not manifests(tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))
    assert run(parquet, tmp_path).returncode == 0
    assert content(tmp_path) == undisturbed


def test_a_cache_without_write_permission_is_a_one_line_error(parquet: Path):
    # root may write anywhere, so its child becomes nobody, in a folder that is open to other users
    user = {"user": 65534} if os.getuid() == 0 else {}
    with tempfile.TemporaryDirectory() as folder:
        files = Path(shutil.copytree(parquet, Path(folder, "parquet")))
        cache = Path(folder, "cache")
        cache.mkdir()
        for path in (Path(folder), files, cache):
            path.chmod(0o555)
        refused = run(files, cache, **user)
        Path(folder).chmod(0o755)
    assert refused.returncode == 1
    assert len(refused.stderr.strip().splitlines()) == 1
    for words in ("cannot write", str(cache), "Permission denied", "data.cache_dir"):
        assert words in refused.stderr
