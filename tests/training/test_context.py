"""Ranks that share each sequence train, evaluate and sample as one rank does; what they cannot is refused."""

import json
import re

import pytest
import torch

import train
from tests.conftest import losses, measured
from tests.training.ranks import run, train_on
from training import plan
from training.checkpoint import find, load_weights
from training.command_line import composed
from training.distributed import World
from training.parallel.mesh import Layout

SHARED = "parallel.context=2"
DOCUMENTS = "data.document_mask=true"
GATHERED, RING = "parallel.gather_keys=true", "parallel.gather_keys=false"
MODERN = ["model.rope=true", "model.n_kv_head=1", "model.qk_norm=true"]


@pytest.fixture
def small(tiny) -> list[str]:
    """A run with several micro-batches, gradient clipping and evaluations that do not fill their last batch."""
    return [
        *(*tiny, "model.n_layer=2", "trainer.micro_batch=2", "trainer.grad_clip=0.5"),
        *("trainer.eval_every=6", "trainer.eval_tokens=77", "trainer.batch_tokens=256"),
    ]


def check_same(folder, one: str, many: str) -> None:
    """Losses to 1e-5, and the same weights and sample."""
    one, many = folder / one, folder / many
    assert losses(many) == pytest.approx(losses(one), rel=1e-5), many
    summaries = [json.loads((each / "summary.json").read_text()) for each in (one, many)]
    assert summaries[1]["val/loss"] == pytest.approx(summaries[0]["val/loss"], rel=1e-5)
    assert summaries[1]["val/tokens"] == summaries[0]["val/tokens"]
    evaluated = [measured(each, "val/loss") for each in (one, many)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)
    ours, theirs = (load_weights(find(each), "cpu") for each in (one, many))
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, rtol=0, atol=1e-4)
    assert (many / "sample.txt").read_text() == (one / "sample.txt").read_text()


@pytest.mark.slow
def test_two_ranks_that_share_each_sequence_train_as_one(started, user_environment, tiny, small, tmp_path):
    modes = {
        "documents": [SHARED, DOCUMENTS],
        "full": [SHARED, "parallel.shard=full", "parallel.recompute=block"],
    }
    refused = {
        "does not divide the 2 ranks; nearest: parallel.context=2": ["parallel.context=3"],
        "does not divide the 2 ranks; nearest: parallel.context=1": [  # two do not divide the sequence
            *("parallel.context=3", "model.seq_len=30", "trainer.batch_tokens=240"),
        ],
        "cuts each sequence into 4 chunks, of which model.seq_len=30 is not a multiple; nearest: 28 or 32": [
            *(SHARED, "model.seq_len=30", "trainer.batch_tokens=240"),
        ],
        "has no dropout; use model.dropout=0": [SHARED, "model.dropout=0.1"],
        "parallel.context=2 has no attention=sdpa; use attention=naive": [SHARED, "attention=sdpa"],
        "has no window; leave model.window out": [SHARED, "model.window=8"],
        "gather_keys has no data.document_mask; leave one of them out": [SHARED, GATHERED, DOCUMENTS],
        "has no precise_delta": [SHARED, "attention=naive", "attention.precise_delta=true"],
    }
    assert started(train.main, *small, "attention=naive", "hydra.run.dir=one") == 0
    assert started(train.main, *small, "attention=naive", DOCUMENTS, "hydra.run.dir=documents one") == 0
    runs = [run(name, *small, *mode) for name, mode in modes.items()]
    runs += [run(f"refused-{number}", *tiny, *mode) for number, mode in enumerate(refused.values())]
    done = train_on(2, runs, tmp_path, user_environment)
    check_same(tmp_path, "documents one", "documents")
    check_same(tmp_path, "one", "full")
    assert "attention   naive (requested: auto)\n" in done.stdout
    assert "parallel    2 ranks share each sequence, in a ring, each rank holds all" in done.stdout
    for number, said in enumerate(refused):
        (line,) = [each for each in done.stdout.splitlines() if each.startswith(f"refused refused-{number}:")]
        assert said in line


