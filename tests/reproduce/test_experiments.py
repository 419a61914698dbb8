"""The experiments run to the end in their tiny form, resume, and refuse in one line. About 30 s on 2 cores."""

import json
import random
import re
import resource
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from triton import language as tl

from benchmarks.__main__ import BENCHMARKS
from kernels import ATTENTION, AttentionError, get_attention, register_attention
from kernels.flash.dispatch import hopper_needs
from kernels.flash.portable.tiles import KERNELS, Tile, forced, tile_for
from kernels.history import flash1, two_pass
from kernels.registry import AttentionRequest
from reproduce import (
    attention,
    attention_verdicts,
    depends,
    encoders,
    history,
    older_code,
    peers,
    results,
    sparse,
    timing,
)
from reproduce.__main__ import main
from reproduce.attention import Inputs, Workload, attend_with
from reproduce.claims import CLAIMS
from reproduce.common import ReproduceError, as_lines, rounded
from reproduce.counting import compulsory_bytes, counting, flash_bytes
from reproduce.experiment import EXPERIMENTS, Options, parse_settings, pick
from reproduce.hardware_counters import parse, read_counters
from reproduce.plan import ASSUMED
from reproduce.results import Store
from reproduce.tables import table
from tests.conftest import INTERPRETED, ROOT
from tests.processes import in_three
from tests.reproduce import tiny
from tests.reproduce.tiny import FOLDER, document, run


@pytest.mark.one_in(5)
@pytest.mark.parametrize("each", [*EXPERIMENTS.values(), *BENCHMARKS.values()], ids=lambda each: each.name)
def test_what_results_depend_on_is_there_and_found_again(each):
    recorded = depends.tree().record(each.path, each.measures)
    assert f"{each.path}.run" in recorded
    assert depends.changed(recorded) == []
    if "kernels.flash" in each.measures:
        assert {"forward_kernel", "naive_attention"} <= {name.rpartition(".")[2] for name in recorded}
        on_cpu = depends.tree().record(each.path, each.measures, gpu=False)
        assert 0 < len(on_cpu) < len(recorded)  # without the Hopper kernels, which a CPU cannot run


SOURCES = {
    "reproduce/speed.py": """
        from . import clock
        from .clock import TURNS as turns

        def run(options):
            from kernels.fast import attend
            return [clock.time_of(attend, x) for x in range(turns)]

        def judge(results):
            return results
    """,
    "reproduce/clock.py": """
        TURNS = 3

        def time_of(call, x):
            return call(x)
    """,
    "kernels/fast.py": """
        import triton
        from .parts import scale

        @triton.jit
        def attend_kernel(Q, length):
            total = length + 1
            if length == 0:
                total = down(length)
            return scale(Q) * total

        @triton.jit
        def down(n):
            return n if n < 2 else up(n - 1)

        @triton.jit
        def up(n):
            return down(n) + 1

        def attend(x):
            return attend_kernel[(1,)](x)
    """,
    "kernels/parts.py": """
        import triton
        HALF = 0.5

        @triton.jit
        def scale(x):
            return x * HALF
    """,
}


def changed_by(tmp_path: Path, files: dict[str, str]) -> set[str]:
    """Of what a result recorded with SOURCES, the names whose code `files` change."""

    def tree(name: str, sources: dict[str, str]) -> depends.Tree:
        for file, source in sources.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(textwrap.dedent(source))
        return depends.Tree(tmp_path / name)

    recorded = tree("before", SOURCES).record("reproduce.speed", ["kernels"])
    names = {"kernels.fast.attend_kernel", "kernels.fast.down", "kernels.fast.up", "kernels.parts.scale"}
    assert set(recorded) == {"reproduce.speed.run", *names}
    today = tree("after", {file: text for file, text in {**SOURCES, **files}.items() if text}).hashes()
    return {name for name, its in recorded.items() if its not in today}


def edited(file: str, *replacements: tuple[str, str]) -> dict[str, str]:
    source = SOURCES[file]
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    return {file: source}


@pytest.mark.parametrize(
    "files",
    [
        edited("reproduce/speed.py", ("from kernels.fast import", "from kernels.flash.new import"))
        | {
            "kernels/fast.py": "",
            "kernels/flash/new.py": SOURCES["kernels/fast.py"].replace(".parts", "..parts"),
        },
        edited("kernels/fast.py", ("attend_kernel", "forward"), ("total", "sum_of_all"), ("Q", "q")),
        edited("kernels/fast.py", ("total = length", "# why\n            total = length")),
        edited("kernels/parts.py", ("scale", "scaled")) | edited("kernels/fast.py", ("scale", "scaled")),
        edited("kernels/fast.py", ("[(1,)]", "[(2,)]")),  # what launches a kernel, not the kernel
        edited(
            "reproduce/speed.py", ("return results", "return sorted(results)")
        ),  # a verdict, not a measurement
        edited("reproduce/clock.py", ("return call(x)", '"""Seconds."""\n            return call(x)')),
    ],
    ids=["moved", "renamed", "comment", "helper renamed", "launch", "verdict", "docstring"],
)
def test_moves_renames_and_comments_make_no_result_stale(files, tmp_path):
    assert changed_by(tmp_path, files) == set()


@pytest.mark.parametrize(
    ("files", "stale"),
    [
        (edited("kernels/fast.py", ("length + 1", "length + 2")), {"kernels.fast.attend_kernel"}),
        (edited("kernels/fast.py", ("== 0", "== False")), {"kernels.fast.attend_kernel"}),
        (
            edited("kernels/fast.py", ("down(n) + 1", "down(n) + 2")),
            {"kernels.fast.attend_kernel", "kernels.fast.down", "kernels.fast.up"},
        ),
        (edited("kernels/parts.py", ("0.5", "0.25")), {"kernels.fast.attend_kernel", "kernels.parts.scale"}),
        (edited("reproduce/clock.py", ("= 3", "= 4")), {"reproduce.speed.run"}),
        (edited("reproduce/clock.py", ("call(x)", "call(x) or call(x)")), {"reproduce.speed.run"}),
    ],
)
def test_changed_code_makes_results_stale_by_name(files, stale, tmp_path):
    assert changed_by(tmp_path, files) == stale


