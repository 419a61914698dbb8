"""Our functions as PyTorch operators: under no_grad, and asked for forward-mode gradients, which they lack."""

import pytest
import torch
from torch.autograd import forward_ad

from kernels.layers.linear_gelu import bias_gelu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    pre, bias = (torch.randn(shape, generator=generator, device=DEVICE) for shape in ((3, 40), (40,)))
    return pre.requires_grad_(), bias.requires_grad_()


def test_no_grad_gives_the_same_numbers_and_records_no_graph() -> None:
    pre, bias = inputs()
    with_graph = bias_gelu(pre, bias)
    with torch.no_grad():
        without = bias_gelu(pre, bias)
    assert with_graph.requires_grad
    assert not without.requires_grad
    assert torch.equal(without, with_graph)


@pytest.mark.parametrize("enabled", [True, False])
def test_forward_mode_gradients_are_refused_and_not_lost(enabled: bool) -> None:
    pre, bias = (x.detach() for x in inputs())
    with torch.set_grad_enabled(enabled), forward_ad.dual_level():
        dual = forward_ad.make_dual(pre, torch.ones_like(pre))
        with pytest.raises(RuntimeError, match="jvp"):
            bias_gelu(dual, bias)
