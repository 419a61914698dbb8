"""Attention in emulated FP8: its rounding and its rotation. Under 1 s."""

import pytest
import torch

from reproduce import fp8


@pytest.mark.parametrize("size", [1, 2, 64, 128])
def test_the_hadamard_matrix_is_orthogonal(size):
    matrix = fp8.hadamard(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size))
    assert matrix.abs().unique().numel() == 1


@pytest.mark.parametrize("rows", [None, 64])
def test_rounding_keeps_three_mantissa_bits(rows):
    x = torch.rand(2, 3, 100, 16, generator=torch.Generator().manual_seed(0)) + 1
    assert ((fp8._rounded(x, rows) - x) / x).abs().max() <= 2**-4


def test_an_outlier_costs_accuracy_only_in_its_own_block():
    x = torch.randn(1, 1, 256, 16, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0, 0] = 1e6
    whole, block = (fp8._rounded(x, rows)[0, 0, 128:] - x[0, 0, 128:] for rows in (None, 128))
    assert block.norm() < 0.1 * whole.norm()


@pytest.mark.parametrize("form", fp8.FORMS)
def test_every_form_matches_exact_attention_within_fp8_error(form):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 70, 32)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    error = (fp8.fp8_attention(q, k, v, form) - exact).norm() / exact.norm()
    assert 0.005 < error < 0.08