def test_documents_are_written_a_line_a_sample_in_eight_digits():
    document = {
        "version": 3,
        "settings": {"lengths": (1, 2)},
        "samples": [{"ms": [1 / 3, 2e-9 / 3]}, {"n": 10**12}],
    }
    text = as_lines(document)
    assert text.splitlines()[4:6] == ['{"ms":[0.33333333,6.6666667e-10]},', '{"n":1000000000000}']
    assert json.loads(text) == rounded(document) | {"settings": {"lengths": [1, 2]}}
    assert json.loads(as_lines(document | {"samples": []}))["samples"] == []


@pytest.mark.slow
def test_a_backend_that_refuses_a_mask_is_not_timed_with_it(tmp_path):
    assert run(tmp_path, "attention", "backends=naive,sdpa", "figures=fa1") == 0
    results = document(tmp_path, "attention")
    timed = {sample["mask"]: set(sample["ms"]) for sample in pick(results, kind="time")}
    assert timed["plain"] == {"naive", "sdpa"}
    assert timed["padding"] == {"naive"}


def test_a_backend_with_wrong_results_is_not_timed(tmp_path, capsys, monkeypatch):
    register_attention("wrong", refuses=lambda request: None)(
        lambda *qkv, **options: 1.01 * get_attention("naive")(*qkv, **options)
    )
    monkeypatch.setitem(ATTENTION, "wrong", ATTENTION.pop("wrong"))  # gone after the test
    run(tmp_path, "attention", "backends=naive,wrong", "figures=fa2")
    (sample,) = pick(document(tmp_path, "attention"), kind="time")
    assert set(sample["ms"]) == {"naive"}
    assert "wrong" in capsys.readouterr().out


@pytest.mark.slow
def test_a_backend_wrong_only_at_full_length_is_not_timed(tmp_path, capsys, monkeypatch):
    naive = get_attention("naive")

    @register_attention("steep", refuses=lambda request: None)
    def steep(q, k, v, **options):
        return naive(q if q.shape[2] <= 64 else q + 0.1 * (q - q.detach()), k, v, **options)

    monkeypatch.setitem(ATTENTION, "steep", ATTENTION.pop("steep"))  # gone after the test
    checked = attention.check
    monkeypatch.setattr(
        attention, "check", lambda name, workload, *rest: checked(name, replace(workload, length=64), *rest)
    )
    run(tmp_path, "attention", "backends=naive,steep", "figures=gpt2", "lengths=128")
    (sample,) = pick(document(tmp_path, "attention"), kind="time")
    assert set(sample["ms"]) == {"naive"}
    assert "at full length" in capsys.readouterr().out


def test_a_run_out_of_time_goes_on_where_it_stopped(tmp_path, capsys):
    assert run(tmp_path, "numerics", "backends=naive", "--budget", "0.0001s") == 75
    assert not (tmp_path / FOLDER / "numerics.json").exists()
    capsys.readouterr()
    assert run(tmp_path, "numerics", "backends=naive") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1].endswith(worth := "; the figures of --tiny, and verdicts on them, mean nothing")
    claims = [line for line in said if re.match(r"claim |C\d+ ", line)]
    assert len(claims) > 1
    assert run(tmp_path, "numerics", "backends=naive") == 0
    *shown, last = capsys.readouterr().out.splitlines()
    assert shown == claims  # once more, but not with a plan
    assert "already done" in last
    assert last.endswith(worth)
    assert run(tmp_path, "numerics", "backends=naive", "--plan") == 0
    assert capsys.readouterr().out == f"{last}\n"
    whole = document(tmp_path, "numerics")["samples"]

    # What a killed run leaves: a partial document with some of the samples.
    path = tmp_path / FOLDER / "numerics.json"
    killed = json.loads(path.read_text()) | {"state": "partial", "seconds": 12.0}
    killed["samples"] = [{**whole[0], "rmse": 12345.0}, {**whole[1], "failed": "RuntimeError"}]
    path.with_name("numerics.partial.json").write_text(json.dumps(killed))
    path.unlink()
    assert run(tmp_path, "numerics", "backends=naive", "--budget", "0.0001s") == 75
    assert "numerics: partial in 12 s" in capsys.readouterr().out
    assert run(tmp_path, "numerics", "backends=naive") == 0
    resumed = document(tmp_path, "numerics")["samples"]
    assert len(resumed) == len(whole)
    assert resumed[0]["rmse"] == 12345.0  # kept, not measured again
    assert not [sample for sample in resumed if "failed" in sample]  # tried again
    assert not path.with_name("numerics.partial.json").exists()


def test_a_finished_result_is_kept_unless_again_or_other_settings(tmp_path, capsys):
    run(tmp_path, "sparse", "backends=naive")
    before = document(tmp_path, "sparse")
    run(tmp_path, "sparse", "backends=naive")
    assert "already done" in capsys.readouterr().out
    run(tmp_path, "sparse", "backends=naive", "--again")
    again = document(tmp_path, "sparse")
    assert before["samples"] != again["samples"]
    run(tmp_path, "sparse", "backends=naive,sdpa_cudnn")
    assert len(document(tmp_path, "sparse")["samples"]) == 2


def test_attention_is_timed_at_every_length_and_papers_lengths_stay_theirs():
    found = attention.workloads(attention.Settings(figures=("fa2", "beyond")), tiny=False)
    points = {(each.length, each.head_dim, each.causal) for each in found}
    assert len(points) == len(found) == len(attention.Settings.lengths) * 3 * 2
    assert {each.length for each in found if each.figure == "fa2"} == {512, 1024, 2048, 4096, 8192, 16384}
    assert {each.batch * each.length for each in found} == {16384, 32768, 65536}


