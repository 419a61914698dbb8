"""Flash attention in Triton's interpreter against float64. About 12 s."""

import pytest
import torch
from torch.nn import functional as F

import kernels
from kernels import AttentionError
from kernels.flash.call import Options, Tensors
from tests.kernels.accuracy import assert_as_accurate, golden, inputs, run

if torch.cuda.is_available():
    pytest.skip("the interpreter's matrix; test_flash_gpu.py has the GPU's", allow_module_level=True)

flash = kernels.get_attention("flash")
flash_packed = kernels.packed_form(flash)
naive = kernels.get_attention("naive")

LENGTHS = [1, 2, 63, 64, 65, 97, 128, 200]
UNEQUAL = [(1, 128), (64, 200), (65, 97), (128, 63), (97, 1), (200, 130)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_exact_at_every_length(causal: bool, head_dim: int, dtype: torch.dtype) -> None:
    for q_len, kv_len in [(length, length) for length in LENGTHS] + UNEQUAL:
        *tensors, d_out = inputs(q_len, kv_len, head_dim, dtype, seed=q_len)
        assert_as_accurate(run(flash, tensors, d_out, causal=causal), tensors, d_out, causal=causal)


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3, "dropout_seed": 7}, {"window": (20, 0)}], ids=str)
def test_packed_qkv_equals_separate_q_k_v_and_has_one_dense_gradient(options: dict[str, object]) -> None:
    qkv = torch.randn(2, 70, 3, 2, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    d_out = torch.randn(2, 2, 70, 32, generator=torch.Generator().manual_seed(1))
    results = []
    for attend in (
        lambda: flash_packed(qkv, return_lse=True, **options),
        lambda: flash(*qkv.permute(2, 0, 3, 1, 4).unbind(), return_lse=True, **options),
    ):
        out, lse = attend()
        gradient = torch.autograd.grad((out, lse), qkv, (d_out, d_out[..., 0]))[0]
        results.append((out.detach(), lse.detach(), gradient))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][2].is_contiguous()


def test_a_packed_qkv_of_the_wrong_shape_is_named() -> None:
    for shape in ((2, 70, 2, 2, 32), (2, 70, 6, 32)):
        with pytest.raises(AttentionError, match=r"qkv must be \(batch, length, 3, heads, head_dim\), got"):
            flash_packed(torch.randn(shape))


