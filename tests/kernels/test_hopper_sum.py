"""The parts of the Hopper backward's sum of dQ that are outside its kernel: the turn in which a block of queries
begins, undoing the order in which the threads store the sum, and delta. On any machine, 2 s."""

import pytest
import torch

from kernels.flash.hopper.backward_schedule import BLOCK_M, KEYS
from kernels.flash.hopper.columns import multiplied
from kernels.flash.hopper.dq import delta_kernel, round_kernel
from kernels.flash.masks import ANY, block_lists, document_bounds, list_strides
from tests.kernels.accuracy import documents

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = 64


def laid_down(half: torch.Tensor) -> torch.Tensor:
    """A (64, 64) block in the order in which a warpgroup stores it, by PTX's layout of wgmma's accumulator.

    Number i of lane l of warp w is at row 16 w + l / 4 + 8 (i / 2 mod 2), column 8 (i / 4) + 2 (l mod 4) + i mod 2.
    All threads store four numbers each, side by side, then the next four.
    """
    i = torch.arange(32).view(8, 1, 1, 4)
    warp, lane = torch.arange(4).view(4, 1, 1), torch.arange(32).view(32, 1)
    rows = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
    columns = 8 * (i // 4) + 2 * (lane % 4) + i % 2
    return half[rows, columns].flatten()


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("head_dim", "width"), [(64, 64), (40, 64), (32, 64), (128, 128), (72, 128), (96, 128)]
)
@pytest.mark.parametrize(
    ("masks", "blind"),
    [*((None, blind) for blind in (0, 3, 70, 130)), ((2, 3), 0), ((1, 3), 70), ((2, 1), 130)],
    ids=str,
)
def test_the_dq_sum_is_written_back_in_row_order(
    masks: tuple[int, int] | None, head_dim: int, width: int, blind: int
) -> None:
    """width: of the tile that head_dim fills, or begins to. masks: batches and heads that have a block mask of their
    own, whose second 128 queries see nothing."""
    batch, heads, q_len, block_m = 2, 3, 2 * KEYS.value + 5, BLOCK_M[width]
    blocks = -(-q_len // block_m)
    dq = torch.randn(batch, heads, blocks * block_m, width)
    dq[..., multiplied(head_dim) :] = float("nan")  # nobody writes them
    across = 1 if width > HALF else 0  # the axis of a block that the two warpgroups split
    halves = [
        laid_down(half) for block in dq.flatten(0, 2).split(block_m) for half in block.split(HALF, dim=across)
    ]
    found = torch.full((batch, heads, q_len, head_dim), float("nan"), device=DEVICE)
    total, strides = torch.cat(halves).to(DEVICE), found.stride()[:3]
    lists = None
    if masks:
        mask = torch.ones(*masks, 3, 3, dtype=torch.bool, device=DEVICE)
        mask[-1, -1, 1] = False
        lists, _ = block_lists(mask, q_len, q_len, False, -1, -1)
    round_kernel[(heads, blocks, batch)](
        total, found, lists, None, None, None, *strides, q_len, blind, None, *list_strides(lists), 0.5,
        BLOCK_M=block_m, HEAD_DIM=head_dim, WIDTH=width, KEYS=KEYS.value,
    )  # fmt: skip
    expected = 0.5 * dq[:, :, :q_len, :head_dim]
    expected[:, :, :blind] = 0
    if masks:
        of_batches, of_heads = (slice(0 if own == 1 else own - 1, None) for own in masks)
        expected[of_batches, of_heads, 128:256] = 0
    assert torch.equal(found.cpu(), expected)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("head_dim", "block_m"), BLOCK_M.items())
