"""The algorithms that led to flash, and what it shares with them, against float64 in Triton's interpreter. About 8 s.

On a GPU the interpreter's tests are skipped, and those of softmax run there.
"""

from collections.abc import Sequence

import pytest
import torch

import kernels
from kernels import AttentionError
from kernels.features import FEATURES
from kernels.flash.portable.tiles import Tile
from kernels.history import flash1, flash2, softmax, stored_p, two_pass
from kernels.history.one_pass import KEYS, one_pass
from kernels.philox import dropout_mask
from tests.conftest import INTERPRETED
from tests.kernels.accuracy import assert_as_accurate, golden, inputs
from tests.kernels.bits import assert_equal, assert_repeats

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("name", ["flash1", "two_pass"])
AND_FLASH = pytest.mark.parametrize("name", ["flash1", "two_pass", "flash"])
OPERATORS = {
    "flash1": (flash1.flash1_forward, flash1.flash1_backward),
    "two_pass": (two_pass.two_pass_forward, two_pass.two_pass_backward),
}
LENGTHS = [(1, 1), (63, 63), (65, 65), (1, 128), (128, 63), (97, 1)]
LONG = [(200, 200), (200, 130)]  # many tiles of queries by many of keys: half a second each
# A value that means "used", for those features whose value is not a tensor.
USED = {"dropout_p": 0.1, "window": (8, 0), "softcap": 5.0, "return_lse": True, "precise_delta": True}
SOFTMAX = [softmax.safe_softmax, softmax.online_softmax]
HALF_AND_SINGLE = pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])


