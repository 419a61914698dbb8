"""Several real gloo ranks on a CPU: whatever they hold and exchange, they train as one rank does."""

import json
import re
import resource
from functools import partial
from itertools import groupby

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import prepare
import train
from kernels import get_attention
from model.config import GPTConfig
from model.fused import FusedGPT
from model.gpt import GPT
from model.huggingface import from_huggingface
from tests.conftest import losses, rows
from tests.model.test_fused import LAYERS
from tests.training.ranks import done_on, run, started_on, train_on
from training.banner import unsaved
from training.checkpoint import find, load_weights
from training.command_line import composed
from training.cuda_graphs import Local
from training.export import export
from training.parallel.blocks import recompute, time_blocks
from training.parallel.config import Recompute
from training.parallel.shard import blocks_at_once

QUICK = {
    "none": [],
    "bf16 exchange": ["parallel.gradient_dtype=bf16"],
    "full recompute": ["parallel.shard=full", "parallel.recompute=block", "parallel.blocks_at_once=2"],
    "shared, ring": ["parallel.context=2", "parallel.gather_keys=false"],
    "shared, gathered": ["parallel.context=2"],
}
OTHERS = {
    "again": ["parallel.recompute=attention_kept"],
    "optimizer": ["parallel.shard=optimizer", "parallel.blocks_at_once=2"],
    "full": ["parallel.shard=full"],
}


@pytest.fixture
def assert_trains_as_one(started, user_environment, tiny, tmp_path):
    """Train in these modes on so many ranks, compare each with one process, and run others; what ranks printed."""

    def assert_trains_as_one(
        ranks: int, modes: dict[str, list[str]], others: list[list[str]], *settings: str
    ) -> str:
        small = [
            *tiny,
            "trainer.micro_batch=1",
            "trainer.grad_clip=0.5",
            "model.n_layer=3",  # two at once leave one
            "trainer.eval_every=6",
            *settings,
        ]
        assert started(train.main, *small, "hydra.run.dir=one") == 0
        runs = [run(name, *small, *mode) for name, mode in modes.items()]
        done = train_on(ranks, runs + others, tmp_path, user_environment)
        said = done.stdout
        in_parts = sum(any("parallel.shard=" in each for each in mode) for mode in modes.values())
        assert done.stderr.count("warning: with trainer.save_every=0 nothing is saved before") == in_parts
        assert "returned a view tensor" not in done.stderr  # FSDP of a block
        assert "models left: 0\n" in said  # or the next run would have less memory
        one = tmp_path / "one"
        weights = load_weights(find(one), "cpu")
        for name in modes:
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
        return said

    return assert_trains_as_one


def test_two_ranks_train_as_one_whatever_they_hold_or_refuse_in_one_line(assert_trains_as_one, tiny):
    """Train, evaluate and sample; what ranks cannot do is refused with what works. In one launch."""
    refused = {
        "uneven": (
            ["trainer.batch_tokens=96"],
            "nearest: 64 or 128; a resumed run keeps its batch, and goes on with 1 or 3 ranks.",
        ),
        "half": (["parallel.shard=full", "trainer.precision=fp16"], "use trainer.precision=bf16."),
        "muon": (
            ["parallel.shard=full", "optimizer.name=muon"],
            "use optimizer=adamw, or parallel.shard=none.",
        ),
        "graphs": (["trainer.cuda_graphs=true"], "needs a CUDA device, not cpu; leave it out"),
    }
    said = assert_trains_as_one(
        2, QUICK, [run(name, *tiny, *settings) for name, (settings, _) in refused.items()]
    )
    for how in ("in a ring", "all keys gathered"):
        assert f"2 ranks share each sequence, {how}, each rank holds all" in said
    for name, (_, remedy) in refused.items():
        (line,) = (each for each in said.splitlines() if each.startswith(f"refused {name}: "))
        assert line.endswith(remedy) or remedy in line


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (["parallel.shard=full"], True),
        (["parallel.shard=optimizer", "trainer.save_every=100"], True),  # the last step
        (["parallel.shard=full", "trainer.eval_every=99"], True),  # no best is kept
        (["parallel.shard=full", "trainer.save_every=99"], False),
        (["parallel.shard=full", "trainer.keep_best=true", "trainer.eval_every=99"], False),
        (["parallel.shard=full", "trainer.steps=0"], False),
        ([], False),  # any rank that is left has it all
    ],
)
def test_a_run_that_a_lost_rank_would_lose_is_warned_of(settings, warned):
    said = unsaved(composed("trainer.steps=100", *settings))
    assert bool(re.match(r"with trainer\.save_every=\d+ nothing is saved", said)) == bool(said) == warned
    assert "\n" not in said


