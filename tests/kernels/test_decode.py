"""Decoding from a cache, in parts of its keys, against float64. About 5 s in the interpreter."""

import random

import pytest
import torch

from kernels import AttentionError
from kernels.flash.decode import decode_attention
from kernels.naive import naive_attention
from tests.random_cases import random_cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cache_of(batch, heads, kv_heads, q_len, room, head_dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, q_len), (kv_heads, room), (kv_heads, room))
    return [
        torch.randn(batch, length, of_heads, head_dim, generator=generator).to(DEVICE, dtype).transpose(1, 2)
        for of_heads, length in shapes
    ]


def exact(q, k, v, lengths, window=None, **options):
    """Each row alone, in float64."""
    outs = []
    for row, length in enumerate(lengths.tolist()):
        one, *keys = (x[row : row + 1].double() for x in (q, k[:, :, :length], v[:, :, :length]))
        outs.append(naive_attention(one, *keys, window=None if window is None else (window, 0), **options))
    return torch.cat(outs)


@pytest.mark.parametrize("number", random_cases(16))
def test_random_caches(number: int) -> None:
    draw = random.Random(number)
    batch, kv_heads, q_len = draw.choice((1, 3)), draw.choice((1, 2)), draw.choice((1, 1, 1, 2, 5))
    heads, room = kv_heads * draw.choice((1, 3, 4)), draw.choice((1, 63, 64, 65, 200, 400))
    q_len = min(q_len, room)
    dtype, head_dim = draw.choice((torch.float32, torch.float16)), draw.choice((16, 40, 64, 128))
    tensors = cache_of(batch, heads, kv_heads, q_len, room, head_dim, dtype, number)
    lengths = torch.tensor([draw.randint(q_len, room) for _ in range(batch)], dtype=torch.int32)
    options = {"scale": draw.choice((None, 0.3)), "softcap": draw.choice((0.0, 0.0, 5.0))}
    if draw.random() < 0.3:
        options["window"] = draw.choice((0, 7, 100))
    if draw.random() < 0.3:
        options["sinks"] = torch.randn(2 * heads, device=DEVICE)[::2]
    out = decode_attention(*tensors, lengths.to(DEVICE), parts=draw.choice((None, 1, 2, 7)), **options)
    if "sinks" in options:
        options["sinks"] = options["sinks"].double()
    want = exact(*tensors, lengths, **options)
    bound = 1e-5 if dtype is torch.float32 else 3e-3
    torch.testing.assert_close(out.double(), want, atol=bound, rtol=bound)


def test_a_row_without_tokens_gives_zero_and_the_others_what_they_would() -> None:
    tensors = cache_of(2, 2, 2, 1, 100, 16)
    lengths = torch.tensor([0, 100], dtype=torch.int32, device=DEVICE)
    out = decode_attention(*tensors, lengths, parts=3)
    assert not out[0].any()
    torch.testing.assert_close(
        out[1:].double(), exact(*(x[1:] for x in tensors), lengths[1:]), atol=1e-5, rtol=1e-5
    )


def test_one_graph_has_it_as_one_operator() -> None:
    tensors = cache_of(2, 4, 2, 1, 100, 16)
    lengths = torch.tensor([30, 100], dtype=torch.int32, device=DEVICE)
    compiled = torch.compile(decode_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors, lengths), decode_attention(*tensors, lengths))


def test_what_it_cannot_do_is_refused_in_one_line() -> None:
    q, k, v = cache_of(2, 4, 2, 1, 30, 16)
    lengths = torch.tensor([30, 20], dtype=torch.int32, device=DEVICE)
    with pytest.raises(AttentionError, match=r"lengths must be torch\.int32, got torch\.int64"):
        decode_attention(q, k, v, lengths.long())
    with pytest.raises(AttentionError, match=r"lengths must be a tensor, got \[30, 20\]"):
        decode_attention(q, k, v, [30, 20])
    with pytest.raises(AttentionError, match=r"lengths must be \(2,\), got \(1,\)"):
        decode_attention(q, k, v, lengths[:1])
    with pytest.raises(AttentionError, match="up to 64 queries a key head, not 80; for longer prompts use"):
        decode_attention(q.expand(2, 4, 40, 16), k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1), lengths)
    with pytest.raises(AttentionError, match=r"sinks must be floating point \(4,\), one per head, got"):
        decode_attention(q, k, v, lengths, sinks=torch.zeros(2, device=DEVICE))
    with pytest.raises(AttentionError, match="softcap must be positive and finite, or 0 for none, got -1"):
        decode_attention(q, k, v, lengths, softcap=-1.0)
    with pytest.raises(AttentionError, match=r"window must be a count of keys .*, got \(3, 0\)"):
        decode_attention(q, k, v, lengths, window=(3, 0))
    with pytest.raises(AttentionError, match="has no gradient: call it under"):
        decode_attention(q.requires_grad_(), k, v, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_cuda_graph_reads_the_lengths_of_each_replay(dtype: torch.dtype) -> None:
    q, k, v = cache_of(4, 12, 12, 1, 1024, 64, dtype)
    lengths = torch.full((4,), 10, dtype=torch.int32, device="cuda")
    decode_attention(q, k, v, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(q, k, v, lengths)
    for of_rows in ([1, 500, 1024, 77], [1024, 2, 64, 65]):
        lengths.copy_(torch.tensor(of_rows))
        graph.replay()
        want = exact(q, k, v, lengths)
        torch.testing.assert_close(out.double(), want, atol=8e-3, rtol=8e-3)


def test_the_largest_tile_in_float32() -> None:
    tensors = cache_of(1, 64, 1, 1, 100, 256)
    lengths = torch.tensor([90], dtype=torch.int32, device=DEVICE)
    want = exact(*tensors, lengths)
    torch.testing.assert_close(decode_attention(*tensors, lengths).double(), want, atol=1e-5, rtol=1e-5)
