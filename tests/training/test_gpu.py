"""Whole runs on a GPU: every backend, compiled, in each precision."""

import json
import pickle
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import AttentionError, resolve_attention
from model.config import MLPKind
from tests.conftest import measured, text_data
from training.checkpoint import find, load_weights
from training.config import (
    AttentionConfig,
    Config,
    ConfigError,
    LoggerConfig,
    ModelConfig,
    Precision,
    TrainerConfig,
)
from training.optimizer import OptimizerConfig, OptimizerName
from training.seeds import stream_seed
from training.trainer import train

pytestmark = pytest.mark.gpu


def config(
    text_file: Path, attention: str, precision: Precision = Precision.bf16, n_layer: int = 4
) -> Config:
    """Where runs are many, n_layer is 2: most of their time is compilation, of each layer."""
    return Config(
        model=ModelConfig(seq_len=1024, n_layer=n_layer, n_head=12, n_embd=768),
        attention=AttentionConfig(attention),
        data=text_data(text_file),
        trainer=TrainerConfig(
            steps=20, batch_tokens=8192, precision=precision, log_every=5, eval_every=0, sample_tokens=0
        ),
        logger=LoggerConfig(wandb=False),
    )


@pytest.mark.parametrize("attention", ["naive", "sdpa", "flash"])
def test_backends_train_alike_in_bf16_under_compile(text_file, tmp_path, attention):
    """bf16 keeps 8 bits, so after 20 steps the losses agree to a percent or so, not to the last digit."""
    reference = train(config(text_file, "sdpa_math", Precision.fp32, n_layer=2), tmp_path / "reference")
    summary = train(config(text_file, attention, n_layer=2), tmp_path / attention)
    assert summary["attention"] == attention
    assert summary["compiled"] is True
    assert summary["dtype"] == "bfloat16"
    assert summary["val/loss"] == pytest.approx(reference["val/loss"], rel=0.02)
    assert summary["perf/peak_allocated_gib"] <= summary["perf/peak_reserved_gib"]
    assert json.loads((tmp_path / attention / "environment.json").read_text())["driver"]


SWITCHES = {
    **{
        "n_kv_head": 4,
        "window": 200,
        "window_pattern": "LS",
        "softcap": 30.0,
        "sinks": True,
        "qk_norm": True,
    },
    **{"rope": True, "rmsnorm": True, "mlp": MLPKind.relu2},
}


# each alone, but for the pattern, which needs a window, and all together
ALONE = [{name: value} for name, value in SWITCHES.items() if name != "window_pattern"]


@pytest.mark.parametrize("on", [*ALONE, SWITCHES], ids=list)
def test_flash_trains_the_switches_of_later_models_as_naive_does(text_file, tmp_path, on):
    """Compiled, in CUDA graphs, with muon; the fused layers serve all but rmsnorm and mlp."""
    runs = []
    for attention, precision in (("naive", Precision.fp32), ("flash", Precision.bf16)):
        switched = config(text_file, attention, precision, n_layer=2)
        model = replace(switched.model, **on)
        muon = OptimizerConfig(OptimizerName.muon)
        runs.append(train(replace(switched, model=model, optimizer=muon), tmp_path / attention))
    assert runs[1]["attention"] == "flash"
    assert runs[1]["block"] == ("torch" if on.keys() & {"rmsnorm", "mlp"} else "fused")
    assert runs[1]["val/loss"] == pytest.approx(runs[0]["val/loss"], rel=0.02)


@pytest.mark.parametrize("attention", ["sdpa", "flex", "fa4"])
def test_packed_documents_train_alike_under_compile(text_file, tmp_path, attention):
    """The others' runs of a document mask end at flash's loss, but for bf16."""
    if attention == "fa4":
        pytest.importorskip("flash_attn.cute")
    masked = [config(text_file, name, n_layer=2) for name in ("flash", attention)]
    masked = [replace(each, data=replace(each.data, document_mask=True)) for each in masked]
    expected, found = (train(each, tmp_path / each.attention.name) for each in masked)
    assert found["attention"] == attention
    assert found["val/loss"] == pytest.approx(expected["val/loss"], rel=0.02)