@pytest.mark.slow
def test_two_ranks_train_as_one_in_the_other_modes(assert_trains_as_one):
    assert_trains_as_one(2, OTHERS, [])


@pytest.mark.slow
def test_four_ranks_train_evaluate_and_sample_as_one_does_whatever_they_hold(assert_trains_as_one):
    assert_trains_as_one(4, QUICK | OTHERS, [])


@pytest.mark.slow
def test_three_ranks_train_as_one_though_they_divide_no_parameter(assert_trains_as_one, tiny, tmp_path):
    """FSDP pads the parts. Ranks that share sequences would have to divide three."""
    settings = ["trainer.batch_tokens=192", "model.n_kv_head=1"]  # three divide the rows of equal q, k and v
    shared = run("shared", *tiny, *settings, "parallel.context=2")
    said = assert_trains_as_one(3, {"full": ["parallel.shard=full"]}, [shared], *settings)
    assert (
        "refused shared: parallel.context=2 does not divide the 3 ranks; nearest: parallel.context=1." in said
    )
    assert all(len(weight) % 3 for weight in load_weights(find(tmp_path / "one"), "cpu").values())


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_full_disk_is_one_line_of_all_ranks_and_leaves_nothing_half_written(
    started, user_environment, tiny, tmp_path, shard
):
    """Rank 0 alone writes a whole model: the other one does not take it for dead."""
    assert started(prepare.main, *tiny) == 0  # its files may be larger than the limit
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, limits[1]))
    settings = [*tiny, "trainer.save_every=2", f"parallel.shard={shard}", "hydra.run.dir=run"]
    try:
        launcher = started_on(2, settings, tmp_path, user_environment)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = launcher.communicate(timeout=120)[0]
    assert launcher.returncode == 1
    (line,) = re.findall("^(?:error|warning): .*", said, re.MULTILINE)
    assert line.startswith("error: the checkpoint of step 2 could not be written to run/checkpoints: "), said
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


# Rank 1 writes its part of the first checkpoint once two more steps are logged, or after 20 s.
WAITS = """
import json, sys, time
from pathlib import Path
from torch.distributed.checkpoint import FileSystemWriter
from tests.training.ranks import logged
from training import checkpoint
from training.command_line import composed
from training.distributed import world
from training.trainer import Trainer

write, complete = FileSystemWriter.write_data, checkpoint.complete

def wait(self, *rest):
    until = time.monotonic() + 20
    while ranks.rank == 1 and logged(run) < min(steps, save_every + 2) and time.monotonic() < until:
        time.sleep(0.01)
    return write(self, *rest)

def say(run_dir, step, keep):
    print(f"step {step} gets its name after row {logged(run_dir)}", flush=True)
    return complete(run_dir, step, keep)

FileSystemWriter.write_data, checkpoint.complete = wait, say
run, settings = Path(sys.argv[1]), composed(*sys.argv[2:])
steps, save_every = settings.trainer.steps, settings.trainer.save_every
with world("cpu") as ranks:
    Trainer(settings, run, ranks).run()
"""


@pytest.mark.slow
def test_steps_go_on_while_parts_are_written_as_they_were(user_environment, tiny, tmp_path):
    settings = [*tiny, "trainer.save_every=4", "trainer.keep_checkpoints=3", "parallel.shard=full"]
    (tmp_path / "waits.py").write_text(WAITS)
    done = done_on(2, ["waits.py", "late", *settings], tmp_path, user_environment)
    named = dict(re.findall(r"^step (\d+) gets its name after row (\d+)$", done.stdout, re.MULTILINE))
    assert named.keys() == {"4", "8", "12"}
    assert int(named["4"]) >= 6
    train_on(2, [run("prompt", *settings)], tmp_path, user_environment)
    late, prompt = (
        load_weights(tmp_path / name / "checkpoints" / "step-00000004", "cpu") for name in ("late", "prompt")
    )
    assert all(torch.equal(weight, prompt[key]) for key, weight in late.items())