def test_compiled_standard_attention_is_timed_wherever_a_claim_is_judged():
    points = set()

    def sample(measure: object, **where: object) -> dict:
        if (where["kind"], where.get("backend")) == ("memory", peers.COMPILED):
            points.add((where["length"], where["head_dim"]))
        return {**where, **ASSUMED}

    attention.run(Options(torch.device("cuda"), False, attention.Settings(figures=("fa2",)), sample))
    assert points == {(length, d) for length in attention_verdicts.MIDDLE for d in (64, 128, 256)}


def test_a_figure_of_attention_joins_those_that_are_there(tmp_path):
    for figure in ("gpt2", "fa2"):
        assert run(tmp_path, "attention", "backends=naive,sdpa", f"figures={figure}") == 0
    timed = [each for each in document(tmp_path, "attention")["samples"] if each["kind"] == "time"]
    assert [each["figure"] for each in timed] == ["gpt2", "fa2"]


def test_a_document_records_the_versions_of_the_peers_that_are_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "PEERS", ("pytest", "no-such-peer"))
    how = {"device": torch.device("cpu"), "settings": EXPERIMENTS["sparse"].module.TINY, "tiny": True}
    environment = Store(tmp_path, EXPERIMENTS["sparse"], **how, command=[]).document["environment"]
    assert environment["pytest"] == pytest.__version__
    assert "no-such-peer" not in environment


def test_what_code_has_outrun_is_measured_again_and_nothing_else(tmp_path):
    """The first of FASTER_SINCE is of head_dims above 128; a finished result of before goes on with them."""
    how = {"device": torch.device("cpu"), "settings": EXPERIMENTS["sparse"].module.TINY, "tiny": True}
    first = Store(tmp_path, EXPERIMENTS["sparse"], **how, command=[])
    for head_dim in (64, 256):
        first.sample(lambda: {"ms": {"flash": [1.0]}}, kind="time", head_dim=head_dim)
    first.document["depends"]["kernels.x"] = next(iter(older_code.FASTER_SINCE))
    first.finish()
    second = Store(tmp_path, EXPERIMENTS["sparse"], **how, command=[])
    assert not second.finished
    for head_dim, ms in ((64, 1.0), (256, 0.5)):
        sample = second.sample(lambda: {"ms": {"flash": [0.5]}}, kind="time", head_dim=head_dim)
        assert sample["ms"] == {"flash": [ms]}
    second.finish()
    assert Store(tmp_path, EXPERIMENTS["sparse"], **how, command=[]).finished


def test_a_budget_of_zero_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["all", "--tiny", "--budget", "0s"])
    assert "0s is not a duration above 0; write 90s, 9m30s or 1h" in capsys.readouterr().err


def test_an_error_costs_only_its_own_sample(tmp_path):
    def store(name="sparse"):
        how = {"device": torch.device("cpu"), "settings": EXPERIMENTS[name].module.TINY}
        return Store(tmp_path, EXPERIMENTS[name], **how, tiny=True, command=[])

    def fail(error):
        raise error

    first = store()
    assert "refused" in first.sample(lambda: fail(RuntimeError("No available kernel. Aborting")), n=1)
    assert first.sample(lambda: fail(torch.OutOfMemoryError("65 GiB")), n=2)["out_of_memory"]
    assert first.sample(lambda: fail(TypeError("flaky")), n=3)["failed"] == "TypeError: flaky"
    assert first.sample(lambda: {"x": 1}, n=4) == {"n": 4, "x": 1}
    illegal = RuntimeError("CUDA error: illegal memory access")
    with pytest.raises(ReproduceError, match="broke the device"):
        first.sample(lambda: fail(illegal), n=5)
    # the last line of a training run's log: its process is gone, and the runs on other GPUs go on
    assert not store("perplexity").sample(lambda: fail(illegal), n=1)["broke_device"]

    second = store()
    assert [sample["n"] for sample in second.document["samples"]] == [1, 2, 3, 4, 5]
    assert "failed" in second.sample(lambda: {"x": 2}, n=5)  # a failure that broke the device is not retried
    second.sample(lambda: fail(TypeError("flaky")), n=3)  # any other failure is retried
    second.finish()
    third = store()
    assert not third.finished  # 3 is tried once more
    third.sample(lambda: {"x": 3}, n=3)
    third.finish()
    assert store().finished


