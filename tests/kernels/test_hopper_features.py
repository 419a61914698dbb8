"""Features on the Hopper kernels, wherever tier="hopper" takes them: accuracy, NaN as padding, repeats."""

import functools
import itertools

import pytest
import torch

import kernels
from tests.kernels.accuracy import assert_as_accurate, documents, inputs, run, unequal_documents
from tests.kernels.bits import assert_equal, assert_repeats, programs_of_hopper
from tests.kernels.hopper import ON_HOPPER

pytestmark = [pytest.mark.gpu, ON_HOPPER]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
LENGTHS = [(n, n) for n in (1, 63, 64, 65, 127, 128, 129, 200, 1000, 1024, 1025, 2100, 4096)]
LENGTHS += [(113, 203), (256, 512), (512, 256), (1023, 1024), (700, 30), (1, 4096)]
NAMES = [
    "kv_lengths",
    "dropout",
    "sinks",
    "kv_lengths dropout",
    "window",
    "sinks documents",
    "kv_lengths window",
    "documents window",
]
NAMES += ["softcap", "softcap window", "softcap kv_lengths", "alibi", "alibi window", "alibi kv_lengths"]
NAMES += [f"precise_delta {name}" for name in ("sinks window", "documents", "sinks", "dropout", "kv_lengths")]
WIDE_NAMES = ["window", "documents", "softcap", "softcap window", "alibi", "alibi documents"]
WIDE_NAMES += ["documents window", "kv_lengths", "sinks", "dropout", "kv_lengths window"]
MORE_WIDE_NAMES = [
    "softcap documents",
    "softcap kv_lengths",
    "alibi window",
    "precise_delta documents",
    "precise_delta kv_lengths",
    "precise_delta sinks",
    "precise_delta softcap window",
    "sinks documents",
    "sinks kv_lengths",
    "sinks window",
]
SPLIT_NAMES = ["precise_delta dropout", "alibi kv_lengths", "alibi kv_lengths precise_delta"]  # up to 192
BY_QUERY = ["kv_lengths", "own_offsets", "own_offsets kv_lengths"]
BY_QUERY += [f"{name} {others}" for name in BY_QUERY[:2] for others in ("window", "sinks precise_delta")]
DROPOUT = {"dropout_p": 0.2, "dropout_seed": 2**40 + 1}


def flash(**options: object) -> functools.partial:
    return functools.partial(kernels.get_attention("flash"), tier="hopper", **options)


def lengths(batch: int, kv_len: int) -> torch.Tensor:
    """All keys but one, none, one, around the end of a block, all; then random ones."""
    fixed = torch.tensor([kv_len - 1, 0, 1, 127, 128, 129, kv_len]).clamp(max=kv_len)
    more = torch.randint(kv_len + 1, (batch,), generator=torch.Generator().manual_seed(kv_len))
    return torch.cat([fixed, more])[:batch].to("cuda", torch.int32)


def is_refused_by_query(name: str) -> bool:
    """Full documents and windows have bounds by query, with which these do not combine."""
    return ("window" in name or "documents" in name) and ("softcap" in name or "alibi" in name)


def features(name: str, batch: int, heads: int, kv_len: int, causal: bool = True) -> dict[str, object]:
    given = {}
    if "precise_delta" in name:
        given["precise_delta"] = True
    if "documents" in name:
        given["cu_seqlens"] = documents(kv_len, batch, "cuda")
    if "kv_lengths" in name:
        given["kv_lengths"] = lengths(batch, kv_len)
    if "dropout" in name:
        given |= DROPOUT
    if "sinks" in name:
        given["sinks"] = torch.linspace(-2, 3, heads, device="cuda")
    if "softcap" in name:
        given["softcap"] = 1.5
    if "alibi" in name:
        given["alibi_slopes"] = torch.linspace(0.01, 0.5, heads, device="cuda")
    if "window" in name:
        given["window"] = (100, 0 if causal else 30)
    return given


