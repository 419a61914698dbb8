"""The Hopper backward's sum of dQ: the order that its threads leave it in is undone. On any machine, 1 s."""

import pytest
import torch

from kernels.flash.hopper_dq import round_kernel
from kernels.flash.hopper_work import BLOCK_M

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = 64


def laid_down(half: torch.Tensor) -> torch.Tensor:
    """(64, 64) of a warpgroup as it lays it down, by PTX's picture of wgmma's accumulator.

    Number i of lane l of warp w is at row 16 w + l / 4 + 8 (i / 2 mod 2), column 8 (i / 4) + 2 (l mod 4) + i mod 2.
    The threads lay down four numbers each, side by side, then the next four.
    """
    i = torch.arange(32).view(8, 1, 1, 4)
    warp, lane = torch.arange(4).view(4, 1, 1), torch.arange(32).view(32, 1)
    rows = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
    columns = 8 * (i // 4) + 2 * (lane % 4) + i % 2
    return half[rows, columns].flatten()


@pytest.mark.parametrize(("head_dim", "block_m"), BLOCK_M.items())
@pytest.mark.parametrize("blind", [0, 3, 70, 130])
def test_the_sum_comes_back_in_rows(head_dim: int, block_m: int, blind: int) -> None:
    batch, heads, q_len = 2, 3, 2 * block_m + 5
    blocks = -(-q_len // block_m)
    dq = torch.randn(batch, heads, blocks * block_m, head_dim)
    across = 1 if head_dim > HALF else 0  # which of a block's axes the two warpgroups share
    halves = [
        laid_down(half) for block in dq.flatten(0, 2).split(block_m) for half in block.split(HALF, dim=across)
    ]
    found = torch.full((batch, heads, q_len, head_dim), float("nan"), device=DEVICE)
    total, strides = torch.cat(halves).to(DEVICE), found.stride()[:3]
    round_kernel[(heads, blocks, batch)](
        total, found, *strides, q_len, blind, 0.5, BLOCK_M=block_m, HEAD_DIM=head_dim
    )
    expected = 0.5 * dq[:, :, :q_len]
    expected[:, :, :blind] = 0
    assert torch.equal(found.cpu(), expected)