def test_gradients_through_lse_match_naive() -> None:
    *tensors, d_out = inputs(70, 90, 32, torch.float32)
    d_lse = torch.randn(1, 1, 70)
    results = []
    for attention in (flash, kernels.get_attention("naive")):
        both = attention(*tensors, return_lse=True)
        results.append(torch.autograd.grad(both, tensors, (d_out, d_lse)))
        lse = attention(*tensors, return_lse=True)[1]
        results[-1] += torch.autograd.grad(lse, tensors, d_lse, allow_unused=True)[:2]  # lse alone
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_a_nan_lse_gradient_of_a_fully_masked_query_is_ignored() -> None:
    """It comes from merging parts in none of which the query sees a key: logaddexp(-inf, -inf) has gradient NaN."""
    *tensors, d_out = inputs(150, 40, 16, torch.float32)  # 110 queries, a tile of dQ's and most of the next
    d_lse = torch.randn(1, 1, 150)
    d_lse[:, :, :110] = 0
    results = []
    for attention in (flash, naive):
        out, lse = attention(*tensors, return_lse=True)
        merged = torch.logaddexp(lse, torch.full_like(lse, -torch.inf))
        *gradients, of_lse = torch.autograd.grad((out, merged), (*tensors, lse), (d_out, d_lse))
        assert of_lse[:, :, :110].isnan().all()
        results.append(gradients)
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_two_halves_of_the_keys_merge_into_the_whole() -> None:
    """What ring attention does with lse, gradients included."""
    *tensors, d_out = inputs(40, 96, 16, torch.float32)
    q, k, v = tensors

    def merged() -> torch.Tensor:
        (a, lse_a), (b, lse_b) = (
            flash(q, k[:, :, part], v[:, :, part], causal=False, return_lse=True)
            for part in (slice(0, 50), slice(50, 96))
        )
        share = torch.sigmoid(lse_b - lse_a)[..., None]
        return a + share * (b - a)

    results = []
    for out in (merged(), flash(q, k, v, causal=False)):
        results.append((out.detach(), *torch.autograd.grad(out, tensors, d_out)))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_lengths_of_zero(q_len: int, kv_len: int) -> None:
    *tensors, d_out = inputs(q_len, kv_len, 16, torch.float32)
    got = run(flash, tensors, d_out, causal=False)
    assert (got["out"] == 0).all()
    assert (got["lse"] == -torch.inf).all()
    assert all((got[name] == 0).all() for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_extreme_scores_stay_accurate_and_finite(dtype: torch.dtype) -> None:
    """Logits of tens of thousands, one huge outlier, all equal, all strongly negative: right, and never NaN.

    The backward has P = exp(S - lse) from a float32 lse, so P's relative error grows as eps * |lse|: that much is the
    algorithm's own.
    """
    *tensors, d_out = inputs(70, 70, 16, dtype)
    q, k, v = (x.detach() for x in tensors)
    outlier = k.clone()
    outlier[:, :, 3] = 6000.0
    for case in ((q * 50, k * 50, v), (q, outlier, v), (q * 0, k, v), (q * 0 + 500, k * 0 - 20, v)):
        leaves = [x.detach().requires_grad_() for x in case]
        got, want = run(flash, leaves, d_out), golden(leaves, d_out)
        eps = 4 * torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps * want["lse"].abs().max().item()
        for name in want:  # equal keys make dq a sum of large terms that cancel: their size counts too
            error, size = (got[name].double() - want[name]).norm(), want[name].norm() + case[1].abs().max()
            assert error <= eps * size, f"{name}: {error:.1e} of {size:.1e}"


@pytest.mark.slow
def test_the_operators_pass_torchs_own_checks() -> None:
    *tensors, d_out = inputs(20, 33, 16, torch.float32, heads=2, kv_heads=1)
    operators = kernels.flash.operators
    for precise_delta in (False, True):
        rest = (*Tensors(), *Options(True, 0.25, precise_delta=precise_delta))
        torch.library.opcheck(operators.flash_forward, (*tensors, *rest))
    results = operators.flash_forward(*(x.detach() for x in tensors), *rest)
    leaves = [x.detach() for x in (*results, *tensors)]
    for d_lse in (None, torch.randn_like(results[1])):
        torch.library.opcheck(operators.flash_backward, (d_out, d_lse, *leaves, *rest))
    qkv = torch.randn(2, 20, 3, 2, 16, requires_grad=True)
    packed = (qkv, None, None)
    torch.library.opcheck(operators.flash_forward, (*packed, *rest))
    results = [x.detach() for x in operators.flash_forward(*packed, *rest)]
    inside = (*results, qkv.detach(), None, None)
    torch.library.opcheck(operators.flash_backward, (results[0], None, *inside, *rest))


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The numbers of x (2, 3, 40, 16), laid out as q may be; and one that is not dense in any order."""
    packed = torch.stack([x.transpose(1, 2)] * 3, 2)
    return {
        "dense": x,
        "heads inside tokens": x.transpose(1, 2).contiguous().transpose(1, 2),
        "heads outside": x.transpose(0, 1).contiguous().transpose(0, 1),
        "packed": packed[:, :, 1].transpose(1, 2),
        "padded": torch.cat([x, x], 3)[..., :16],
        "shared heads": x[:, :1].expand(2, 3, 40, 16),
        "one head": x[:, :1],
        "one token": x[:, :, :1],
        "overlapping": x[..., 0].contiguous().view(2, 3, 40).unfold(2, 32, 1),
    }


@pytest.mark.parametrize("name", layouts(torch.zeros(2, 3, 40, 16)))
def test_results_have_the_memory_layout_that_sdpa_promises(name: str) -> None:
    """SDPA and our operators promise a compiler the layout of torch.empty_like of q, k and v."""
    x = layouts(torch.randn(2, 3, 40, 16))[name]
    q, k, v = (x.detach().as_strided(x.shape, x.stride()).requires_grad_() for _ in range(3))
    operators = kernels.flash.operators
    rest = (*Tensors(), *Options(True, 0.25, precise_delta=True))
    out, lse, low = operators.flash_forward(q, k, v, *rest)
    results = (out, low, *operators.flash_backward(out, None, out, lse, low, q, k, v, *rest)[:3])
    for result in results:
        want = torch.empty_like(x)
        assert result.stride() == want.stride() or want.stride(-1) != 1
        assert result.stride(-1) == 1
    torch.library.opcheck(operators.flash_forward, (q, k, v, *rest), test_utils="test_faketensor")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("packed", [False, True])
def test_compiled_autograd_takes_the_backward_of_an_eager_forward(packed: bool) -> None:
    qkv = torch.randn(1, 40, 3, 2, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    sinks = torch.zeros(2, requires_grad=True)

    def loss() -> torch.Tensor:
        options = {"sinks": sinks, "dropout_p": 0.1, "dropout_seed": 3}
        if packed:
            return flash_packed(qkv, **options).square().sum()
        return flash(*qkv.permute(2, 0, 3, 1, 4).unbind(), **options).square().sum()

    want = torch.autograd.grad(loss(), (qkv, sinks))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss().backward()
    assert all(torch.equal(x.grad, gradient) for x, gradient in zip((qkv, sinks), want, strict=True))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_row_by_row_under_torch_func_are_those_of_naive_and_sdpa() -> None:
    """As docs/architecture.md says."""
    *tensors, d_out = inputs(8, 8, 16, torch.float32, batch=2)
    want = run(naive, tensors, d_out)["dq"]
    q, k, v = (x.detach() for x in tensors)

    def by_row(attention):
        of_row = lambda q, k, v, d_out: (attention(q[None], k[None], v[None]) * d_out).sum()  # noqa: E731
        return torch.func.vmap(torch.func.grad(of_row))(q, k, v, d_out)

    for name in ("naive", "sdpa"):
        torch.testing.assert_close(by_row(kernels.get_attention(name)), want, atol=1e-5, rtol=1e-5)
    assert torch.func.hessian(lambda q: naive(q, k, v).sum())(q).shape == (*q.shape, *q.shape)
    with pytest.raises(AttentionError, match=r"nothing under torch\.func .*; use attention=naive$"):
        by_row(flash)


def test_alibi_slopes_that_require_grad_are_refused_but_under_no_grad() -> None:
    q, k, v, _ = inputs(8, 8, 16, torch.float32)
    slopes = torch.nn.Parameter(torch.tensor([0.5]))
    with pytest.raises(AttentionError, match="no gradient for alibi_slopes"):
        flash(q, k, v, alibi_slopes=slopes)
    with torch.no_grad():
        torch.testing.assert_close(
            flash(q, k, v, alibi_slopes=slopes), naive(q, k, v, alibi_slopes=slopes), atol=1e-5, rtol=1e-5
        )


def test_autocast_casts_inputs_to_its_dtype() -> None:
    *tensors, d_out = inputs(40, 50, 16, torch.float32)
    tensors[0] = tensors[0].detach().half().requires_grad_()  # as from a layer that autocast runs in float16
    with torch.autocast("cpu", torch.float16):
        out = flash(*tensors)
        packed = flash_packed(torch.randn(1, 40, 3, 1, 16))
    assert out.dtype == packed.dtype == torch.float16
    assert torch.equal(out, flash(*(x.half() for x in tensors)))
    out.backward(d_out.half())
    assert [x.grad.dtype for x in tensors] == [torch.float16, torch.float32, torch.float32]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(32, 16), (16, 40)], ids=["narrower", "wider"])
def test_v_may_have_a_head_dim_of_its_own(head_dim: int, value_dim: int) -> None:
    """As in multi-head latent attention; twice, since calls are remembered."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 20, head_dim), (2, 2, 24, head_dim), (2, 2, 24, value_dim)]
    tensors = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    visible = torch.ones(20, 24, dtype=torch.bool).tril(4)
    expected = F.scaled_dot_product_attention(*wide, attn_mask=visible, enable_gqa=True)
    d_out = torch.randn(expected.shape, generator=draw)
    wanted = torch.autograd.grad(expected, wide, d_out.double())
    wider = {x.data_ptr() for x in tensors if x.shape[-1] == max(head_dim, value_dim)}
    saved: set[int] = set()
    for _ in range(2):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.add(x.data_ptr()) or x, lambda x: x):
            out = flash(*tensors)
        assert wider <= saved  # not copied
        found = torch.autograd.grad(out, tensors, d_out)
        torch.testing.assert_close((out, *found), (expected.float(), *(each.float() for each in wanted)))
    compiled = torch.compile(flash, backend="aot_eager", fullgraph=True)(*tensors)
    torch.testing.assert_close(compiled, out)