def run(
    name: str, tensors: Sequence[torch.Tensor], d_out: torch.Tensor, **options: object
) -> dict[str, torch.Tensor]:
    """out, dq, dk, dv of an attention, from memory that is NaN where nothing has been written."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty fills what it gives
    try:
        out = kernels.get_attention(name)(*tensors, **options)
        gradients = torch.autograd.grad(out, tensors, d_out)
    finally:
        torch.use_deterministic_algorithms(False)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def assert_exact(
    name: str, lengths: list[tuple[int, int]], head_dim: int, dtype: torch.dtype, causal: bool
) -> None:
    for q_len, kv_len in lengths:
        *tensors, d_out = inputs(q_len, kv_len, head_dim, dtype, seed=q_len)
        assert_as_accurate(run(name, tensors, d_out, causal=causal), tensors, d_out, causal=causal)


# ---- attention ---------------------------------------------------------------------------------------


@pytest.mark.one_in(5)
@INTERPRETED
@BOTH
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(16, torch.float32), (80, torch.float16), (80, torch.float32), (128, torch.float16)],
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_exact_at_every_length(name: str, causal: bool, head_dim: int, dtype: torch.dtype) -> None:
    assert_exact(name, LENGTHS, head_dim, dtype, causal)


@pytest.mark.one_in(5)
@INTERPRETED
@BOTH
@pytest.mark.parametrize(
    ("head_dim", "dtype", "causal"),
    [(16, torch.float32, True), (80, torch.float16, True), (128, torch.float16, False)],
)
def test_exact_over_many_tiles(name: str, head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    assert_exact(name, LONG, head_dim, dtype, causal)


@INTERPRETED
@AND_FLASH
def test_fully_masked_queries_have_zero_output_and_gradient(name: str) -> None:
    *tensors, d_out = inputs(150, 40, 16, torch.float32)
    got = run(name, tensors, d_out)
    assert (got["out"][:, :, :110] == 0).all()
    assert (got["dq"][:, :, :110] == 0).all()
    assert_as_accurate(got, tensors, d_out)


@INTERPRETED
@BOTH
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(1, 0, 5), (1, 5, 0), (1, 0, 0), (0, 5, 5)])
def test_lengths_of_zero(name: str, batch: int, q_len: int, kv_len: int, causal: bool) -> None:
    *tensors, d_out = inputs(q_len, kv_len, 16, torch.float32, batch=batch)
    got = run(name, tensors, d_out, causal=causal)
    for x, like in zip(got.values(), (tensors[0], *tensors), strict=True):
        assert x.shape == like.shape
        assert (x == 0).all()


@pytest.mark.one_in(3)
@INTERPRETED
@BOTH
@HALF_AND_SINGLE
def test_extreme_scores_stay_accurate_and_finite(name: str, dtype: torch.dtype) -> None:
    """Logits of tens of thousands, one huge outlier, all equal, all strongly negative: right, and never NaN.

    The bounds are those of flash: a probability is recomputed from float32 statistics, and its relative error grows
    as they do. Where one key has all of the probability dS is 0 but for that error, and dq is dS times an outlier.
    """
    *tensors, d_out = inputs(70, 70, 16, dtype)
    q, k, v = (x.detach() for x in tensors)
    outlier = k.clone()
    outlier[:, :, 3] = 6000.0
    for case in ((q * 50, k * 50, v), (q, outlier, v), (q * 0, k, v), (q * 0 + 500, k * 0 - 20, v)):
        leaves = [x.detach().requires_grad_() for x in case]
        got, want = run(name, leaves, d_out), golden(leaves, d_out)
        eps = 4 * torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps * want["lse"].abs().max().item()
        for each, x in got.items():
            error, size = (x.double() - want[each]).norm(), want[each].norm() + case[1].abs().max()
            if each == "dq" and case[1] is outlier:
                size += 16**-0.5 * 6000 * d_out.double().norm()
            assert error <= eps * size, f"{each}: {error:.1e} of {size:.1e}"


@INTERPRETED
@AND_FLASH
@HALF_AND_SINGLE
def test_scale_and_grouped_heads(name: str, dtype: torch.dtype) -> None:
    *tensors, d_out = inputs(30, 40, 32, dtype, heads=4, kv_heads=2)
    assert_as_accurate(run(name, tensors, d_out, scale=0.05), tensors, d_out, scale=0.05)


@INTERPRETED
@AND_FLASH
def test_views_of_a_packed_qkv_and_a_gradient_that_is_not_contiguous(name: str) -> None:
    qkv = torch.randn(2, 70, 3, 2, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tensors = [qkv[:, :, each].transpose(1, 2) for each in range(3)]
    d_out = torch.randn(2, 70, 32, 2, generator=torch.Generator().manual_seed(1)).permute(0, 3, 1, 2)
    got = run(name, tensors, d_out)
    assert_as_accurate(got, tensors, d_out)
    # Heads lie inside tokens, so that the model merges them without a copy.
    assert got["out"].transpose(1, 2).is_contiguous()


@INTERPRETED
@AND_FLASH
def test_an_expanded_output_gradient_gives_the_same_results(name: str) -> None:
    *tensors, d_out = inputs(70, 70, 16, torch.float32, heads=2, kv_heads=2)
    expanded = d_out[:, :1, :1].expand_as(d_out)
    assert_equal(run(name, tensors, expanded), run(name, tensors, expanded.contiguous()))


@INTERPRETED
@BOTH
def test_q_k_and_v_may_have_different_memory_layouts(name: str) -> None:
    *tensors, d_out = inputs(40, 70, 16, torch.float32, batch=2, heads=2, kv_heads=2)
    want = run(name, tensors, d_out)
    # Memory of q: heads inside tokens; of k: tokens outside all; of v: head_dim not last.
    orders = [(0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)]
    laid = []
    for x, order in zip(tensors, orders, strict=True):
        back = [order.index(axis) for axis in range(4)]
        laid.append(x.detach().permute(order).contiguous().permute(back).requires_grad_())
    assert len({x.stride() for x in laid}) == 3
    assert_equal(run(name, laid, d_out), want)


@INTERPRETED
@AND_FLASH
def test_repeats_agree_bit_for_bit(name: str) -> None:
    *tensors, d_out = inputs(80, 130, 16, torch.float16)
    assert_repeats(run, name, tensors, d_out, times=1)


@INTERPRETED
def test_flash1_is_exact_with_tiles_that_are_not_square() -> None:
    *tensors, d_out = inputs(100, 150, 16, torch.float32)
    q, k, v = (x.detach() for x in tensors)
    for tile in (Tile(16, 64, 4, 1), Tile(64, 16, 4, 1)):
        out, row_max, row_sum = flash1.forward_with(tile, q, k, v, True, 0.25)
        assert_as_accurate(
            {"out": out, "lse": (row_max + row_sum.log2()) / 1.4426950408889634}, tensors, d_out
        )


@INTERPRETED
@BOTH
def test_results_are_exact_with_tiles_that_are_not_square(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a GPU's backward; the tiles used in the interpreter are square."""
    *tensors, d_out = inputs(100, 150, 16, torch.float32)
    for tile in (Tile(64, 32, 4, 1), Tile(16, 64, 4, 1)):
        monkeypatch.setattr("kernels.history.inputs.INTERPRETER", tile)
        assert_as_accurate(run(name, tensors, d_out), tensors, d_out)


