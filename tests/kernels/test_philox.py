"""The dropout mask: Philox word for word as Triton draws it, and as random as it should be. About 3 s."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.philox import dropout_mask, philox


@triton.jit
def draw_kernel(Words, seed, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    first, second, third, fourth = tl.randint4x(seed, index)
    tl.store(Words + index, first)
    tl.store(Words + SIZE + index, second)
    tl.store(Words + 2 * SIZE + index, third)
    tl.store(Words + 3 * SIZE + index, fourth)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU tensor, so the interpreter")
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**62 + 12345])
def test_words_are_tritons(seed: int) -> None:
    words = torch.empty(4, 64, dtype=torch.int32)
    draw_kernel[1,](words, seed, SIZE=64)
    zero = torch.zeros((), dtype=torch.int64)
    ours = philox(torch.tensor(seed), torch.arange(64), zero, zero, zero)
    assert torch.equal(words.long() & 0xFFFFFFFF, torch.stack(torch.broadcast_tensors(*ours)))


def test_the_published_known_answers() -> None:
    """Random123's known-answer vectors for philox4x32-10: counter and key all zeros, and all ones."""
    zero, ones = torch.zeros((), dtype=torch.int64), torch.full((), 0xFFFFFFFF, dtype=torch.int64)
    assert [f"{word.item():08x}" for word in philox(zero, zero, zero, zero, zero)] == [
        "6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8",
    ]  # fmt: skip
    assert [f"{word.item():08x}" for word in philox(torch.tensor(-1), ones, ones, ones, ones)] == [
        "408f276d", "41c83b0e", "a20bc7c6", "6d5451fd",
    ]  # fmt: skip


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_share_dropped(dropout_p: float) -> None:
    keep = dropout_mask(1234, dropout_p, 2, 3, 300, 299).double()
    sigma = (dropout_p * (1 - dropout_p)) ** 0.5
    assert abs(keep.mean().item() - (1 - dropout_p)) < 5 * sigma / keep.numel() ** 0.5
    for dim in range(4):  # every row, column, head and batch too
        means = keep.mean([d for d in range(4) if d != dim])
        assert (means - (1 - dropout_p)).abs().max() < 5.5 * sigma / (keep.numel() / len(means)) ** 0.5


def test_neighbours_do_not_follow_each_other() -> None:
    keep = dropout_mask(99, 0.5, 2, 2, 256, 256).double() - 0.5
    for shift, dim in [(1, 3), (8, 3), (16, 3), (1, 2), (8, 2), (16, 2), (1, 1), (1, 0)]:
        correlation = (keep * keep.roll(shift, dim)).mean() / 0.25
        assert abs(correlation) < 5 / keep.numel() ** 0.5


def test_a_mask_is_a_pure_function_of_seed_batch_head_row_and_column() -> None:
    whole = dropout_mask(5, 0.3, 3, 4, 100, 90)
    assert torch.equal(whole[:2, :3, :33, :50], dropout_mask(torch.tensor(5), 0.3, 2, 3, 33, 50))
    assert not torch.equal(whole, dropout_mask(6, 0.3, 3, 4, 100, 90))
    assert not torch.equal(whole, dropout_mask(5 + 2**32, 0.3, 3, 4, 100, 90))
