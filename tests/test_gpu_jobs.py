"""The jobs of .ci/gpu, and their runner, without a GPU."""

import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
from collections import defaultdict

import pytest
import torch

from kernels.features import FEATURES
from kernels.flash.dispatch import hopper_needs
from kernels.registry import AttentionRequest
from reproduce import perplexity, perplexity_runs
from reproduce.experiment import Options, pick
from reproduce.older_code import FASTER_SINCE
from reproduce.report_notes import timed_again
from reproduce.results import changed_since, faster_since, without_outrun
from reproduce.ring import samples as ring_samples
from reproduce.timing import timed as figures
from reproduce.timing import took
from tests.conftest import ROOT

FOLDER = ROOT / ".ci" / "gpu"


@pytest.mark.slow
def test_the_runner_starts_jobs_by_priority_and_ends_those_at_their_limit(tmp_path):
    (tmp_path / "queue").mkdir()
    (tmp_path / "have").mkdir()
    (tmp_path / "have" / "torch").write_text("export GREETING=hello\n")
    tarfile.open(tmp_path / "repo.tar.gz", "w:gz").close()
    (tmp_path / "stop").touch()
    jobs = {
        "10_says": '# gpus: 0\necho $GREETING > "$JOB_OUT/said"',
        "20_sleeps": "# gpus: 0\n# limit: 1\nexec sleep 60",
        "30_is_large": "# gpus: 1",
        "40_lacks_a_text": "# gpus: 0\n# needs: text",
    }
    for name, job in jobs.items():
        (tmp_path / "queue" / f"{name}.sh").write_text(f"# env: torch\n{job}\n")
    subprocess.run([sys.executable, FOLDER / "runner.py", tmp_path, "0"], check=True, timeout=60)
    assert (tmp_path / "out" / "says" / "said").read_text() == "hello\n"
    never_start = {path.stem for path in (tmp_path / "queue").iterdir()}
    assert never_start == {"30_is_large", "40_lacks_a_text"}
    ended = dict(re.findall(r"^(\w+): status (-?\d+)", (tmp_path / "state").read_text(), re.MULTILINE))
    assert ended == {"says": "0", "sleeps": "-15"}