@INTERPRETED
def test_two_pass_gives_the_same_with_any_number_of_programs() -> None:
    q, k, v, _ = (x.detach() for x in inputs(200, 200, 16, torch.float32, heads=2, kv_heads=2))
    want = two_pass.forward_in(None, q, k, v, True, 0.25)
    for programs in (1, 3):
        assert all(map(torch.equal, two_pass.forward_in(programs, q, k, v, True, 0.25), want))


WAYS = [
    *(flash2.PRINTED, flash2.Way(lse=False), flash2.Way(once=False)),
    *(flash2.SPLIT_QUERIES, *flash2.SPLIT_KEYS, flash2.Way(lse=False, split_keys=True)),
]


@pytest.mark.one_in(3)
@INTERPRETED
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_flash2_is_exact_with_and_without_each_of_its_changes(way: flash2.Way) -> None:
    shapes = [(97, 130, 16, True), (200, 130, 64, True), (65, 65, 32, False), (1, 128, 48, True)]
    for dtype, (q_len, kv_len, head_dim, causal) in zip(
        (torch.float32, torch.float16) * 2, shapes, strict=True
    ):
        *tensors, d_out = inputs(q_len, kv_len, head_dim, dtype, heads=4, kv_heads=2)
        out = flash2.flash2_attention(*tensors, causal=causal, way=way)
        gradients = torch.autograd.grad(out, tensors, d_out)
        got = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
        assert_as_accurate(got, tensors, d_out, causal=causal)


@INTERPRETED
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_flash2_takes_lengths_of_zero(q_len: int, kv_len: int) -> None:
    *tensors, d_out = inputs(q_len, kv_len, 16, torch.float32)
    out = flash2.flash2_attention(*tensors)
    assert not any(x.any() for x in (out, *torch.autograd.grad(out, tensors, d_out)))


@INTERPRETED
@pytest.mark.parametrize(("kernel", "head_dim"), flash1.CANDIDATES)
def test_flash1s_candidates_are_exact(kernel: str, head_dim: int) -> None:
    *tensors, d_out = inputs(150, 200, head_dim, torch.float16)
    for tile in flash1.CANDIDATES[kernel, head_dim]:
        with flash1.forced(**{kernel: tile}):
            assert_as_accurate(run("flash1", tensors, d_out), tensors, d_out)


@INTERPRETED
@AND_FLASH
def test_torch_compile_gives_equal_results_without_graph_breaks(name: str) -> None:
    *tensors, d_out = inputs(40, 40, 16, torch.float32)
    compiled = torch.compile(kernels.get_attention(name), backend="aot_eager", fullgraph=True)
    out = compiled(*tensors)
    got = dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, tensors, d_out)), strict=True))
    assert_equal(got, run(name, tensors, d_out))


@INTERPRETED
@BOTH
def test_the_operators_pass_torchs_own_checks(name: str) -> None:
    q, k, v, d_out = inputs(20, 33, 16, torch.float32, heads=2, kv_heads=2)
    forward, backward = OPERATORS[name]
    heads_in_tokens = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.library.opcheck(forward, (heads_in_tokens, k, v, True, 0.25))
    q, k, v = (x.detach() for x in (q, k, v))
    out, *statistics = forward(q, k, v, True, 0.25)
    saved = (out, *statistics) if name == "flash1" else statistics
    torch.library.opcheck(backward, (d_out, *saved, q, k, v, True, 0.25))


