"""Embedding lookup with a bitwise repeatable gradient.

The forward is torch's. In the backward, torch.compile accumulates the gradient rows of a token with atomics, in an
order that varies from run to run; ours is a segmented sum over sorted tokens, in fixed order, without atomics.

Sorting makes the positions of each token adjacent: a run. Runs are split at the boundaries of fixed-size chunks of
the sorted positions, and one program sums one piece. A run of a single piece is written to the result directly; the
pieces of a longer one are added by a second kernel.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch
from ..operators import NAMESPACE, operator
from .checks import block_of, check_device, check_dtype, no_second_derivative
from .sums import total_of


class Tile(NamedTuple):
    """How rows are distributed over programs and threads."""

    chunk: int  # sorted positions; runs are split at chunk boundaries
    rows: int  # that a program adds at a time
    columns: int  # of a row per thread


# On an H200, 4 rows in 4 warps were the fastest of four configurations for uniform tokens, whatever the chunk, and
# with chunks of 64 within a fifth of the best for text in which one token is 6 % of all. Unsplit runs took 6 times as
# long there.
TILE = Tile(chunk=64, rows=4, columns=8)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens].

    The gradient is summed in float32 and bitwise repeatable. The backward may run repeatedly, but there is no second
    derivative.

    Args:
        tokens: int64 or int32 (...), in [0, rows); torch refuses others.
        weight: (rows, width); float32, bfloat16 or float16.

    Returns:
        (..., width), contiguous, of weight's dtype.

    Raises:
        ValueError: another dtype of weight. FusedError: our kernels cannot run here.
    """
    check_dtype("weight", weight)
    # An autograd.Function in the graph would keep torch.compile from using its graph cache.
    look_up = token_rows if torch.compiler.is_compiling() else _TokenRows.apply
    return look_up(tokens, weight, total_of(weight))


