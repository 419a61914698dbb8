"""What training needs beyond a causal softmax, in the interpreter against the naive oracle. About 10 s."""

import numpy as np
import pytest
import torch

import kernels
from kernels.flash.call import Options, Tensors
from kernels.flash.dropout import is_kept
from kernels.flash.portable.spec import rules_of, specify
from kernels.flash.portable.tiles import Tile
from kernels.philox import dropout_mask
from tests.kernels.accuracy import assert_as_accurate, golden, inputs, run

triton = pytest.importorskip("triton")
tl = triton.language

if torch.cuda.is_available():
    pytest.skip("the interpreter's checks; test_flash_gpu.py has the GPU's", allow_module_level=True)

flash = kernels.get_attention("flash")
naive = kernels.get_attention("naive")


def check(options: dict[str, object], q_len=200, kv_len=200, dtype=torch.float32, **shape: int) -> None:
    *tensors, d_out = inputs(q_len, kv_len, 16, dtype, **shape)
    assert_as_accurate(run(flash, tensors, d_out, **options), tensors, d_out, **options)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@triton.jit
def mask_kernel(Seed, Kept, batch, head, first_row, first_key, TRANSPOSED: tl.constexpr, SPEC: tl.constexpr):
    rules = rules_of(batch, head, Seed, None, None, None, None, SPEC.BLOCK_M, SPEC.BLOCK_N, 1.0)
    rows, keys = tl.arange(0, SPEC.BLOCK_M), tl.arange(0, SPEC.BLOCK_N)
    index = rows[:, None] * SPEC.BLOCK_N + keys[None, :]
    if TRANSPOSED:
        kept = is_kept(first_row, rows[None, :], first_key, keys[:, None], rules, SPEC)
        tl.store(Kept + tl.trans(index), kept.to(tl.int8))
    else:
        kept = is_kept(first_row, rows[:, None], first_key, keys[None, :], rules, SPEC)
        tl.store(Kept + index, kept.to(tl.int8))


@pytest.mark.parametrize("dropout_p", [0.3, 0.9])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_dropout_mask_equals_the_oracles_element_by_element(transposed: bool, dropout_p: float) -> None:
    seed = torch.tensor(2**40 + 17)
    kept = torch.zeros(64, 128, dtype=torch.int8)
    spec = specify(Tile(64, 128, 4, 1), 16, causal=True, dropout_p=dropout_p)
    mask_kernel[1,](seed, kept, 2, 5, 16, 48, TRANSPOSED=transposed, SPEC=spec)
    assert torch.equal(kept.bool(), dropout_mask(seed, dropout_p, 3, 6, 80, 176)[2, 5, 16:, 48:])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_dropout(causal: bool, dtype: torch.dtype) -> None:
    options = {"causal": causal, "dropout_p": 0.2, "dropout_seed": torch.tensor(5)}
    check(options, 130, 200, dtype, batch=2, heads=2, kv_heads=1)


def test_dropout_takes_a_plain_number_as_seed() -> None:
    q, k, v, _ = inputs(40, 40, 16, torch.float32)
    outs = [flash(q, k, v, dropout_p=0.5, dropout_seed=seed) for seed in (3, torch.tensor(3), 4)]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads(kv_heads: int) -> None:
    check({}, 97, 130, torch.float16, batch=2, heads=4, kv_heads=kv_heads)


@pytest.mark.parametrize("window", [(0, 0), (7, 0), (70, 40), (-1, 20), (20, -1), (300, 300)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_window(causal: bool, window: tuple[int, int]) -> None:
    check({"causal": causal, "window": window})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False, "window": (70, 40)},
        {"causal": False, "window": (70, -1)},
        {"cu_seqlens": ints(0, 5, 100, 150)},
        {"block_mask": torch.tensor([[[[True, False], [True, True]]]])},
    ],
    ids=["causal", "window", "left", "documents", "blocks"],
)
def test_a_wide_head_with_dk_and_dv_in_one_loop_is_exact(options: dict[str, object]) -> None:
    *tensors, d_out = inputs(150, 150, 144, torch.float16)
    assert_as_accurate(run(flash, tensors, d_out, **options), tensors, d_out, **options)


