"""A run that diverges ends, says where, and leaves no broken model."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import measured
from tests.training.conftest import CPU, having, steps_saved
from training import checkpoint, evaluation
from training.config import Config, ConfigError, Precision
from training.failures import diverged
from training.load_run import load_run
from training.trainer import Trainer, train


def poisoned(config: Config, folder: Path, value: float, at: int) -> Trainer:
    """A trainer whose gradients are `value` from step `at` on."""
    run = Trainer(config, folder, CPU)
    whole_step, done = run.train_step, 0

    def train_step(step, inputs, targets):
        nonlocal done
        done = step + 1
        return whole_step(step, inputs, targets)

    run.train_step = train_step
    run.model.wte.weight.register_hook(lambda gradient: gradient * value if done >= at else gradient)
    return run


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nonfinite_gradient_ends_the_run_and_no_bad_weights_are_saved(config, tmp_path, precision, value):
    sparse = having(config, precision=precision, log_every=100, save_every=2, keep_checkpoints=1)
    with pytest.raises(
        ConfigError, match=r"norm is (nan|inf) \(.*1 of 16.* wte.weight\) at step 4: .*step-00000002"
    ):
        poisoned(sparse, tmp_path, value, at=4).run()
    assert steps_saved(tmp_path) == [2]
    assert all(w.isfinite().all() for w in checkpoint.load_weights(checkpoint.find(tmp_path), "cpu").values())


@pytest.mark.parametrize(
    ("dtype", "rounded", "advice"),
    [
        (torch.bfloat16, True, "or try attention.precise_delta=true or trainer.precision=fp32;"),
        (torch.bfloat16, False, "or try trainer.precision=fp32;"),
        (torch.float32, True, "raise schedule.warmup_fraction;"),
    ],
)
def test_the_advice_is_what_the_run_does_not_have_yet(tmp_path, dtype, rounded, advice):
    assert advice in diverged("the loss is nan", 4, 4, tmp_path, dtype, rounded)


def test_a_step_skipped_for_fp16_overflow_does_not_end_the_run(config, tmp_path):
    run = poisoned(having(config, precision=Precision.fp16), tmp_path, math.inf, at=6)
    assert math.isfinite(run.run()["val/loss"])
    assert not math.isfinite(measured(tmp_path, "train/grad_norm")[6])


def test_fp16_overflow_at_every_gradient_scale_ends_the_run(config, tmp_path):
    run = poisoned(having(config, precision=Precision.fp16, steps=40), tmp_path, math.inf, at=1)
    with pytest.raises(ConfigError, match=r"at every gradient scale.*at step 17.*no checkpoint was saved"):
        run.run()


def test_a_model_that_its_last_update_broke_is_neither_saved_nor_recommended(config, tmp_path):
    """A step's loss is from before its update, so it says nothing of what is saved."""
    run = Trainer(having(config, save_every=1, keep_checkpoints=1), tmp_path, CPU)
    train_step = run.train_step

    def breaking(step, *batch):
        measured = train_step(step, *batch)
        if step == 3:
            with torch.no_grad():
                run.model.h[0].mlp.c_fc.bias[5] = math.inf
        return measured

    run.train_step = breaking
    said = r"the update broke the model \(its loss is nan\) at step 4: .*from before is .*step-00000003"
    with pytest.raises(ConfigError, match=said):
        run.run()
    assert steps_saved(tmp_path) == [3]


def test_a_checkpoint_with_a_nan_is_refused_by_name(config, tmp_path):
    train(having(config, save_every=4), tmp_path)
    weights = checkpoint.load_weights(checkpoint.find(tmp_path), "cpu")
    weights["wpe.weight"][3, 3] = math.nan
    save_file(weights, checkpoint.find(tmp_path) / "weights.safetensors")
    said = r"not finite, in wpe\.weight; use the checkpoint before it, .*step-00000004"
    for goes_on in ({"resume": str(tmp_path)}, {"init_from": str(tmp_path)}):
        with pytest.raises(ConfigError, match=said):
            train(having(config, steps=12, **goes_on), tmp_path / "other")
    with pytest.raises(ConfigError, match=said):
        load_run(tmp_path)


def test_an_infinite_perplexity_is_null_in_the_summary(config, tmp_path, monkeypatch):
    evaluate = Trainer._evaluate
    monkeypatch.setattr(Trainer, "_evaluate", lambda run, done: replace(evaluate(run, done), loss=800.0))
    assert train(config, tmp_path)["val/perplexity"] == math.inf

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert (summary["val/loss"], summary["val/perplexity"]) == (800.0, None)


def test_a_nan_validation_loss_ends_the_run(config, tmp_path):
    assert math.isnan(evaluation.Evaluation(math.nan, 1, 1).perplexity)
    run = Trainer(config, tmp_path, CPU)
    run.model.register_forward_hook(lambda model, _, loss: loss if model.training else loss * math.nan)
    with pytest.raises(ConfigError, match="validation loss is nan at step 2"):
        run.run()
    assert not (tmp_path / "summary.json").exists()
