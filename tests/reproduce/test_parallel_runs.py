"""Experiments in several processes: planned, killed, continued, none of their samples lost. 60 s on 2 cores."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.__main__ import BENCHMARKS
from reproduce import attention, command_line, fleet, history, parallel_runs, timing
from reproduce.__main__ import PROGRAM, main
from reproduce.attention import Workload
from reproduce.experiment import EXPERIMENTS, parse_settings
from reproduce.parallel_runs import Call, compile_share, measure, measure_all
from reproduce.plan import Step, missing, steps
from reproduce.results import Store
from tests.conftest import ROOT

CPU = torch.device("cpu")
QUICK = ("history.processes=2", "history.row_lengths=100,200", "history.lengths=", "history.heads=")
COMMAND = ["history", "sparse", "--tiny", "--device", "cpu", *QUICK]


def samples(folder: Path, name: str) -> list[dict]:
    for path in (folder / "cpu" / f"{name}.json", folder / "cpu" / f"{name}.partial.json"):
        if path.exists():
            return json.loads(path.read_text())["samples"]
    return []


def planned(folder: Path, capsys: pytest.CaptureFixture) -> dict[str, int]:
    """How many samples the plan names of each experiment."""
    assert main([*COMMAND, "--results", str(folder), "--plan"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    return {row.split()[0]: int(row.split()[1]) for row in rows}


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_where_it_stopped(tmp_path, capsys):
    whole = planned(tmp_path, capsys)
    assert whole.keys() == {"history", "sparse"}
    assert not list(tmp_path.iterdir())  # a plan measures nothing
    command = [sys.executable, "-m", "reproduce", *COMMAND, "--results", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
    while len(samples(tmp_path, "history")) < 5:
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = samples(tmp_path, "history")
    left = planned(tmp_path, capsys)
    assert left == {"history": whole["history"] - len(before), "sparse": whole["sparse"]}

    assert main([*COMMAND, "--results", str(tmp_path)]) == 0
    assert samples(tmp_path, "history")[: len(before)] == before  # kept, not measured again
    assert len(samples(tmp_path, "history")) == whole["history"]
    assert sorted(path.name for path in (tmp_path / "cpu").glob("*.json")) == ["history.json", "sparse.json"]
    results = json.loads((tmp_path / "cpu" / "history.json").read_text())
    assert len(timing.took(timing.timed(results, kind="softmax")[0], "safe")) == 2
    own = [setting.removeprefix("history.") for setting in QUICK]
    assert results["command"] == ["python", "-m", "reproduce", "history", *own, "--tiny"]
    capsys.readouterr()
    assert main([*COMMAND, "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("already done") == 2


def history_store(folder: Path, settings: history.Settings) -> Store:
    return Store(folder, EXPERIMENTS["history"], device=CPU, settings=settings, tiny=True, command=[])


@pytest.mark.slow
def test_processes_that_write_the_same_document_lose_nothing(tmp_path):
    settings = parse_settings(history.TINY, ["processes=3", "row_lengths=100,200,300", "lengths=", "heads="])
    plan = list(steps(history_store(tmp_path, settings)))
    assert [step.process for step in plan] == [0, 1, 2]
    asked = {step.process: step.samples for step in plan}
    call = Call(tmp_path, tiny=True, settings={})
    assert measure_all(plan, [CPU, CPU], call, None) == set()  # the second and third process at the same time
    store = history_store(tmp_path, settings)
    assert not missing(store, settings)
    found = [sample.get("process", 0) for sample in store.document["samples"]]
    assert {process: found.count(process) for process in asked} == asked
    count, seconds = store.document["took"]["softmax"]
    assert count == 9
    assert seconds > 0


def test_what_is_cut_at_the_end_of_its_time_is_continued(tmp_path, capsys):
    assert main([*COMMAND, "perplexity", "--results", str(tmp_path), "--budget", "1s"]) == 75
    said = capsys.readouterr().out
    assert "history: out of time; " in said
    assert "perplexity: out of time; " in said  # which runs alone, and was not started
    assert planned(tmp_path, capsys).keys() == {"history", "sparse"}


def test_compiling_takes_once_what_the_missing_samples_need_and_keeps_nothing(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # it sets another, for its process alone
    monkeypatch.setattr(
        history, "_checked", lambda name, workload, **rest: taken.append((name, workload.causal))
    )
    settings = parse_settings(history.TINY, ["lengths=64,32", "heads=", "row_lengths=", "tile_keys="])
    call = Call(tmp_path, tiny=True, settings={})

    def compile_with(shares: int) -> set:
        taken.clear()
        store = history_store(tmp_path, settings)
        plan = list(steps(store))
        for share in range(shares):
            compile_share(CPU, plan, call, share, shares)
        assert len(taken) == len(set(taken))
        return set(taken)

    every = {(name, causal) for name in history.ATTENTIONS for causal in (False, True)}
    assert compile_with(2) == every
    assert not list(tmp_path.iterdir())
    # Another machine: the checks are measured, and full attention is timed; causal attention is not.
    store = history_store(tmp_path, settings)
    for name, causal in every:
        store.sample(lambda: {"passed": True}, kind="check", head_dim=32, causal=causal, backend=name)
    shapes = [("order", "fa2", 1, 64), ("order", "fa2", 2, 32), ("ablation", "ablation", 1, 64)]
    for kind, figure, batch, length in shapes:
        full = asdict(Workload(figure, batch, 1, length, 32, False))
        store.sample(lambda: {"ms": {}}, kind=kind, process=0, **full)
    assert compile_with(1) == {(name, True) for name in history.ATTENTIONS}


def test_a_part_that_is_there_compiles_nothing(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setattr(history, "_checked", lambda name, *_, **__: taken.append(name))
    settings = parse_settings(history.TINY, ["lengths=64,32", "heads=", "row_lengths=", "tile_keys="])
    part = replace(settings, lengths=(32,))
    experiment, call = EXPERIMENTS["history"], Call(tmp_path, tiny=True, settings={})
    store = history_store(tmp_path, settings)
    while left := missing(store, part):
        for where in left:
            store.sample(lambda: {"passed": True, "ms": {}}, **where)
    for selected, compiles in ((part, False), (settings, True)):
        compile_share(CPU, [Step(experiment, settings, selected, 0, 1, None, 0.0)], call, 0, 1)
        assert bool(taken) == compiles


def test_what_readme_shows_is_planned_before_the_rest(tmp_path, capsys):
    names = ["perplexity", "history", "attention"]
    assert main([*names, "--tiny", "--device", "cpu", "--results", str(tmp_path), "--plan"]) == 0
    rows = [row.partition("  ")[0] for row in capsys.readouterr().out.splitlines()[1:]]
    assert rows == ["attention (README's figures)", "history", "attention", "perplexity"]  # which runs alone


def test_what_fails_is_tried_once_a_call_though_it_is_in_both_parts(tmp_path, monkeypatch):
    def fails(backend, workload, *rest):
        tried.append(workload)
        raise TypeError("flaky")

    monkeypatch.setattr(attention, "check", fails)
    experiment, settings = EXPERIMENTS["attention"], parse_settings(attention.TINY, ["backends=standard"])
    call = Call(tmp_path, tiny=True, settings={})
    for _ in range(2):
        tried: list[Workload] = []
        plan = list(steps(call.store(experiment, settings, CPU)))
        assert len(plan) == 2
        for step in plan:
            measure([CPU], step, call)
        assert len(tried) == len(set(tried)) > 0


@pytest.mark.parametrize(("devices", "took"), [(1, 6), (2, 5)])
def test_others_wait_for_an_experiments_first_process_alone(devices, took, monkeypatch):
    """Simulated processes of 3, 1 and 2 seconds: the second and third run at the same time if they can."""
    clock, seconds = [0], {"first": 3, "second": 1, "third": 2}

    class Process:
        exitcode, sentinel = 0, None
        terminate = join = kill = lambda self, *_: None

        def __init__(self, job, device):
            self.end = clock[0] + seconds[job.name]

        def is_alive(self):
            return clock[0] < self.end

    monkeypatch.setattr(fleet, "_started", Process)
    monkeypatch.setattr(fleet, "wait", lambda sentinels, timeout: clock.__setitem__(0, clock[0] + 1))
    jobs = [fleet.Job(name, print, (), Path(), None if name == "first" else "first") for name in seconds]
    ended = [(job.name, state) for job, state in fleet.run(jobs, [CPU] * devices)]
    assert [name for name, _ in ended] == ["first", "second", "third"]
    assert {state for _, state in ended} == {fleet.DONE}
    assert clock == [took]


def test_what_waits_for_a_job_that_failed_is_not_started(tmp_path):
    jobs = [
        fleet.Job("first", int, ("no number",), tmp_path / "first.log"),
        fleet.Job("second", print, (), tmp_path / "second.log", after="first"),
        fleet.Job("third", print, ("said",), tmp_path / "third.log", after="an earlier call's"),
    ]
    ended = {job.name: state for job, state in fleet.run(jobs, [CPU])}
    assert ended == {"first": fleet.FAILED, "second": fleet.NOT_STARTED, "third": fleet.DONE}
    assert (tmp_path / "third.log").read_text() == "cpu said\n"


def say_gpus(device: torch.device) -> None:
    print(device, os.environ.get("CUDA_VISIBLE_DEVICES"))


@pytest.mark.slow
def test_a_job_sees_its_gpu_or_all_of_them_where_it_takes_several(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(
        fleet, "multiprocessing", multiprocessing
    )  # a fork would have the environment of before
    for name, device in (("all", torch.device("cuda")), ("second", torch.device("cuda", 1))):
        job = fleet.Job(name, say_gpus, (), tmp_path / name)
        assert [state for _, state in fleet.run([job], [device])] == [fleet.DONE]
    assert (tmp_path / "all").read_text() == "cuda 4,7\n"
    assert (tmp_path / "second").read_text() == "cuda 7\n"
    given = []
    monkeypatch.setattr(
        parallel_runs, "measure_all", lambda plan, devices, *_: given.append(devices) or set()
    )
    gpus = [torch.device("cuda", n) for n in range(2)]
    for name in ("neighbour", "huggingface"):
        plan = [Step(BENCHMARKS[name], None, None, process, 3, None, 0.0) for process in range(3)]
        command_line._run(plan, gpus, Call(tmp_path, False, {}), None, SimpleNamespace())
    assert given == [[torch.device("cuda")], gpus[:1]]


def test_one_gpu_that_is_named_is_all_that_an_experiment_gets(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpus = [torch.device("cuda", n) for n in range(2)]
    assert command_line._devices("auto", gpus[0]) == command_line._devices("cuda", gpus[0]) == gpus
    assert command_line._devices("cuda:0", gpus[0]) == gpus[:1]
    given = []
    asked = SimpleNamespace(name="perplexity", module=SimpleNamespace(run=given.append))
    step = Step(asked, None, None, 0, 1, None, 0.0)
    monkeypatch.setattr(Call, "store", lambda *_, **how: SimpleNamespace(sample=None, find=None))
    measure(gpus[:1], step, Call(Path(), True, {}))
    assert given[0].devices == gpus[:1]


def test_a_document_that_was_cut_between_processes_is_judged():
    def time(causal, length, process):
        ms = {
            "flash": {"forward": [1.0] * 3, "backward": [1.0] * 3},
            "standard": {"forward": [4.0] * 3, "backward": [4.0] * 3},
        }
        workload = asdict(Workload("fa2", 1, 1, length, 64, causal))
        return {"kind": "time", **workload, "process": process, "ms": ms, "late": {}}

    lengths = (1024, 2048)
    samples = [time(causal, n, p) for causal in (False, True) for n in lengths for p in range(3)]
    cut = samples[:-2]  # causal attention at 2048 has one process, the others three
    found = attention.judge({"device": "NVIDIA H100", "settings": {}, "samples": cut})
    assert [each.ours for each in found if each.claim == "C20"] == ["1.00x", "1.00x (one process)"]


def test_times_are_in_the_order_of_processes_whoever_wrote_first():
    samples = [
        {"kind": "time", "process": process, "ms": {"a": {"all": [1.0 + process]}}} for process in (0, 2, 1)
    ]
    (sample,) = timing.timed({"samples": samples}, kind="time")
    assert timing.took(sample, "a") == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(("noise", "rounds"), [(0.001, 20), (0.2, 60)])
def test_a_steady_call_takes_no_more_than_the_least_rounds(noise, rounds, monkeypatch):
    def phases(call, number, device, sleep):
        return [1.0 + noise * (number % 7)], False

    monkeypatch.setattr(timing, "_phases", phases)
    timed = timing.time_alternating({"a": None}, CPU, seconds=60.0, rounds=(20, 60))
    assert len(timed.ms["a"][0]) == rounds


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["comapre", "runs/SWEEP"], "did you mean compare?"),
        (["history", "sprase", "--tiny"], "sprase is not key=value, nor an experiment"),
        (
            ["history", "sparse", "length=3"],
            "length=3: settings apply to one experiment: write NAME.length=3",
        ),
        (["length=3"], "length=3: name an experiment first"),
    ],
)
def test_a_mistake_in_a_list_of_experiments_is_a_one_line_error(arguments, words, capsys):
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_all_leaves_out_what_takes_a_text_of_ones_own_unless_it_is_named(capsys):
    chosen = command_line._chosen(PROGRAM, ["all", "history.rounds=3"], False)
    assert chosen.keys() == EXPERIMENTS.keys() - {"perplexity"}
    said = "left out, as it takes text of your own: perplexity (name it with perplexity.text=...)\n"
    assert capsys.readouterr().out == said
    words = ["all", "perplexity.text=a.txt"]
    assert command_line._chosen(PROGRAM, words, False)["perplexity"] == ["text=a.txt"]


@pytest.mark.gpu
def test_all_gpus_compile_and_then_measure(tmp_path, capsys):
    command = ["history", "numerics", "--tiny", "history.processes=2", "--results", str(tmp_path)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "compiled in " in said
    assert said.count(": complete in ") == 2
