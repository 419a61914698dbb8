"""Every recipe composes, is short, and can form its batch on one GPU and on eight."""

import pytest

from training.command_line import CONFIGS, composed, options_of
from training.config import Config, Precision
from training.schedule import learning_rate


def recipe(name: str, *overrides: str) -> Config:
    return composed(f"experiment={name}", *overrides)


@pytest.mark.parametrize("name", options_of("experiment"))
def test_a_recipe_composes_and_builds_its_batch(name):
    config = recipe(name)
    for ranks in (1, 8):
        accumulation, micro_batch = config.accumulation_steps(ranks)
        assert accumulation * micro_batch * ranks * config.model.seq_len == config.trainer.batch_tokens
    assert len((CONFIGS / "experiment" / f"{name}.yaml").read_text().splitlines()) <= 20


def test_gpt2_small_has_the_settings_of_the_papers_released_code():
    config = recipe("paper/gpt2_small")
    assert config.trainer.batch_tokens == 512 * 1024
    assert (config.optimizer.lr, tuple(config.optimizer.betas)) == (6e-4, (0.9, 0.999))
    assert (config.model.dropout, config.model.scale_attn_by_inverse_layer_idx) == (0.1, True)
    assert not config.optimizer.decay_embeddings
    assert config.trainer.precision is Precision.fp16
    assert (config.data.source, config.data.tokenizer, config.data.val_fraction) == (
        "openwebtext",
        "gpt2",
        0.0005,
    )
    rates = [
        learning_rate(config.schedule, config.optimizer.lr, step, config.trainer.steps)
        for step in (3999, 4000, 202_000, 399_999)
    ]
    assert rates == pytest.approx([6e-4, 6e-4, 3e-4, 0.0], rel=1e-3)


def test_the_papers_recipes_differ_only_where_the_papers_models_do():
    small = recipe("paper/gpt2_small")
    medium = recipe("paper/gpt2_medium")
    assert (medium.model.n_layer, medium.model.n_head, medium.model.n_embd) == (24, 16, 1024)
    assert (medium.optimizer.lr, medium.model.dropout) == (1.5e-4, 0.1)
    for name, seq_len in (("2k", 2048), ("4k", 4096)):
        longer = recipe(f"paper/gpt2_small_{name}")
        assert longer.model.seq_len == seq_len
        assert longer.trainer.batch_tokens == small.trainer.batch_tokens
        assert longer.optimizer == small.optimizer


def test_nanogpts_warm_up_is_2000_steps():
    config = recipe("nanogpt/gpt2_small")
    assert round(config.schedule.warmup_fraction * config.trainer.steps) == 2000
    assert config.accumulation_steps(8) == (5, 12)


def test_the_command_line_wins_over_a_recipe():
    assert recipe("paper/gpt2_small", "trainer.precision=bf16").trainer.precision is Precision.bf16
    assert recipe("compare/gpt2_small", "attention=naive").attention.name == "naive"
