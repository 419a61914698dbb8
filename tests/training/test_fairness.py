"""Switching attention changes attention and nothing else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels import AttentionError
from model.gpt import cross_entropy
from tests.conftest import measured, text_data
from training.config import (
    AttentionConfig,
    Config,
    Layers,
    LoggerConfig,
    ModelConfig,
    TrainerConfig,
)
from training.distributed import World
from training.layers import resolve_layers
from training.seeds import stream_seed
from training.trainer import Trainer, train

STEPS = 4


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 24 bytes: the one to evaluate is two sequences, where 300 took a third of the time."""
    path = tmp_path_factory.mktemp("fairness") / "text.txt"
    path.write_text("\n\n".join(f"{i * i} wizards, {i * 7919} quips" for i in range(1, 61)))
    return path


def config(text_file: Path, attention: str, dropout: float = 0.0) -> Config:
    """Two short sequences a step and one document to evaluate, once: every token costs the interpreter time."""
    return Config(
        model=ModelConfig(seq_len=16, n_layer=2, n_head=2, n_embd=32, dropout=dropout),
        attention=AttentionConfig(attention),
        data=replace(text_data(text_file), val_fraction=0.01),
        trainer=TrainerConfig(
            steps=STEPS, batch_tokens=32, log_every=1, eval_every=0, device="cpu", sample_tokens=0
        ),
        logger=LoggerConfig(wandb=False),
    )


def trained(config: Config, folder: Path) -> tuple[list[float], torch.Tensor]:
    """The training losses followed by the validation loss, and the state of torch's generator afterwards."""
    torch.manual_seed(0)
    summary = train(config, folder)
    losses = list(map(float, measured(folder, "train/loss").values()))
    assert len(losses) == config.trainer.steps
    return [*losses, summary["val/loss"]], torch.get_rng_state()


@pytest.mark.parametrize("other", ["sdpa", "flash"])
def test_same_weights_and_batches(text_file, tmp_path, other):
    naive = Trainer(config(text_file, "naive"), tmp_path, World(torch.device("cpu")))
    switched = Trainer(config(text_file, other), tmp_path, World(torch.device("cpu")))
    for name, weight in naive.model.state_dict().items():
        assert torch.equal(weight, switched.model.state_dict()[name]), name
    for n in range(STEPS):
        for ours, theirs in zip(naive.batches.batch(n), switched.batches.batch(n), strict=True):
            assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("other", ["sdpa", "flash"])
def test_same_losses_and_no_random_number_drawn(text_file, tmp_path, other):
    """fp32, so the first losses agree to 1e-5 relative."""
    losses, state = trained(config(text_file, "naive"), tmp_path / "naive")
    switched, switched_state = trained(config(text_file, other), tmp_path / other)
    assert switched == pytest.approx(losses, rel=1e-5)
    assert torch.equal(state, switched_state)


def test_attention_dropout_shifts_no_other_stream(text_file, tmp_path):
    _, state = trained(config(text_file, "naive", dropout=0.2), tmp_path / "naive")
    _, switched = trained(config(text_file, "sdpa", dropout=0.2), tmp_path / "sdpa")
    assert torch.equal(state, switched)


def test_evaluation_does_not_move_training(text_file, tmp_path):
    never = config(text_file, "sdpa", dropout=0.2)
    often = replace(never, trainer=replace(never.trainer, eval_every=2))
    assert trained(often, tmp_path / "often")[0] == trained(never, tmp_path / "never")[0]


def test_the_seed_moves_weights_and_batches(text_file, tmp_path):
    first = Trainer(config(text_file, "sdpa"), tmp_path, World(torch.device("cpu")))
    other = Trainer(replace(config(text_file, "sdpa"), seed=1), tmp_path, World(torch.device("cpu")))
    assert not torch.equal(first.model.wte.weight, other.model.wte.weight)
    assert not np.array_equal(first.batches.batch(0)[0], other.batches.batch(0)[0])


@pytest.mark.parametrize("option", ["loss", "block"])
def test_fused_layers_are_the_same_layers(text_file, tmp_path, option):
    plain = config(text_file, "naive")
    fused = replace(plain, model=replace(plain.model, **{option: Layers.fused}))
    losses, state = trained(plain, tmp_path / "plain")
    switched, switched_state = trained(fused, tmp_path / "fused")
    assert switched == pytest.approx(losses, rel=1e-5)
    assert torch.equal(state, switched_state)


def test_fused_layers_draw_their_dropout_from_a_seed(text_file, tmp_path):
    """And not from the generator that torch's attention moves, so the masks are the same with any attention.

    One layer and two steps: the interpreter draws a mask row by row, and took 17 s with two and four.
    """
    plain = config(text_file, "naive", dropout=0.2)
    fused = replace(
        plain,
        model=replace(plain.model, block=Layers.fused, n_layer=1),
        trainer=replace(plain.trainer, steps=2),
    )
    losses, state = trained(fused, tmp_path / "fused")
    flash, _ = trained(replace(fused, attention=AttentionConfig("flash")), tmp_path / "flash")
    assert flash == pytest.approx(losses, rel=1e-5)
    torch.manual_seed(stream_seed(fused.seed, "dropout", 1, 0, 0))  # where the last step put it
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_are_fused_on_a_gpu_by_themselves(text_file, tmp_path):
    for device, want in (("cuda", Layers.fused), ("cpu", Layers.torch)):
        assert resolve_layers(Layers.auto, "model.loss", torch.device(device)) is want
        assert resolve_layers(Layers.torch, "model.loss", torch.device(device)) is Layers.torch
    trainer = Trainer(config(text_file, "sdpa"), tmp_path, World(torch.device("cpu")))
    assert trainer.model.fused is None
    assert trainer.model.loss is cross_entropy


def test_options_of_the_attention_reach_both_its_forms(text_file, tmp_path):
    precise = replace(config(text_file, "flash"), attention=AttentionConfig("flash", precise_delta=True))
    attention = Trainer(precise, tmp_path, World(torch.device("cpu"))).model.h[0].attn
    assert attention.attention.keywords == attention.packed.keywords == {"precise_delta": True}


def test_flash_drops_what_naive_drops(text_file, tmp_path):
    """One mask, a function of the seed: with dropout, too, the losses agree."""
    losses, state = trained(config(text_file, "naive", dropout=0.2), tmp_path / "naive")
    switched, switched_state = trained(config(text_file, "flash", dropout=0.2), tmp_path / "flash")
    assert switched == pytest.approx(losses, rel=1e-5)
    assert torch.equal(state, switched_state)


def test_document_mask_keeps_attention_within_documents(tmp_path):
    """Backends agree on it, it changes the loss, and one that cannot do it is refused."""
    text_file = tmp_path / "short.txt"  # documents of a few tokens, several to a sequence
    text_file.write_text("\n\n".join(str(i) * 5 for i in range(200)))
    masked = config(text_file, "naive")
    masked = replace(masked, data=replace(masked.data, document_mask=True))
    switched = replace(masked, attention=AttentionConfig("flash"))
    losses = trained(masked, tmp_path / "naive")[0]
    assert trained(switched, tmp_path / "flash")[0] == pytest.approx(losses, rel=1e-5)
    assert losses[1:] != trained(config(text_file, "naive"), tmp_path / "unmasked")[0][1:]
    with pytest.raises(AttentionError, match="cu_seqlens"):
        train(replace(masked, attention=AttentionConfig("sdpa")), tmp_path / "sdpa")
