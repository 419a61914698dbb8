"""Packed documents under torch's attention and FlashAttention-4: as naive computes them. About 10 s."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask

from kernels import AttentionError, get_attention, resolve_attention, varlen
from kernels.documents import flex_mask, visible
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
    mask = flex_mask(documents(length, batch), None, batch, length, length, causal)
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
        mask = flex_mask(cu_seqlens, None, 2, 1000, 1000, causal=True)
        return looked_at([mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices])

    torch.compile(strides, fullgraph=True)(documents(1000, 2))
    assert found == [(8, 8, 1), (64, 64, 8, 1)] * 2


RAGGED = {  # lengths of queries and keys -> their offsets in two rows
    (300, 500): ([0, 130, 130, 400, 410, 600], [0, 100, 120, 700, 710, 1000]),
    (500, 300): ([0, 128, 256, 700, 900, 1000], [0, 256, 257, 257, 384, 600]),
    (5, 9): ([0, 2, 4, 10], [0, 1, 11, 18]),
}


def ragged(lengths: tuple[int, int]) -> dict[str, torch.Tensor]:
    offsets = (torch.tensor(each, dtype=torch.int32) for each in RAGGED[lengths])
    return dict(zip(("cu_seqlens", "cu_seqlens_k"), offsets, strict=True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", RAGGED, ids=str)
@pytest.mark.parametrize("name", ["sdpa", "sdpa_flash", "sdpa_math"])
def test_sdpa_masks_keys_with_offsets_of_their_own(name: str, lengths: tuple[int, int], causal: bool) -> None:
    *tensors, d_out = inputs(*lengths, 16, torch.float32, batch=2, heads=4, kv_heads=2)
    options = {"causal": causal, "scale": 0.3, **ragged(lengths)}
    found, expected = (
        with_gradients(get_attention(each), tensors, d_out, **options) for each in (name, "naive")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_flexs_blocks_of_keys_with_offsets_of_their_own_miss_no_pair(
    lengths: tuple[int, int], causal: bool
) -> None:
    """Those that torch finds among them; and none is full that has a pair to hide."""
    mask = flex_mask(*ragged(lengths).values(), 2, *lengths, causal)
    expected = create_block_mask(mask.mask_mod, 2, None, *lengths, device="cpu")
    seen = visible(*ragged(lengths).values(), 2, *lengths, causal)
    rows, columns = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    assert torch.equal(seen[:, 0], torch.stack([mask.mask_mod(row, 0, rows, columns) for row in range(2)]))

    def blocks(of, kind: str) -> torch.Tensor:
        counts, indices = (getattr(of, f"{kind}_{what}") for what in ("num_blocks", "indices"))
        listed = torch.zeros(*indices.shape[:-1], indices.shape[-1] + 1, dtype=torch.bool)
        places = torch.where(torch.arange(indices.shape[-1]) < counts[..., None], indices, indices.shape[-1])
        return listed.scatter(-1, places.long(), True)[..., :-1]

    full, wanted = (blocks(each, "full_kv") for each in (mask, expected))
    assert not (full & ~wanted).any()
    assert not ((wanted | blocks(expected, "kv")) & ~(full | blocks(mask, "kv"))).any()


@pytest.mark.slow  # it compiles C++
@pytest.mark.parametrize("causal", [True, False])
def test_flex_masks_keys_with_offsets_of_their_own(causal: bool) -> None:
    q, k, v = (x.detach() for x in inputs(500, 300, 16, torch.float32, batch=2, heads=4, kv_heads=2)[:3])
    options = {"causal": causal, **ragged((500, 300))}
    flex, expected = get_attention("flex"), get_attention("naive")(q, k, v, **options)
    torch.testing.assert_close(flex(q, k, v, **options), expected)
    compiled = torch.compile(lambda *tensors, **options: flex(*tensors, **options), fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, **options), expected)


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


def test_other_features_with_documents_are_refused() -> None:
    cpu = {"device": torch.device("cpu"), "dtype": torch.float32, "head_dim": 64}
    with pytest.raises(
        AttentionError, match=r"does not support dropout_p with cu_seqlens \(packed documents\)"
    ):
        resolve_attention("sdpa", **cpu, cu_seqlens=True, dropout_p=0.1)
    q, cu_seqlens = torch.randn(1, 2, 8, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    with pytest.raises(AttentionError, match="attention=sdpa does not support dropout_p with cu_seqlens;"):
        get_attention("sdpa")(q, q, q, cu_seqlens=cu_seqlens, dropout_p=0.1, dropout_seed=1)
    with pytest.raises(AttentionError, match=r"cu_seqlens must be torch\.int32"):
        get_attention("flex")(q, q, q, cu_seqlens=cu_seqlens.long())
    with pytest.raises(AttentionError, match=r"^cu_seqlens_k, .*, needs cu_seqlens, those of the queries$"):
        get_attention("naive")(q, q, q, cu_seqlens_k=cu_seqlens)
    asked = {"device": torch.device("cuda"), "dtype": torch.float16, "head_dim": 64, "cu_seqlens": True}
    with pytest.raises(
        AttentionError, match=r"does not support cu_seqlens_k \(.*with cu_seqlens .*; use att"
    ):
        resolve_attention("sdpa_flash", **asked, cu_seqlens_k=True)
    with pytest.raises(AttentionError, match="attention=sdpa does not support kv_lengths with cu_seqlens;"):
        get_attention("sdpa")(q, q, q, cu_seqlens=cu_seqlens, kv_lengths=torch.tensor([5]).int())


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