@pytest.mark.slow
def test_blocks_that_are_gathered_at_once_change_no_bit_and_a_resume_may_choose_otherwise(
    user_environment, tiny, tmp_path
):
    """The sum of two ranks' gradients has no order. Of 5 blocks, by default all."""
    five = [*tiny, "model.n_layer=5", "trainer.steps=6", "trainer.micro_batch=2", "parallel.shard=full"]
    modes = {
        "one": (1, ["trainer.save_every=3"]),
        "two": (2, []),
        "three": (3, ["parallel.recompute=block"]),
        "all": (None, []),
        "resumed": (5, ["trainer.resume=one/checkpoints/step-00000003"]),
    }
    runs = [
        run(name, *five, *mode, f"parallel.blocks_at_once={'null' if number is None else number}")
        for name, (number, mode) in modes.items()
    ]
    said = train_on(2, runs, tmp_path, user_environment).stdout
    facts = {name: json.loads((tmp_path / name / "facts.json").read_text()) for name in modes}
    assert [each["blocks_at_once"] for each in facts.values()] == [1, 2, 3, 5, 5]
    assert "optimizer state in parts, 3 blocks at once, " in said
    assert facts["resumed"]["resumed"] == {"3": {}}  # nothing that changes the run
    weights = load_weights(find(tmp_path / "one"), "cpu")
    for name in modes:
        assert losses(tmp_path / name) == losses(tmp_path / "one")[3 * (name == "resumed") :], name
        theirs = load_weights(find(tmp_path / name), "cpu")
        assert all(torch.equal(weight, theirs[key]) for key, weight in weights.items()), name


@pytest.mark.parametrize(
    ("width", "blocks", "sequences", "at_once"),
    [
        (768, 12, 32, 4),  # GPT-2 small as measured on four GPUs
        (768, 12, 16, 6),  # and eight; 8 by their FLOPs
        (1600, 48, 16, 2),  # XL
        (4096, 2, 1, 1),  # of 7 B: large ones
        (64, 5, 1, 5),
    ],
)
def test_so_many_blocks_are_gathered_at_once_as_a_gpu_computes_in_the_time_of_its_host(
    width, blocks, sequences, at_once
):
    with torch.device("meta"):
        model = GPT(GPTConfig(n_embd=width, n_layer=blocks, n_head=1), get_attention("naive"))
    assert blocks_at_once(model, 1024 * sequences) == at_once


class Layers(torch.nn.Module):
    """Two of 1.4 MB: DDP's first bucket is full at 1 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(600, 600), torch.nn.Linear(600, 600)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()).sum()


def test_only_micro_steps_with_an_exchange_are_cut_at_buckets():
    graphs, counts = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()  # after the tests of CUDA graphs torch 2.11 would not cut it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layers = Layers()
        local, replicas = Local(layers), DistributedDataParallel(layers)
        for model in (local, replicas, local):
            torch.compile(model, backend=backend)(torch.ones(1, 600)).backward()
            counts.append(len(graphs))
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()
    assert counts == [1, 3, 3]


@pytest.mark.slow
def test_our_fused_blocks_train_alike_in_parts(user_environment, tiny, short_text_file, tmp_path):
    """In the interpreter: blocks, loss and attention of ours; with what is kept and what is computed again."""
    short = [*tiny, "trainer.steps=2", "trainer.batch_tokens=32", "model.seq_len=16", "model.n_layer=2"]
    # Of what the interpreter computes slowly, little.
    short += ["trainer.sample_tokens=0", f"data.files={short_text_file}", "data.val_fraction=0.01"]
    ours = [*short, "attention=flash", "model.block=fused", "model.loss=fused", "model.dropout=0.1"]
    interpreted = user_environment | {"TRITON_INTERPRET": "1"}
    kept = ["parallel.recompute=attention_kept"]
    two = [*ours, "model.dropout=0.0"]
    runs = [run("one", *ours), run("kept", *ours, *kept), run("again", *ours, "parallel.recompute=block")]
    train_on(1, [*runs, run("alone", *two)], tmp_path, interpreted)
    assert losses(tmp_path / "kept") == losses(tmp_path / "one")
    assert losses(tmp_path / "again") == losses(tmp_path / "one")
    train_on(2, [run("both", *two, "parallel.shard=full", *kept)], tmp_path, interpreted)
    assert losses(tmp_path / "both") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


class Calls(TorchDispatchMode):
    """Counts attention's forwards."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        forward = any(each in name for each in ("flash_forward", "_attention", "_varlen_attn"))
        self.count += forward and "backward" not in name
        return function(*args, **kwargs or {})