@pytest.mark.slow
def test_two_ranks_share_sequences_in_every_other_form(started, user_environment, small, tmp_path):
    modes = {
        "shared": [SHARED, RING],
        "optimizer": [SHARED, "parallel.shard=optimizer", DOCUMENTS],
        "compiled": [SHARED, "trainer.compile=true", DOCUMENTS],
        "modern": [SHARED, *MODERN],
        "gathered": [SHARED, GATHERED, "parallel.shard=full", "parallel.recompute=block"],
        "gathered, compiled": [SHARED, GATHERED, "trainer.compile=true", *MODERN],
    }
    assert started(train.main, *small, "attention=naive", "hydra.run.dir=one") == 0
    assert started(train.main, *small, "attention=naive", DOCUMENTS, "hydra.run.dir=documents one") == 0
    assert started(train.main, *small, "attention=naive", *MODERN, "hydra.run.dir=modern one") == 0
    train_on(2, [run(name, *small, *mode) for name, mode in modes.items()], tmp_path, user_environment)
    check_same(tmp_path, "one", "shared")
    check_same(tmp_path, "documents one", "optimizer")
    check_same(tmp_path, "documents one", "compiled")
    check_same(tmp_path, "modern one", "modern")
    check_same(tmp_path, "one", "gathered")
    check_same(tmp_path, "modern one", "gathered, compiled")
    # Documents go around a ring; so does what is told to.
    facts = [
        json.loads((tmp_path / name / "facts.json").read_text()) for name in ("shared", "compiled", "modern")
    ]
    assert [each["gather_keys"] for each in facts] == [False, False, True]


@pytest.mark.slow
def test_four_ranks_share_sequences_and_batches(started, user_environment, small, tmp_path):
    modes = {
        "by four": ["parallel.context=4", DOCUMENTS],
        "two by two": [SHARED, "trainer.micro_batch=1"],
        "two by two, full": [SHARED, "parallel.shard=full", DOCUMENTS],
        "gathered": ["parallel.context=4", GATHERED],
        "optimizer": [SHARED, "parallel.shard=optimizer"],
        "bf16": [SHARED, "parallel.gradient_dtype=bf16"],
        "modern": [SHARED, *MODERN],
    }
    assert started(train.main, *small, "attention=naive", "hydra.run.dir=one") == 0
    assert started(train.main, *small, "attention=naive", DOCUMENTS, "hydra.run.dir=documents one") == 0
    assert started(train.main, *small, "attention=naive", *MODERN, "hydra.run.dir=modern one") == 0
    runs = [run(name, *small, *mode) for name, mode in modes.items()]
    uneven = run("uneven", *small, SHARED, "trainer.batch_tokens=96", "trainer.micro_batch=1")
    said = train_on(4, [*runs, uneven], tmp_path, user_environment).stdout
    assert "is 3 sequences, which 2 groups of 2 ranks cannot share equally; nearest: 64 or 128; " in said
    assert "and goes on with 2 or 6 ranks.\n" in said
    check_same(tmp_path, "documents one", "by four")
    check_same(tmp_path, "one", "two by two")
    check_same(tmp_path, "documents one", "two by two, full")
    check_same(tmp_path, "one", "gathered")
    check_same(tmp_path, "one", "optimizer")
    check_same(tmp_path, "modern one", "modern")
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    assert losses(tmp_path / "bf16") != pytest.approx(losses(tmp_path / "one"), rel=1e-7)  # rounded it was


