"""Weight gradients that the products sum: the same as autograd's, over micro-steps, in eager mode and compiled."""

import pytest
import torch
from torch.nn import functional as F

from kernels.layers.linear import linear
from kernels.layers.sums import next_sums, sum_in_product, summing


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_adds_its_weights_gradient_to_what_is_there(compiled: bool, with_bias: bool) -> None:
    torch.compiler.reset()
    weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((6, 4), (6,)))
    call = torch.compile(linear, backend="aot_eager") if compiled else linear
    weight.grad = torch.zeros_like(weight)
    sum_in_product(weight, torch.float32)
    expected = torch.zeros_like(weight)
    for _ in range(2):
        x = torch.randn(3, 5, 4, requires_grad=True)
        d_out = torch.randn(3, 5, 6)
        with summing():
            out = call(x, weight, bias if with_bias else None)
        d_x, d_weight = torch.autograd.grad(F.linear(x, weight), (x, weight), d_out)
        (found,) = torch.autograd.grad(out, x, d_out)
        expected += d_weight
        torch.testing.assert_close(found, d_x)
        torch.testing.assert_close(weight.grad, expected)


def test_it_reads_the_cast_weight_only_where_it_sums() -> None:
    weight, x = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4)
    weight.grad = torch.zeros_like(weight)
    sum_in_product(weight, torch.bfloat16)
    with torch.no_grad(), summing():
        weight.mul_(2)
        torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    next_sums([weight])
    with summing():
        found = linear(x.bfloat16(), weight)
    torch.testing.assert_close(found, F.linear(x.bfloat16(), weight.bfloat16()))


def test_a_weight_frozen_later_is_no_longer_summed() -> None:
    weight, x = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    sum_in_product(weight, torch.float32)
    weight.requires_grad_(False)
    with summing():
        linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand_as(x))
    assert not weight.grad.any()
