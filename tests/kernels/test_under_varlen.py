"""Our kernels under torch's varlen_attn and its operators of packed sequences, in the interpreter. About 2 s."""

import pytest
import torch
from torch.nn.attention import varlen

import kernels
from kernels.flash.under_sdpa import activate
from kernels.naive import naive_attention
from tests.kernels.accuracy import inputs

if torch.cuda.is_available():
    pytest.skip("the interpreter's checks", allow_module_level=True)
if not hasattr(varlen, "varlen_attn_out"):
    pytest.skip("torch before 2.12 has another varlen_attn", allow_module_level=True)
varlen_attn, varlen_attn_out = varlen.varlen_attn, varlen.varlen_attn_out


@pytest.fixture(autouse=True)
def activated():
    override = activate(
        "CPU"
    )  # the operators that varlen_attn calls on CUDA, so that the interpreter can run them
    yield
    override.remove()


# Offsets of queries and keys of three sequences: equal; more keys; more queries than keys, and none of either.
OFFSETS = {
    "equal": ([0, 30, 31, 70], [0, 30, 31, 70]),
    "cached": ([0, 7, 8, 40], [0, 40, 41, 75]),
    "longer": ([0, 20, 20, 60], [0, 5, 25, 60]),
}


def by_sequence(attention, tensors, of_queries: list[int], of_keys: list[int], **options):
    """An attention of each sequence alone, of packed (tokens, heads, head_dim)."""
    outs = []
    for number in range(len(of_queries) - 1):
        bounds = [slice(*each[number : number + 2]) for each in (of_queries, of_keys, of_keys)]
        q, k, v = (x[of].transpose(0, 1)[None] for x, of in zip(tensors, bounds, strict=True))
        outs.append(attention(q, k, v, **options)[0].transpose(0, 1))
    return torch.cat(outs)


def packed(queries: int, keys: int):
    *tensors, d_out = inputs(queries, keys, 16, torch.float32, heads=4, kv_heads=2)
    return [x.detach()[0].transpose(0, 1).requires_grad_() for x in tensors], d_out[0].transpose(0, 1)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (3, 2)], ids=str)
@pytest.mark.parametrize("name", OFFSETS)
def test_varlen_attn_runs_on_our_kernels(name: str, window: tuple[int, int]) -> None:
    """Forward and backward, as torchtitan calls it: a tensor of offsets for both, or one for each."""
    of_queries, of_keys = OFFSETS[name]
    tensors, d_out = packed(of_queries[-1], of_keys[-1])
    cu_q = torch.tensor(of_queries, dtype=torch.int32)
    for cu_k in (torch.tensor(of_keys, dtype=torch.int32), *([cu_q] if of_queries == of_keys else [])):
        out = varlen_attn(*tensors, cu_q, cu_k, 40, 40, window_size=window, scale=0.3, enable_gqa=True)
        causal = window[1] == 0
        want = by_sequence(
            naive_attention, tensors, of_queries, of_keys, causal=causal, window=window, scale=0.3
        )
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(*(torch.autograd.grad(each, tensors, d_out) for each in (out, want)))


@pytest.mark.parametrize(("queries", "keys"), [(40, 60), (60, 40), (30, 40)])
def test_one_tensor_of_offsets_serves_unequal_buffers(queries: int, keys: int) -> None:
    """Buffers may be longer than what the offsets cover: by other than kv_len - q_len are keys before a query."""
    tensors, d_out = packed(queries, keys)
    ends = [0, 11, 30]
    offsets = torch.tensor(ends, dtype=torch.int32)
    out = varlen_attn(*tensors, offsets, offsets, 19, 19, window_size=(-1, 0), enable_gqa=True)[:30]
    want = by_sequence(naive_attention, tensors, ends, ends)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(*(torch.autograd.grad(each, tensors, d_out[:30]) for each in (out, want)))


