"""The switches of the model through the real command line: a run of each, what is refused, what resumes."""

import json

import pytest
import torch

import sample
import train
from kernels.flash import dispatch
from tests.conftest import losses
from training import checkpoint

ALL = [
    *("model.n_kv_head=1", "model.window=8", "model.softcap=30", "model.sinks=true", "model.qk_norm=true"),
    *("model.rope=true", "model.rmsnorm=true", "model.mlp=swiglu"),
]


def test_all_switches_train_resume_and_are_sampled_from(started, tiny, tmp_path, capsys, monkeypatch):
    switched = [*tiny, *ALL, "trainer.steps=40", "trainer.save_every=20", "optimizer.lr=1e-2"]
    assert started(train.main, *switched, "hydra.run.dir=whole") == 0
    told = capsys.readouterr().out
    assert "  attention  naive (requested: auto)\n" in told
    assert "  layers     torch blocks (the fused ones have no mlp), torch loss\n" in told
    assert ", n_kv_head 1, window 8, softcap 30.0, sinks, qk_norm, rope, rmsnorm, mlp swiglu\n" in told
    first, *_, last = losses(tmp_path / "whole")
    assert last < first - 1.0
    resume = "trainer.resume=whole/checkpoints/step-00000020"
    assert started(train.main, *switched, resume, "hydra.run.dir=cut") == 0
    whole, cut = (checkpoint.find(tmp_path / name) / checkpoint.WEIGHTS for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["sample.py", "whole", "the quick", "-n", "60", "-t", "0"])
    sample.main()
    assert capsys.readouterr().out.startswith("the quick")


def test_the_banner_says_what_a_run_is(started, tiny, capsys):
    odd = ["optimizer=muon", "schedule=wsd", "schedule.warmup_fraction=0.25", "seed=7", "init_seed=5"]
    model = [
        "model.dropout=0.1",
        "model.window=8",
        "model.window_pattern=SSL",
        "model.rope=true",
        "model.rope_theta=500",
    ]
    more = ["data.document_mask=true", "trainer.grad_clip=0", "parallel.recompute=block"]
    assert started(train.main, *tiny, *odd, *model, *more) == 0
    told = capsys.readouterr().out
    assert "  attention  naive (requested: auto), within documents\n" in told
    assert ", window 8, rope, window_pattern SSL, rope_theta 500.0, dropout 0.1\n" in told
    assert "  optimizer  muon, learning rate 0.003, weight decay 0.1\n" in told
    assert "  schedule   wsd to 0, over the last 0.2 of the steps, after 3 steps of warm-up\n" in told
    assert "  seed       7, of the initial weights 5\n" in told
    assert "  parallel   blocks are computed again\n" in told


def test_the_banner_says_why_a_hopper_gpu_runs_portable_kernels(started, tiny, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: True)
    monkeypatch.setattr(dispatch, "machine_lacks", lambda device: None)
    dispatch.choose.cache_clear()
    short = ["trainer.steps=1", "trainer.sample_tokens=0", "attention=flash"]
    assert started(train.main, *tiny, *short) == 0
    dispatch.choose.cache_clear()
    why = "those for Hopper need float16 or bfloat16, not torch.float32"
    assert f"  attention  flash, triton kernels ({why})\n" in capsys.readouterr().out


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("attention=sdpa model.window=8", "attention=sdpa cannot be used here: it does not support window; "),
        ("attention=sdpa_math model.softcap=5", "it does not support softcap; use attention=naive"),
        (
            "model.block=fused model.mlp=relu2",
            "model.block=fused has no form for model.mlp: use model.block=torch",
        ),
        ("model.n_kv_head=3", "model.n_kv_head=3 does not divide model.n_head=2: it may be 1, 2"),
        ("model.mlp=geglu", "expected one of [gelu, relu2, swiglu]"),
        (
            "trainer.resume=run model.rope=true",
            "was trained with model.rope=False, but this run has model.rope=True",
        ),
        ("trainer.init_from=run model.sinks=true", "needs model.sinks=False; this run has model.sinks=True"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_line(started, tiny, settings, said):
    if "=run" in settings:
        assert started(train.main, *tiny, "hydra.run.dir=run") == 0
    error = started(train.main, *tiny, *settings.split())
    assert error.startswith("error: ")
    assert said in error
    assert "\n" not in error


@pytest.mark.slow
def test_a_rotary_models_weights_start_a_run_at_another_length_and_window(started, tiny, tmp_path):
    rotary = [*tiny, "model.rope=true", "model.window=8"]
    assert started(train.main, *rotary, "hydra.run.dir=short") == 0
    longer = ["model.seq_len=64", "model.window=16", "model.rope_theta=50000", "trainer.init_from=short"]
    assert started(train.main, *rotary, *longer, "hydra.run.dir=long") == 0
    facts = json.loads((tmp_path / "long/facts.json").read_text())
    assert facts["parameters"] == json.loads((tmp_path / "short/facts.json").read_text())["parameters"]


@pytest.mark.slow
def test_a_checkpoint_from_before_the_switches_resumes(started, tiny, tmp_path):
    assert started(train.main, *tiny, "hydra.run.dir=old") == 0
    file = checkpoint.find(tmp_path / "old") / "training.pt"
    state = torch.load(file)
    for name in ("n_kv_head", "window", "rope", "mlp", "sinks"):
        del state["identity"]["model"][name]
    torch.save(state, file)
    assert started(train.main, *tiny, "trainer.resume=old", "trainer.steps=13", "hydra.run.dir=new") == 0