def test_compiled_code_is_not_reused_for_another_precision(text_file, tmp_path, monkeypatch):
    """PyTorch 2.11 by itself took fp16's graph from its cache for bf16: a loss of 2.97 instead of 2.85."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    train(config(text_file, "flash", Precision.fp16), tmp_path / "fp16")
    after = train(config(text_file, "flash"), tmp_path / "bf16")
    eager = config(text_file, "flash")
    eager = replace(eager, trainer=replace(eager.trainer, compile=False))
    alone = train(eager, tmp_path / "eager")
    assert after["val/loss"] == pytest.approx(alone["val/loss"], rel=0.01)


def test_a_profiled_step_prints_the_kernels_that_took_most_time(text_file, tmp_path, capsys):
    """Including the kernels that CUDA graphs launch."""
    profiled = config(text_file, "flash")
    train(replace(profiled, trainer=replace(profiled.trainer, profile_step=15)), tmp_path)
    snapshot = pickle.loads((tmp_path / "memory-step-00000015.pickle").read_bytes())
    assert snapshot["segments"]
    said = capsys.readouterr().out
    shares = [int(share) for share in re.findall(r"^ +(\d+)% +[\d.]+ ms +\d+ x  ", said, re.MULTILINE)]
    assert len(shares) == 8
    assert 20 < sum(shares) <= 100
    assert int(re.search(r"total: [\d.]+ ms in (\d+) calls", said)[1]) > 50


def test_only_torchs_attention_draws_dropout_from_torchs_generator(text_file, tmp_path):
    """So the masks of the other layers are the same with any attention, in compiled runs as well."""
    states = {}
    for attention in ("flash", "sdpa"):
        dropped = config(text_file, attention)
        dropped = replace(dropped, model=replace(dropped.model, dropout=0.1))
        train(dropped, tmp_path / attention)
        states[attention] = torch.cuda.get_rng_state()
    torch.manual_seed(stream_seed(dropped.seed, "dropout", dropped.trainer.steps - 1, 0, 0))
    assert torch.equal(states["flash"], torch.cuda.get_rng_state())
    assert not torch.equal(states["sdpa"], torch.cuda.get_rng_state())


def test_auto_selects_flash_on_a_gpu(text_file, tmp_path):
    assert train(config(text_file, "auto"), tmp_path)["attention"] == "flash"


def test_fp16_with_gradient_scaling_reaches_the_loss_of_fp32(text_file, tmp_path, monkeypatch):
    """The gradient scale begins at 2^16, and steps that overflow are skipped. After 20 steps a skipped one still
    changes the loss (the second: 2.931 instead of 2.850 on an H200), so the float32 run skips the same steps."""
    skipped = []

    class Noting(torch.amp.GradScaler):
        steps = 0

        def update(self):
            before = self.get_scale()
            super().update()
            if self.get_scale() < before:
                skipped.append(self.steps)
            self.steps += 1

    class LeavingOut(torch.amp.GradScaler):
        steps = 0

        def step(self, optimizer):
            if self.steps not in skipped:
                super().step(optimizer)
            self.steps += 1

    with monkeypatch.context() as patch:
        patch.setattr(torch.amp, "GradScaler", Noting)
        half = train(config(text_file, "flash", Precision.fp16), tmp_path / "fp16")
        patch.setattr(torch.amp, "GradScaler", LeavingOut)
        full = train(config(text_file, "flash", Precision.fp32), tmp_path / "fp32")
    assert len(skipped) < 5
    assert half["val/loss"] == pytest.approx(full["val/loss"], rel=0.005)


def test_flash_needs_less_memory_than_naive(text_file, tmp_path):
    peaks = {}
    for attention in ("naive", "flash"):
        torch.cuda.empty_cache()
        peaks[attention] = train(config(text_file, attention), tmp_path / attention)[
            "perf/peak_allocated_gib"
        ]
    assert peaks["flash"] < peaks["naive"]


HOW = {
    "compiled, replayed": {"cuda_graphs": True},
    "compiled": {"cuda_graphs": False},
    "replayed": {"compile": False, "cuda_graphs": True},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_run_repeats_bit_for_bit_with_and_without_cuda_graphs(text_file, tmp_path, dropout, how):
    """In bf16, with the fused embedding: when compiled, torch's sums its gradient in a varying order."""
    runs = []
    for number in range(2):
        logging, folder = config(text_file, "auto"), tmp_path / str(number)
        trainer = replace(logging.trainer, log_every=1, micro_batch=4, **how)
        train(replace(logging, trainer=trainer, model=replace(logging.model, dropout=dropout)), folder)
        runs.append((measured(folder, "train/loss"), load_weights(find(folder), "cpu")))
    (losses, weights), (losses_again, weights_again) = runs
    assert len(losses) == 20
    assert losses_again == losses
    for name, weight in weights.items():
        assert torch.equal(weights_again[name], weight), name


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", [Precision.fp16, Precision.fp32])
@pytest.mark.parametrize("attention", ["naive", "sdpa", "flash", "flash, documents"])
def test_what_is_not_compiled_trains_alike_replayed(text_file, tmp_path, attention, precision, dropout):
    """With the masks and the skipped steps of the run whose host launches each kernel. torch's attention with dropout
    has a seed that the host reads."""
    runs, (attention, _, documents) = [], attention.partition(", ")
    refused = pytest.raises(
        ConfigError, match=r"attention=sdpa in this model cannot be recorded \(CUDA error: "
    )
    for graphs in (False, True):
        eager = config(text_file, attention, precision, n_layer=2)
        eager = replace(eager, model=replace(eager.model, dropout=dropout))
        eager = replace(eager, data=replace(eager.data, document_mask=bool(documents)))
        trainer = replace(eager.trainer, compile=False, cuda_graphs=graphs, micro_batch=4, log_every=1)
        with refused if graphs and dropout and attention == "sdpa" else nullcontext():
            runs.append(train(replace(eager, trainer=trainer), tmp_path / str(graphs)))
    if len(runs) == 1:
        return
    losses = [measured(tmp_path / str(graphs), "train/loss") for graphs in (False, True)]
    assert [run["cuda_graphs"] for run in runs] == [False, True]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3 if precision is Precision.fp16 else 1e-4)
    assert runs[1]["val/loss"] == pytest.approx(runs[0]["val/loss"], rel=2e-3)


def test_a_resumed_run_ends_with_the_loss_of_an_uninterrupted_run(text_file, tmp_path):
    whole = config(text_file, "flash")
    whole = replace(whole, trainer=replace(whole.trainer, save_every=10))
    reference = train(whole, tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-00000010"
    resumed = replace(whole, trainer=replace(whole.trainer, resume=str(checkpoint)))
    assert train(resumed, tmp_path / "resumed")["val/loss"] == reference["val/loss"]


def test_an_attention_without_fp32_support_is_refused():
    with pytest.raises(AttentionError, match="sdpa_cudnn"):
        resolve_attention("sdpa_cudnn", device=torch.device("cuda"), dtype=torch.float32, head_dim=64)
