"""The oracle itself, against sums written out query by query, and its dropout. About 2 s."""

import math

import numpy as np
import pytest
import torch

from kernels import AttentionError
from kernels.naive import naive_attention
from kernels.philox import drop_share, dropout_mask

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8


def make(q_len: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(q_len * 1000 + kv_len)
    shapes = (HEADS, q_len), (KV_HEADS, kv_len), (KV_HEADS, kv_len)
    return tuple(
        torch.randn(BATCH, *shape, HEAD_DIM, generator=generator, dtype=torch.float64) for shape in shapes
    )


def by_hand(q, k, v, sees, logit=lambda x, head, distance: x, sink=None):
    """out and lse one query at a time: `sees(batch, head, row, key, distance)`, distance = key - query position."""
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=q.dtype)
    offset = k.shape[2] - q.shape[2]
    for b in range(BATCH):
        for h in range(HEADS):
            for i in range(q.shape[2]):
                keys = [j for j in range(k.shape[2]) if sees(b, h, i, j, j - i - offset)]
                x = [
                    logit(q[b, h, i] @ k[b, h // 2, j] / math.sqrt(HEAD_DIM), h, j - i - offset) for j in keys
                ]
                weights = torch.tensor(x + ([] if sink is None else [sink[h]]), dtype=q.dtype).exp()
                if len(weights):
                    lse[b, h, i] = weights.sum().log()
                for j, weight in zip(keys, weights, strict=False):
                    out[b, h, i] += weight / weights.sum() * v[b, h // 2, j]
    return out, lse


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (3, 7), (7, 3), (1, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_masks_are_aligned_bottom_right(causal: bool, q_len: int, kv_len: int) -> None:
    q, k, v = make(q_len, kv_len)
    want = by_hand(q, k, v, lambda b, h, i, j, distance: not causal or distance <= 0)
    torch.testing.assert_close(naive_attention(q, k, v, causal=causal, return_lse=True), want)


FEATURES = {
    "window": (
        {"window": (2, 1), "causal": False},
        {"sees": lambda b, h, i, j, distance: -2 <= distance <= 1},
    ),
    "causal window": ({"window": (2, 5)}, {"sees": lambda b, h, i, j, distance: -2 <= distance <= 0}),
    "softcap": ({"softcap": 0.5}, {"logit": lambda x, h, distance: 0.5 * math.tanh(x / 0.5)}),
    "alibi": (
        {"alibi_slopes": torch.tensor([0.5, 0.25, 1.0, 0.0]), "causal": False},
        {
            "sees": lambda b, h, i, j, distance: True,
            "logit": lambda x, h, distance: x - [0.5, 0.25, 1.0, 0.0][h] * abs(distance),
        },
    ),
    "sinks": ({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"sink": [0.5, -1.0, 2.0, 0.0]}),
    "kv_lengths": (
        {"kv_lengths": torch.tensor([4, 0], dtype=torch.int32), "causal": False},
        {"sees": lambda b, h, i, j, distance: j < (4, 0)[b]},
    ),
    "cu_seqlens": (
        {"cu_seqlens": torch.tensor([0, 2, 2, 8, 9, 12], dtype=torch.int32)},
        {"sees": lambda b, h, i, j, distance: distance <= 0 and DOCUMENT[b * 6 + i] == DOCUMENT[b * 6 + j]},
    ),
    "cu_seqlens with kv_lengths": (
        {
            "cu_seqlens": torch.tensor([0, 2, 2, 8, 9, 12], dtype=torch.int32),
            "kv_lengths": torch.tensor([4, 2], dtype=torch.int32),
            "causal": False,
        },
        {"sees": lambda b, h, i, j, distance: DOCUMENT[b * 6 + i] == DOCUMENT[b * 6 + j] and j < (4, 2)[b]},
    ),
}
DOCUMENT = [0, 0, 2, 2, 2, 2, 6, 6, 8, 9, 9, 9]  # 2..7 is one document, cut in two by the end of its row


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_matches_sums_written_out_by_hand(name: str) -> None:
    options, rules = FEATURES[name]
    q, k, v = make(6, 6)
    want = by_hand(q, k, v, **{"sees": lambda b, h, i, j, distance: distance <= 0, **rules})
    torch.testing.assert_close(naive_attention(q, k, v, return_lse=True, **options), want)


def test_documents_whose_keys_have_offsets_of_their_own_are_each_an_attention() -> None:
    q, k, v = make(6, 8)
    of_queries, of_keys = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 2, 8, 12], [0, 3, 5, 9, 16]))
    slopes = torch.tensor([0.5, 0.25, 1.0, 0.0])
    # (row, queries, keys) of each document, the third in two parts; the second has keys alone.
    parts = [(0, (0, 2), (0, 3)), (0, (2, 6), (5, 8)), (1, (0, 2), (0, 1)), (1, (2, 6), (1, 8))]
    for options in ({}, {"causal": False}, {"window": (1, 0)}, {"causal": False, "window": (1, 1)}):
        options |= {"alibi_slopes": slopes}
        out, lse = naive_attention(
            q, k, v, cu_seqlens=of_queries, cu_seqlens_k=of_keys, return_lse=True, **options
        )
        for row, queries, keys in parts:
            bounds = (slice(*queries), slice(*keys), slice(*keys))
            one = (x[row : row + 1, :, each] for x, each in zip((q, k, v), bounds, strict=True))
            want = naive_attention(*one, return_lse=True, **options)
            torch.testing.assert_close(
                (out[row, :, bounds[0]], lse[row, :, bounds[0]]), tuple(x[0] for x in want)
            )


def test_block_mask_hides_whole_tiles() -> None:
    q, k, v = (x[:, :, :130] for x in make(130, 130))
    mask = torch.tensor([[[[True, True], [False, True]]]])
    out = naive_attention(q, k, v, block_mask=mask)
    whole = naive_attention(q, k, v)
    torch.testing.assert_close(out[:, :, :128], whole[:, :, :128])
    tail = naive_attention(q[:, :, 128:], k[:, :, 128:], v[:, :, 128:])
    torch.testing.assert_close(out[:, :, 128:], tail)
    with pytest.raises(AttentionError, match=r"block_mask must be \(batch or 1, heads or 1, 2, 2\)"):
        naive_attention(q, k, v, block_mask=mask[..., :1])


def test_queries_that_see_nothing_have_zero_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in make(7, 3))
    out, lse = naive_attention(q, k, v, return_lse=True)
    (out.sum() + lse[:, :, 4:].sum()).backward()
    assert (out[:, :, :4] == 0).all()
    assert (lse[:, :, :4] == -math.inf).all()
    assert (q.grad[:, :, :4] == 0).all()
    assert not any(x.grad.isnan().any() for x in (q, k, v))