@INTERPRETED
@AND_FLASH
def test_a_second_derivative_is_refused(name: str) -> None:
    q, k, v, d_out = inputs(8, 8, 16, torch.float32)
    (dq,) = torch.autograd.grad(kernels.get_attention(name)(q, k, v), q, d_out, create_graph=True)
    with pytest.raises(
        AttentionError, match=f"attention={name} has no second derivative; use attention=naive"
    ):
        dq.sum().backward()


@INTERPRETED
@BOTH
def test_forward_mode_gradients_are_refused_and_not_lost(name: str) -> None:
    q, k, v, d_out = (x.detach() for x in inputs(8, 8, 16, torch.float32))
    attention = kernels.get_attention(name)
    with pytest.raises(AttentionError, match=f"attention={name} has no forward-mode derivative"):
        torch.func.jvp(lambda v: attention(q, k, v), (v,), (d_out,))


@INTERPRETED
@pytest.mark.parametrize("name", ["flash1", "two_pass", "chunked"])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_refused_by_name(name: str, feature: str) -> None:
    options = {feature: USED.get(feature, torch.ones(1))}
    with pytest.raises(
        AttentionError, match=f"attention={name} cannot be used here: it does not support {feature}(;| [(])"
    ):
        kernels.resolve_attention(name, device="cpu", dtype=torch.float32, head_dim=16, **options)
    q, k, v, _ = inputs(8, 8, 16, torch.float32)
    with pytest.raises(
        AttentionError, match=f"attention={name} does not support {feature}; attention=naive does"
    ):
        kernels.get_attention(name)(q, k, v, dropout_seed=7, **options)
    off = {feature: FEATURES[feature].unused}
    assert kernels.get_attention(name)(q, k, v, dropout_seed=7, **off).shape == q.shape


@INTERPRETED
@AND_FLASH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.bfloat16}, "interpreter multiplies bfloat16 wrongly"),
        ({"dtype": torch.float64}, "it takes float16, bfloat16 and float32, not torch.float64"),
        ({"head_dim": 8}, "it takes head_dim 16 to 256, not 8"),
        ({"head_dim": 257}, "it takes head_dim 16 to 256, not 257"),
    ],
)
def test_an_unsupported_dtype_or_head_dim_is_refused(
    name: str, change: dict[str, object], message: str
) -> None:
    shape = {"head_dim": 16, "dtype": torch.float32} | change
    with pytest.raises(AttentionError, match=f"attention={name} cannot be used here: .*{message}"):
        kernels.resolve_attention(name, device="cpu", **shape)
    q, k, v, _ = inputs(8, 8, **shape)
    with pytest.raises(AttentionError, match=f"attention={name}: .*{message}"):
        kernels.get_attention(name)(q, k, v)


@BOTH
def test_a_cpu_without_the_interpreter_is_refused_in_a_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(AttentionError) as refused:
        kernels.resolve_attention(name, device="cpu", dtype=torch.float32, head_dim=64)
    said = str(refused.value)
    assert said.startswith(
        f"attention={name} cannot be used here: it needs a CUDA device, not cpu "
        "(TRITON_INTERPRET=1, set before triton is imported, interprets it, slowly)"
    )
    assert said.endswith("; use attention=sdpa")
    assert "\n" not in said


@INTERPRETED
@AND_FLASH
def test_overlapping_views_are_exact_and_a_batch_over_the_grid_refused(name: str) -> None:
    base = torch.randn(1, 1, 80, generator=torch.Generator().manual_seed(0))
    tensors = [base.unfold(2, 16, 1)[:, :, :40].requires_grad_() for _ in range(3)]
    d_out = torch.randn(1, 1, 40, 16, generator=torch.Generator().manual_seed(1))
    assert_as_accurate(run(name, tensors, d_out), tensors, d_out)
    q = torch.zeros(65536, 1, 1, 16)
    with pytest.raises(AttentionError, match=r"batch and heads up to 65535, got \(65536, 1\)"):
        kernels.get_attention(name)(q, q, q)


