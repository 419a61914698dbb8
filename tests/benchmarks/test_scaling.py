"""The measurements of several GPUs, on two gloo ranks, and the prediction for more than there are."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.predict import (
    BLOCK_HOST,
    STEP_HOST,
    cases,
    collective,
    data_parallel,
    errors,
    fsdp,
    measured,
    predicted,
    rows_of_one_sequence,
    work,
)
from benchmarks.scaling import LAYOUTS, MODELS, _reason, layouts_of
from training.command_line import composed

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is refused without a GPU")
def test_without_a_gpu_nothing_large_is_measured(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["scaling", "--models", "small", "tiny"])
    assert capsys.readouterr().err.endswith(
        "error: no CUDA device: here only --models tiny, which shows that it works\n"
    )


@pytest.mark.slow
def test_two_ranks_are_measured_against_one_and_a_layout_that_fails_is_named(text_file, tmp_path, capsys):
    out = tmp_path / "scaling.json"
    small = [
        *("trainer.device=cpu", "attention=naive", "model.seq_len=16", "model.n_head=2", "model.n_embd=32"),
        *("trainer.batch_tokens=128", "data=text_files", f"data.files={text_file}", r"data.separator='\n\n'"),
        *("data.val_fraction=0.1", "data.workers=1"),
    ]
    tiny = ["scaling", "--models", "tiny", "--steps", "1", "--out", str(out), "--gpus", "1", "2"]
    assert main([*tiny, "--layouts", "whole", "full", "context", "--", *small]) == 0
    said = capsys.readouterr().out
    samples = json.loads(out.read_text())["samples"]
    assert [(each["ranks"], each["name"]) for each in samples] == [
        (1, "whole"),
        *[(2, "whole")] * 2,
        *[(2, "full")] * 2,
        *[(2, "context")] * 2,
    ]
    for each in samples:
        assert each["losses"] == pytest.approx(samples[0]["losses"], rel=1e-5)
        assert each["perf/tokens_per_second"] > 0
        assert each["clocks"] == {}  # of a GPU alone
    assert said.count(" equal") == 3
    assert "DIFFER" not in said
    assert main([*tiny, "--layouts", "whole", "--", *small, "trainer.precision=fp8"]) == 0
    failed = json.loads(out.read_text())["samples"]
    assert [each["ranks"] for each in failed] == [1, 2]
    assert all("fp8" in each["failed"] for each in failed)
    assert main([*tiny, "--layouts", "whole", "--minutes", "0.001", "--", *small]) == 0
    late = json.loads(out.read_text())["samples"]
    assert {each["failed"] for each in late} == {"not done after 0.001 minutes"}


TORCHRUN = """
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: {end}
Root Cause (first observed failure):
[0]:
  exitcode  : {code} (pid: 9966)
  traceback : {trace}