def test_every_job_finds_its_script(tmp_path):
    listed = subprocess.run([sys.executable, FOLDER / "jobs.py"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    (tmp_path / "queue").mkdir()
    subprocess.run([sys.executable, FOLDER / "jobs.py", tmp_path, "10", *names], check=True)
    for name in names:
        script = (tmp_path / "queue" / f"10_{name}.sh").read_text()
        assert all((ROOT / path).is_file() for path in re.findall(r"\.ci/gpu/\S+", script)), name


def test_every_job_of_perplexity_has_runs(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    settings = perplexity.Settings()
    options = Options(torch.device("cuda"), False, settings, sample=None)
    names = defaultdict(set, numerics={"numerics_start", "numerics_end"}, stability={"numerics_context"})
    for each in perplexity_runs.training_runs(settings, options):
        names[each.part].add(each.name)
    jobs = importlib.import_module("jobs").JOBS.values()
    queued = [found.groups() for job in jobs if (found := re.search(r"perplexity.sh (\w+) (\S+)", job.body))]
    assert queued
    for part, only in queued:
        assert set(only.split(",")) <= names[part]


def test_a_job_brings_back_what_a_run_has_written_and_says_what_it_could_not(tmp_path):
    for folder in (
        "runs/a",
        "results",
        "out",
        "taken/runs/a/metrics.csv",
    ):  # no file can take a folder's place
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs" / "a" / "metrics.csv").write_text("step\n")
    said = {}
    for out in ("out", "taken"):
        lines = f'source "{FOLDER}/jobs/run.sh"; run "runs/*" sleep 0.2'
        how = {"env": {**os.environ, "JOB_OUT": out}, "capture_output": True, "text": True}
        said[out] = subprocess.run(["bash", "-c", lines], cwd=tmp_path, **how).stderr
    assert (tmp_path / "out" / "runs" / "a" / "metrics.csv").read_text() == "step\n"
    assert said["out"] == ""  # of what it has not written yet
    assert "metrics.csv" in said["taken"]


NAMES = {
    "alibi": "alibi_slopes",
    "documents": "cu_seqlens",
    "dropout": "dropout_p",
    "padding": "kv_lengths",
    "precise": "precise_delta",
}


def test_the_hopper_kernels_have_all_that_is_raced_as_never_timed(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER / "files")
    raced = importlib.import_module("race_points").POINTS["untimed"]
    assert len(raced) == len(set(raced))
    for point in raced:
        features = frozenset(NAMES.get(word, word) for word in point.feature.split("+") if word)
        assert features <= FEATURES.keys()
        asked = torch.device("cuda"), torch.bfloat16, point.head_dim, features, "hopper"
        call = point.length, point.length, point.causal
        for which in ("forward", "backward"):
            assert hopper_needs(which, AttentionRequest(*asked, *call)) is None, point


@pytest.mark.slow  # it imports every experiment
def test_merged_slices_are_what_every_process_measured(tmp_path):
    where = {"model": "gpt2_small", "context": 1024, "dropout": 0.0, "dtype": "bfloat16", "mode": "compiled"}
    groups = {
        "compiled": {**where, "part": "compiled", "micro_batch": 16, "accumulation": 4},
        "whole": {**where, "part": "whole", "micro_batch": 64, "accumulation": 1},
    }
    document = {
        **{
            "experiment": "training",
            "device": "NVIDIA H100",
            "tiny": False,
            "state": "partial",
            "commit": None,
        },
        **{
            "depends": {},
            "environment": {},
            "seconds": 1.0,
            "date": "2026-11-26",
            "took": {"speed": [3, 0.5]},
        },
        "settings": {"processes": 3},
    }
    for name, group in groups.items():
        ms = {"flash": {"optimizer": [1.0]}}
        samples = [
            {"kind": "speed", **group, "process": number, "ms": ms, "step_tokens": 1} for number in range(3)
        ]
        folder = tmp_path / "out" / name / "results" / "nvidia-h100"
        folder.mkdir(parents=True)
        (folder / "training.partial.json").write_text(json.dumps({**document, "samples": samples}))
    for commit, named in (
        ("abc", "abc"),
        ("def", "abc to def"),
        ("abc", "abc to def"),
        ("fed", "abc to fed"),
    ):
        merge = [sys.executable, FOLDER / "merge.py", "out", "--commit", commit, "--into", "results"]
        subprocess.run(merge, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
        merged = json.loads((tmp_path / "results" / "nvidia-h100" / "training.partial.json").read_text())
        assert merged["commit"] == named
    assert [(each["part"], each["process"]) for each in merged["samples"]] == [
        (part, number) for number in range(3) for part in groups
    ]


@pytest.mark.slow  # it imports every experiment
def test_over_a_complete_document_go_the_points_that_every_process_timed_again(tmp_path):
    said = {"experiment": "attention", "device": "NVIDIA H100", "tiny": False, "environment": {}, "took": {}}
    said |= {"seconds": 1.0, "settings": {"processes": 2}}

    def timed(length: int, process: int, ms: float) -> dict:
        point = {"kind": "time", "head_dim": 128, "causal": False, "length": length, "process": process}
        return {**point, "ms": {"flash": {"forward": [ms]}}, "clocks": {"sm_mhz": [ms]}}

    (outrun,) = {
        old for old, its in FASTER_SINCE.items() if "up to 128" in its[0].words and old.startswith("c63")
    }
    old = {"state": "complete", "commit": "abc", "date": "2026-11-26", "depends": {"kernel": outrun}}
    once = {"kind": "tiles", "length": 2048}  # by one process
    failed = {**once, "failed": "an illegal memory access", "broke_device": True}
    before = [
        {"kind": "check"},
        *(timed(length, n, 2.0) for length in (2048, 4096) for n in range(2)),
        failed,
    ]
    again = [timed(2048, 0, 1.0), timed(2048, 1, 1.0), timed(4096, 0, 1.0), {**once, "ms": {}}]
    folder, into = tmp_path / "out" / "job" / "results" / "nvidia-h100", tmp_path / "results" / "nvidia-h100"
    for place in (folder, into):
        place.mkdir(parents=True)
    (into / "attention.json").write_text(json.dumps({**said, **old, "samples": before}))
    new = {"state": "partial", "commit": None, "date": "2026-11-28", "depends": {}, "samples": again}
    (folder / "attention.partial.json").write_text(json.dumps({**said, **new}))
    merge = [sys.executable, FOLDER / "merge.py", "out", "--commit", "def", "--into", "results", "--over"]
    subprocess.run(merge, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert [path.name for path in into.iterdir()] == ["attention.json"]
    merged = json.loads((into / "attention.json").read_text())
    assert (merged["state"], merged["commit"], merged["date"]) == ("complete", "abc to def", "2026-11-28")
    anew = [{**each, "again": "def"} for each in (*again[:2], again[3])]
    assert merged["samples"] == [*before[:1], *before[3:5], *anew]
    assert timed_again(merged) == "lengths 2048 at def"
    assert faster_since(merged)  # of 4096
    assert without_outrun(merged)["samples"] == [before[0], *merged["samples"][3:]]
    newest = {**merged, "samples": merged["samples"][3:]}
    assert not faster_since(newest)
    assert faster_since({**newest, "again": {"def": {"kernel": outrun}}})  # by their own code's hashes
    assert changed_since({**newest, "again": {"def": {"kernel": "of no definition"}}}) == ["kernel"]
    assert timed_again({"samples": [{"context": 2048, "again": "def"}]}) == "lengths 2048 at def"
    # A point and a check of their own join it, once.
    more = [*(timed(8192, n, 3.0) for n in range(2)), timed(512, 0, 3.0)]
    check = {"kind": "check", "contender": "flash", "errors": [0.5]}
    settings = {"processes": 2, "lengths": [8192]}
    memory = {"kind": "memory", "contender": "flash", "peak_bytes": 5}
    checks = [{**check, "errors": [0.25]}, check, {**memory, "peak_bytes": 4}, memory]
    other = {**said, **new, "settings": settings, "samples": [*checks, *more]}
    (folder / "attention.partial.json").write_text(json.dumps(other))
    subprocess.run(merge, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    joined = json.loads((into / "attention.json").read_text())
    assert joined["samples"] == [
        *merged["samples"],
        check,
        memory,
        *({**each, "again": "def"} for each in more),
    ]
    assert joined["settings"]["lengths"] == [8192]
    # The process that it lacks joins that of one alone, and is of the same figure.
    (folder / "attention.partial.json").write_text(json.dumps({**other, "samples": [timed(512, 1, 3.0)]}))
    later = ["fed" if word == "def" else word for word in merge]
    subprocess.run(later, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    last = json.loads((into / "attention.json").read_text())["samples"][-2:]
    assert [(each["length"], each["process"]) for each in last] == [(512, 0), (512, 1)]
    (figure,) = figures({"samples": last})
    assert (len(took(figure, "flash")), figure["again"]) == (2, {"def", "fed"})
    (into / "attention.json").write_text(json.dumps(merged))
    # Once more, and one process twice, which is no other process.
    (folder / "attention.partial.json").write_text(json.dumps({**said, **new, "samples": [*again, again[2]]}))
    subprocess.run(merge, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert json.loads((into / "attention.json").read_text())["samples"] == merged["samples"]
    # A partial one is what is read, so it takes them, and stays partial.
    (folder / "attention.partial.json").write_text(json.dumps({**said, **new}))
    (into / "attention.partial.json").write_text(
        json.dumps({**said, **old, "state": "partial", "samples": before})
    )
    subprocess.run(merge, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    partial = json.loads((into / "attention.partial.json").read_text())
    assert (partial["state"], partial["samples"]) == ("partial", merged["samples"])


@pytest.mark.slow
def test_a_ring_that_several_jobs_timed_has_as_many_processes(tmp_path):
    def ring(ranks: int, ms: float, error: float) -> dict:
        passes = {"forward": [ms], "backward": [ms]}
        point = {"kind": "time", "ranks": ranks, "length": 64, "ms": {"ring": passes, "one GPU": passes}}
        return {**point, "sent_bytes": {}, "errors": {"ring": {"out": error}}, "left_out": {}}

    about = {"experiment": "ring", "device": "NVIDIA H200", "tiny": False, "depends": {}, "state": "complete"}
    about |= {"seconds": 1.0, "took": {"time": [1, 1.0]}, "date": "2026-11-29", "commit": None}
    for name, samples in {
        "ring_2": [ring(2, 1.0, 0.1), ring(4, 3.0, 0.1)],
        "ring_2b": [ring(2, 2.0, 0.3)],
    }.items():
        folder = tmp_path / "out" / name / "results" / "nvidia-h200"
        folder.mkdir(parents=True)
        document = {**about, "environment": {}, "settings": {"ranks": [], "lengths": []}, "samples": samples}
        (folder / "ring.json").write_text(json.dumps(document))
    merge = [sys.executable, FOLDER / "merge.py", "out", "--commit", "def", "--into", "results"]
    subprocess.run(merge, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    merged = json.loads((tmp_path / "results" / "nvidia-h200" / "ring.json").read_text())
    assert merged["settings"] == {"ranks": [2, 4], "lengths": [64]}
    two, four = ring_samples(merged)
    assert list(took(two, "ring")) == [2.0, 4.0]
    assert list(took(four, "ring")) == [6.0]
    assert [each["errors"] for each in pick(merged, ranks=2)] == [{"ring": {"out": 0.3}}] * 2


@pytest.mark.slow
def test_a_long_run_that_was_cut_is_in_the_report_with_its_curve(tmp_path):
    run = tmp_path / "out" / "long_run_8" / "runs" / "long"
    run.mkdir(parents=True)
    header = "step,tokens,seconds,train/loss,val/loss,val/bits_per_byte,perf/tokens_per_second"
    rows = [f"{n},,{n}.5,{10 - n / 10},,,4000000\n{n},,{n}.6,,{9 - n / 10},1.25," for n in (1, 10, 20)]
    (run / "metrics.csv").write_text("\n".join([header, *rows]))
    config = "trainer: {batch_tokens: 500000}\ndata: {tokenizer: /here, corpora: {english: 2.0, code: 1.0}}\n"
    (run / "config.yaml").write_text(config)
    environment = {"device_name": "NVIDIA Test 3000", "command": ["/here/python"], "commit": None}
    (run / "environment.json").write_text(json.dumps(environment))
    (run / "facts.json").write_text(json.dumps({"attention": "flash", "parameters": 124e6, "world_size": 8}))
    lines = ["merge.py", "out", "--commit", "abcdef", "--into", "results"]
    for command in ([FOLDER / lines[0], *lines[1:]], ["-m", "reproduce", "report", "--results", "results"]):
        told = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, *command], cwd=tmp_path, env=told, check=True)
    folder = tmp_path / "results" / "nvidia-test-3000x8"
    assert "/here" not in (folder / "long_run.json").read_text()
    assert (folder / "long_run.svg").exists()
    report = (tmp_path / "results" / "REPORT.md").read_text()
    said = "10 M tokens, on 8 NVIDIA Test 3000 (cut after step 20): perplexity 1096.63, 1.250 bits per byte"
    assert said in report
    assert "](nvidia-test-3000x8/long_run.svg)" in report
    assert said in (tmp_path / "results" / "report.html").read_text()


@pytest.mark.slow
def test_killed_ranks_are_kept_by_gpu_and_number_of_ranks(tmp_path):
    folder = tmp_path / "out" / "killed_4"
    folder.mkdir(parents=True)
    each = {"ranks": 4, "environment": {"device_name": "NVIDIA Test 3000"}, "resumed": True}
    for name in ("parts", "whole"):
        (folder / f"killed_{name}.json").write_text(json.dumps(each | {"name": name}))
    merge = [sys.executable, FOLDER / "merge.py", "out", "--commit", "abc", "--into", "results"]
    told = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(merge, cwd=tmp_path, env=told, check=True)
    kept = json.loads((tmp_path / "results" / "nvidia-test-3000x4" / "killed.json").read_text())
    assert [each["name"] for each in kept["samples"]] == ["parts", "whole"]