def test_varlen_attn_of_a_cache_reads_only_the_keys_in_use() -> None:
    (q, k, v), _ = packed(3, 30)
    of_queries, of_keys = torch.tensor([0, 1, 2, 3]).int(), torch.tensor([0, 10, 20, 30]).int()
    used = torch.tensor([10, 4, 1]).int()
    with torch.no_grad():
        out = varlen_attn(q, k, v, of_queries, of_keys, 1, 10, seqused_k=used, enable_gqa=True, num_splits=1)
        for row, count in enumerate(used.tolist()):
            keys = slice(10 * row, 10 * row + count)
            want = naive_attention(*(x.transpose(0, 1)[None] for x in (q[row : row + 1], k[keys], v[keys])))
            torch.testing.assert_close(out[row], want[0, :, 0])
        into = torch.empty_like(q)
        varlen_attn_out(into, q, k, v, of_queries, of_keys, 1, 10, seqused_k=used, enable_gqa=True)
    assert torch.equal(into, out)
    pages, table = k.unflatten(0, (3, 10)), torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(kernels.AttentionError, match=r"it does not support block_table$"):
        varlen_attn(
            q, pages, pages, of_queries, None, 1, 10, seqused_k=used, block_table=table, enable_gqa=True
        )


def test_another_head_dim_of_v_is_refused() -> None:
    """torch's varlen_attn does not look."""
    (q, k, v), _ = packed(20, 20)
    offsets = torch.tensor([0, 20]).int()
    with pytest.raises(kernels.AttentionError, match=r"must share a head_dim, got 16, 16 and 8$"):
        varlen_attn(q, k, v[..., :8], offsets, offsets, 20, 20, enable_gqa=True)


@pytest.mark.parametrize(("keys", "used", "numbers"), [([0, 20], None, "2, 1"), ([0, 9, 20], [9], "2, 2, 1")])
def test_offsets_of_unequal_numbers_of_sequences_are_refused(
    keys: list[int], used: list[int] | None, numbers: str
) -> None:
    (q, k, v), _ = packed(20, 20)
    given = {"enable_gqa": True} | ({} if used is None else {"seqused_k": torch.tensor(used).int()})
    with torch.no_grad(), pytest.raises(kernels.AttentionError, match=rf"of \[{numbers}\] sequences"):
        varlen_attn(q, k, v, torch.tensor([0, 9, 20]).int(), torch.tensor(keys).int(), 11, 20, **given)


def test_torchs_dense_operator_and_dropout_in_packed_sequences() -> None:
    """What SDPA calls for nested tensors, with dropout; and the same operator for tensors without offsets."""
    operator = torch.ops.aten._flash_attention_forward
    tensors, d_out = packed(40, 40)
    offsets = torch.tensor([0, 25, 40], dtype=torch.int32)
    torch.manual_seed(1)
    out, _, state, _, _ = operator(*tensors, offsets, offsets, 25, 25, 0.5, True, False, scale=-0.3)
    seed = state.view(torch.int64)[0]
    q, k, v = (x.transpose(0, 1)[None] for x in tensors)
    options = {"dropout_p": 0.5, "dropout_seed": seed, "cu_seqlens": offsets, "scale": 0.3}
    want = naive_attention(-q, k, v, **options)[0].transpose(0, 1)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(*(torch.autograd.grad(each, tensors, d_out) for each in (out, want)))
    batch = [x.detach()[None].requires_grad_() for x in tensors]
    out = operator(*batch, None, None, 40, 40, 0.0, False, False, window_size_left=6, window_size_right=0)[0]
    want = naive_attention(*(x.transpose(1, 2) for x in batch), window=(6, 0)).transpose(1, 2)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(*(torch.autograd.grad(each, batch, d_out[None]) for each in (out, want)))


def test_one_graph_has_varlen_attn() -> None:
    """As torchtitan compiles a block: the operator stays opaque, and is differentiated."""
    tensors, d_out = packed(40, 40)
    offsets = torch.tensor([0, 25, 40], dtype=torch.int32)

    def attend(q, k, v, offsets):
        return varlen_attn(2 * q, k, v, offsets, offsets, 25, 25, window_size=(-1, 0), enable_gqa=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    outs = [each(*tensors, offsets) for each in (compiled, attend)]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad(out, tensors, d_out) for out in outs))
