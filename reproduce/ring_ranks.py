"""What each rank does in the experiment `ring`: check the contenders against float64, count bytes, time in turns."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from kernels import get_attention
from kernels.ring import RingGroup, ring_attention, shard_positions
from kernels.ring.group import Arriving

from . import timing
from .attention import compare
from .experiment import Sample

if TYPE_CHECKING:
    from .ring import Settings

RING, GATHERED, TORCH, ONE = "ring", "keys gathered", "context_parallel", "one GPU"
COMPUTE, EXCHANGE = "ring's computing alone", "ring's exchange alone"
FORWARD, BACKWARD = "forward", "backward"


class Shape(NamedTuple):
    """Of whole sequences."""

    batch: int
    heads: int
    length: int
    head_dim: int

    @property
    def flops(self) -> float:
        """Of the causal forward: two products of the lower triangle. The backward has five."""
        return 2 * self.batch * self.heads * self.length**2 * self.head_dim


class Inputs:
    """Seeded q, k, v and a gradient of the output, (batch, heads, length, head_dim): whole, and this rank's part."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.whole = [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4)]
        self.positions = shard_positions(shape.length, dist.get_rank(), dist.get_world_size()).to(device)
        self.part = [self.mine(x) for x in self.whole]

    def mine(self, x: Tensor) -> Tensor:
        return x[:, :, self.positions]


class Contender(NamedTuple):
    """attend: q, k, v -> out; whole: of whole sequences, not of this rank's part; within: for both passes."""

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    whole: bool = False
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def contenders(on_gpu: bool) -> dict[str, Contender]:
    """Name -> contender. PyTorch's has no ring on a CPU."""
    found = {
        RING: Contender(partial(ring_attention, gather_keys=False)),
        GATHERED: Contender(partial(ring_attention, gather_keys=True)),
        COMPUTE: Contender(partial(ring_attention, gather_keys=False), within=silent),
        ONE: Contender(get_attention("flash"), whole=True),
    }
    if on_gpu:
        found[TORCH] = Contender(_sdpa)
    return found


def silent() -> AbstractContextManager[Any]:
    """Within it a ring sends nothing: each rank goes on with what it has."""
    return patch.object(RingGroup, "pass_on", lambda ring, tensor: Arriving(tensor, tensor, []))


@contextmanager
def kept_messages() -> Iterator[list[Tensor]]:
    """What this rank sends in a ring."""
    sent: list[Tensor] = []
    pass_on = RingGroup.pass_on

    def keeping(ring: RingGroup, tensor: Tensor) -> Arriving:
        sent.append(tensor)
        return pass_on(ring, tensor)

    with patch.object(RingGroup, "pass_on", keeping):
        yield sent


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@contextmanager
def under_context_parallel(ranks: int, device: torch.device) -> Iterator[None]:
    """Within it, torch's attention is PyTorch's ring. It cuts the tensors that it is given; ours are cut already."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    given = torch.zeros(2 * ranks, device=device)
    mesh = init_device_mesh(device.type, (ranks,))
    with context_parallel(mesh, buffers=[given], buffer_seq_dims=[0]):
        yield


@contextmanager
def counted_collectives() -> Iterator[list[int]]:
    """The bytes that this rank sends by each of the two collectives that PyTorch's ring calls."""
    from torch.distributed import _functional_collectives as collectives

    sent: list[int] = []
    ranks = dist.get_world_size()
    # to every other rank what it holds; to the next rank what it holds
    copies = {"all_gather_single": ranks - 1, "all_gather_tensor": ranks - 1, "permute_tensor": 1}
    with ExitStack() as patched:
        for name in filter(lambda each: hasattr(collectives, each), copies):
            call = getattr(collectives, name)

            def counting(
                tensor: Tensor, *rest: Any, _call=call, _copies=copies[name], **named: Any
            ) -> Tensor:
                sent.append(_copies * tensor.nbytes)
                return _call(tensor, *rest, **named)

            patched.enter_context(patch.object(collectives, name, counting))
        yield sent


def _passes(contender: Contender, inputs: Inputs) -> Iterator[list[Tensor]]:
    """Nothing, the output of a forward, the gradients of a backward: each as soon as it is there."""
    *qkv, d_out = inputs.whole if contender.whole else inputs.part
    qkv = [x.detach().requires_grad_() for x in qkv]
    with contender.within():
        yield []
        out = contender.attend(*qkv)
        yield [out.detach()]
        yield list(torch.autograd.grad(out, qkv, d_out))


def _gradients(contender: Contender, inputs: Inputs) -> list[Tensor]:
    """This rank's part of out, dq, dk and dv."""
    results = [x for each in _passes(contender, inputs) for x in each]
    return [inputs.mine(x) for x in results] if contender.whole else results


