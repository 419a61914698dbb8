"""Which runs use CUDA graphs, and the sums of their gradients. test_gpu.py tests that runs repeat."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import get_attention
from kernels.layers.linear import linear
from model.config import GPTConfig
from model.gpt import Linear
from tests.conftest import measured, text_data
from training import plan
from training.config import (
    AttentionConfig,
    Config,
    ConfigError,
    Layers,
    LoggerConfig,
    ModelConfig,
    TrainerConfig,
)
from training.cuda_graphs import Local, add_gradients, compiled_to_graphs, resolve_graphs
from training.distributed import World, world
from training.layers import make_gpt
from training.optimizer import update
from training.parallel.config import GradientDtype, ParallelConfig, Recompute, Shard
from training.parallel.replicate import replicated
from training.precision import cast_together
from training.trainer import train

GPU, CPU = torch.device("cuda"), torch.device("cpu")
REPLICATED = ParallelConfig()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("gpus", [1, 2])
def test_cuda_graphs_default_to_on_for_compiled_runs_of_a_whole_model(gpus):
    ranks = World(GPU, size=gpus)
    assert resolve_graphs(None, True, ranks, REPLICATED)
    assert resolve_graphs(True, True, ranks, REPLICATED)
    assert not resolve_graphs(False, True, ranks, REPLICATED)
    assert not resolve_graphs(None, False, ranks, REPLICATED)
    assert not resolve_graphs(None, True, World(CPU, size=gpus), REPLICATED)
    assert not resolve_graphs(None, True, ranks, ParallelConfig(shard=Shard.full))


@pytest.mark.parametrize(
    ("is_compiled", "ranks", "parallel", "needed"),
    [
        (True, World(CPU), REPLICATED, "a CUDA device, not cpu"),
        (False, World(GPU, size=2), REPLICATED, "trainer.compile=true on several GPUs"),
        (True, World(GPU, size=2), ParallelConfig(shard=Shard.full), "parallel.shard=none, not full"),
        (True, World(GPU), ParallelConfig(recompute=Recompute.block), "parallel.recompute=none, not block"),
    ],
)
def test_requesting_unusable_cuda_graphs_is_refused_with_what_they_need(is_compiled, ranks, parallel, needed):
    with pytest.raises(ConfigError, match=f"cuda_graphs=true needs {needed}"):
        resolve_graphs(True, is_compiled, ranks, parallel)


def test_what_is_not_compiled_is_replayed_when_asked_for_unless_attention_needs_the_host():
    one = World(GPU)
    assert resolve_graphs(True, False, one, REPLICATED)
    assert not resolve_graphs(None, False, one, REPLICATED)
    with pytest.raises(ConfigError, match=r"needs trainer\.compile=true with this attention"):
        resolve_graphs(True, False, one, REPLICATED, whole=False)


def test_shared_sequences_are_replayed_where_that_pays_or_is_asked_for_but_not_with_documents():
    ranks, ring = World(GPU, size=4), ParallelConfig(context=4)
    assert resolve_graphs(True, True, ranks, ring)
    assert not resolve_graphs(None, True, ranks, ring)
    assert resolve_graphs(None, True, ranks, ring, gather_keys=True)
    assert not resolve_graphs(False, True, ranks, ring, gather_keys=True)
    assert not resolve_graphs(None, True, ranks, ring, documents=True)
    with pytest.raises(ConfigError, match=r"needs data\.document_mask=false with parallel\.context=4"):
        resolve_graphs(True, True, ranks, ring, documents=True)
    assert resolve_graphs(None, True, ranks, REPLICATED, documents=True)


def test_graphs_are_dropped_before_the_group_whose_messages_they_hold(monkeypatch, tmp_path):
    """NCCL would wait for ever. Also where the run fails."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    place = {"init_method": f"file://{tmp_path}/store", "rank": 0, "world_size": 1}
    monkeypatch.setattr(dist, "init_process_group", partial(dist.init_process_group, **place))
    dropped = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: dropped.append(dist.is_initialized()))
    with pytest.raises(ZeroDivisionError), world("cpu"):
        raise ZeroDivisionError
    assert dropped == [True]
    assert not dist.is_initialized()


@pytest.mark.parametrize("later", [{}, {"rmsnorm": True, "qk_norm": True}], ids=["gpt2", "modern"])
@pytest.mark.parametrize("block", [Layers.torch, Layers.fused])
def test_what_adds_to_gradients_itself_adds_what_autograd_would(block, later):
    gradients = []
    for summed in (False, True):
        config = GPTConfig(50, 16, n_layer=2, n_head=2, n_embd=16, **later)
        generator = torch.Generator().manual_seed(0)
        attention = get_attention("naive")
        model = make_gpt(config, attention, loss=Layers.fused, block=block, generator=generator).to(DEVICE)
        compiled_to_graphs(model, torch.float32)  # what it returns would be compiled for a minute
        called = Local(model) if summed else model
        for micro in range(2):
            tokens = torch.arange(16, device=DEVICE)[None] % (7 - micro)
            add_gradients(called(tokens, tokens), model)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    cast = {name for name, parameter in model.named_parameters() if hasattr(parameter, "low")}
    blocks = {name for name in gradients[0] if name.startswith("h.") and gradients[0][name].dim() == 2}
    assert cast == (blocks if block is Layers.fused else set())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


