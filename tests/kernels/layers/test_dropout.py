"""Dropout of rows, element by element against the mask of kernels/philox.py."""

import pytest
import torch

from kernels.layers import FusedError
from kernels.layers import dropout as room
from kernels.layers.checks import check_device
from kernels.layers.dropout import dropout
from kernels.philox import row_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def expected(x, dropout_p, seed):
    keep = row_mask(seed, dropout_p, x.shape[:-1].numel(), x.shape[-1], x.device).view(x.shape)
    return torch.where(keep, x.double() / (1 - dropout_p), 0.0).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 48), (2, 3, 100), (1, 768), (5, 1), (33,), (0, 48)])
def test_dropout_and_its_gradient_apply_the_philox_mask(dtype, shape):
    x = torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True)
    d_out = torch.randn(shape, device=DEVICE, dtype=dtype)
    out = dropout(x, 0.3, 2**50 + 1)
    (d_x,) = torch.autograd.grad(out, x, d_out)
    for ours, of in ((out, x), (d_x, d_out)):
        torch.testing.assert_close(ours, expected(of, 0.3, 2**50 + 1))


@pytest.mark.parametrize("dropout_p", [0.0, 1e-3, 0.5, 1 - 1e-3])
def test_dropout_matches_the_mask_at_any_probability(dropout_p):
    x = torch.ones(200, 100, device=DEVICE)
    torch.testing.assert_close(dropout(x, dropout_p, 3), expected(x, dropout_p, 3))


def test_no_dropout_needs_no_seed_and_no_pass_over_memory():
    x = torch.randn(3, 8, device=DEVICE)
    assert dropout(x, 0.0, None) is x


def test_dropout_takes_tensors_of_any_strides():
    x = torch.randn(48, 6, device=DEVICE).T
    d_out = torch.ones((), device=DEVICE).expand(6, 48)
    x.requires_grad_()
    out = dropout(x, 0.5, 1)
    (d_x,) = torch.autograd.grad(out, x, d_out)
    torch.testing.assert_close((out, d_x), (expected(x, 0.5, 1), expected(d_out, 0.5, 1)))


def test_torch_compile_takes_dropout_without_graph_breaks():
    x = torch.randn(5, 48, device=DEVICE, requires_grad=True)
    seed = torch.tensor(9, device=DEVICE)
    torch.library.opcheck(room.dropped, (x, seed, 0.3))
    compiled = torch.compile(dropout, fullgraph=True, backend="aot_eager")
    for function in (compiled, dropout):
        out = function(x, 0.3, seed)
        (d_x,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close((out, d_x), (expected(x, 0.3, 9), expected(torch.ones_like(x), 0.3, 9)))


def test_compiled_dropout_takes_a_different_int_seed_each_call():
    x = torch.randn(5, 48, device=DEVICE)
    compiled = torch.compile(dropout, fullgraph=True, backend="aot_eager")
    for seed in (1, 2, 3):
        torch.testing.assert_close(compiled(x, 0.3, seed), expected(x, 0.3, seed))


def test_dropout_has_a_second_derivative():
    x = torch.randn(3, 8, device=DEVICE, dtype=torch.float32, requires_grad=True)
    (d_x,) = torch.autograd.grad(dropout(x, 0.5, 4).square().sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(d_x.sum(), x)
    torch.testing.assert_close(twice, expected(expected(torch.full_like(x, 2.0), 0.5, 4), 0.5, 4))


def test_an_unsupported_dtype_probability_seed_or_device_is_refused(monkeypatch):
    x = torch.zeros(3, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"^x is torch\.float64"):
        dropout(x.double(), 0.1, 1)
    with pytest.raises(ValueError, match=r"dropout_p must be at least 0 and below 1, got 1\.0"):
        dropout(x, 1.0, 1)
    with pytest.raises(ValueError, match="dropout_seed must fit int64"):
        dropout(x, 0.1, 2**63)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    check_device.cache_clear()
    with pytest.raises(FusedError, match="dropout needs a CUDA device, not cpu"):
        dropout(x.cpu(), 0.1, 1)


@pytest.mark.gpu
def test_dropout_matches_the_mask_at_the_size_of_gpt2():
    x = torch.randn(65536, 768, device="cuda")
    torch.testing.assert_close(dropout(x, 0.1, 11), expected(x, 0.1, 11))