@pytest.mark.parametrize("left", [ANY, 0, 200])
@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
def test_turns_begin_with_the_first_block_of_keys_that_adds_to_dq(
    packed: bool, left: int, head_dim: int, block_m: int
) -> None:
    """The work items that add to a block of queries are those whose keys one of its queries sees, without a gap. So
    each finds its turn, whatever the documents."""
    batch, heads, length = 2, 3, 1000
    starts = torch.zeros(batch, length, dtype=torch.int32)
    if packed:
        starts, _ = document_bounds(documents(length, batch, DEVICE), batch, length)
    blocks, keys = -(-length // block_m), KEYS.value
    out, d_out = torch.randn(2, batch, heads, length, head_dim, device=DEVICE)
    delta = torch.full((batch, heads, length), float("nan"), device=DEVICE)
    turns = torch.full((batch * heads * blocks + 1,), -7, dtype=torch.int32, device=DEVICE)
    delta_kernel[(heads, blocks, batch)](
        out, None, d_out, None, None, delta, turns, starts if packed else None, None,
        *out.stride()[:3], *d_out.stride()[:3], length, left,
        BLOCK_M=block_m, HEAD_DIM=head_dim, WIDTH=head_dim, KEYS=keys,
    )  # fmt: skip
    torch.testing.assert_close(delta, (out * d_out).sum(-1))
    assert turns[-1] == 0
    row, key = torch.arange(length)[:, None], torch.arange(length)
    seen = (key <= row) & (key >= row - left) & (key >= starts.cpu()[:, :, None])
    for b in range(batch):
        for block in range(blocks):
            visited = seen[b, block * block_m : (block + 1) * block_m].any(0).nonzero().flatten() // keys
            first, last = visited[0], visited[-1]
            assert visited.unique().tolist() == list(range(first, last + 1))
            of_heads = turns[:-1].view(batch, heads, blocks)[b, :, block]
            assert of_heads.tolist() == [first] * heads


@pytest.mark.parametrize(("head_dim", "block_m"), BLOCK_M.items())
def test_delta_ignores_the_lse_gradient_of_fully_masked_rows(head_dim: int, block_m: int) -> None:
    batch, heads, length = 2, 3, 200
    out, d_out = torch.randn(2, batch, heads, length, head_dim, device=DEVICE)
    lse, d_lse, delta = torch.randn(3, batch, heads, length, device=DEVICE)
    lse[:, :, :150], d_lse[:, :, :150], out[:, :, :150] = -torch.inf, torch.nan, 0
    turns = torch.empty(batch * heads * 4 + 1, dtype=torch.int32, device=DEVICE)
    delta_kernel[(heads, -(-length // block_m), batch)](
        out, None, d_out, lse, d_lse, delta, turns, None, None,
        *out.stride()[:3], *d_out.stride()[:3], length, ANY,
        BLOCK_M=block_m, HEAD_DIM=head_dim, WIDTH=head_dim, KEYS=KEYS.value,
    )  # fmt: skip
    torch.testing.assert_close(delta, (out * d_out).sum(-1) - d_lse.where(lse > -torch.inf, 0.0))


@pytest.mark.parametrize(("head_dim", "block_m"), BLOCK_M.items())
def test_delta_adds_what_rounding_took_from_out(head_dim: int, block_m: int) -> None:
    batch, heads, length = 2, 3, 200
    exact, d_out = torch.randn(2, batch, length, heads, head_dim, device=DEVICE).transpose(2, 3)
    out, d_out = exact.half(), d_out.half()
    low = (exact - out.float()).half()
    turns = torch.empty(batch * heads * 4 + 1, dtype=torch.int32, device=DEVICE)
    want = (exact * d_out.float()).sum(-1)
    wrong = []
    for each in (None, low):
        delta = torch.full_like(want, float("nan"))
        delta_kernel[(heads, -(-length // block_m), batch)](
            out, each, d_out, None, None, delta, turns, None, None,
            *out.stride()[:3], *d_out.stride()[:3], length, ANY,
            BLOCK_M=block_m, HEAD_DIM=head_dim, WIDTH=head_dim, KEYS=KEYS.value,
        )  # fmt: skip
        wrong.append((delta - want).abs().max())
    assert wrong[1] < 1e-4 < 1e-3 < wrong[0]