def token_rows(tokens: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
    """The operator: weight[tokens]. total: what the gradient is added to, which autograd then does not get."""
    return F.embedding(tokens, weight)


def embedding_gradient(d_out: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """The gradient of a table: (rows, width) in d_out's dtype. d_out: (..., width), tokens: (...)."""
    table = d_out.new_zeros((rows, d_out.shape[-1]))
    _add_up(d_out.contiguous(), tokens.contiguous(), table)
    return table


class _TokenRows(torch.autograd.Function):
    """`token_rows` with its gradient."""

    @staticmethod
    def forward(ctx, tokens, weight, total):
        check_device("embedding", weight.device.type)  # raises now rather than in the backward
        ctx.save_for_backward(tokens)
        ctx.total = total  # not saved: the loss's backward changes it first
        ctx.rows = weight.shape[0]
        # Not our operator: torch.compile sees torch's, and fuses it with what follows.
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, d_out):
        (tokens,) = ctx.saved_tensors
        if ctx.total is None:
            return None, embedding_gradient(d_out, tokens, ctx.rows), None
        _add_rows(ctx.total, d_out, tokens)
        return None, None, None


@torch.library.custom_op(f"{NAMESPACE}::add_rows", mutates_args=("total",))
def _add_rows(total: Tensor, d_out: Tensor, tokens: Tensor) -> None:
    _add_up(d_out.contiguous(), tokens.contiguous(), total)


@_add_rows.register_fake
def _(total, d_out, tokens):
    return None


token_rows = operator(
    token_rows,
    lambda tokens, weight, total: weight.new_empty((*tokens.shape, weight.shape[1])),
    _TokenRows.apply,
)
embedding_gradient = operator(
    embedding_gradient,
    lambda d_out, tokens, rows: d_out.new_empty((rows, d_out.shape[-1])),
    no_gradient=no_second_derivative,
)


def _add_up(d_out: Tensor, tokens: Tensor, table: Tensor) -> None:
    """Add the sum of d_out over each token's positions, accumulated in float32, to the token's row of table.

    d_out: (..., width). tokens: (...), integer. table: (rows, width). All contiguous. Rows of tokens that do not
    occur are not touched.
    """
    count, width = tokens.numel(), table.shape[1]
    block, warps, chunks = _grid(TILE, count, width)
    # A stable sort: the order of equal tokens is the order of summation.
    in_order, places = torch.sort(tokens.flatten().int(), stable=True)
    # For each chunk, the piece of the run continued from the previous chunk, and that of the run continued in the
    # next.
    pieces = table.new_empty((chunks, 2, width), dtype=torch.float32)
    numbers = (count, width, block, TILE.chunk, TILE.rows)

    def runs():
        return sum_runs_kernel, (count, 1, 1), numbers, {"num_warps": warps}

    def joined():
        return join_pieces_kernel, (chunks - 1, 1, 1), numbers, {"num_warps": warps}

    if d_out.numel():
        launch((in_order, places, d_out, table, pieces), ("sum_runs", count, width), runs)
    if d_out.numel() and chunks > 1:
        launch((in_order, table, pieces), ("join_pieces", count, width), joined)


@functools.lru_cache(1024)  # Triton's cdiv costs 2 us a call
def _grid(tile: Tile, count: int, width: int) -> tuple[int, int, int]:
    """(columns in a block, warps per program, chunks)."""
    block = block_of(width)
    warps = min(max(block // (32 * tile.columns), 1), 16)
    return block, warps, triton.cdiv(count, tile.chunk)


@triton.jit
def sum_runs_kernel(
    InOrder,
    Places,
    DOut,
    Table,
    Pieces,
    count,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per sorted position, idle unless a piece of a run starts there. Grid (count,)."""
    first = tl.program_id(0)
    token = tl.load(InOrder + first)
    starts = tl.load(InOrder + first - 1, mask=first > 0, other=-1) != token
    if starts | (first % CHUNK == 0):
        chunk = first // CHUNK
        end = tl.minimum((chunk + 1) * CHUNK, count)
        columns = tl.arange(0, BLOCK)
        inside = columns < WIDTH
        sums = tl.zeros([ROWS, BLOCK], tl.float32)
        at = first
        while tl.load(InOrder + at, mask=at < end, other=-1) == token:
            here = at + tl.arange(0, ROWS)
            same = tl.load(InOrder + here, mask=here < end, other=-1) == token
            place = tl.load(Places + here, mask=same, other=0)  # int64
            wanted = same[:, None] & inside[None, :]
            rows = tl.load(DOut + place[:, None] * WIDTH + columns[None, :], mask=wanted, other=0.0)
            sums += rows.to(tl.float32)
            at += ROWS
        total = tl.sum(sums, 0)
        goes_on = tl.load(InOrder + end, mask=end < count, other=-1) == token
        if starts & (goes_on == 0):
            row = Table + token.to(tl.int64) * WIDTH
            total += tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(row + columns, total.to(Table.dtype.element_ty), mask=inside)
        else:
            piece = Pieces + (2 * chunk + starts.to(tl.int32)).to(tl.int64) * WIDTH
            tl.store(piece + columns, total, mask=inside)


@triton.jit
def join_pieces_kernel(
    InOrder,
    Table,
    Pieces,
    count,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per chunk except the last, idle unless a run starts in it and continues in the next. Grid
    (chunks - 1,)."""
    chunk = tl.program_id(0)
    begin = chunk * CHUNK
    token = tl.load(InOrder + begin + CHUNK)
    goes_on = tl.load(InOrder + begin + CHUNK - 1) == token
    starts = tl.load(InOrder + begin - 1, mask=begin > 0, other=-1) != token
    if starts & goes_on:
        columns = tl.arange(0, BLOCK)
        inside = columns < WIDTH
        first = tl.load(Pieces + (2 * chunk + 1).to(tl.int64) * WIDTH + columns, mask=inside, other=0.0)
        sums = tl.zeros([ROWS, BLOCK], tl.float32)
        at = chunk + 1
        while tl.load(InOrder + at * CHUNK, mask=at * CHUNK < count, other=-1) == token:
            here = at + tl.arange(0, ROWS)
            same = tl.load(InOrder + here * CHUNK, mask=here * CHUNK < count, other=-1) == token
            pieces = Pieces + (2 * here).to(tl.int64)[:, None] * WIDTH + columns[None, :]
            sums += tl.load(pieces, mask=same[:, None] & inside[None, :], other=0.0)
            at += ROWS
        total = first + tl.sum(sums, 0)
        row = Table + token.to(tl.int64) * WIDTH
        total += tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(row + columns, total.to(Table.dtype.element_ty), mask=inside)