class Casts(TorchDispatchMode):
    """Counts the matrices that are cast one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator is torch.ops.aten._to_copy.default and args[0].dim() == 2
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("block", "frozen"),
    [
        *((Layers.torch, None), (Layers.fused, "wte"), (Layers.torch, "h")),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((Layers.fused, None), (Layers.torch, "wte"), (Layers.fused, "h"))
        ),
    ],
)
def test_what_is_cast_and_added_in_a_few_launches_has_autograds_bits(block, frozen):
    """From a first micro-step, which has nothing to add to. bfloat16 would not run in the interpreter."""
    tokens = torch.randint(50, (3, 2, 16), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    gradients, casts = [], []
    for few in (False, True):
        config = GPTConfig(50, 16, n_layer=2, n_head=2, n_embd=16)
        model = make_gpt(config, get_attention("naive"), loss=Layers.torch, block=block, generator=None)
        model.to(DEVICE)
        if frozen:
            model.get_submodule(frozen).requires_grad_(False)
        call = cast_together(model, torch.float16) if few else model
        with Casts() as counted:
            for each in tokens:
                with torch.autocast(DEVICE, torch.float16):
                    loss = call(each, each) / 3
                if few:
                    add_gradients(loss, model)
                else:
                    loss.backward()
                gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        casts.append(counted.count)
    assert sum(each is not None for each in gradients[0]) == sum(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(gradients[:3], gradients[3:], rtol=0, atol=0)
    blocks = 2 * 2 * 4 * 3 if frozen != "h" else 0  # two ways, blocks, weights, micro-steps
    assert casts[0] - casts[1] == blocks


def test_without_graphs_gradients_are_added_in_the_calling_thread():
    seen = []

    class Noticed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, d_out):
            seen.append(torch._C._is_multithreading_enabled())
            return d_out

    model = torch.nn.Linear(3, 2)
    for _ in range(2):  # without gradients, and with
        add_gradients(Noticed.apply(model(torch.ones(1, 3))).sum(), model)
    add_gradients(Noticed.apply(model(torch.ones(1, 3))).sum(), model, graphs=True)  # as it was timed
    assert seen == [False, False, True]
    assert torch._C._is_multithreading_enabled()
    torch.testing.assert_close(model.weight.grad, torch.full((2, 3), 3.0))


def test_a_frozen_weight_gets_no_gradient():
    """It would grow unseen, as no optimizer zeroes it, and with it the norm by which all gradients are clipped."""
    gradients = []
    for summed in (False, True):
        config = GPTConfig(50, 16, n_layer=2, n_head=2, n_embd=16)
        layers = {"loss": Layers.fused, "block": Layers.fused}
        generator = torch.Generator().manual_seed(0)
        model = make_gpt(config, get_attention("naive"), **layers, generator=generator).to(DEVICE)
        for parameter in (model.wte.weight, *model.h[0].parameters()):
            parameter.requires_grad_(False)
        compiled_to_graphs(model, torch.float32)
        called = Local(model) if summed else model
        tokens = torch.arange(16, device=DEVICE)[None] % 7
        add_gradients(called(tokens, tokens), model)
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.requires_grad})
        assert all(each.grad is None for each in model.parameters() if not each.requires_grad)
    assert gradients[1]["h.1.mlp.c_fc.weight"].any()
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_where_attention_breaks_the_graph_the_embeddings_gradients_are_added_by_autograd():
    gradients = []
    attention = get_attention("naive")
    for whole in (True, False):
        torch.compiler.reset()
        config = GPTConfig(50, 16, n_layer=1, n_head=2, n_embd=16)
        layers = {"loss": Layers.fused, "block": Layers.fused}
        between = attention if whole else torch.compiler.disable(attention)
        generator = torch.Generator().manual_seed(0)
        model = make_gpt(config, between, **layers, generator=generator).to(DEVICE)
        compiled_to_graphs(model, torch.float32, whole=whole)
        call = torch.compile(Local(model), backend="aot_eager", fullgraph=whole)
        tokens = torch.arange(16, device=DEVICE)[None] % 7
        add_gradients(call(tokens, tokens), model)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.fixture
def recording(monkeypatch, tmp_path):
    """Runs on a CPU without graphs, in whose place `stand_in` gets what would be recorded."""

    def run(stand_in: Callable, graphs: bool) -> list[float]:
        monkeypatch.setattr(plan, "resolve_graphs", lambda *asked, **how: graphs)
        monkeypatch.setattr(torch.cuda, "make_graphed_callables", stand_in)
        how = TrainerConfig(
            steps=3, batch_tokens=64, micro_batch=2, log_every=1, eval_every=0, device="cpu", sample_tokens=0
        )
        model = ModelConfig(seq_len=16, n_layer=1, n_head=2, n_embd=16, dropout=0.1)
        (tmp_path / "text.txt").write_text("to be or not to be\n\n" * 90)
        config = Config(model, AttentionConfig("naive"), text_data(tmp_path / "text.txt"), trainer=how)
        folder = tmp_path / str(graphs)
        train(replace(config, logger=LoggerConfig(wandb=False)), folder)
        return measured(folder, "train/loss")

    return run


def test_a_replayed_run_is_that_whose_host_launches_each_kernel(recording):
    recorded = []

    def run_as_they_run_it(loss, like, **options):
        recorded.append(len(like))
        for _ in range(3):
            torch.autograd.grad(loss(*like), list(loss.parameters()), allow_unused=True)
        return loss

    launched, replayed = (recording(run_as_they_run_it, graphs) for graphs in (False, True))
    assert recorded == [3]  # tokens, targets, the seed of dropout
    assert replayed == pytest.approx(launched, rel=1e-5)


def test_what_cannot_be_recorded_is_refused_in_a_line(recording):
    def fail(*asked, **options):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nSearch for it")

    with pytest.raises(
        ConfigError,
        match=r"attention=naive .* \(CUDA error: [^\n]* capturing\); leave out trainer.cuda_graphs, or use trainer",
    ):
        recording(fail, graphs=True)


STEPS = 4
MICRO_STEPS = [(rank, micro) for rank in range(2) for micro in range(3)]


class Layers600(torch.nn.Module):
    """Two of 1.4 MB, in two of DDP's buckets."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.last, self.first = Linear(600, 600), Linear(600, 600)
        for layer in (self.first, self.last):
            layer.product = linear
            torch.nn.init.normal_(layer.weight, std=0.04, generator=generator)
            torch.nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()).square().mean()


