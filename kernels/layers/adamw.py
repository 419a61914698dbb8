"""A step of AdamW in one pass over a model: it clips, updates, zeroes the gradient, and casts the weight to bfloat16.

torch takes a pass for each: for GPT-2 small 48 bytes an element and 1.56 ms on an H200, against 37 and 1.16 here,
each with the norms' 4 bytes. The arithmetic is torch's, but in float32 where its fused form has float64 on CUDA: an
ulp or two apart. The state is torch.optim.AdamW's, so either continues what the other began.
"""

import math
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch

BLOCK, WARPS = 1024, 4  # a program's elements and warps; the fastest of seven pairs, by up to 15 %
# For each optimizer and group: its rows and their tables. A cache of only the last eight groups made each step wait
# 80 to 250 ms where seven models took turns (on an H200).
_known: WeakKeyDictionary[torch.optim.Optimizer, dict[int, tuple[list, tuple]]] = WeakKeyDictionary()


def takes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `adamw_step` is this optimizer's step: torch.optim.AdamW, fused, plain, of float32 weights on a GPU."""
    return type(optimizer) is torch.optim.AdamW and all(
        (group["fused"], group["amsgrad"], group["maximize"]) == (True, False, False)
        and (weight.is_cuda and weight.dtype is torch.float32 and _low(weight).dtype is not torch.float16)
        for group in optimizer.param_groups
        for weight in group["params"]
    )


def adamw_step(optimizer: torch.optim.AdamW, norm: Tensor, clip: float) -> None:
    """Clip by the norm of all gradients (0-d, float32), take the step, zero the gradients; waits at new addresses.

    A weight without a gradient is left as it is, as in torch. Every other has its state, both dense and in the order
    of its own elements. A norm that is not finite does the same to the weights as in torch.
    """
    known = _known.setdefault(optimizer, {})
    for number, group in enumerate(optimizer.param_groups):
        if rows := _rows(group, optimizer.state):
            if number not in known or known[number][0] != rows:
                known[number] = rows, _tables(rows, norm.device)
            _step(group, norm, clip, *known[number][1])


def _step(group: dict, norm: Tensor, clip: float, table: Tensor, chunks: Tensor, aligned: bool) -> None:
    count, lr, betas = len(table), float(group["lr"]), group["betas"]
    scales = norm.new_empty(1 + 2 * count)

    def prepare():
        powers = [math.log2(max(beta, 1e-300)) for beta in betas]
        return prepare_kernel, (1, 1, 1), (count, lr, clip, *powers, triton.next_power_of_2(count)), {}

    def step():
        numbers = (lr * group["weight_decay"], *betas, group["eps"], aligned, BLOCK)
        return adamw_kernel, (len(chunks), 1, 1), numbers, {"num_warps": WARPS}

    # Not cached: the learning rate changes in each step.
    launch((table, norm, scales), None, prepare)
    launch((table, chunks, scales), None, step)


def _rows(group: dict, state: dict) -> list[tuple[int, ...]]:
    """For each weight with a gradient: the addresses that its update needs (0 for no copy), and its size."""
    rows = []
    for weight in group["params"]:
        if weight.grad is None:
            continue
        own, low = state[weight], _low(weight)
        tensors = weight, weight.grad, own["exp_avg"], own["exp_avg_sq"], own["step"]
        copy = low.data_ptr() if low.dtype is torch.bfloat16 else 0
        rows.append((*[each.data_ptr() for each in tensors], copy, weight.numel()))
    return rows


def _low(weight: Tensor) -> Tensor:
    """What `linear` multiplies by (sums.py): a copy under autocast, in float32 the weight itself."""
    return getattr(weight, "low", weight)