def gradients(how: str, attention: str, device: str, **settings) -> tuple[list[torch.Tensor], int]:
    """Of a small model, in bf16 on a GPU; and how often they needed attention's forward."""
    config = GPTConfig(vocab_size=100, seq_len=16, n_layer=1, n_head=2, n_embd=32, **settings)
    tokens = torch.arange(32, device=device).view(2, 16)
    model = GPT(config, get_attention(attention)).to(device)
    recompute(model, Recompute(how))
    with Calls() as calls, torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        model(tokens, tokens).backward()
    return [parameter.grad for parameter in model.parameters()], calls.count


@pytest.mark.parametrize(("how", "forwards"), [("none", 1), ("attention_kept", 1), ("block", 2)])
@pytest.mark.parametrize("attention", ["flash", "sdpa"])
def test_what_is_kept_is_not_computed_again(how, forwards, attention):
    """The model computes the same, and calls attention's operator as often as it should."""
    found, calls = gradients(how, attention, "cpu")
    assert calls == forwards
    for gradient, whole in zip(found, gradients("none", attention, "cpu")[0], strict=True):
        assert torch.equal(gradient, whole)


@pytest.mark.parametrize("of", [GPT, partial(FusedGPT, layers=LAYERS)], ids=["tensors", "tuples"])
def test_what_is_computed_again_or_to_evaluate_is_not_timed(of):
    """What passes between blocks is `exchange`, in both passes; a block computed again is a part of the backward."""
    tokens, begun = torch.arange(32).view(2, 16), []
    config = GPTConfig(vocab_size=100, seq_len=16, n_layer=2, n_head=2, n_embd=32)
    model, untimed = (of(config, get_attention("naive")) for _ in range(2))
    recompute(model, Recompute.block)
    time_blocks(model, begun.append)
    with torch.no_grad():
        model(tokens, tokens)
    assert begun == []
    loss = model(tokens, tokens)
    assert begun == ["blocks", "exchange", "blocks", "forward_backward"]
    loss.backward()
    backward = [phase for phase, _ in groupby(begun[4:])]  # of a tuple's tensors each says it
    assert backward == ["exchange", *["forward_backward", "exchange"] * 2]
    untimed(tokens, tokens).backward()
    for parameter, other in zip(model.parameters(), untimed.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


@pytest.mark.gpu
@pytest.mark.parametrize(("how", "forwards"), [("none", 1), ("attention_kept", 1), ("block", 2)])
def test_torchs_attention_of_packed_documents_is_kept_too(how, forwards):
    assert gradients(how, "sdpa", "cuda", document_end=5)[1] == forwards


@pytest.mark.slow
def test_two_equal_runs_of_two_ranks_end_bitwise_equal(user_environment, tiny, tmp_path):
    small = [*tiny, "model.n_layer=2", "trainer.steps=6", "trainer.sample_tokens=0"]
    modes = {
        "none": [],
        "bf16": ["parallel.gradient_dtype=bf16"],
        "optimizer": [
            "parallel.shard=optimizer",
            "trainer.micro_batch=2",
        ],  # it sums two micro-steps in whole
        "full": ["parallel.shard=full"],
    }
    for number in (1, 2):  # each in a launch of its own
        runs = [run(f"{name}{number}", *small, *mode) for name, mode in modes.items()]
        train_on(2, runs, tmp_path, user_environment)
    for name in modes:
        first, second = (load_weights(find(tmp_path / f"{name}{number}"), "cpu") for number in (1, 2))
        assert losses(tmp_path / f"{name}1") == losses(tmp_path / f"{name}2")
        for key, weight in first.items():
            assert torch.equal(weight, second[key]), (name, key)


@pytest.mark.slow
def test_gradients_are_exchanged_in_the_dtype_asked_for_and_what_is_not_hidden_is_measured(
    user_environment, tiny, tmp_path
):
    runs = [run("fp32", *tiny), run("bf16", *tiny, "parallel.gradient_dtype=bf16")]
    parts = ["parallel.shard=full", "trainer.micro_batch=1"]
    runs += [run("full", *tiny, *parts), run("again", *tiny, *parts, "parallel.recompute=block")]
    train_on(2, runs, tmp_path, user_environment)
    # Rounded to 8 bits, so the second loss differs, and by little.
    fp32, bf16 = losses(tmp_path / "fp32"), losses(tmp_path / "bf16")
    assert fp32[0] == bf16[0]
    assert 0 < abs(fp32[-1] - bf16[-1]) < 1e-3 * fp32[-1]
    for name in ("fp32", "full", "again"):
        row = rows(tmp_path / name)[-2]
        took = [
            float(row[f"perf/{phase}_ms"]) for phase in ("data", "forward_backward", "exchange", "optimizer")
        ]
        assert all(each > 0 for each in took)
        assert sum(took) <= float(row["perf/step_ms"])
    assert row["perf/slowest_rank"] in ("0", "1")
    per_device = float(row["perf/tokens_per_second_per_device"])
    assert per_device == pytest.approx(float(row["perf/tokens_per_second"]) / 2, rel=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["parallel.shard=full"], "splits the model over the ranks of torchrun, and this is one process"),
        (
            ["parallel.recompute=attention_kept", "attention=naive", "trainer.device=cpu"],
            "not naive; use attention=flash or sdpa or sdpa_flash, or ",
        ),
        (["parallel.gradient_dtype=bf16"], "parallel.gradient_dtype is read with torchrun only"),
        (["parallel.timeout=0"], "parallel.timeout is 0.0; it must be above 0 seconds"),
        (
            ["parallel.blocks_at_once=2"],
            "parallel.blocks_at_once is read with parallel.shard=full or optimizer",
        ),
        (["parallel.blocks_at_once=0"], "parallel.blocks_at_once is 0; it must be at least 1"),
        (
            ["parallel.shard=full", "parallel.blocks_at_once=9", "model.n_layer=3"],
            "parallel.blocks_at_once=9, of a model of 3 blocks; the nearest is 3",
        ),
        (["parallel.shard=some"], "some"),
        (
            ["parallel.context=2", "trainer.sample_every=1"],
            "trainer.sample_every needs a rank with the whole model",
        ),
        (
            ["parallel.shard=full", "trainer.hellaswag=true"],
            "trainer.hellaswag needs a rank with the whole model",
        ),
    ],
)
def test_what_one_process_cannot_do_is_refused_in_one_line(started, tiny, settings, said):
    error = started(train.main, *tiny, *settings)
    assert error.startswith("error: ")
    assert "\n" not in error
    assert said in error


@pytest.mark.slow
def test_compiled_ranks_train_as_eager_ones(user_environment, tiny, tmp_path):
    """In one piece, without an exchange and around DDP; by blocks in parts, and where they are computed again."""
    small = [*tiny, "model.n_layer=2", "trainer.steps=4", "trainer.micro_batch=1", "trainer.sample_tokens=0"]
    modes = {
        "none": [],
        "again": ["parallel.recompute=attention_kept"],
        "full": ["parallel.shard=full", "parallel.recompute=block"],
        "optimizer": ["parallel.shard=optimizer"],
    }
    compiled = [run(name, *small, "trainer.compile=true", *mode) for name, mode in modes.items()]
    train_on(2, [run("eager", *small), *compiled], tmp_path, user_environment)
    for name in modes:
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "eager"), rel=1e-5), name