@pytest.mark.slow
def test_a_run_goes_on_with_its_sequences_shared_or_whole(started, user_environment, tiny, tmp_path):
    """One rank, two that share each sequence, one, four with the model in parts, and two with both."""
    steady = [*tiny, "optimizer.lr=1e-2", "schedule=constant", "attention=naive", "trainer.micro_batch=1"]
    steady.append("schedule.warmup_fraction=0")
    until = {
        steps: [*steady, "trainer.resume=auto", f"trainer.steps={steps}"] for steps in (4, 8, 12, 16, 20)
    }
    full = "parallel.shard=full"
    assert started(train.main, *steady, "trainer.steps=20", "hydra.run.dir=whole") == 0
    assert started(train.main, *until[4], "hydra.run.dir=run") == 0
    train_on(2, [run("run", *until[8], SHARED)], tmp_path, user_environment)
    assert started(train.main, *until[12], "hydra.run.dir=run") == 0
    train_on(4, [run("run", *until[16], full)], tmp_path, user_environment)
    train_on(2, [run("run", *until[20], full, SHARED)], tmp_path, user_environment)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "said", "instead"),
    [
        (["parallel.context=3"], "nearest: parallel.context=2", ["parallel.context=2"]),
        ([SHARED, "model.seq_len=30"], "nearest: 28 or 32", [SHARED, "model.seq_len=28"]),
        ([SHARED, "attention=sdpa"], "use attention=naive", [SHARED, "attention=naive"]),
        ([SHARED, "attention=flash"], "use attention=naive", [SHARED, "attention=naive"]),
        *(
            (
                [SHARED, f"attention={name}", "attention.tier=hopper"],
                "use attention=naive without attention.tier",
                [SHARED, "attention=naive"],
            )
            for name in ("flash", "sdpa")
        ),
        (
            [SHARED, "attention.tier=hopper"],
            "attention.tier=hopper applies to flash only, which cannot be used here: ",
            [SHARED],
        ),
        (
            [SHARED, "parallel.recompute=attention_kept"],
            "not naive; use parallel.recompute=block",
            [SHARED, "parallel.recompute=block"],
        ),
        (
            ["parallel.recompute=attention_kept", "attention=naive"],
            "not naive; use attention=sdpa or sdpa_flash, or parallel.recompute=block",
            ["parallel.recompute=attention_kept", "attention=sdpa_flash"],
        ),
    ],
)
def test_what_a_refusal_names_instead_is_accepted(monkeypatch, settings, said, instead):
    """As two ranks on a CPU check it, without the tests' interpreter, in which flash would run."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(plan, "layout_of", lambda *_: Layout())
    ranks = World(torch.device("cpu"), size=2, launched=True)
    small = ["model.seq_len=32", "trainer.batch_tokens=13440"]  # a multiple of 28 and of 30, too
    with pytest.raises(ValueError, match=re.escape(said)):
        plan.checked(composed(*small, *settings), ranks)
    plan.checked(composed(*small, *instead), ranks)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (SHARED, "this is one process: start it with torchrun --standalone --nproc_per_node=2 train.py"),
        (GATHERED, "parallel.gather_keys is read with parallel.context=2 or more; leave it out"),
        ("parallel.context=0", "parallel.context is 0; it must be at least 1"),
    ],
)
def test_one_process_cannot_share_a_sequence(started, tiny, setting, said):
    error = started(train.main, *tiny, setting)
    assert said in error
    assert "\n" not in error


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_share_each_sequence_and_repeat(user_environment, tiny, tmp_path):
    """Flash in bf16, compiled, over NCCL: losses as on one GPU, and of a second run the same bits."""
    settings = [
        *(*tiny, "model.seq_len=2048", "model.n_head=4", "model.n_embd=256", "trainer.batch_tokens=4096"),
        *("trainer.steps=20", "trainer.sample_tokens=0", "attention=flash"),
        *("optimizer.lr=1e-4", "schedule.warmup_fraction=0.5"),  # else what bf16 rounds may grow
    ]
    for ranks, names in ((1, ["one"]), (2, ["two", "again"])):
        runs = [run(name, *settings, f"parallel.context={ranks}") for name in names]
        train_on(ranks, runs, tmp_path, user_environment, "cuda")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-3)
    assert losses(tmp_path / "again") == losses(tmp_path / "two")
    replayed = ["trainer.micro_batch=1", "trainer.cuda_graphs=true"]
    others = {
        "ring": [RING],
        "ring again": [RING],
        "ring, replayed": [RING, *replayed],
        "gathered, replayed": replayed,
        "gathered, launched": [GATHERED, "trainer.cuda_graphs=false"],
    }
    runs = [run(name, *settings, SHARED, *mode) for name, mode in others.items()]
    train_on(2, runs, tmp_path, user_environment, "cuda")
    for name in others:
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=2e-3), name
    assert losses(tmp_path / "ring again") == losses(tmp_path / "ring")
    facts = [
        json.loads((tmp_path / name / "facts.json").read_text())
        for name in ("two", "ring", "gathered, launched")
    ]
    assert [(each["gather_keys"], each["cuda_graphs"]) for each in facts] == [
        (True, True),
        (False, False),
        (True, False),
    ]
