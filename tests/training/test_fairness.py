"""Switching attention changes attention and nothing else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels import AttentionError
from model.gpt import GPT, cross_entropy
from tests.conftest import losses, text_data
from training.config import (
    AttentionConfig,
    Config,
    Layers,
    LoggerConfig,
    ModelConfig,
    Precision,
    TrainerConfig,
)
from training.distributed import World
from training.layers import resolve_layers
from training.parallel.config import ParallelConfig
from training.plan import _drifts
from training.seeds import stream_seed
from training.trainer import Trainer, train

STEPS = 4


def config(short_text_file: Path, attention: str, dropout: float = 0.0) -> Config:
    """Two short sequences a step and one document to evaluate, once: every token costs the interpreter time."""
    return Config(
        model=ModelConfig(seq_len=16, n_layer=2, n_head=2, n_embd=32, dropout=dropout),
        attention=AttentionConfig(attention),
        data=replace(text_data(short_text_file), val_fraction=0.01),
        trainer=TrainerConfig(
            steps=STEPS, batch_tokens=32, log_every=1, eval_every=0, device="cpu", sample_tokens=0
        ),
        logger=LoggerConfig(wandb=False),
    )


def trained(config: Config, folder: Path) -> tuple[list[float], torch.Tensor]:
    """The training losses followed by the validation loss, and the state of torch's generator afterwards."""
    torch.manual_seed(0)
    summary = train(config, folder)
    assert len(losses(folder)) == config.trainer.steps
    return [*losses(folder), summary["val/loss"]], torch.get_rng_state()


@pytest.mark.parametrize("other", ["sdpa", "flash"])
def test_weights_and_batches_do_not_depend_on_the_attention(short_text_file, tmp_path, other):
    naive = Trainer(config(short_text_file, "naive"), tmp_path, World(torch.device("cpu")))
    switched = Trainer(config(short_text_file, other), tmp_path, World(torch.device("cpu")))
    for name, weight in naive.model.state_dict().items():
        assert torch.equal(weight, switched.model.state_dict()[name]), name
    for n in range(STEPS):
        for ours, theirs in zip(naive.batches.batch(n), switched.batches.batch(n), strict=True):
            assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("other", ["sdpa", "flash"])
def test_losses_and_the_random_state_do_not_depend_on_the_attention(short_text_file, tmp_path, other):
    """In fp32, so the losses agree to 1e-5 relative."""
    losses, state = trained(config(short_text_file, "naive"), tmp_path / "naive")
    switched, switched_state = trained(config(short_text_file, other), tmp_path / other)
    assert switched == pytest.approx(losses, rel=1e-5)
    assert torch.equal(state, switched_state)


def test_with_dropout_the_random_state_does_not_depend_on_the_attention(short_text_file, tmp_path):
    _, state = trained(config(short_text_file, "naive", dropout=0.2), tmp_path / "naive")
    _, switched = trained(config(short_text_file, "sdpa", dropout=0.2), tmp_path / "sdpa")
    assert torch.equal(state, switched)


def test_evaluation_during_training_does_not_change_the_losses(short_text_file, tmp_path):
    never = config(short_text_file, "sdpa", dropout=0.2)
    often = replace(never, trainer=replace(never.trainer, eval_every=2))
    assert trained(often, tmp_path / "often")[0] == trained(never, tmp_path / "never")[0]


@pytest.mark.parametrize("name", ["seed", "init_seed"])
def test_another_seed_changes_the_weights_and_init_seed_not_the_batches(short_text_file, tmp_path, name):
    plain = config(short_text_file, "sdpa")
    first, other = (
        Trainer(each, tmp_path, World(torch.device("cpu"))) for each in (plain, replace(plain, **{name: 1}))
    )
    assert not torch.equal(first.model.wte.weight, other.model.wte.weight)
    assert np.array_equal(first.batches.batch(0)[0], other.batches.batch(0)[0]) == (name == "init_seed")


@pytest.mark.parametrize("option", [pytest.param("loss", marks=pytest.mark.slow), "block"])
def test_fused_layers_give_the_losses_and_random_state_of_torch_layers(short_text_file, tmp_path, option):
    plain = config(short_text_file, "naive")
    fused = replace(plain, model=replace(plain.model, **{option: Layers.fused}))
    losses, state = trained(plain, tmp_path / "plain")
    switched, switched_state = trained(fused, tmp_path / "fused")
    assert switched == pytest.approx(losses, rel=1e-5)
    assert torch.equal(state, switched_state)


@pytest.mark.slow
def test_dropout_masks_of_fused_layers_are_the_same_with_any_attention(short_text_file, tmp_path):
    """They come from a seed, and not from torch's generator, from which torch's attention draws as well.

    One layer and two steps: the interpreter draws a mask row by row, and took 17 s with two layers and four steps.
    """
    plain = config(short_text_file, "naive", dropout=0.2)
    fused = replace(
        plain,
        model=replace(plain.model, block=Layers.fused, n_layer=1),
        trainer=replace(plain.trainer, steps=2),
    )
    losses, state = trained(fused, tmp_path / "fused")
    flash, _ = trained(replace(fused, attention=AttentionConfig("flash")), tmp_path / "flash")
    assert flash == pytest.approx(losses, rel=1e-5)
    torch.manual_seed(stream_seed(fused.seed, "dropout", 1, 0, 0))  # the last step's seed
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_are_fused_by_default_on_a_gpu_only(short_text_file, tmp_path):
    for device, want in (("cuda", Layers.fused), ("cpu", Layers.torch)):
        assert resolve_layers(Layers.auto, "model.loss", torch.device(device)) is want
        assert resolve_layers(Layers.torch, "model.loss", torch.device(device)) is Layers.torch
    gpu = {"option": "model.block", "device": torch.device("cuda"), "unmeasured": True}
    assert resolve_layers(Layers.auto, **gpu) is Layers.torch
    trainer = Trainer(config(short_text_file, "sdpa"), tmp_path, World(torch.device("cpu")))
    assert type(trainer.model) is GPT
    assert trainer.model.loss is cross_entropy