def test_a_backend_that_failed_is_timed_in_a_later_run(tmp_path, monkeypatch):
    command = ["attention", "--tiny", "--device", tiny.DEVICE, "figures=gpt2", "backends=standard,sdpa"]
    command += ["--results", str(tmp_path)]

    def who_was_timed():
        document = json.loads((tmp_path / FOLDER / "attention.json").read_text())
        return [list(sample["ms"]) for sample in pick(document, kind="time")]

    def flaky(backend, *rest, check=attention.check):
        if backend == "sdpa":
            raise TypeError("flaky")
        return check(backend, *rest)

    def stopped(backend, *rest, check=attention.check):
        if backend == "sdpa":
            raise KeyboardInterrupt
        return check(backend, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(attention, "check", flaky)
        assert main(command) == 1
        assert who_was_timed() == [["standard"]]
        patch.setattr(attention, "check", stopped)  # interrupted before the failed sample is tried again
        assert main(command) == 130
    assert main(command) == 0
    assert who_was_timed() == [["standard", "sdpa"]]


def test_the_list_needs_no_torch():
    code = "import sys; from reproduce.__main__ import main; main([]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    for experiment in EXPERIMENTS.values():
        assert experiment.name in done.stdout
        assert f" {' '.join(experiment.claims)} " in done.stdout  # apart from the next column
        assert f" {experiment.minutes:g}min " in done.stdout


@pytest.mark.slow
def test_a_closed_output_pipe_is_not_an_error():
    """As `python -m reproduce | head` does."""
    command = [sys.executable, "-m", "reproduce"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as listing:
        listing.stdout.close()
        assert listing.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tracing"], "there is no experiment tracing; choose one of attention"),
        (["comapre"], "all, report, compare, milestones, workspace; did you mean compare?"),
        (["numerics", "lenghts=3"], "lenghts is not a setting of this experiment; it has backends"),
        (["numerics", "repeats=many"], "repeats=many: it must be of type int"),
        (["numerics", "dtypes=float32,fp8"], "dtypes=fp8: it must be float16, bfloat16 or float32"),
        (["numerics", "repeats"], "repeats is not key=value"),
        (["attention", "lengths="], "lengths= names nothing to run: write one or more, like lengths=64"),
        (["attention", "backends=flesh"], "there is no attention flesh; choose from standard, "),
        (["training", "--device", "cpu"], "training needs a CUDA device"),
        (["numerics", "--device", "tpu"], "--device tpu is not supported; use auto, cpu, cuda or cuda:N."),
        (["all", "repeats=3"], "settings apply to one experiment"),
    ],
)
def test_a_mistaken_command_is_a_one_line_error(arguments, words, tmp_path, capsys):
    tiny = [] if arguments[0] == "training" else ["--tiny"]
    assert main([*arguments, *tiny, "--results", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "in_the_way"),
    [(["report"], "results/REPORT.md/folder"), (["numerics", "--tiny", "repeats=1"], "results")],
)
def test_an_unwritable_path_is_a_one_line_error_with_the_remedy(command, in_the_way, tmp_path, capsys):
    (tmp_path / in_the_way).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / in_the_way).touch()
    assert main([*command, "--results", str(tmp_path / "results")]) == 1
    error = capsys.readouterr().err
    assert re.search(
        r"^error: .*cannot be written \(.*\): choose another place with --results FOLDER$", error
    )
    assert error.count("\n") == 1


def test_a_failed_write_names_the_file_and_the_remedy(tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # no file may be larger
    try:
        assert run(tmp_path, "numerics", "backends=naive") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = "numerics.partial.json cannot be written (File too large): choose another place with --results FOLDER\n"
    assert capsys.readouterr().err.endswith(said)


def test_settings_are_parsed_by_their_types():
    settings = parse_settings(
        EXPERIMENTS["numerics"].module.TINY, ["lengths=3,5", "backends=naive", "repeats=2"]
    )
    assert settings.lengths == (3, 5)
    assert settings.backends == ("naive",)
    assert settings.repeats == 2
    with pytest.raises(ReproduceError):
        parse_settings(settings, ["lengths=3,x"])


def test_processes_of_a_point_are_joined_whatever_ran_beside_one_of_them() -> None:
    point = {"kind": "time", "length": 128, "ms": {"flash": {"all": [1.0]}}}
    document = {"samples": [{**point, "process": 0}, {**point, "process": 1, "beside": "GPU tests"}]}
    (joined,) = timing.timed(document, kind="time")
    assert joined["ms"] == {"flash": {"all": [[1.0], [1.0]]}}


def test_calls_take_turns_in_another_order_each_round_and_phases_are_timed_separately():
    turns = []

    def call_of(name):
        def call(number):
            turns.append((name, number))
            yield
            yield

        return call

    calls = {name: call_of(name) for name in "abc"}
    timed = timing.time_alternating(calls, torch.device("cpu"), seconds=0, warmup=1, rounds=(20, 99))
    # No two turns get the same one of the rotating inputs, and the first round does not get those of the warm-up.
    assert [number for _, number in turns] == list(range(3 * 21))
    orders = ["".join(name for name, _ in turns[3 * i : 3 * i + 3]) for i in range(1, 21)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) == 6  # all there are
    assert [len(phase) for phase in timed.ms["b"]] == [20, 20]
    assert timed.late == {}  # no device to wait for


def three_processes(*medians: float) -> dict:
    """A document with a contender for each list of medians of three processes."""
    samples = [
        {"kind": "time", "length": 64, "process": process, "late": {},
         "ms": {name: {"forward": [ms / 4] * 3, "backward": [ms / 2, 3 * ms / 4, ms]} for name, ms in at.items()}}
        for process, at in enumerate(medians)
    ]  # fmt: skip
    return {"samples": samples}


def test_what_is_stated_is_the_median_of_the_processes_with_their_range():
    results = three_processes({"a": 1.0, "b": 2.0}, {"a": 1.2, "b": 2.1}, {"a": 1.1, "b": 1.15})
    (sample,) = timing.timed(results, kind="time")
    a, b = (timing.took(sample, name) for name in "ab")
    assert list(a) == pytest.approx([1.0, 1.2, 1.1])
    assert a.shown("{:.1f}") == "1.1 (1.0 to 1.2)"
    assert a.shown("{:.1f} ms") == "1.1 (1.0 to 1.2) ms"
    assert list(b / a) == pytest.approx([2.0, 1.75, 1.15 / 1.1])  # process by process
    assert timing.took(sample, "a", "forward").median == pytest.approx(0.275)
    assert timing.took(sample, "c") is None
    assert "\na            0.275 (0.25 to 0.3)    0.825" in table(results)


@pytest.mark.parametrize(
    ("theirs", "word"),
    [((1.25, 1.3, 1.4), "faster"), ((1.15, 1.3, 1.4), "level"), ((0.8, 0.9, 0.95), "slower")],
)
def test_faster_is_said_only_where_the_ranges_do_not_overlap(theirs, word):
    assert timing.versus(timing.Times((1.0, 1.2, 1.1)), timing.Times(theirs)) == word


@pytest.mark.parametrize(
    ("patience", "sleeps", "late"),
    [
        (8, {"quick": [1, 1, 1], "slow": [1, 1, 2, 4, 4], "endless": [1, 1, 2, 4, 8, 8]}, {"endless": 2}),
        (1, {"quick": [1, 1, 1], "slow": [1, 1, 1], "endless": [1, 1, 1]}, {"slow": 2, "endless": 2}),
    ],
)
def test_a_round_whose_device_sleep_was_too_short_is_repeated(patience, sleeps, late, monkeypatch):
    """On a simulated device that only sleeps; the warm-up, which compiles, is not repeated."""
    head_starts, slept = {"quick": 0.5, "slow": 3, "endless": 1e9}, {name: [] for name in sleeps}
    asleep, queued = [], []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def query(self):
            return asleep[-1] < head_starts[queued[-1]]

        def synchronize(self):
            slept[queued[-1]].append(asleep[-1])

        def elapsed_time(self, end):
            return 1.0

    def call_of(name):
        def call(number):
            queued.append(name)
            yield

        return call

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: asleep.append(cycles / timing.HEAD_START))
    calls, device = {name: call_of(name) for name in sleeps}, torch.device("cuda")
    timed = timing.time_alternating(calls, device, seconds=0, warmup=1, rounds=(2, 2), patience=patience)
    assert slept == sleeps
    assert timed.late == late
    assert all(phases == [[1.0, 1.0]] for phases in timed.ms.values())