def _errors(contender: Contender, settings: Settings, device: torch.device) -> dict[str, float]:
    """The largest error of any rank over its limit, by `attention.compare`: 1 or less passes."""
    dtype = getattr(torch, settings.dtype)
    inputs = Inputs(Shape(settings.batch, 2, settings.check_length, settings.head_dim), dtype, device)
    naive = Contender(get_attention("naive"), whole=True)
    found, theirs = _gradients(contender, inputs), _gradients(naive, inputs)
    inputs.whole = [x.double() for x in inputs.whole]
    compared = compare(found, theirs, _gradients(naive, inputs), dtype)
    errors, limits = compared["errors"], compared["limits"]
    return dict(zip(errors, _slowest([errors[each] / limits[each] for each in errors], device), strict=True))


def _slowest(values: list[float], device: torch.device) -> list[float]:
    """The largest of all ranks."""
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def _time(contender: Contender, inputs: Inputs, device: torch.device) -> list[float]:
    """Milliseconds of the forward and the backward."""
    stamps = [_now(device) for _ in _passes(contender, inputs)]
    return _slowest([1e3 * (b - a) for a, b in itertools.pairwise(stamps)], device)


def _time_messages(messages: dict[str, list[Tensor]], device: torch.device) -> list[float]:
    """Milliseconds of the messages of each pass, one after the other, with nothing computed."""
    ring, milliseconds = RingGroup(), []
    for sent in messages.values():
        began = _now(device)
        for tensor in sent:
            ring.pass_on(tensor).wait()
        milliseconds.append(1e3 * (_now(device) - began))
    return _slowest(milliseconds, device)


def _now(device: torch.device) -> float:
    """The time at which every rank is here and its device idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _messages(inputs: Inputs, sent: list[Any], contender: Contender) -> dict[str, list[Any]]:
    """What a contender adds to `sent` in each pass."""
    _, forward, _ = (len(sent) for _ in _passes(contender, inputs))
    return {FORWARD: sent[:forward], BACKWARD: sent[forward:]}


def on_rank(
    rank: int, ranks: int, length: int, settings: Settings, device_type: str, process: int, path: str
) -> None:
    """What `ring.measure` starts: rank 0 writes the sample to `path`."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{path}.store", rank=rank, world_size=ranks, timeout=timedelta(minutes=2)
    )
    shape = Shape(settings.batch, settings.heads, length, settings.head_dim)
    dtype, on_gpu = getattr(torch, settings.dtype), device_type == "cuda"
    # As many as leave a rank's part of each outside the L2 cache when its turn comes.
    count = timing.input_sets(4 * math.prod(shape) // ranks * dtype.itemsize, device)
    sets = [Inputs(shape, dtype, device, seed) for seed in range(count)]
    with under_context_parallel(ranks, device) if on_gpu else nullcontext():
        sample = _sample(sets, contenders(on_gpu), settings, device, process)
    if rank == 0:
        torch.save(sample, path)
    dist.barrier()
    dist.destroy_process_group()


def _sample(
    sets: list[Inputs], racing: dict[str, Contender], settings: Settings, device: torch.device, process: int
) -> Sample:
    """See `ring.measure`."""
    messages = []
    for inputs in sets:
        with kept_messages() as kept:
            messages.append(_messages(inputs, kept, racing[RING]))
    sent = {RING: {phase: sum(x.nbytes for x in each) for phase, each in messages[0].items()}}
    errors, left_out = {}, {}
    for name in [each for each in racing if each != COMPUTE]:  # in one order on all ranks
        try:
            errors[name] = _errors(racing[name], settings, device)
            if name == TORCH:
                with counted_collectives() as counted:
                    found = _messages(sets[0], counted, racing[TORCH])
                sent[TORCH] = {phase: sum(each) for phase, each in found.items()}
        except RuntimeError as error:  # PyTorch's is a prototype
            left_out[name] = str(error).splitlines()[0]
        else:
            worst = max(errors[name].values())
            left_out |= {name: f"{worst:.2g} of the error that is allowed"} if worst > 1 else {}
    calls: dict[str, Callable[[int], list[float]]] = {
        name: lambda turn, each=each: _time(each, sets[turn % len(sets)], device)
        for name, each in racing.items()
        if name not in left_out
    }
    calls[EXCHANGE] = lambda turn: _time_messages(messages[turn % len(sets)], device)
    with timing.recorded(device) if dist.get_rank() == 0 else nullcontext({}) as clocks:  # of its GPU
        times = race(calls, settings, process)
    return {"ms": times, "sent_bytes": sent, "errors": errors, "left_out": left_out, "clocks": clocks}


def race(
    calls: dict[str, Callable[[int], list[float]]], settings: Settings, process: int
) -> dict[str, dict[str, list[float]]]:
    """Time the calls in turns, in an order drawn anew each round, the same on all ranks; see `timing.race`."""
    times = {name: {FORWARD: [], BACKWARD: []} for name in calls}
    turns, order = itertools.count(), random.Random(process)
    for number in range(-settings.warmup, settings.rounds):
        for name in order.sample(list(calls), len(calls)):
            taken = calls[name](next(turns))
            for phase, milliseconds in zip(times[name].values(), taken, strict=True):
                if number >= 0:
                    phase.append(milliseconds)
    return times