"""


@pytest.mark.parametrize(
    ("told", "trace", "reason"),
    [
        (
            "[rank1]: x.MissingConfigException: no model/a",
            "To enable",
            "x.MissingConfigException: no model/a",
        ),
        ("[rank0]:   raise Error: this\nAssertionError", "To enable", "AssertionError"),
        ("error: cuda:0 is out of memory", "To enable", "error: cuda:0 is out of memory"),
        ("W1125 a warning", "Signal 9 (SIGKILL) received by PID 9", "Signal 9 (SIGKILL) received by PID 9"),
    ],
)
def test_the_reason_of_a_rank_is_found_in_what_torchrun_prints(told, trace, reason):
    assert _reason(told + TORCHRUN.format(code=1, trace=trace, end="")) == reason


@pytest.mark.one_in(16)
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_shared_by_as_many_gpus_as_the_docs_name(model, gpus):
    for _, settings in layouts_of(model, gpus, list(LAYOUTS)):
        config = composed(*MODELS[model], *settings)
        accumulation, _ = config.accumulation_steps(gpus // config.parallel.context)  # or ConfigError
        assert accumulation >= 1


def test_a_prediction_is_the_computation_and_what_links_cannot_hide():
    small = work("small", 65536, 0.5)
    assert collective(1e9, 1) == 0
    assert collective(8e9, 8) == pytest.approx(7e9 / 450e9)  # seven of eight parts come over NVLink
    assert collective(8e9, 1024) == pytest.approx(
        8e9 * 127 / 128 / 8 / 50e9
    )  # over eight ports, which are slower
    assert data_parallel(small, 1) == small.seconds
    assert small.seconds < data_parallel(small, 8) < 1.01 * small.seconds
    little = work("small", 1024, 0.5)  # too short a backward to hide 0.5 GB of gradients
    assert data_parallel(little, 512) > 1.5 * little.seconds
    large = work("xl", 65536, 0.5, 16384)
    assert fsdp(large, 512) > fsdp(large, 8) > large.seconds


def test_no_prediction_is_shorter_than_the_host_needs():
    one_by_one = {"model": "small", "name": "full", "ranks": 8, "batch_tokens": 131072, "micro_batch": 4}
    host = 4 * 12 * BLOCK_HOST  # four micro-steps
    for name in ("full", "full, blocks again"):
        assert predicted(one_by_one | {"name": name}, 0.5) == pytest.approx(host)
    assert predicted(one_by_one | {"blocks_at_once": 12}, 0.5) == pytest.approx(host * 13 / 24)
    ring = {"model": "32k", "name": "context", "ranks": 8}
    replayed = predicted(ring | {"name": "context, CUDA graphs"}, 0.5)
    assert replayed < 12 * 16 * STEP_HOST < predicted(ring, 0.5)


def test_predictions_are_held_against_what_was_measured_step_by_step_as_it_was(tmp_path):
    one = {"model": "small", "name": "whole", "ranks": 1, "batch_tokens": 131072, "micro_batch": 16}
    full = one | {
        "name": "full",
        "ranks": 8,
        "perf/step_ms": 2e3 * predicted(one | {"name": "full", "ranks": 8}, 0.4),
    }
    samples = [
        one | {"perf/mfu": 0.4},
        full,
        full | {"perf/step_ms": 0.0},  # a second run
        one | {"failed": "no memory", "ranks": 8},
    ]
    samples += [full | {"name": "optimizer"}, full | {"model": "7b", "name": "full, blocks again"}]
    long = one | {"model": "32k", "batch_tokens": 32768, "perf/step_ms": 1e3}
    for folder, several in (("h100x2", []), ("h100x8", samples[1:])):  # one GPU's are in both
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "scaling.json").write_text(json.dumps({"samples": [samples[0], long, *several]}))
    alone, first, last = found = cases(tmp_path)
    assert (alone.row[:3], alone.row[-1]) == (["32k", "whole", "1"], "h100x2")
    assert (first.row[1:4], first.row[-2:]) == (["full", "8", "131,072"], ["-100.0% to +100.0%", "h100x8"])
    assert first.measured == (0.0, full["perf/step_ms"])
    assert last.row[:2] == ["7b", "full, blocks again"]
    assert [*errors(found)][1] == ["FSDP", "8", "3", "-100.0%", "+100.0%"]


def test_every_measured_step_of_a_layout_that_is_predicted_stands_against_its_prediction():
    left_out = ("optimizer", "bf16 gradients")
    steps = {
        (each["model"], str(each["ranks"]), each["perf/step_ms"])
        for samples in measured(RESULTS).values()
        for each in samples
        if (each["ranks"] > 1 or each["model"].endswith("k")) and not each["name"].endswith(left_out)
    }
    shown = {(case.key[0], case.key[2], step) for case in cases(RESULTS) for step in case.measured}
    assert steps == shown


def test_a_ring_is_predicted_to_scale_within_a_host_and_to_wait_for_the_network_beyond():
    """32k tokens are shared by 8 GPUs at most, since each has two chunks; 256k by 16 over two hosts."""
    found = {(row[0], row[2]): row for row in rows_of_one_sequence(0.5, [1, 2, 8, 16])}
    assert ("32k", "16") not in found
    assert float(found["128k", "8"][5].rstrip("%")) > 99
    assert float(found["64k", "16"][5].rstrip("%")) < 50
    assert float(found["128k", "1"][3]) == pytest.approx(2 * float(found["128k", "2"][3]), rel=1e-2)


def test_gathered_keys_are_predicted_to_hide_nothing():
    sample = {"model": "128k", "name": "context", "ranks": 8}
    ring, gathered = (
        predicted(sample | {"name": name}, 0.5) for name in ("context", "context, keys gathered")
    )
    sent = 12 * 2 * 131072 * 12 * 64 * (2 + 2 + 4) * 7 / 8 / 450e9  # of 12 layers
    assert gathered == pytest.approx(ring + sent, rel=1e-2)