def test_peak_memory_is_what_was_held_at_one_time():
    def work():
        for _ in range(3):
            x = torch.empty(1000)
            del x
        return [torch.empty(500) for _ in range(4)]

    assert timing.peak_bytes(work, torch.device("cpu")) == 4 * 500 * 4


@INTERPRETED
def test_counted_memory_traffic_equals_the_formula():
    workload = Workload("test", 1, 1, 192, 32, False)
    inputs = Inputs(workload, torch.float16, torch.device("cpu"))
    tiles = {kernel: tile_for(kernel, 90, 32, torch.float16, False, 192) for kernel in KERNELS}
    attend = attend_with("flash")
    with forced(**tiles), counting() as traffic:
        out = attend(inputs, 0)
        forward = traffic.copy()
        torch.autograd.grad(out, inputs.qkv, inputs.d_out)
    backward = traffic.since(forward)
    shapes = {kernel: (tile.block_m, tile.block_n) for kernel, tile in tiles.items()}
    formula, floor = flash_bytes(192, 32, shapes), compulsory_bytes(192, 32)
    assert forward.read + forward.written == formula["forward"] >= floor["forward"]
    assert backward.read + backward.written == formula["backward"] >= floor["backward"]


@pytest.mark.slow
@INTERPRETED
def test_flash1_runs_with_its_fastest_tiles(monkeypatch):
    slow, fast = (Tile(16, rows, 4, 1) for rows in (16, 64))
    monkeypatch.setattr(flash1, "CANDIDATES", {(each, 16): (slow, fast) for each in ("forward", "backward")})
    samples = []

    def sample(measure, **where):
        samples.append({**where, **measure()})
        return samples[-1]

    options = Options(torch.device("cpu"), True, replace(history.TINY, rounds=5), sample)
    tiles = history.fastest_tiles(16, 128, 16, options)
    assert tiles == {"forward": fast, "backward": fast}  # a quarter of the steps, in the interpreter
    compiled = []
    given = flash1.compiled_for
    monkeypatch.setattr(
        flash1, "compiled_for", lambda tile, *rest: (compiled.append(tile), given(tile, *rest))[1]
    )
    workload = Workload("fa2", 1, 1, 32, 16, False)
    history.time_order([*history.ATTENTIONS], workload, options, tiles)
    assert set(compiled) == {fast}
    compiled.clear()
    monkeypatch.setattr(two_pass, "BACKWARD", {16: slow})
    history.time_passes(workload, options)
    assert slow in compiled
    assert fast not in compiled


@INTERPRETED
def test_predecessors_of_flash_have_the_counts_that_the_papers_state():
    workload = Workload("figure2", 1, 1, 128, 32, False)
    counted = {name: history.count_backward(name, workload) for name in history.ATTENTIONS}
    # flash has two kernels that both compute the scores; flash1 saves maximum and sum.
    assert counted == {
        "two_pass": {"products": 7, "saved": 4},
        "flash1": {"products": 5, "saved": 8},
        "flash": {"products": 7, "saved": 4},
    }
    accesses = {name: history.count_softmax(name, 1000, 5)["accesses"] for name in history.softmaxes(5)}
    results = 5 * (4 + 8) / 4000  # values and indices of the top 5; sorting them moves a little more
    assert list(accesses.values()) == pytest.approx([4, 3, 5 + results, 4 + results, 1 + results], abs=0.06)
    small, large = (history.count_tile(history.tile_of(keys), workload) for keys in (64, 128))
    elements = 128 * 32 * 2
    assert small["bytes"] - small["statistics"] == (3 * 2 + 1) * elements
    assert large["bytes"] - large["statistics"] == (3 * 1 + 1) * elements


@INTERPRETED
def test_only_unmasked_lanes_of_a_kernel_are_counted():
    x, y = torch.ones(100), torch.zeros(100)
    with counting() as traffic:
        double_kernel[(4,)](x, y, 100, BLOCK=32)
    assert (y == 2).all()
    assert (traffic.read, traffic.written) == (400, 400)


@triton.jit
def double_kernel(X, Y, length, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + index, mask=index < length)
    tl.store(Y + index, 2 * x, mask=index < length)


def test_torch_operators_are_counted_and_views_are_not():
    x, y = torch.ones(8, 4), torch.ones(4, 16)
    with counting() as traffic:
        z = x @ y
        z.t().view(16, 8).add_(1)
    assert traffic.read == 4 * (8 * 4 + 4 * 16) + 4 * 8 * 16
    assert traffic.written == 2 * 4 * 8 * 16
    assert traffic.flops == 2 * 8 * 4 * 16


def test_a_tensor_made_in_the_shape_or_dtype_of_another_does_not_read_it():
    x = torch.ones(1000)
    with counting() as traffic:
        x.new_zeros(1)
        x.new_full((2,), 3.0)
        torch.zeros_like(x).fill_(2)
    assert (traffic.read, traffic.written) == (0, 4 * (1 + 2 + 1000 + 1000))


