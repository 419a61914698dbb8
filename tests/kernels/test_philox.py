"""The dropout mask: Philox word for word as Triton draws it, and as random as it should be. About 3 s."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.philox import ROUNDS, drop_share, dropout_mask, philox, row_mask


@triton.jit
def draw_kernel(Words, seed, SIZE: tl.constexpr, ROUNDS: tl.constexpr):
    index = tl.arange(0, SIZE)
    first, second, third, fourth = tl.randint4x(seed, index, ROUNDS)
    tl.store(Words + index, first)
    tl.store(Words + SIZE + index, second)
    tl.store(Words + 2 * SIZE + index, third)
    tl.store(Words + 3 * SIZE + index, fourth)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU tensor, so the interpreter")
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**62 + 12345])
def test_philox_words_equal_those_of_triton(seed: int) -> None:
    words = torch.empty(4, 64, dtype=torch.int32)
    draw_kernel[1,](words, seed, SIZE=64, ROUNDS=ROUNDS)
    zero = torch.zeros((), dtype=torch.int64)
    ours = philox(torch.tensor(seed), torch.arange(64), zero, zero, zero)
    assert torch.equal(words.long() & 0xFFFFFFFF, torch.stack(torch.broadcast_tensors(*ours)))


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    ],
)
def test_philox_gives_the_published_known_answers(counter: str, key: str, answer: str) -> None:
    """Random123's kat_vectors for philox4x32 with 7 rounds: all zeros, all ones, digits of pi."""
    low, high = (int(word, 16) for word in key.split())
    seed = torch.tensor([low | high << 32 if high < 2**31 else (low | high << 32) - 2**64])
    words = philox(seed, *(torch.tensor([int(word, 16)]) for word in counter.split()))
    assert " ".join(f"{word.item():08x}" for word in words) == answer


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_the_share_dropped_matches_the_probability_in_every_dimension(dropout_p: float) -> None:
    share = drop_share(dropout_p)
    keep = dropout_mask(1234, dropout_p, 2, 3, 300, 299).double()
    sigma = (share * (1 - share)) ** 0.5
    assert abs(keep.mean().item() - (1 - share)) < 5 * sigma / keep.numel() ** 0.5
    for dim in range(4):  # every row, column, head and batch too
        means = keep.mean([d for d in range(4) if d != dim])
        assert (means - (1 - share)).abs().max() < 5.5 * sigma / (keep.numel() / len(means)) ** 0.5


def test_the_drop_probability_is_rounded_to_16_bits() -> None:
    assert [drop_share(p) for p in (0.5, 0.25, 2.0**-16)] == [0.5, 0.25, 2.0**-16]
    assert all(abs(drop_share(p) - p) <= 2.0**-17 for p in (0.1, 0.3, 0.9, 1e-6))
    assert drop_share(1 - 1e-9) == 1 - 2.0**-16
    assert dropout_mask(0, 1e-6, 1, 1, 64, 64).all()


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_neighbouring_elements_and_seeds_are_uncorrelated(dropout_p: float) -> None:
    share = drop_share(dropout_p)
    keep, other_seed, high_seed = (
        dropout_mask(seed, dropout_p, 2, 2, 512, 512).double() - (1 - share) for seed in (99, 100, 99 + 2**32)
    )
    shifts = [(0, 0, rows, columns) for rows in (0, 1, 2, 8, 16, 64) for columns in (0, 1, 2, 8, 9, 16, 64)]
    pairs = [(keep, keep.roll(shift, (0, 1, 2, 3))) for shift in (*shifts[1:], (0, 1, 0, 0), (1, 0, 0, 0))]
    pairs += [(keep, other_seed), (keep, high_seed), (keep, keep.transpose(2, 3).triu(1))]
    for one, other in pairs:
        correlation = (one * other).mean() / (share * (1 - share))
        assert abs(correlation) < 5 / keep.numel() ** 0.5


def test_the_eight_elements_of_a_call_are_independent() -> None:
    """A chi-squared test on the frequency of their 2^8 patterns, at a dropout rate where all of them are likely."""
    keep = dropout_mask(7, 0.5, 4, 4, 512, 512).long().view(4, 4, 32, 2, 8, 32, 2, 4, 2)
    pattern = sum(
        keep[:, :, :, row, :, :, right, :, odd] << (4 * row + 2 * right + odd)
        for row in (0, 1) for right in (0, 1) for odd in (0, 1)
    )  # fmt: skip
    counts = pattern.flatten().bincount(minlength=256).double()
    expected = counts.sum() / 256
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_squared - 255) < 5 * (2 * 255) ** 0.5


def test_a_mask_is_a_pure_function_of_seed_batch_head_row_and_column() -> None:
    whole = dropout_mask(5, 0.3, 3, 4, 100, 90)
    assert torch.equal(whole[:2, :3, :33, :50], dropout_mask(torch.tensor(5), 0.3, 2, 3, 33, 50))
    assert not torch.equal(whole, dropout_mask(6, 0.3, 3, 4, 100, 90))
    assert not torch.equal(whole, dropout_mask(5 + 2**32, 0.3, 3, 4, 100, 90))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_row_masks_drop_the_right_share_and_are_uncorrelated(dropout_p: float) -> None:
    keep = row_mask(1234, dropout_p, 700, 701).double()
    sigma = (dropout_p * (1 - dropout_p)) ** 0.5
    assert abs(keep.mean().item() - (1 - dropout_p)) < 5 * sigma / keep.numel() ** 0.5
    for dim in range(2):
        assert (keep.mean(dim) - (1 - dropout_p)).abs().max() < 5.5 * sigma / keep.shape[dim] ** 0.5
    for other in (row_mask(1235, dropout_p, 700, 701), keep.roll(1, 0), keep.roll(1, 1), keep.roll(4, 1)):
        assert abs((keep * other).mean().item() - (1 - dropout_p) ** 2) < 0.01


def test_a_row_mask_does_not_depend_on_the_size_of_the_tensor() -> None:
    whole = row_mask(5, 0.4, 40, 64)
    assert torch.equal(row_mask(5, 0.4, 20, 33), whole[:20, :33])
