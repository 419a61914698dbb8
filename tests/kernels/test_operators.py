"""Our functions as PyTorch operators: under no_grad, asked for forward-mode gradients (none), and counted."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from kernels import decode_attention, get_attention, packed_form
from kernels.layers.linear_cross_entropy import linear_cross_entropy
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


def flops(function, *inputs: torch.Tensor) -> tuple[int, int]:
    """What torch counts for the function, and for the backward of its sum."""
    with FlopCounterMode(display=False) as forward:
        out = function(*inputs)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_torch_counts_flash_as_it_counts_its_own_attention(kv_heads: int) -> None:
    """Of torch's, the kernels of its flash attention, which only a GPU has: without memory."""
    shapes = (2, 4, 24, 16), (2, kv_heads, 40, 16), (2, kv_heads, 40, 16)
    q, k, v = (torch.empty(shape, device="meta") for shape in shapes)
    k, v = (x.repeat_interleave(4 // kv_heads, 1) for x in (k, v))  # not every torch counts grouped heads
    aten = torch.ops.aten
    with FlopCounterMode(display=False) as own_forward:
        out, lse, _, _, n, m, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v)
    with FlopCounterMode(display=False) as own_backward:
        saved = out, lse, None, None, n, m, 0.0, False, seed, offset
        aten._scaled_dot_product_flash_attention_backward(out, q, k, v, *saved)
    ours = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    counted = own_forward.get_total_flops(), own_backward.get_total_flops()
    assert flops(get_attention("flash"), *ours) == counted
    compiled = torch.compile(get_attention("flash"), backend="aot_eager")
    assert flops(compiled, *ours) == counted
    torch.compiler.reset()  # what was compiled under a mode would fail other tests' fullgraph
    assert counted[0] == 2 * 2 * (2 * 4 * 24 * 40 * 16)


def test_torch_counts_packed_flash_too() -> None:
    qkv = torch.randn(2, 24, 3, 4, 16, device=DEVICE, requires_grad=True)
    packed = packed_form(get_attention("flash"))
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in qkv.unbind(2))
    assert flops(packed, qkv) == flops(get_attention("flash"), q, k, v)


def test_torch_counts_decoding_as_attention_to_the_whole_cache() -> None:
    q, k, v = (torch.randn(2, heads, room, 16, device=DEVICE) for heads, room in ((4, 1), (2, 40), (2, 40)))
    lengths = torch.tensor([3, 40], dtype=torch.int32, device=DEVICE)
    with FlopCounterMode(display=False) as counted:
        decode_attention(q, k, v, lengths)
    assert counted.get_total_flops() == 2 * 2 * (2 * 4 * 1 * 40 * 16)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_torch_counts_the_head_with_its_loss_as_it_counts_its_own(reduction: str) -> None:
    hidden = torch.randn(12, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(40, 16, device=DEVICE, requires_grad=True)
    targets = torch.arange(12, device=DEVICE)
    own = flops(lambda x, w: F.cross_entropy(x @ w.T, targets, reduction=reduction), hidden, weight)
    ours = flops(lambda x, w: linear_cross_entropy(x, w, targets, reduction=reduction), hidden, weight)
    again = own[0] if reduction == "none" else 0  # the logits, in the backward
    assert sum(ours) == sum(own) + again