@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"kv_lengths": torch.tensor([2, 0], dtype=torch.int32)}]
)
def test_a_sink_of_minus_infinity_is_no_sink(options: dict[str, object]) -> None:
    """Also for queries that see nothing."""
    q, k, v = (x.requires_grad_() for x in make(7, 3))
    sinks = torch.tensor([0.5, -math.inf, -math.inf, 0.0], dtype=torch.float64, requires_grad=True)
    d_out = torch.randn(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, without = (
        naive_attention(q, k, v, sinks=each, return_lse=True, **options) for each in (sinks, None)
    )
    torch.testing.assert_close([x[:, 1:3] for x in found], [x[:, 1:3] for x in without])
    *gradients, d_sinks = torch.autograd.grad((found[0] * d_out).sum(), (q, k, v, sinks))
    assert not any(x.isnan().any() for x in (*gradients, *found))
    assert torch.equal(d_sinks[1:3], torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("value_dim", [3, 16])
def test_v_may_have_a_head_dim_of_its_own(value_dim: int) -> None:
    """Each of its columns is weighted alike."""
    q, k, _ = make(7, 9)
    v = torch.randn(*k.shape[:-1], value_dim, dtype=k.dtype, generator=torch.Generator().manual_seed(1))
    out = naive_attention(q, k, v, window=(4, 0), dropout_p=0.2, dropout_seed=3)
    assert out.shape == (*q.shape[:-1], value_dim)
    for column in range(value_dim):
        each = v[..., column : column + 1].expand_as(k)
        alone = naive_attention(q, k, each, window=(4, 0), dropout_p=0.2, dropout_seed=3)
        torch.testing.assert_close(out[..., column], alone[..., 0])


def test_logits_that_overflow_float16_before_they_are_scaled_are_right() -> None:
    q, k = torch.full((1, 1, 4, 64), 40.0), torch.full((1, 1, 4, 64), 30.0)
    k[:, :, 1] = 20.0
    v = torch.randn(1, 1, 4, 64, generator=torch.Generator().manual_seed(0))
    found = naive_attention(*(x.half() for x in (q, k, v)))
    torch.testing.assert_close(found.float(), naive_attention(q, k, v), atol=2e-3, rtol=2e-3)


def test_dropout_follows_the_mask_and_leaves_torchs_generator_unchanged() -> None:
    q, k, v = make(40, 40)
    v = torch.eye(40, dtype=torch.float64).expand(BATCH, KV_HEADS, 40, 40)  # out is then the probabilities
    q, k = q[..., :1].expand(-1, -1, -1, 40), k[..., :1].expand(-1, -1, -1, 40)
    before = torch.random.get_rng_state()
    dropped = naive_attention(q, k, v, dropout_p=0.3, dropout_seed=torch.tensor(7))
    assert torch.equal(before, torch.random.get_rng_state())
    whole = naive_attention(q, k, v)
    keep = dropout_mask(7, 0.3, BATCH, HEADS, 40, 40)
    torch.testing.assert_close(dropped, whole * keep / (1 - drop_share(0.3)))


def test_dropout_needs_a_valid_seed_and_a_probability_below_one() -> None:
    q, k, v = make(4, 4)
    with pytest.raises(AttentionError, match="needs dropout_seed"):
        naive_attention(q, k, v, dropout_p=0.1)
    with pytest.raises(AttentionError, match="at least 0 and below 1, got 1"):
        naive_attention(q, k, v, dropout_p=1.0, dropout_seed=0)
    for seed in (1.5, "1", [1]):
        with pytest.raises(AttentionError, match="dropout_seed must be an int or a 0-d int64 tensor, got"):
            naive_attention(q, k, v, dropout_p=0.1, dropout_seed=seed)
    for seed in (-(2**63), 2**63 - 1):
        assert naive_attention(q, k, v, dropout_p=0.1, dropout_seed=seed).shape == q.shape
    for seed in (-(2**63) - 1, 2**63, np.uint64(2**63)):
        with pytest.raises(AttentionError, match=rf"dropout_seed must fit int64, .*, got {seed}$"):
            naive_attention(q, k, v, dropout_p=0.1, dropout_seed=seed)


def test_offsets_that_a_transform_hides_are_not_read() -> None:
    q, offsets = torch.randn(1, 2, 6, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    attend = lambda offsets: naive_attention(q, q, q, cu_seqlens=offsets)  # noqa: E731
    want = attend(offsets)
    torch.testing.assert_close(torch.vmap(attend)(torch.stack([offsets, offsets]))[1], want)
    torch.testing.assert_close(torch.func.functionalize(attend)(offsets), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 3, 5, 8)}, "must share a shape"),
        (
            {"k": torch.zeros(2, 3, 5, 8), "v": torch.zeros(2, 3, 5, 8)},
            "kv_heads must divide heads, got 3 kv_heads",
        ),
        ({"k": torch.zeros(2, 2, 5, 9), "v": torch.zeros(2, 2, 5, 9)}, "must share batch and head_dim"),
        ({"k": torch.zeros(2, 2, 5, 9)}, "must share batch and head_dim"),  # what no attention takes
        ({"q": torch.zeros(2, 4, 8)}, "q must be"),
        ({"q": np.zeros((2, 4, 5, 8))}, "q, k and v must be tensors, got ndarray"),
        ({"q": torch.zeros(2, 4, 5, 8, dtype=torch.int64)}, "q must be floating point, got torch.int64"),
        ({"v": torch.zeros(2, 2, 5, 8, dtype=torch.float64)}, "must share a dtype"),
        ({"window": (-2, 0)}, "window must be"),
        ({"window": 3}, r"window must be \(left, right\).*got 3"),
        ({"scale": -1.0}, "scale must be positive"),
        (dict.fromkeys("qkv", torch.zeros(2, 2, 5, 0)), "q has head_dim 0"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"sinks": torch.zeros(3)}, r"sinks must be floating point \(4,\)"),
        ({"kv_lengths": torch.zeros(2)}, "kv_lengths must be torch.int32"),
        ({"kv_lengths": torch.zeros(3, dtype=torch.int32)}, r"kv_lengths must be \(2,\)"),
        (
            {"cu_seqlens": torch.zeros(3, dtype=torch.int32), "q": torch.zeros(2, 4, 4, 8)},
            "needs q_len == kv_len, or cu_seqlens_k, got 4 and 5",
        ),
        ({"cu_seqlens_k": torch.zeros(3, dtype=torch.int32)}, "cu_seqlens_k, .*, needs cu_seqlens, those of"),
        (
            {"cu_seqlens": torch.zeros(3, dtype=torch.int32), "cu_seqlens_k": torch.zeros(3)},
            "cu_seqlens_k must be torch.int32",
        ),
        (
            {
                "cu_seqlens": torch.zeros(3, dtype=torch.int32),
                "cu_seqlens_k": torch.zeros(4, dtype=torch.int32),
            },
            r"must have as many documents, got \(4,\) and \(3,\)",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 6, 4], dtype=torch.int32)},
            r"cu_seqlens must ascend: offsets, not lengths; got \[0, 6, 4\]",
        ),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments = {"q": torch.zeros(2, 4, 5, 8), "k": torch.zeros(2, 2, 5, 8), "v": torch.zeros(2, 2, 5, 8)}
    with pytest.raises(AttentionError, match=message):
        naive_attention(**arguments | change)


@pytest.mark.gpu
def test_dropout_compiled_by_inductor_equals_eager_dropout() -> None:
    """PyTorch 2.11 does not compile the mask's 64-bit products."""
    q, k, v = torch.randn(3, 2, 3, 100, 64, device="cuda")
    options = {"dropout_p": 0.3, "dropout_seed": torch.tensor(5, device="cuda")}
    compiled = torch.compile(naive_attention, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, **options), naive_attention(q, k, v, **options))