def gradients(
    layers: Layers600, run: Callable[[int, int, torch.Tensor], None], ranks: list[int]
) -> list[dict]:
    """Of each step, after `run` of (rank, micro, input) for the micro-steps of these ranks."""
    optimizer, scaler = torch.optim.SGD(layers.parameters(), 0.5), torch.amp.GradScaler("cpu", enabled=False)
    found = []
    for step in range(STEPS):
        for rank, micro in MICRO_STEPS:
            generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
            x = torch.randn(4, 600, generator=generator)
            if rank in ranks:
                run(rank, micro, x)
        found.append({name: parameter.grad.clone() for name, parameter in layers.named_parameters()})
        update(layers, optimizer, scaler, keep_gradients=True)
    return found


def summed_on_two(rank: int, folder: str) -> None:
    """The gradients of two ranks, as compiled but not by Inductor; saves rank 0's, and checks who saw them."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    layers, compilations, seen, places = Layers600(), [], [], []

    def backend(graph, inputs):
        compilations.append(graph)
        return aot_eager(graph, inputs)

    replicas = replicated(layers, init_device_mesh("cpu", (2,)), GradientDtype.fp32, lambda: None)
    compiled_to_graphs(layers, torch.float32)  # what it returns needs CUDA
    local, exchanged = (torch.compile(each, backend=backend) for each in (Local(layers), replicas))
    layers.first.weight.register_hook(lambda gradient: seen.append(gradient.shape))

    def run(rank: int, micro: int, x: torch.Tensor) -> None:
        if micro < 2:
            add_gradients(local(x) / 3, layers)
        else:
            (exchanged(x) / 3).backward()
            places.append(layers.first.weight.grad.data_ptr())

    found = gradients(layers, run, [rank])
    assert len(seen) == STEPS  # the last micro-step's: the others were summed
    assert len({*places[:2]}) == 2, "DDP moved no gradient: this tests nothing"
    assert len({*places[1:]}) == 1
    assert len(compilations) == 3  # the undivided form and two pieces, not again after that
    assert hasattr(layers.first.weight.grad, "_dynamo_static_input_type")
    if rank == 0:
        torch.save(found, f"{folder}/gradients")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_sum_gradients_before_the_exchange_wherever_ddp_moves_them(tmp_path):
    layers = Layers600()
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    expected = gradients(layers, lambda rank, micro, x: add_gradients(layers(x) / 6, layers), [0, 1])
    torch.multiprocessing.spawn(summed_on_two, args=(str(tmp_path),), nprocs=2)
    for found, wanted in zip(torch.load(tmp_path / "gradients"), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-8)