@pytest.mark.parametrize("attention", [flash, naive], ids=["flash", "naive"])
def test_numpy_integers_and_values_that_mean_none(attention) -> None:
    q, k, v, _ = inputs(40, 40, 16, torch.float32)
    plain, windowed = attention(q, k, v), attention(q, k, v, window=(5, 0))
    assert torch.equal(attention(q, k, v, window=(np.int64(5), np.int32(0))), windowed)
    assert torch.equal(attention(q, k, v, window=(-1, -1), softcap=None), plain)
    assert torch.equal(attention(q, k, v, softcap=np.int64(20)), attention(q, k, v, softcap=20.0))
    for window in ((5.0, 0), (torch.tensor(5), 0), ("5", 0)):
        with pytest.raises(kernels.AttentionError, match="window must be"):
            attention(q, k, v, window=window)


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p"])
@pytest.mark.parametrize("attention", [flash, naive], ids=["flash", "naive"])
def test_a_tensor_is_no_number_since_flash_would_give_it_no_gradient(attention, name: str) -> None:
    q, k, v, _ = inputs(40, 40, 16, torch.float32)
    learned = {name: torch.tensor(0.5, requires_grad=True), "dropout_seed": 1}
    with pytest.raises(kernels.AttentionError, match=rf"^{name} must be a number.*Tensor; its \.item\(\)"):
        attention(q, k, v, **learned)
    with pytest.raises(kernels.AttentionError, match=f"^{name} must be a number of Python's, got str$"):
        attention(q, k, v, **learned | {name: "0.5"})


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p", "window"])
def test_a_number_of_numpys_is_refused_by_name_where_torch_compile_makes_a_tensor_of_it(name: str) -> None:
    q, k, v, _ = (x.detach() for x in inputs(40, 40, 16, torch.float32))
    value = (np.int64(5), np.int64(0)) if name == "window" else np.float32(0.5)
    options = {name: value} | ({"dropout_seed": 1} if name == "dropout_p" else {})
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{name} must be a number of Python's"):
        torch.compile(lambda: flash(q, k, v, **options), fullgraph=True, backend="eager")()


@pytest.mark.parametrize(("q_len", "kv_len"), [(130, 200), (200, 130)])
def test_window_at_unequal_lengths(q_len: int, kv_len: int) -> None:
    check({"causal": False, "window": (20, 5)}, q_len, kv_len)
    check({"window": (20, 5)}, q_len, kv_len)
    # All keys but one, all keys, and more than 32 bits hold: the kernels add positions to a window's side.
    for window in [(kv_len - 2, q_len - 2), (kv_len - 1, q_len - 1), (2**40, 2**31 - 1)]:
        check({"causal": False, "window": window}, q_len, kv_len)


def test_one_graph_for_lengths_shorter_and_longer_than_a_window() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(flash, backend=backend, fullgraph=True, dynamic=True)
    for length in (50, 20, 90):
        q, k, v, _ = (x.detach() for x in inputs(length, length, 16, torch.float32))
        torch.testing.assert_close(compiled(q, k, v, window=(30, 0)), naive(q, k, v, window=(30, 0)))
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_softcap(dtype: torch.dtype) -> None:
    *tensors, d_out = inputs(130, 200, 16, dtype)
    with torch.no_grad():
        tensors[0].mul_(5)  # so that the cap has an effect
    assert_as_accurate(run(flash, tensors, d_out, softcap=4.0), tensors, d_out, softcap=4.0)


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("cap", [100.0, 1e3, 1e6])
def test_a_large_softcap_loses_no_accuracy(cap: float, size: int) -> None:
    """Scores reach 6, and 28 with q 5 times as large: beyond where the kernels use the series for a cap of 100."""
    *tensors, d_out = inputs(130, 200, 16, torch.float32)
    with torch.no_grad():
        tensors[0].mul_(size)
    assert_as_accurate(run(flash, tensors, d_out, softcap=cap), tensors, d_out, softcap=cap)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_alibi(causal: bool) -> None:
    check({"causal": causal, "alibi_slopes": torch.tensor([0.5, 0.03])}, 130, 200, heads=2, kv_heads=2)