def _tables(rows: list[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor, bool]:
    """A row for each tensor, int64 (tensors, 7); (tensor, place in it) of each program, int32 (programs, 2); whether
    all addresses are multiples of 16 bytes and all sizes of 4, for 16-byte loads."""
    table = torch.tensor(rows)
    programs = (table[:, -1] + BLOCK - 1) // BLOCK
    tensor = torch.arange(len(rows)).repeat_interleave(programs)
    place = torch.arange(len(tensor)) - (programs.cumsum(0) - programs)[tensor]
    addresses, sizes = table[:, [0, 1, 2, 3, 5]], table[:, 6]
    aligned = not (addresses % 16).any() and not (sizes % 4).any()
    return table.to(device), torch.stack([tensor, place], 1).int().to(device), aligned


@triton.jit
def prepare_kernel(
    Tensors, Norm, Scales, count, lr, clip, LOG1: tl.constexpr, LOG2: tl.constexpr, BLOCK: tl.constexpr
):
    """Count the step; write the clipping factor and, for each tensor, the learning rate and the divisor of the root
    mean square, both with their bias correction. In float64: 1 - beta^step loses digits. LOG1, LOG2: the betas'
    logarithms to base 2. Grid (1,)."""
    # A reciprocal, as in torch, where the minimum with a nan is a nan too.
    factor = clip * tl.div_rn(1.0, tl.load(Norm) + 1e-6)
    tl.store(Scales, tl.minimum(factor, 1.0, propagate_nan=tl.PropagateNan.ALL))
    each = tl.arange(0, BLOCK)
    inside = each < count
    place = tl.load(Tensors + 7 * each + 4, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(place, mask=inside, other=1.0) + 1
    tl.store(place, step, mask=inside)
    first = 1 - tl.exp2(step.to(tl.float64) * LOG1)
    second = 1 - tl.exp2(step.to(tl.float64) * LOG2)
    tl.store(Scales + 1 + 2 * each, (lr / first).to(tl.float32), mask=inside)
    tl.store(Scales + 2 + 2 * each, tl.sqrt(second).to(tl.float32), mask=inside)


@triton.jit
def at(row, column: tl.constexpr, begin, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to element `begin` of the tensor in a column. ALIGNED: four are loaded at once, 16 or 8 bytes."""
    pointer = tl.load(row + column).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, dtype.primitive_bitwidth // 2)
    return pointer + begin


@triton.jit
def adamw_kernel(
    Tensors,
    Chunks,
    Scales,
    decay,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK elements of a tensor. decay: learning rate * weight decay. Grid (programs,)."""
    tensor = tl.load(Chunks + 2 * tl.program_id(0))
    begin = tl.load(Chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK
    row = Tensors + 7 * tensor
    left = tl.load(row + 6) - begin
    if ALIGNED:
        left = tl.multiple_of(left, 4)
    each = tl.arange(0, BLOCK)
    inside = each < left
    weights = at(row, 0, begin, tl.float32, ALIGNED) + each
    gradients = at(row, 1, begin, tl.float32, ALIGNED) + each
    means = at(row, 2, begin, tl.float32, ALIGNED) + each
    squares = at(row, 3, begin, tl.float32, ALIGNED) + each
    weight = tl.load(weights, mask=inside, other=0.0)
    gradient = tl.load(gradients, mask=inside, other=0.0) * tl.load(Scales)
    mean = tl.load(means, mask=inside, other=0.0)
    square = tl.load(squares, mask=inside, other=0.0)
    rate, root = tl.load(Scales + 1 + 2 * tensor), tl.load(Scales + 2 + 2 * tensor)
    weight -= decay * weight
    mean = BETA1 * mean + (1 - BETA1) * gradient
    square = BETA2 * square + (1 - BETA2) * gradient * gradient
    weight -= tl.div_rn(rate * mean, tl.div_rn(tl.sqrt_rn(square), root) + EPS)
    tl.store(weights, weight, mask=inside)
    tl.store(gradients, tl.zeros([BLOCK], tl.float32), mask=inside)
    tl.store(means, mean, mask=inside)
    tl.store(squares, square, mask=inside)
    if tl.load(row + 5) != 0:
        copies = at(row, 5, begin, tl.bfloat16, ALIGNED) + each
        tl.store(copies, weight.to(tl.bfloat16), mask=inside)
