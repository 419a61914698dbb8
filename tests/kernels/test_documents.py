"""Packed documents under torch's attention and FlashAttention-4: as naive computes them. About 10 s."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask

from kernels import AttentionError, get_attention, resolve_attention, varlen
from kernels.documents import flex_mask
from kernels.fa4 import fa4_or_documents
from tests.kernels.accuracy import documents, inputs

SHAPES = [(300, 2), (1000, 1), (128, 3), (5, 2), (129, 1)]


def with_gradients(attention, tensors, d_out, **options):
    out = attention(*tensors, **options)
    return [out, *torch.autograd.grad(out, tensors, d_out)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "batch"), SHAPES)
@pytest.mark.parametrize("name", ["sdpa", "sdpa_flash", "sdpa_math"])
def test_sdpa_keeps_to_documents_by_a_mask(name: str, length: int, batch: int, causal: bool) -> None:
    *tensors, d_out = inputs(length, length, 16, torch.float32, batch=batch, heads=4, kv_heads=2)
    options = {"cu_seqlens": documents(length, batch), "causal": causal, "scale": 0.3}
    found, expected = (
        with_gradients(get_attention(each), tensors, d_out, **options) for each in (name, "naive")
    )
    torch.testing.assert_close(found, expected)


def test_documents_run_on_flash_attention_where_torch_would_prefer_cudnn(monkeypatch) -> None:
    def asked(q, *rest, **options):
        assert torch.backends.cuda.flash_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        return q

    monkeypatch.setattr(varlen, "varlen_attn", asked)
    q, ends = torch.randn(8, 2, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    assert varlen.varlen(q, q, q, ends, 8, True, 1.0) is q


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "batch"), SHAPES)
def test_flexs_blocks_are_those_of_every_pair_of_tokens(length: int, batch: int, causal: bool) -> None:
    """As torch finds them from the same mask; and so which are full, where the kernel does not look at pairs."""
    mask = flex_mask(documents(length, batch), batch, length, causal)
    expected = create_block_mask(mask.mask_mod, batch, None, length, length, device="cpu")
    for kind in ("kv", "full_kv"):
        counts, indices = (
            [getattr(each, f"{kind}_{what}") for each in (mask, expected)]
            for what in ("num_blocks", "indices")
        )
        assert torch.equal(*counts)
        listed = torch.arange(indices[0].shape[-1]) < counts[0][..., None]
        assert torch.equal(*(each * listed for each in indices))


@pytest.mark.slow  # it compiles C++
def test_flex_keeps_to_documents_alone_and_inside_a_compiled_model() -> None:
    q, k, v, _ = (x.detach() for x in inputs(300, 300, 16, torch.float32, batch=2, heads=4, kv_heads=2))
    flex, cu_seqlens = get_attention("flex"), documents(300, 2)
    expected = get_attention("naive")(q, k, v, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(flex(q, k, v, cu_seqlens=cu_seqlens), expected)
    compiled = torch.compile(lambda *tensors: flex(*tensors[:3], cu_seqlens=tensors[3]), fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, cu_seqlens), expected)


@pytest.mark.slow  # it compiles C++
def test_compiled_blocks_have_the_strides_that_flexs_kernel_steps_by() -> None:
    """On a GPU it goes to the next row of the batch by the stride of its one head: Inductor chose 0."""
    found: list[tuple[int, ...]] = []

    @torch.library.custom_op("tests::looked_at", mutates_args=(), tags=(torch.Tag.flexible_layout,))
    def looked_at(lists: list[torch.Tensor]) -> torch.Tensor:
        found.extend(each.stride() for each in lists)
        return lists[0].clone()

    looked_at.register_fake(lambda lists: torch.empty_like(lists[0]))

    def strides(cu_seqlens: torch.Tensor) -> torch.Tensor:
        mask = flex_mask(cu_seqlens, 2, 1000, causal=True)
        return looked_at([mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices])

    torch.compile(strides, fullgraph=True)(documents(1000, 2))
    assert found == [(8, 8, 1), (64, 64, 8, 1)] * 2


def as_the_package(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
    """FlashAttention-4's function of documents by its documentation; of none that is empty, since each is work."""
    out = torch.empty_like(q)
    for begin, end in zip(cu_seqlens_q, cu_seqlens_k[1:], strict=False):
        assert 0 < end - begin <= min(max_seqlen_q, max_seqlen_k)
        one = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(
            *one, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
        out[begin:end] = attended.transpose(0, 1)
    return out, None


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "batch"), SHAPES)
def test_fa4_gets_documents_without_empty_ones_and_cut_at_rows(length: int, batch: int, causal: bool) -> None:
    tensors = [
        x.detach() for x in inputs(length, length, 32, torch.float32, batch=batch, heads=4, kv_heads=2)[:3]
    ]
    options = {"cu_seqlens": documents(length, batch), "causal": causal, "scale": 0.3}
    package = {"flash_attn_func": None, "flash_attn_varlen_func": as_the_package}
    torch.testing.assert_close(
        fa4_or_documents(*tensors, **package, **options), get_attention("naive")(*tensors, **options)
    )


def test_other_features_beside_documents_are_refused() -> None:
    cpu = {"device": torch.device("cpu"), "dtype": torch.float32, "head_dim": 64}
    with pytest.raises(
        AttentionError, match=r"does not support dropout_p beside cu_seqlens \(packed documents\)"
    ):
        resolve_attention("sdpa", **cpu, cu_seqlens=True, dropout_p=0.1)
    q, cu_seqlens = torch.randn(1, 2, 8, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    with pytest.raises(AttentionError, match="attention=sdpa does not support dropout_p beside cu_seqlens;"):
        get_attention("sdpa")(q, q, q, cu_seqlens=cu_seqlens, dropout_p=0.1, dropout_seed=1)
    with pytest.raises(AttentionError, match=r"cu_seqlens must be torch\.int32"):
        get_attention("flex")(q, q, q, cu_seqlens=cu_seqlens.long())


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_math", "flex", "fa4"])
def test_a_gpu_computes_what_naive_does(name: str, dtype: torch.dtype, compiled: bool, causal: bool) -> None:
    try:
        resolve_attention(name, device=torch.device("cuda"), dtype=dtype, head_dim=64, cu_seqlens=True)
    except AttentionError as why:
        pytest.skip(str(why))
    *tensors, d_out = inputs(1000, 1000, 64, dtype, batch=2, heads=4, kv_heads=4, device="cuda")
    options = {"cu_seqlens": documents(1000, 2, "cuda"), "causal": causal}
    attention = get_attention(name)
    attention = torch.compile(attention) if compiled else attention
    found = with_gradients(attention, tensors, d_out, **options)
    expected = with_gradients(get_attention("naive"), tensors, d_out, **options)
    tolerance = 0.03 if dtype is torch.bfloat16 else 3e-3
    for result, mine, naives in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        torch.testing.assert_close(
            mine, naives, atol=tolerance, rtol=tolerance, msg=lambda why, result=result: f"{result}: {why}"
        )
