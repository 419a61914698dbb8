"""Weight gradients that the products sum: the same as autograd's, over micro-steps, in eager mode and compiled."""

import pytest
import torch
from torch.nn import functional as F

from kernels.layers.linear import linear, sum_in_product


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_adds_its_weights_gradient_to_what_is_there(compiled: bool, with_bias: bool) -> None:
    torch.compiler.reset()
    weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((6, 4), (6,)))
    call = torch.compile(linear, backend="aot_eager") if compiled else linear
    weight.grad = torch.zeros_like(weight)
    sum_in_product(weight)
    expected = torch.zeros_like(weight)
    for _ in range(2):
        x = torch.randn(3, 5, 4, requires_grad=True)
        d_out = torch.randn(3, 5, 6)
        out = call(x, weight, bias if with_bias else None)
        d_x, d_weight = torch.autograd.grad(F.linear(x, weight), (x, weight), d_out)
        (found,) = torch.autograd.grad(out, x, d_out)
        expected += d_weight
        torch.testing.assert_close(found, d_x)
        torch.testing.assert_close(weight.grad, expected)