def test_standard_attention_reads_each_matrix_once_a_pass():
    workload = Workload("test", 1, 1, 64, 32, False)
    inputs = Inputs(workload, torch.float16, torch.device("cpu"))
    with torch.no_grad(), counting() as traffic:
        attend_with("standard")(inputs, 0)
    rows, square, scalar = 64 * 32 * 2, 64 * 64 * 2, 2  # the scalar is baddbmm's
    assert traffic.read == (2 * rows + scalar) + square + (square + rows)
    assert traffic.written == scalar + square + square + rows


def test_hardware_counters_are_summed_over_kernels():
    row = '"{}","python","kernel","{}","byte","{}"'
    output = "\n".join(
        [
            "==PROF== Connected",
            '"ID","Process Name","Kernel Name","Metric Name","Metric Unit","Metric Value"',
            row.format(0, "dram__bytes_read.sum", "1,000"),
            row.format(0, "dram__bytes_write.sum", "500"),
            row.format(1, "dram__bytes_read.sum", "24"),
        ]
    )
    counters = parse(output)
    assert counters["dram_read"] == 1024
    assert counters["dram_written"] == 500
    assert counters["kernels"] == 2
    assert parse("==ERROR== ERR_NVGPUCTRPERM")["kernels"] == 0


def test_output_of_nvidia_smi_and_ncu_is_read(tmp_path, monkeypatch):
    """With stand-ins for nvidia-smi and ncu that print what the real ones print."""
    for name, body in {
        "nvidia-smi": """case "$*" in *clocks.sm,power.draw,temperature.gpu*--id=GPU-1f-2e*) ;; *) exit 1;; esac
case "$*" in *--loop-ms=*) ;; *) echo '1980, 412.5, 41'; exit;; esac
echo '1755, 600.5, 50'; echo '1980, [N/A], 50'; echo '1980, 700.5, 60'; echo '1800, 650.5, 55'; printf '19'
: > printed; exec sleep 60""",
        "ncu": r'''case "$*" in *flash*) echo '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1;; esac
echo '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
echo '"0","k","dram__bytes_read.sum","byte","2,048"'''
        + "'",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1f-2e"))
    with timing.recorded(torch.device("cuda", 0)) as clocks:
        while not (tmp_path / "printed").exists():
            time.sleep(0.01)
    assert len(clocks.pop("host_load")) == 2
    # A value that the GPU does not tell and a line that was cut are left out.
    assert clocks == {"sm_mhz": [1755, 1800, 1980], "watts": [600.5, 650.5, 700.5], "celsius": [50, 55, 60]}
    monkeypatch.setattr(timing, "RECORD_EVERY_MS", 0)
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\ncase $* in *loop*) exec sleep 60;; esac\necho 1980, 412.5, 41\n"
    )
    with timing.recorded(torch.device("cuda", 0)) as clocks:
        pass
    del clocks["host_load"]
    assert clocks == {"sm_mhz": [1980] * 3, "watts": [412.5] * 3, "celsius": [41] * 3}
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")  # as beside 96 processes
    with monkeypatch.context() as patch:
        run = subprocess.run
        patch.setattr(subprocess, "run", lambda *command, **how: run(*command, **how | {"timeout": 0.1}))
        with timing.recorded(torch.device("cuda", 0)) as clocks:
            pass
    assert clocks.keys() == {"host_load"}
    workload = Workload("test", 1, 1, 64, 32, False)
    assert read_counters("standard", workload)["dram_read"] == 2048
    refused = read_counters("flash", workload)
    assert "no permission" in refused["refused"]
    assert "--clock-control none" in refused["command"]


def test_block_masks_have_the_stated_share_of_blocks():
    assert sparse.butterfly_mask(128 * 64).sum() == 64 * (6 + 1)
    mask = sparse.random_mask(128 * 20, 30)
    assert (mask.sum(-1) == 6).all()
    slope, intercept, fit = sparse.affine({0.1: 3.0, 0.5: 7.0, 0.9: 11.0})
    assert (slope, intercept, fit) == pytest.approx((10, 2, 1))


def test_a_backend_out_of_memory_is_dropped_and_the_others_are_timed(monkeypatch):
    timed = []

    def hungry(names, *_):
        timed.append(list(names))
        if "naive" in names:
            raise torch.OutOfMemoryError
        return {"ms": {}}

    monkeypatch.setattr(attention, "_time", hungry)
    workload = Workload("test", 1, 1, 64, 32, False)
    assert attention.time_all(["naive", "flash", "sdpa_math"], workload, None, torch.float16) == {"ms": {}}
    assert timed == [["naive", "flash", "sdpa_math"], ["naive", "flash"], ["flash"]]
    with pytest.raises(torch.OutOfMemoryError):
        attention.time_all(["naive"], workload, None, torch.float16)


@pytest.mark.parametrize(("growth", "status"), [(2.1, "reproduced"), (2.3, "not reproduced")])
def test_block_sparse_time_is_linear_or_it_is_not_and_its_blocks_are_named(growth, status):
    """From 4096 to 32,768 tokens, the number of blocks grows 2.29 times with each doubling."""
    samples = [
        {
            "kind": "butterfly",
            "backend": "flash",
            "length": 4096 * 2**i,
            "ms": {"butterfly": {"all": [growth**i]}, "dense": {"all": [4.0**i]}},
            "share": float(sparse.butterfly_mask(4096 * 2**i).float().mean()),
        }
        for i in range(4)
    ]
    results = {"device": "GPU", "settings": {"length": 4096}, "samples": in_three(*samples)}
    linear, as_blocks = sparse.judge(results)
    assert (linear.claim, linear.status) == ("C10", status)
    assert "2.29x" in linear.why
    assert (as_blocks.status, as_blocks.ours) == ("not comparable", f"{growth / 2.29:.2f}x")