# ---- stored probabilities -----------------------------------------------------------------------------


def run_stored(
    tensors: Sequence[torch.Tensor], d_out: torch.Tensor, **options: object
) -> dict[str, torch.Tensor]:
    """`run` of stored_p."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        out = stored_p.stored_p_attention(*tensors, **options)
        gradients = torch.autograd.grad(out, tensors, d_out)
    finally:
        torch.use_deterministic_algorithms(False)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def rules_of(kv_len: int, padded: bool, dropped: bool, device: str = "cpu") -> dict[str, object]:
    """Arguments for two sequences, of which the second is padded."""
    options: dict[str, object] = {}
    if padded:
        options["kv_lengths"] = torch.tensor([kv_len, 3 * kv_len // 4], dtype=torch.int32, device=device)
    return options | ({"dropout_p": 0.1, "dropout_seed": 7} if dropped else {})


@pytest.mark.one_in(3)
@INTERPRETED
@HALF_AND_SINGLE
@pytest.mark.parametrize("rules", [(False, False), (True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize(
    ("q_len", "kv_len"),
    [(1, 1), (100, 128), (130, 200), (9, 512)],
)
def test_stored_probabilities_are_exact(
    q_len: int, kv_len: int, rules: tuple[bool, bool], dtype: torch.dtype
) -> None:
    """In one tile of keys and in several, with fewer and more queries than a tile has."""
    *tensors, d_out = inputs(q_len, kv_len, 64, dtype, batch=2)
    options = rules_of(kv_len, *rules)
    got = run_stored(tensors, d_out, **options)
    assert_as_accurate(got, tensors, d_out, causal=False, **options)


@INTERPRETED
def test_what_is_stored_is_the_softmax_and_its_sign_what_dropout_drops() -> None:
    """As in every other attention here, whose mask is that of `dropout_mask`."""
    q, k, v, _ = (x.detach() for x in inputs(40, 150, 64, torch.float32, batch=2, heads=2, kv_heads=2))
    options = rules_of(150, True, True)
    lengths = options["kv_lengths"]
    out, p = stored_p.forward(q, k, v, torch.tensor(7), lengths, 0.125, 0.1)
    p = p[:, :, :40, :150]
    hidden = torch.arange(150) >= lengths[:, None, None, None]
    scores = (q.double() @ k.double().mT / 8).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(p.abs().double(), scores.softmax(-1), atol=1e-6, rtol=1e-5)
    assert torch.equal(p < 0, ~dropout_mask(7, 0.1, 2, 2, 40, 150) & ~hidden)
    flash = kernels.get_attention("flash")(q, k, v, causal=False, **options)
    torch.testing.assert_close(out, flash, atol=1e-6, rtol=1e-5)


@INTERPRETED
@pytest.mark.parametrize("kv_len", [100, 150])
def test_padding_may_hold_nan_and_a_sequence_without_keys_gives_0(kv_len: int) -> None:
    *tensors, d_out = inputs(20, kv_len, 64, torch.float32, batch=3)
    lengths = torch.tensor([kv_len, 70, 0], dtype=torch.int32)
    want = run_stored(tensors, d_out, kv_lengths=lengths)
    for x in tensors[1:]:
        x.data.masked_fill_(torch.arange(kv_len)[:, None] >= lengths[:, None, None, None], torch.nan)
    got = run_stored(tensors, d_out, kv_lengths=lengths)
    assert_equal(got, want)
    assert not any(x[2].any() for x in got.values())
    assert not any(got[name][1, :, 70:].any() for name in ("dk", "dv"))


@INTERPRETED
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy, of the maximum of such a row
@pytest.mark.parametrize("kv_len", [100, 150])
@pytest.mark.parametrize("dropped", [False, True], ids=["plain", "dropout"])
def test_stored_nan_stays_nan_and_gradients_of_padding_are_0_all_the_same(kv_len: int, dropped: bool) -> None:
    *tensors, d_out = inputs(20, kv_len, 64, torch.float32, batch=2)
    options = rules_of(kv_len, True, dropped)
    keys = options["kv_lengths"][1]
    for x in (tensors[0].data, d_out):
        kept = x[1, :, 3].clone()
        x[1, :, 3] = torch.nan
        got = run_stored(tensors, d_out, **options)
        x[1, :, 3] = kept
        assert got["dq"][1, :, 3].isnan().all()
        assert not any(got[name][1, :, keys:].any() for name in ("dk", "dv"))
        assert all(got[name][1, :, :keys].isnan().any() for name in ("dk", "dv"))
        assert not any(value[0].isnan().any() for value in got.values())
        assert got["out"].isnan().any(3).sum() == (0 if x is d_out else got["out"].shape[1])


@INTERPRETED
def test_stored_p_takes_grouped_heads_views_and_lengths_of_zero_and_repeats() -> None:
    qkv = torch.randn(2, 30, 3, 2, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tensors = [qkv[:, :, each].transpose(1, 2) for each in range(3)]
    tensors[1:] = [x[:, :1] for x in tensors[1:]]
    d_out = torch.randn(2, 30, 64, 2, generator=torch.Generator().manual_seed(1)).permute(0, 3, 1, 2)
    got = assert_repeats(run_stored, tensors, d_out, times=1, scale=0.05)
    assert_as_accurate(got, tensors, d_out, causal=False, scale=0.05)
    for q_len, kv_len in ((0, 5), (5, 0)):
        *tensors, d_out = inputs(q_len, kv_len, 64, torch.float32)
        assert not any(x.any() for x in run_stored(tensors, d_out).values())


@INTERPRETED
@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((8, 8, 128, torch.float32), {}, "it takes head_dim 64, not 128"),
        (
            (8, 513, 64, torch.float32),
            {},
            "a probability for every query and key, and takes up to 512 of each, not 513",
        ),
        ((8, 8, 64, torch.bfloat16), {}, "interpreter multiplies bfloat16 wrongly"),
        ((8, 8, 64, torch.float32), {"dropout_p": 0.1}, "needs dropout_seed"),
    ],
)
def test_what_stored_p_cannot_do_is_refused_in_a_line(
    shape: tuple[int, int, int, torch.dtype], options: dict[str, object], message: str
) -> None:
    q, k, v, _ = inputs(*shape)
    with pytest.raises(AttentionError, match=message):
        stored_p.stored_p_attention(q, k, v, **options)


# ---- softmax -----------------------------------------------------------------------------------------


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Probabilities as `want` in float64, but for the rounding to their type."""
    rtol, atol = {torch.float16: (1e-3, 6e-8), torch.float32: (2e-5, 1e-37)}[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


def assert_the_k_largest(x: torch.Tensor, k: int, values: torch.Tensor, indices: torch.Tensor) -> None:
    """Descending, each with its own index; in which order equal ones come is left open."""
    assert indices.dtype is torch.int64
    assert_near(values, x.double().softmax(-1).topk(k).values)
    assert_near(values, x.double().softmax(-1).gather(1, indices))
    assert torch.equal(x.gather(1, indices).sort(descending=True).values, x.topk(k).values)
    assert all(len(set(row)) == k for row in indices.tolist())


def rows_of(length: int, dtype: torch.dtype, rows: int = 3) -> torch.Tensor:
    x = torch.randn(rows, length, generator=torch.Generator().manual_seed(length)) * 3
    return x.to(DEVICE, dtype)


@HALF_AND_SINGLE
def test_one_pass_of_every_head(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 2, 3, 2 * KEYS, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    expected = torch.softmax(q.double() @ k.double().mT / 32**0.5, -1) @ v.double()
    within = 1e-3 if dtype is torch.float16 else 1e-5
    torch.testing.assert_close(one_pass(q, k, v).double(), expected, rtol=within, atol=within)


@HALF_AND_SINGLE
@pytest.mark.parametrize("function", SOFTMAX)
def test_softmax_at_every_length(function, dtype: torch.dtype) -> None:
    for length in (1, 5, 4096, 5000):
        x = rows_of(length, dtype)
        got = function(x)
        assert got.dtype is dtype
        assert_near(got, x.double().softmax(-1))
    for empty in (x[:, :0], x[:0]):
        assert function(empty).shape == empty.shape


@pytest.mark.parametrize("function", SOFTMAX)
def test_softmax_of_rows_that_are_not_contiguous(function) -> None:
    x = rows_of(5, torch.float32, rows=70).T
    assert_near(function(x), x.double().softmax(-1))


@pytest.mark.parametrize("function", SOFTMAX)
def test_softmax_of_huge_values(function) -> None:
    """Close to the limits of float16, of either sign, and minus infinity, which marks a masked element."""
    x = torch.full((4, 5000), -6e4, dtype=torch.float16, device=DEVICE)
    x[0, ::7] = 6e4
    x[1, 4999] = 6e4  # the maximum comes last
    x[2, 10:] = -torch.inf
    assert_near(function(x), x.double().softmax(-1))


@pytest.mark.parametrize("function", [*SOFTMAX, lambda x: softmax.online_softmax_topk(x, 5)[0]])
def test_an_offset_costs_softmax_no_accuracy(function) -> None:
    x = rows_of(5, torch.float32) + 1e5
    torch.testing.assert_close(function(x).sort().values.double(), x.double().softmax(-1).sort().values)


@HALF_AND_SINGLE
@pytest.mark.parametrize(("length", "k"), [(1, 1), (5, 3), (5, 5), (4096, 1), (5000, 7)])
def test_the_k_largest_of_a_softmax(length: int, k: int, dtype: torch.dtype) -> None:
    x = rows_of(length, dtype)
    x[0] = x[0].sort().values  # the worst of orders: every block brings better ones
    values, indices = softmax.online_softmax_topk(x, k)
    assert values.dtype is dtype
    assert_the_k_largest(x, k, values, indices)


def test_the_k_largest_of_rows_that_are_not_contiguous_and_huge() -> None:
    x = torch.linspace(-6e4, 6e4, 80, device=DEVICE).half().view(40, 2).T
    values, indices = softmax.online_softmax_topk(x, 4)
    assert_the_k_largest(x, 4, values, indices)


def test_topk_of_masked_elements_has_distinct_indices_and_k_is_checked() -> None:
    x = torch.tensor([[1.0, -torch.inf, -torch.inf]], device=DEVICE)
    values, indices = softmax.online_softmax_topk(x, 3)
    assert values.tolist() == [[1.0, 0.0, 0.0]]
    assert sorted(indices[0].tolist()) == [0, 1, 2]
    for k in (0, 4):
        with pytest.raises(ValueError, match=f"k={k}: it must be 1 to 3"):
            softmax.online_softmax_topk(x, k)


# ---- on a GPU ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_exact_on_a_gpu_and_20_repeats_agree(
    name: str, causal: bool, head_dim: int, dtype: torch.dtype
) -> None:
    heads = {"batch": 4, "heads": 16, "kv_heads": 16}
    *tensors, d_out = inputs(1000, 1000, head_dim, dtype, device="cuda", **heads)
    first = assert_repeats(run, name, tensors, d_out, times=20, causal=causal)
    assert_as_accurate(first, tensors, d_out, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("length", [100, 128, 200, 512])
def test_stored_probabilities_are_exact_on_a_gpu_and_20_repeats_agree(
    length: int, dtype: torch.dtype
) -> None:
    shape = {"batch": 2, "heads": 16, "kv_heads": 16}
    *tensors, d_out = inputs(length, length, 64, dtype, device="cuda", **shape)
    options = rules_of(length, True, True, "cuda")
    first = assert_repeats(run_stored, tensors, d_out, times=20, **options)
    assert_as_accurate(first, tensors, d_out, causal=False, **options)