def test_sinks_and_their_gradient() -> None:
    # 70 queries see the sink alone
    *tensors, d_out = inputs(200, 130, 16, torch.float32, heads=3, kv_heads=3)
    sinks = torch.tensor([0.5, -1.0, 4.0], requires_grad=True)
    d_lse = torch.randn(1, 3, 200)
    assert_as_accurate(run(flash, tensors, d_out, sinks=sinks), tensors, d_out, sinks=sinks.detach())
    gradients = []
    for attention in (flash, kernels.get_attention("naive")):
        out, lse = attention(*tensors, sinks=sinks, return_lse=True)
        gradients.append(torch.autograd.grad((out * d_out).sum() + (lse * d_lse).sum(), [sinks, *tensors]))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_a_sink_of_minus_infinity_is_none() -> None:
    *tensors, d_out = inputs(200, 130, 16, torch.float32, heads=2, kv_heads=2)  # 70 queries see no key
    sinks = torch.tensor([-torch.inf, 0.5], requires_grad=True)
    with_sink, without = (run(flash, tensors, d_out, **options) for options in ({"sinks": sinks}, {}))
    for name, x in with_sink.items():
        assert torch.equal(x[:, 0], without[name][:, 0]), name
    out, lse = flash(*tensors, sinks=sinks, return_lse=True)
    d_lse = torch.where(lse == -torch.inf, torch.nan, 1.0)  # as from logaddexp of two that see nothing
    of_sinks, *others = torch.autograd.grad((out, lse), [sinks, *tensors], (d_out, d_lse))
    assert of_sinks[0] == 0
    assert of_sinks[1] != 0
    assert all(x.isfinite().all() for x in others)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # inf - inf, in the interpreter
@pytest.mark.parametrize("name", ["flash", "naive"])
def test_a_huge_sink_takes_all_and_an_infinite_one_spoils_its_head_alone(name: str) -> None:
    *tensors, d_out = inputs(20, 20, 16, torch.float32, heads=3, kv_heads=3)
    sinks = torch.tensor([7.7e25, 0.5, torch.inf], requires_grad=True)
    out, lse = kernels.get_attention(name)(*tensors, sinks=sinks, return_lse=True)
    *gradients, of_sinks = torch.autograd.grad((out * d_out).sum() + lse.sum(), [*tensors, sinks])
    assert not any(x[:, 0].any() for x in (out, *gradients))
    assert of_sinks[0] == 20  # each row's lse is the sink
    assert all(x[:, 1].isfinite().all() for x in (out, *gradients))
    # dV too, but where the larger of NaN and a number is the number: on GPUs, in the interpreter since triton 3.9.
    assert all(x[:, 2].isnan().all() for x in (out, *gradients[:2]))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_kv_lengths(causal: bool) -> None:
    *tensors, d_out = inputs(150, 200, 16, torch.float32, batch=4)
    lengths = ints(200, 70, 0, 129)
    got = run(flash, tensors, d_out, causal=causal, kv_lengths=lengths)
    assert_as_accurate(got, tensors, d_out, causal=causal, kv_lengths=lengths)
    with torch.no_grad():  # padding may hold anything
        for x in tensors[1:]:
            for batch, length in enumerate(lengths):
                x[batch, :, length:] = torch.nan
    poisoned = run(flash, tensors, d_out, causal=causal, kv_lengths=lengths)
    assert all(torch.equal(poisoned[name], got[name]) for name in got)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_packed_documents(causal: bool) -> None:
    bounds = ints(0, 3, 3, 67, 68, 150, 310, 399, 400)  # an empty one, one token, one across the end of a row
    check({"causal": causal, "cu_seqlens": bounds}, batch=2)


def test_packed_documents_equal_each_document_alone() -> None:
    q, k, v, _ = (x.detach() for x in inputs(100, 100, 16, torch.float32))
    out = flash(q, k, v, cu_seqlens=ints(0, 30, 100))
    for part in (slice(0, 30), slice(30, 100)):
        torch.testing.assert_close(out[:, :, part], flash(q[:, :, part], k[:, :, part], v[:, :, part]))


