"""FlashAttention-4 behind our signature. Under 1 s; on a GPU, where its package is, it computes what naive does."""

import sys
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from kernels import ATTENTION, AttentionError, AttentionRequest, get_attention
from kernels.fa4 import fa4, fa4_or_documents


def as_the_package(q, k, v, *, softmax_scale, causal):
    """The package's function by its documentation: (batch, length, heads, head_dim), and the log-sum-exp beside."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2), None


@pytest.mark.parametrize("q_len", [6, 9])
@pytest.mark.parametrize("causal", [True, False])
def test_layout_scale_and_causal_mask_are_passed_to_the_package(causal: bool, q_len: int) -> None:
    q, k, v = torch.randn(2, 4, q_len, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    expected = get_attention("naive")(q, k, v, causal=causal, scale=0.3)
    found = fa4(q, k, v, flash_attn_func=as_the_package, causal=causal, scale=0.3)
    torch.testing.assert_close(found, expected)


def test_unsupported_features_are_refused_by_name() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(AttentionError, match="attention=fa4 does not support window"):
        fa4(q, q, q, flash_attn_func=as_the_package, window=(2, 0))
    with pytest.raises(AttentionError, match="attention=fa4 does not support dropout_p"):
        fa4(q, q, q, flash_attn_func=as_the_package, dropout_p=0.1, dropout_seed=1)
    with pytest.raises(AttentionError, match="k and v must share a shape"):
        fa4(q, q, q[..., :4], flash_attn_func=as_the_package)


def test_a_seed_without_dropout_is_ignored_as_by_the_others() -> None:
    q = torch.randn(1, 1, 4, 8)
    seeded = fa4(q, q, q, flash_attn_func=as_the_package, dropout_p=0.0, dropout_seed=1)
    assert torch.equal(seeded, fa4(q, q, q, flash_attn_func=as_the_package))


def test_autocast_casts_inputs_to_its_dtype() -> None:
    q = torch.randn(1, 1, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = fa4(q.bfloat16(), q, q, flash_attn_func=as_the_package)
    assert torch.equal(out, fa4(*[q.bfloat16()] * 3, flash_attn_func=as_the_package))


def test_an_unsupported_request_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not(dtype: torch.dtype = torch.bfloat16, *features: str, head_dim: int = 64) -> str | None:
        request = AttentionRequest(torch.device("cuda"), dtype, head_dim, frozenset(features))
        return ATTENTION["fa4"].refuses(request)

    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert "pip install flash-attn-4" in why_not()
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", ModuleType("flash_attn.cute"))
    assert why_not() is None
    assert why_not(torch.float32) == "it takes float16 and bfloat16, not torch.float32"
    assert why_not(torch.bfloat16, "dropout_p") == "it does not support dropout_p"
    refused = "it takes a head_dim that is a multiple of 32, up to 256, not {}: at others its dQ is wrong"
    assert [why_not(head_dim=each) for each in (80, 288)] == [refused.format(each) for each in (80, 288)]


def test_a_call_that_would_get_a_wrong_gradient_is_refused() -> None:
    q = torch.randn(1, 1, 4, 80)
    functions = {"flash_attn_func": as_the_package, "flash_attn_varlen_func": as_the_package}
    with pytest.raises(
        AttentionError, match=r"attention=fa4 cannot be used here: .* multiple of 32, .*not 80"
    ):
        fa4_or_documents(q, q, q, **functions)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 192, 224, 256])
def test_the_package_computes_what_naive_does(head_dim: int, causal: bool) -> None:
    pytest.importorskip("flash_attn.cute")
    q, k, v, d_out = (
        torch.randn(2, 4, 300, head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_(i < 3)
        for i in range(4)
    )
    results = []
    for name in ("fa4", "naive"):
        out = get_attention(name)(q, k, v, causal=causal)
        results.append([out, *torch.autograd.grad(out, (q, k, v), d_out)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)