def test_growth_and_the_share_of_blocks_are_held_to_in_every_process():
    """Here the median of three is within the bounds, and one process is not."""
    shares = {"0.1": 0.15, "0.5": 0.55, "0.9": 0.95, "dense": 1.0}
    samples = [
        {"kind": "shares", "backend": "flash", "process": process,
         "ms": {name: {"all": [share + off * (name == "0.5")]} for name, share in shares.items()}}
        for process, off in enumerate((0.0, 0.0, 0.2))
    ]  # fmt: skip
    samples += [
        {"kind": "butterfly", "backend": "flash", "length": 4096 * 2**i, "share": 0.5, "process": process,
         "ms": {"butterfly": {"all": [growth**i]}}}
        for process, growth in enumerate((2.0, 2.0, 2.3))
        for i in range(2)
    ]  # fmt: skip
    found = sparse.judge({"device": "GPU", "settings": {"length": 4096}, "samples": samples})
    assert [(each.claim, each.status) for each in found[:3]] == [
        ("C5", "not reproduced"), ("C5", "not reproduced"), ("C10", "not reproduced"),
    ]  # fmt: skip
    assert found[2].ours == "2.00x (2.00x to 2.30x)"
    samples = [
        {"kind": "time", **asdict(Workload("fa1", 16, 8, 4096 * 2**i, 64, False)), "process": process,
         "ms": {"flash": {"forward": [growth**i], "backward": [growth**i]}}}
        for process, growth in enumerate((4.0, 4.0, 4.5))
        for i in range(2)
    ]  # fmt: skip
    (growth,) = attention_verdicts.judge({"device": "GPU", "settings": {}, "samples": samples})
    assert (growth.claim, growth.status, growth.ours) == ("C7", "not reproduced", "4.00x (4.00x to 4.50x)")


@pytest.mark.parametrize(
    ("butterfly", "dense", "status"),
    [
        (0.9, 2.0, "reproduced"),
        (1.1, 2.0, "not reproduced"),
        (1.1, 3.0, "not comparable"),  # faster if its run were as fast as the other
        (0.9, 1.0, "not comparable"),
        (1.0, 2.0, "not reproduced"),  # the ranges overlap
    ],
)
def test_block_sparse_attention_is_the_fastest_only_where_no_approximation_is_faster(
    butterfly, dense, status
):
    """Beside 2 ms of flash and 1 ms of the fastest other, in two runs of two processes."""
    shape = {"batch": 16, "heads": 8, "head_dim": 64}
    others = {"linear": 1.5, "linformer": 1.0, "flash": 2.0}
    documents = []
    for name, times, where in (
        (
            "sparse",
            {"butterfly": butterfly, "dense": dense},
            {"kind": "butterfly", "backend": "flash", "share": 0.5},
        ),
        ("attention", others, {"kind": "time", "figure": "fa1", "mask": "plain", **shape}),
    ):
        samples = [
            {**where, "length": 1024, "process": process,
             "ms": {each: {"all": [slower * ms]} for each, ms in times.items()}}
            for process, slower in enumerate((1.0, 1.02))
        ]  # fmt: skip
        settings = {**shape, "length": 4096, "dtype": "bfloat16"}
        documents.append({"experiment": name, "device": "GPU", "settings": settings, "samples": samples})
    (verdict,) = sparse.judge_against_others(documents)
    assert (verdict.claim, verdict.status, verdict.basis) == ("C10", status, "GPU, two runs")
    assert "linformer" in verdict.ours
    assert sparse.judge_against_others([documents[0], documents[1] | {"device": "another"}]) == []


def test_every_claims_figure_is_found_by_its_number_in_the_readme():
    readme = (ROOT / "reproduce/README.md").read_text()
    for claim in CLAIMS.values():
        where = claim.source.partition(" ")[2]
        (row,) = re.findall(rf"^\| {re.escape(where)} \| {claim.name}: .*$", readme, re.MULTILINE)
        assert claim.statement.rstrip(".") in row
        if not claim.experiment:
            assert claim.missing in row
            continue
        assert f"`python -m reproduce {claim.experiment}`" in row
        measured, judged = re.findall(r"`(\w+\.py)`", row)
        assert measured == f"{claim.experiment}.py"
        assert f'"{claim.name}"' in (ROOT / "reproduce" / judged).read_text()