@CAUSAL
@DTYPES
@pytest.mark.parametrize(
    ("head_dim", "name"),
    [(head_dim, name) for head_dim in (64, 96, 128) for name in NAMES]
    + [(head_dim, name) for head_dim in (136, 160, 192, 256) for name in WIDE_NAMES + MORE_WIDE_NAMES]
    + [(head_dim, name) for head_dim in (136, 160, 192) for name in SPLIT_NAMES]
    + [(152, "dropout"), (168, "dropout"), (184, "dropout")],
)  # 96, 136, 160 and 192: results in two parts
def test_exact_at_every_length(head_dim: int, name: str, dtype: torch.dtype, causal: bool) -> None:
    """Forward and backward, with grouped heads; two or three consumers, dQ's product in its step or a step late."""
    if not causal and is_refused_by_query(name):
        pytest.skip("full windows and documents with softcap or ALiBi have the portable kernels")
    for q_len, kv_len in LENGTHS:
        ragged = (kv_len - q_len) % 64
        if "dropout" in name and head_dim > 64 and ("kv" in name or ragged):
            continue  # those have the portable forward
        if "kv" in name and causal and ragged and ("window" not in name or kv_len <= 101):
            continue  # so have those; a window of 100 hides none of so few keys
        if "documents" in name and q_len != kv_len:
            continue  # those are refused
        batch = 8 if q_len <= 1025 else 2
        *tensors, d_out = inputs(
            q_len, kv_len, head_dim, dtype, batch=batch, heads=4, kv_heads=2, seed=q_len, device="cuda"
        )  # fmt: skip
        given = {"causal": causal, **features(name, batch, 4, kv_len, causal)}
        assert_as_accurate(run(flash(), tensors, d_out, **given), tensors, d_out, **given)


@DTYPES
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["", "gqa"])
@pytest.mark.parametrize(
    ("head_dim", "name", "causal"),
    [(64, "window", True), (128, "window", True), (128, "softcap window", True), (128, "alibi window", True)]
    + [(each, "window", False) for each in (64, 128, 256)],
)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_keys_that_a_window_hides_from_all_queries(
    packed: bool, head_dim: int, name: str, causal: bool, kv_heads: int, dtype: torch.dtype
) -> None:
    """Their gradients are 0, in memory that held NaN; at head_dim 128 the main kernel stores them."""
    for q_len, kv_len in [(1, 300), (64, 4096), (100, 517), (1000, 2100), (1024, 2048), (4096, 8192)]:
        sizes = {"batch": 3, "heads": 4, "kv_heads": kv_heads, "device": "cuda"}
        *tensors, d_out = inputs(q_len, kv_len, head_dim, dtype, seed=q_len, **sizes)
        if packed:  # k and v in one tensor, tokens outermost
            shape = (3, kv_len, 2, kv_heads, head_dim)
            kv = torch.stack([x.detach().transpose(1, 2) for x in tensors[1:]], 2).reshape(shape)
            tensors[1:] = (kv[:, :, each].transpose(1, 2).requires_grad_() for each in (0, 1))
        given = {"causal": causal, **features(name, 3, 4, kv_len, causal)}
        held = [torch.full((x.numel() * 2,), torch.nan, device="cuda", dtype=dtype) for x in tensors]
        del held  # the allocator hands it out again
        got = run(flash(), tensors, d_out, **given)
        assert_as_accurate(got, tensors, d_out, **given)
        unseen = max(kv_len - q_len - 100, 0)
        assert not any(got[each][:, :, :unseen].any() for each in ("dk", "dv"))


@CAUSAL
@DTYPES
@pytest.mark.parametrize(
    ("head_dim", "name"),
    [(head_dim, name) for head_dim in (64, 128, 256) for name in BY_QUERY]
    + [(head_dim, name) for head_dim in (32, 96, 136, 160, 192) for name in BY_QUERY[:3]],
)
def test_documents_by_query_are_exact_at_every_length(
    head_dim: int, name: str, dtype: torch.dtype, causal: bool
) -> None:
    """Documents whose keys have offsets of their own, or with key padding."""
    for q_len, kv_len in LENGTHS:
        if "own_offsets" not in name and q_len != kv_len:
            continue
        batch = 8 if q_len <= 1025 else 2
        *tensors, d_out = inputs(
            q_len, kv_len, head_dim, dtype, batch=batch, heads=4, kv_heads=2, seed=q_len, device="cuda"
        )  # fmt: skip
        given = {"causal": causal, **by_query(name, batch, 4, q_len, kv_len, causal)}
        assert_as_accurate(run(flash(), tensors, d_out, **given), tensors, d_out, **given)


def by_query(
    name: str, batch: int, heads: int, q_len: int, kv_len: int, causal: bool = True
) -> dict[str, object]:
    if "own_offsets" in name:
        offsets = unequal_documents(q_len, kv_len, batch, "cuda")
    else:
        offsets = {"cu_seqlens": documents(q_len, batch, "cuda")}
    return features(name, batch, heads, kv_len, causal) | offsets