def test_attention_options_reach_the_unpacked_and_the_packed_function(short_text_file, tmp_path):
    precise = replace(
        config(short_text_file, "flash"), attention=AttentionConfig("flash", precise_delta=True)
    )
    attention = Trainer(precise, tmp_path, World(torch.device("cpu"))).model.h[0].attn
    assert attention.attention.keywords == attention.packed.keywords == {"precise_delta": True}


ON_GPU = pytest.mark.gpu  # Triton's interpreter multiplies bfloat16 wrongly


@pytest.mark.parametrize(
    ("attention", "seq_len", "precision", "kept"),
    [
        pytest.param(AttentionConfig("flash"), 4096, Precision.bf16, True, marks=ON_GPU),
        pytest.param(AttentionConfig("flash"), 2048, Precision.bf16, False, marks=ON_GPU),
        pytest.param(
            AttentionConfig("flash", precise_delta=False), 4096, Precision.bf16, False, marks=ON_GPU
        ),
        (AttentionConfig("flash"), 4096, Precision.fp32, False),
        (AttentionConfig("flash", precise_delta=True), 16, Precision.fp32, True),
        (AttentionConfig("sdpa"), 4096, Precision.bf16, False),
    ],
)
def test_flash_keeps_what_rounding_takes_where_runs_diverge_without(
    request, tmp_path, attention, seq_len, precision, kept
):
    text, device = tmp_path / "text.txt", "cuda" if request.node.get_closest_marker("gpu") else "cpu"
    text.write_text("\n\n".join(f"{i} is long enough for a window. " * 300 for i in range(3)))
    plain = config(text, "flash")
    trainer = replace(
        plain.trainer,
        device=device,
        precision=precision,
        batch_tokens=2 * seq_len,
        micro_batch=1,
        compile=False,
    )
    model = replace(plain.model, seq_len=seq_len)
    wanted = replace(plain, attention=attention, model=model, trainer=trainer)
    run = Trainer(wanted, tmp_path / "run", World(torch.device(device)))
    assert run.plan.computation.precise_delta is kept
    assert (getattr(run.model.h[0].attn.attention, "keywords", {}) == {"precise_delta": True}) is kept


@pytest.mark.parametrize(
    ("name", "head_dim", "rest", "kept"),
    [
        ("auto", 64, {}, True),
        ("auto", 256, {}, True),
        ("flash", 64, {"tier": "hopper"}, False),
        ("flash", 64, {"context": 2}, False),
    ],
)
def test_nobody_who_did_not_ask_for_precise_delta_is_refused_for_it(
    short_text_file, name, head_dim, rest, kept
):
    model = ModelConfig(seq_len=4096, n_layer=2, n_head=2, n_embd=2 * head_dim)
    attention, shared = AttentionConfig(name, rest.get("tier", "auto")), rest.get("context", 1)
    plain = config(short_text_file, name)
    rest = {"trainer": replace(plain.trainer, batch_tokens=4096), "parallel": ParallelConfig(context=shared)}
    wanted = replace(plain, model=model, attention=attention, **rest)
    assert _drifts(wanted, "flash", torch.bfloat16) is kept
    assert not _drifts(wanted, "flash", torch.float32)


@pytest.mark.slow
def test_flash_and_naive_attention_use_the_same_dropout_mask(short_text_file, tmp_path):
    """The mask is a function of the seed, so the losses agree with dropout as well."""
    losses, state = trained(config(short_text_file, "naive", dropout=0.2), tmp_path / "naive")
    switched, switched_state = trained(config(short_text_file, "flash", dropout=0.2), tmp_path / "flash")
    assert switched == pytest.approx(losses, rel=1e-5)
    assert torch.equal(state, switched_state)


@pytest.mark.slow
def test_document_mask_keeps_attention_within_documents(tmp_path):
    """Backends agree on the loss, the mask changes it, and a backend that cannot mask documents is refused."""
    short_text_file = tmp_path / "short.txt"  # documents of a few tokens, several to a sequence
    short_text_file.write_text("\n\n".join(str(i) * 5 for i in range(200)))
    masked = config(short_text_file, "naive")
    masked = replace(masked, data=replace(masked.data, document_mask=True))
    losses = trained(masked, tmp_path / "naive")[0]
    for name in ("flash", "sdpa"):
        switched = replace(masked, attention=AttentionConfig(name))
        assert trained(switched, tmp_path / name)[0] == pytest.approx(losses, rel=1e-5)
    assert losses[1:] != trained(config(short_text_file, "naive"), tmp_path / "unmasked")[0][1:]
    with pytest.raises(AttentionError, match="cu_seqlens"):
        train(replace(masked, attention=AttentionConfig("chunked")), tmp_path / "chunked")