def test_a_last_stride_other_than_one_is_refused() -> None:
    q, k, v, _ = inputs(16, 16, 16, torch.float32)
    with pytest.raises(AttentionError, match=r"k's last stride must be 1, .*pass k.contiguous\(\)"):
        flash(q, k.transpose(2, 3), v)


def test_a_call_that_passed_its_checks_vouches_for_no_other() -> None:
    """Eager calls are remembered by what the checks look at."""
    q, k, v, _ = inputs(64, 64, 32, torch.float16)
    qkv = torch.zeros(1, 64, 3, 2, 32, dtype=torch.float16)

    def refused(message: str, *tensors: torch.Tensor, **options: object) -> None:
        with pytest.raises(AttentionError, match=message):
            flash(*(tensors or (q, k, v)), **options)

    for _ in range(2):
        flash(q, k, v)
        refused("share a dtype", q, k, v.float())
        refused("share a device", q, k.to("meta"), v)
        refused("share a shape", q, k, v[:, :, 1:])
        refused("last stride", q, k.transpose(2, 3).contiguous().transpose(2, 3), v)
        refused("must be .batch", q[0], k[0], v[0])
        refused("must be .batch", q[0, 0, 0, 0], k, v)
        refused("scale must be positive", scale=0.0)
        refused("dropout_p must be", dropout_p=1.0)
        refused("needs dropout_seed", dropout_p=0.5)
        refused("window must be", window=(1, 2, 3))
        refused("softcap must be", softcap=-1.0)
        refused("tier=nothing", tier="nothing")
        refused("seed must be", dropout_seed="5")
        refused("must be a tensor", kv_lengths=[64])
        flash_packed(qkv)
        refused("q must be .batch, heads", qkv, qkv, qkv)
    listed = [flash(q, k, v, window=window) for window in ([3, 0], (3, 0), (3, 0))]
    assert torch.equal(listed[0], listed[1])
    assert torch.equal(listed[1], listed[2])
    assert not torch.equal(listed[0], flash(q, k, v))
    with torch.autocast("cpu", torch.float16):
        assert flash(q.float(), k.float(), v.float()).dtype is torch.float16