def answer_of(tokens: list[int]) -> int:
    """The value of an expression of ListOps, read token by token with a stack."""
    stack: list[list] = [[]]
    for token in tokens:
        if token < 10:
            stack[-1].append(token)
        elif token < encoders.CLOSE:
            stack.append([list(encoders.OPERATIONS)[token - 10]])
        elif token == encoders.CLOSE:
            name, *values = stack.pop()
            values.sort()
            middle = values[len(values) // 2]
            stack[-1].append(
                {"max": values[-1], "min": values[0], "median": middle, "sum": sum(values) % 10}[name]
            )
    ((value,),) = stack
    return value


def test_listops_has_the_answers_of_its_rule_at_the_length_asked():
    rng = random.Random(1)
    examples = [encoders.listops(rng, 512) for _ in range(50)]
    assert {len(tokens) for tokens, _ in examples} == {512}
    assert [answer_of(tokens[1:]) for tokens, _ in examples] == [answer for _, answer in examples]
    assert len({answer for _, answer in examples}) == 10
    assert all(512 - tokens.count(encoders.FILL) > 512 // 4 for tokens, _ in examples)


@pytest.mark.parametrize(
    ("standard", "flash", "status"),
    [
        ((800, 810, 790), (790, 805, 800), "reproduced"),
        ((800, 810, 790), (700, 715, 690), "not reproduced"),
        ((800, 810, 790), (900, 910, 890), "not reproduced"),
        ((310, 320, 300), (315, 305, 330), "not comparable"),
        ((900, 905, 910), (800, 900, 1000), "not reproduced"),
        ((800,), (790,), "not measured"),
    ],
)
def test_equal_accuracy_needs_something_learned_and_no_more_than_noise_between(standard, flash, status):
    where = {"kind": "accuracy", "length": 2048, "of": 2000, "most_frequent": 300, "steps": 2000}
    samples = [
        {**where, "contender": name, "seed": seed, "right": right}
        for name, rights in (("standard", standard), ("flash", flash))
        for seed, right in enumerate(rights)
    ]
    exact, sparse, *_ = encoders.judge({"device": "GPU", "samples": samples})
    assert (exact.claim, exact.status, sparse.status) == ("C16", status, "not measured")
    assert sparse.why.startswith("flash+butterfly lacks seed 0")
    if status == "not comparable":
        assert exact.why.endswith("with 0 and 0 seeds")
    few = "too few seeds to tell: pairs spread by 4.7 points, so it takes about 22, " in exact.why
    assert few == (standard[0] == 900)


def test_who_lacks_which_seed_is_said():
    where = {"kind": "accuracy", "of": 100, "most_frequent": 10, "steps": 1, "right": 50}
    seeds = {"standard": (0, 1), "flash": (0, 1, 2), "flash+butterfly": (0, 2, 3)}
    samples = [{**where, "contender": name, "seed": seed} for name, each in seeds.items() for seed in each]
    exact, sparse, *_ = encoders.judge({"device": "GPU", "samples": samples})
    assert exact.why.startswith("standard lacks seed 2; ")
    assert exact.why.endswith("flash 50.0 % (seed 0), 50.0 % (seed 1), 50.0 % (seed 2)")
    assert sparse.why.startswith("standard lacks seed 2, 3 and flash+butterfly lacks seed 1; ")


def test_every_contender_learns_from_the_same_examples():
    drawn = [next(iter(encoders.ListOps(64, 4, seed))) for seed in (0, 0, 1)]
    (tokens, answers), again, other = drawn
    assert (tokens.shape, answers.shape) == ((4, 64), (4,))
    assert torch.equal(tokens, again[0])
    assert not torch.equal(tokens, other[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles for a CPU")
@pytest.mark.parametrize(
    "name", [peers.STANDARD, peers.CUT, pytest.param(peers.COMPILED, marks=pytest.mark.slow)]
)
def test_every_form_of_standard_attention_agrees_with_naive(name):
    for causal, mask in ((True, "plain"), (False, "padding")):
        workload = Workload("fa1", 2, 2, 32, 16, causal, mask)
        inputs = Inputs(workload, torch.float32, torch.device("cpu"))
        expected = attention.gradients(attend_with("naive"), inputs)
        found = attention.gradients(attend_with(name), inputs)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


def test_linear_attention_and_linformer_are_what_their_papers_say():
    workload = Workload("fa1", 1, 2, 48, 16, False)
    inputs = Inputs(workload, torch.float64, torch.device("cpu"))
    q, k, v = inputs.qkv
    similarity = (torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).mT
    expected = similarity / similarity.sum(-1, keepdim=True) @ v
    assert torch.allclose(attend_with(peers.LINEAR)(inputs, 0), expected)
    low_rank = attend_with(peers.LINFORMER)
    out = low_rank(inputs, 0)
    assert out.shape == q.shape
    assert torch.equal(out, low_rank(inputs, 1))  # one set of projections
    twice = [(2 * v if x is v else x) for x in inputs.qkv]
    inputs.qkv = twice
    assert torch.allclose(
        low_rank(inputs, 2), 2 * out
    )  # linear in v, as a softmax over the projected keys is


@INTERPRETED
def test_one_kernel_that_stores_the_probabilities_takes_part_in_table_7_alone():
    """There its results are right, with padding, and its dropout keeps the mean."""
    cpu, workload = torch.device("cpu"), Workload("stored", 2, 2, 64, 64, False, "padding+dropout")
    assert attention.check(peers.STORED_P, workload, torch.float16, cpu)["passed"]
    chosen = attention.workloads(attention.Settings(lengths=(512, 1024)), tiny=False)
    assert {each.figure for each in chosen if peers.suits(peers.STORED_P, each)} == {"stored"}
    with pytest.raises(AttentionError, match=r"stored_p: it stores a probability .* not 1024"):
        peers.refuse(peers.STORED_P, replace(workload, length=1024), torch.float16, cpu)


def test_the_kernels_that_a_hopper_gpu_takes_against_stored_probabilities_are_as_said():
    """In C30's words (attention_verdicts.py)."""
    used = frozenset({"kv_lengths", "dropout_p"})
    for n in (128, 256, 512):
        call = AttentionRequest(
            torch.device("cuda"), torch.bfloat16, 64, used, "auto", n, n, False, heads=1024
        )
        assert hopper_needs("forward", call)
        assert not hopper_needs("backward", call)


def test_what_stores_the_probabilities_is_checked_at_each_length_and_others_once():
    asked = []

    def sample(measure, **where):
        asked.append(where)
        return {**where, "refused": "not here"}

    settings = attention.Settings(lengths=(128, 256), figures=("fa1", "stored"), backends=("flash",))
    attention.run(Options(torch.device("cuda"), False, settings, sample))
    checks = [where for where in asked if where["mask"] == "padding+dropout"]
    once = {"kind": "check", "backend": "flash", "head_dim": 64, "causal": False, "mask": "padding+dropout"}
    assert [list(where.items()) for where in checks] == [
        list(where.items()) for length in (128, 256) for where in (once, {**once, "length": length})
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in peers.MAKE if name not in peers.APPROXIMATE])
def test_every_exact_contender_of_attention_is_right_on_a_gpu(name):
    mask = "padding" if name.endswith(("+mask", "+cut")) else "plain"
    workload, device = Workload("fa1", 2, 2, 512, 64, False, mask), torch.device("cuda")
    try:
        peers.refuse(name, workload, torch.bfloat16, device)
    except AttentionError as error:
        pytest.skip(str(error))  # FlashAttention-4 may not be installed
    found = attention.check(name, workload, torch.bfloat16, device)
    assert found["passed"], found