def test_nan_in_one_row_of_documents_reaches_no_other_row() -> None:
    *tensors, d_out = inputs(100, 100, 16, torch.float32, batch=2)
    bounds = ints(0, 60, 130, 200)  # the second document is cut by the end of the first row
    want = run(flash, tensors, d_out, cu_seqlens=bounds)
    with torch.no_grad():
        for x in tensors:
            x[0, :, 70] = torch.nan
    got = run(flash, tensors, d_out, cu_seqlens=bounds)
    assert all(torch.equal(got[name][1], want[name][1]) for name in got)
    assert got["out"][0].isnan().any()


# Offsets of queries and keys in two rows. A document has fewer keys than queries, more, or none of either; the end of
# a row cuts it, or its keys are in another row.
RAGGED = {
    (150, 200): (ints(0, 60, 60, 170, 200, 210, 230, 300), ints(0, 20, 25, 240, 240, 320, 330, 400)),
    (200, 130): (ints(0, 10, 30, 150, 150, 160, 180, 400), ints(0, 64, 65, 65, 70, 120, 140, 260)),
    (130, 130): (ints(0, 50, 130, 260), ints(0, 64, 200, 260)),
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("window", [None, (0, 0), (40, 20), (-1, 5), (70, -1), (2**40, 2**31 - 1)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_documents_whose_keys_have_offsets_of_their_own(
    lengths: tuple[int, int], causal: bool, window: tuple[int, int] | None, dtype: torch.dtype
) -> None:
    of_queries, of_keys = RAGGED[lengths]
    options = {"causal": causal, "window": window, "cu_seqlens": of_queries, "cu_seqlens_k": of_keys}
    check(options, *lengths, dtype, batch=2, heads=2, kv_heads=1)


def test_equal_offsets_for_queries_and_keys_are_those_of_documents() -> None:
    *tensors, d_out = inputs(100, 100, 16, torch.float32, batch=2)
    offsets = ints(3, 60, 60, 130, 190)  # tokens before and behind them form documents, too
    got = run(flash, tensors, d_out, window=(9, 0), cu_seqlens=offsets, cu_seqlens_k=offsets)
    for attention in (flash, naive):
        want = run(attention, tensors, d_out, window=(9, 0), cu_seqlens=offsets)
        for name in want:
            torch.testing.assert_close(got[name], want[name], msg=name)
    want = run(naive, tensors, d_out, window=(9, 0), cu_seqlens=offsets, cu_seqlens_k=offsets)
    torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)
@pytest.mark.parametrize("lengths", [(150, 200), (200, 130)], ids=str)
def test_keys_with_offsets_of_their_own_with_other_features(lengths: tuple[int, int]) -> None:
    of_queries, of_keys = RAGGED[lengths]
    documents, sinks = {"cu_seqlens": of_queries, "cu_seqlens_k": of_keys}, torch.tensor([0.0, 1.0])
    shape = {"batch": 2, "heads": 2, "kv_heads": 1}
    dropout = {"dropout_p": 0.2, "dropout_seed": 1}
    check({"sinks": sinks, "softcap": 5.0, "precise_delta": True, **documents, **dropout}, *lengths, **shape)
    blocks = torch.tensor([[[[1, 0], [1, 1]]]]).bool()
    check({"kv_lengths": ints(90, 70), "block_mask": blocks, **documents}, *lengths, **shape)
    *tensors, _ = inputs(*lengths, 16, torch.float32, **shape)
    sinks.requires_grad_()
    d_lse = torch.randn(2, 2, lengths[0])
    gradients = []
    for attention in (flash, naive):
        out, lse = attention(*tensors, sinks=sinks, return_lse=True, **documents)
        gradients.append(torch.autograd.grad(out.square().sum() + (lse * d_lse).sum(), [sinks, *tensors]))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_one_graph_has_keys_with_offsets_of_their_own() -> None:
    *tensors, d_out = inputs(150, 200, 16, torch.float32, batch=2)
    compiled = torch.compile(flash, backend="aot_eager", fullgraph=True, dynamic=True)
    options = dict(zip(("cu_seqlens", "cu_seqlens_k"), RAGGED[150, 200], strict=True)) | {"window": (40, 0)}
    got, want = run(compiled, tensors, d_out, **options), run(flash, tensors, d_out, **options)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_alibi_with_keys_with_offsets_of_their_own_is_refused_as_is_tier_hopper() -> None:
    q, k, v, _ = inputs(8, 12, 16, torch.float32)
    options = {"cu_seqlens": ints(0, 3, 8), "cu_seqlens_k": ints(0, 10, 12)}
    refused = r"flash does not support alibi_slopes with cu_seqlens_k; attention=naive does$"
    with pytest.raises(kernels.AttentionError, match=refused):
        flash(q, k, v, **options, alibi_slopes=torch.ones(1))
    asked = {"device": q.device, "dtype": q.dtype, "head_dim": 16, "alibi_slopes": True, "cu_seqlens_k": True}
    refused = "it does not support alibi_slopes with cu_seqlens_k; use attention=naive"
    with pytest.raises(kernels.AttentionError, match=refused):
        kernels.resolve_attention("flash", **asked, cu_seqlens=True)
    with pytest.raises(kernels.AttentionError, match=r"tier=hopper cannot run this call: .*tier=auto$"):
        flash(q, k, v, **options, tier="hopper")


@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)  # in the rows of padding, which are then set to 0
@pytest.mark.one_in(5)
@pytest.mark.parametrize("window", [None, (30, 10)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", [(150, 90), (0, 200), (64, 1)], ids=str)
def test_padding_of_rows_that_are_packed_may_hold_anything(
    causal: bool, lengths: tuple[int, int], window: tuple[int, int] | None
) -> None:
    *tensors, d_out = inputs(200, 200, 16, torch.float32, batch=2, heads=2, kv_heads=1)
    options = {"causal": causal, "window": window, "cu_seqlens": ints(0, 30, 130, 160, 270, 300, 400)}
    options |= {"kv_lengths": ints(*lengths)}
    got = run(flash, tensors, d_out, **options)
    assert_as_accurate(got, tensors, d_out, **options)
    with torch.no_grad():
        for x in tensors[1:]:
            for batch, length in enumerate(lengths):
                x[batch, :, length:] = torch.nan
    poisoned = run(flash, tensors, d_out, **options)
    assert all(torch.equal(poisoned[name], got[name]) for name in got)


def test_documents_that_end_with_the_padding_equal_each_document_alone() -> None:
    q, k, v, _ = (x.detach() for x in inputs(100, 100, 16, torch.float32))
    out = flash(q, k, v, cu_seqlens=ints(0, 30, 70, 100), kv_lengths=ints(70))
    for part in (slice(0, 30), slice(30, 70)):
        torch.testing.assert_close(out[:, :, part], flash(q[:, :, part], k[:, :, part], v[:, :, part]))
    assert not out[:, :, 70:].any()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_block_mask(causal: bool) -> None:
    mask = torch.tensor([[[[1, 0, 1], [0, 1, 0], [0, 0, 0]], [[1, 1, 1], [1, 0, 1], [0, 1, 0]]]]).bool()
    check({"causal": causal, "block_mask": mask}, 300, 300, heads=2, kv_heads=1)
    check({"causal": causal, "block_mask": mask[:, :1]}, 300, 300, batch=2, heads=2, kv_heads=2)


def test_precise_delta_removes_the_bias_of_one_sided_rounding() -> None:
    """The case of arXiv 2510.04212, in float16: two keys share the maximum, their values are negative and average to
    half way between two numbers, and the small rest, negative too, always tips the rounding the same way."""
    q, k = torch.zeros(1, 1, 64, 16), torch.zeros(1, 1, 64, 16)
    q[..., 0], k[:, :, :2, 0] = 4.0, 10.0  # logits 10, 10, 0, 0, ...
    ulp = 2.0**-10
    v = torch.full((1, 1, 64, 16), -1.0)
    v[:, :, 0], v[:, :, 1] = -1.5 - ulp, -1.5 - 2 * ulp
    d_out = torch.rand(1, 1, 64, 16, generator=torch.Generator().manual_seed(0)) + 0.5
    *tensors, d_out = (x.half() for x in (q, k, v, d_out))
    want = (golden(tensors, d_out, causal=False)["out"] * d_out.double()).sum(-1)
    leaning = {}
    for precise_delta in (False, True):
        operators, rest = (
            kernels.flash.operators,
            (*Tensors(), *Options(False, 0.25, precise_delta=precise_delta)),
        )
        out, lse, low = operators.flash_forward(*tensors, *rest)
        delta = operators.flash_backward(d_out, None, out, lse, low, *tensors, *rest)[3]
        leaning[precise_delta] = (delta - want).mean().item()
    assert leaning[False] < -3e-3, "the case no longer shows the bias"
    assert abs(leaning[True]) < 1e-4


def test_precise_delta_changes_nothing_else() -> None:
    check({"precise_delta": True}, 130, 130, torch.float16)


@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)
def test_features_together() -> None:
    slopes, sinks = torch.tensor([0.1, 0.01]), torch.tensor([0.0, 1.0])
    shape = {"batch": 2, "heads": 2, "kv_heads": 1}
    dropout = {"dropout_p": 0.1, "dropout_seed": 1}
    check({"window": (60, 0), "softcap": 5.0, "sinks": sinks, **dropout}, **shape)
    check(
        {"cu_seqlens": ints(0, 77, 300, 400), "window": (50, 0), "alibi_slopes": slopes, **dropout}, **shape
    )
    mask = torch.tensor([[[[1, 0], [1, 1]]]]).bool()
    check(
        {
            "window": (100, 0),
            "kv_lengths": ints(190, 20),
            "block_mask": mask,
            "softcap": 3.0,
            "alibi_slopes": slopes,
        },
        **shape,
    )


def test_every_feature_passes_torchs_own_checks() -> None:
    *tensors, d_out = inputs(33, 33, 16, torch.float32, heads=2, kv_heads=1)
    slopes, sinks = torch.tensor([0.1, 0.01]), torch.tensor([0.0, 1.0], requires_grad=True)
    starts, ends = torch.zeros(1, 33, dtype=torch.int32), torch.full((1, 33), 33, dtype=torch.int32)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    blocks = kernels.flash.masks.block_lists(mask, 33, 33, True, 20, -1)
    features = Tensors(torch.tensor(3), slopes, sinks, starts, ends, None, *blocks)
    options = Options(True, 0.25, 0.1, 20, -1, 5.0, "auto", True)
    torch.library.opcheck(kernels.flash.operators.flash_forward, (*tensors, *features, *options))
    compiled = torch.compile(flash, backend="aot_eager", fullgraph=True)
    features = {
        "dropout_p": 0.1,
        "dropout_seed": torch.tensor(3),
        "cu_seqlens": ints(0, 5, 33),
        "sinks": sinks,
    }
    got, want = run(compiled, tensors, d_out, **features), run(flash, tensors, d_out, **features)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_slopes_sinks_and_kv_lengths_may_be_strided() -> None:
    slopes = torch.tensor([0.5, 9.0, 0.1, 9.0])[::2]
    sinks = torch.tensor([[0.3, 9.0], [1.0, 9.0]])[:, 0]
    lengths = ints(50, 1, 30, 1)[::2]
    check({"alibi_slopes": slopes, "sinks": sinks, "kv_lengths": lengths}, 60, 60, batch=2, heads=2)
    check({"alibi_slopes": torch.tensor(0.5).expand(2)}, 60, 60, heads=2)


def test_rows_beyond_the_end_add_nothing_even_if_scores_overflow() -> None:
    """Slopes below 0 let scores grow with distance; a row beyond the end must not turn them into inf * 0."""
    options = {"causal": False, "alibi_slopes": torch.tensor([-5.0, -3.0])}
    *tensors, d_out = inputs(70, 70, 16, torch.float32, heads=2)
    exact = run(naive, [x.double() for x in tensors], d_out.double(), **options)
    for name, x in run(flash, tensors, d_out, **options).items():
        torch.testing.assert_close(x.double(), exact[name], rtol=1e-3, atol=1e-3, msg=name)
