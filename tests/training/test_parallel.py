"""Several real gloo ranks on a CPU: whatever they hold and exchange, they train as one rank does."""

import json

import pytest
import torch

import train
from kernels import get_attention
from model.huggingface import from_huggingface
from tests.conftest import measured
from tests.training.ranks import train_on
from training.checkpoint import find, load_weights
from training.export import export

MODES = {
    "none": [],
    "bf16 exchange": ["parallel.gradient_dtype=bf16"],
    "optimizer": ["parallel.shard=optimizer"],
    "full": ["parallel.shard=full"],
    "full recompute": ["parallel.shard=full", "parallel.recompute=block"],
}


def run(name: str, *settings: str) -> list[str]:
    return [f"hydra.run.dir={name}", *settings]


def losses(folder) -> list[float]:
    return [float(each) for each in measured(folder, "train/loss").values()]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_train_evaluate_and_sample_as_one_does_whatever_they_hold(
    started, user_environment, tiny, tmp_path, ranks
):
    tiny = [
        *tiny,
        "trainer.micro_batch=1",
        "trainer.grad_clip=0.5",
        "model.n_layer=2",
        "trainer.eval_every=6",
    ]
    assert started(train.main, *tiny, "hydra.run.dir=one") == 0
    train_on(ranks, [run(name, *tiny, *mode) for name, mode in MODES.items()], tmp_path, user_environment)
    one = tmp_path / "one"
    weights = load_weights(find(one), "cpu")
    for name in MODES:
        many, close = tmp_path / name, 1e-3 if "bf16" in name else 1e-5
        assert losses(many) == pytest.approx(losses(one), rel=close), name
        summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, many)]
        assert summaries[1]["val/loss"] == pytest.approx(summaries[0]["val/loss"], rel=close)
        assert summaries[1]["val/tokens"] == summaries[0]["val/tokens"]
        theirs = load_weights(find(many), "cpu")
        for key, weight in weights.items():
            torch.testing.assert_close(theirs[key], weight, rtol=0, atol=1e-2 if close == 1e-3 else 1e-4)
        if close < 1e-3:
            assert (many / "sample.txt").read_text() == (one / "sample.txt").read_text()


def test_a_run_goes_on_with_other_ranks_and_another_layout(started, user_environment, tiny, tmp_path):
    """1 -> 2 -> 1, whole and in parts; a checkpoint in parts is exported, and begins another run."""
    steady = [*tiny, "optimizer.lr=1e-2", "schedule=constant", "schedule.warmup_fraction=0"]
    until = {
        steps: [*steady, "trainer.resume=auto", f"trainer.steps={steps}"] for steps in (4, 8, 12, 16, 20)
    }
    assert started(train.main, *steady, "trainer.steps=20", "hydra.run.dir=whole") == 0
    assert started(train.main, *until[4], "hydra.run.dir=run") == 0
    layouts = {8: "full", 12: "optimizer", 16: "none"}
    runs = [run("run", *until[steps], f"parallel.shard={how}") for steps, how in layouts.items()]
    copy = run("copy", *until[16], "trainer.resume=run", "parallel.shard=full")
    train_on(2, [*runs[:2], copy, runs[2]], tmp_path, user_environment)
    assert started(train.main, *until[20], "hydra.run.dir=run") == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert losses(tmp_path / "copy") == pytest.approx(losses(tmp_path / "whole")[12:16], rel=1e-5)

    export(tmp_path / "copy", tmp_path / "exported")
    theirs = from_huggingface(tmp_path / "exported", get_attention("naive"))
    weights = load_weights(find(tmp_path / "copy"), "cpu")
    assert torch.equal(theirs.h[0].mlp.c_fc.weight, weights["h.0.mlp.c_fc.weight"])
    again = [*tiny, "trainer.init_from=copy", "trainer.steps=0", "hydra.run.dir=evaluated"]
    assert started(train.main, *again) == 0
    before, after = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("copy", "evaluated")
    )
    assert after["val/loss"] == pytest.approx(before["val/loss"], rel=1e-5)