def test_offsets_that_do_not_ascend_end() -> None:
    """And give numbers: which keys such a query sees is nobody's business, but not those of other memory."""
    draw = torch.Generator().manual_seed(0)
    for head_dim, number in itertools.product((64, 128, 160, 256), range(20)):
        *tensors, d_out = inputs(
            1000, 700, head_dim, torch.bfloat16, batch=3, heads=4, kv_heads=4, device="cuda"
        )
        most = 2**31 - 1 if number % 4 == 3 else 3100
        offsets = [torch.randint(-50, most, (2 + number,), generator=draw).cuda().int() for _ in range(2)]
        given = dict(zip(("cu_seqlens", "cu_seqlens_k"), offsets, strict=True))
        if number % 2:
            given["kv_lengths"] = lengths(3, 700)
        got = run(flash(), tensors, d_out, causal=number % 3 > 0, **given)
        assert not any(each.isnan().any() for each in got.values())
        assert all(got[each].isfinite().all() for each in ("out", "dq", "dk", "dv"))


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128, 136, 160, 192, 256])
@pytest.mark.parametrize("length", [1000, 4100])
@pytest.mark.parametrize("name", ["", *BY_QUERY[:3:2]], ids=["alone", "documents", "own_offsets"])
def test_padding_may_hold_anything(name: str, length: int, head_dim: int, causal: bool) -> None:
    *tensors, d_out = inputs(
        length, length, head_dim, torch.bfloat16, batch=8, heads=4, kv_heads=4, device="cuda"
    )  # fmt: skip
    given = {"causal": causal, "kv_lengths": lengths(8, length)}
    if name:
        given |= by_query(name, 8, 4, length, length)
    clean = run(flash(), tensors, d_out, **given)
    with torch.no_grad():
        for x in tensors[1:]:
            for batch, end in enumerate(given["kv_lengths"]):
                x[batch, :, end:] = torch.nan
    poisoned = run(flash(), tensors, d_out, **given)
    assert all(torch.equal(poisoned[name], clean[name]) for name in clean)


@CAUSAL
@pytest.mark.parametrize(
    ("head_dim", "name"),
    [(each, name) for each in (64, 128) for name in ("kv_lengths", "dropout", "sinks", "softcap", "alibi")]
    + [(each, name) for each in (64, 128) for name in ("documents", "window", "kv_lengths window")]
    + [(256, name) for name in WIDE_NAMES]
    + [(136, "dropout"), (160, "precise_delta dropout"), (160, "alibi kv_lengths")]
    + [(96, "kv_lengths"), (96, "dropout"), (192, "kv_lengths"), (192, "dropout"), (192, "documents")],
)
@pytest.mark.parametrize("length", [1000, 2100])
def test_250_repeats_agree_bit_for_bit(length: int, head_dim: int, name: str, causal: bool) -> None:
    if not causal and is_refused_by_query(name):
        pytest.skip("full windows and documents with softcap or ALiBi have the portable kernels")
    if "dropout" in name and causal:
        length = length // 64 * 64
    *tensors, d_out = inputs(
        length, length, head_dim, torch.bfloat16, batch=16, heads=12, kv_heads=12, device="cuda"
    )  # fmt: skip
    given = {"causal": causal, **features(name, 16, 12, length, causal)}
    assert_repeats(run, flash(), tensors, d_out, **given)


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
@pytest.mark.parametrize("name", BY_QUERY[:3])
@pytest.mark.parametrize("length", [1000, 2100])
def test_250_repeats_by_query_agree_bit_for_bit(length: int, name: str, head_dim: int, causal: bool) -> None:
    kv_len = length + 300 if "own_offsets" in name else length
    *tensors, d_out = inputs(
        length, kv_len, head_dim, torch.bfloat16, batch=16, heads=12, kv_heads=12, device="cuda"
    )
    given = {"causal": causal, **by_query(name, 16, 12, length, kv_len)}
    assert_repeats(run, flash(), tensors, d_out, **given)


@pytest.mark.parametrize("programs", [1, 7])
@pytest.mark.parametrize(
    ("head_dim", "name"),
    [(each, name) for each in (64, 128) for name in ("kv_lengths", "dropout")]
    + [(256, name) for name in ("softcap window", "alibi documents", "kv_lengths")]
    + [(each, name) for name in ("own_offsets kv_lengths", "documents") for each in (64, 128, 256)],
)
def test_any_number_of_programs_gives_the_same(head_dim: int, name: str, programs: int) -> None:
    *tensors, d_out = inputs(
        1024, 1024, head_dim, torch.bfloat16, batch=8, heads=6, kv_heads=3, device="cuda"
    )
    given = by_query(name, 8, 6, 1024, 1024) if name in BY_QUERY[1:] else features(name, 8, 6, 1024)
    first = run(flash(), tensors, d_out, **given)
    with programs_of_hopper(programs):
        assert_equal(run(flash(), tensors, d_out, **given), first)
