"""Both linear layers and GELU in one function, against the same in float64 and against torch's own."""

import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.compiled_autograd import _enable as compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from triton.experimental.gluon import language as gl

from kernels.layers import FusedError, gelu_product
from kernels.layers import mlp as room
from kernels.layers.mlp import mlp
from kernels.layers.sums import sum_in_product, summing
from tests.kernels.accuracy import assert_all_as_close, assert_all_as_exact, double, results
from tests.kernels.bits import assert_repeats
from tests.kernels.emulator import emulate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("x", "first", "bias", "second")
SIZES = torch.tensor([5e0, 8e0, 1e1, 2e1, 1e2, 1e3, 1e5, 1e10, 1e19, 1e20, 1e25, 1e38, 3e38])
HUGE = torch.cat([-SIZES, SIZES])
WITH_BIAS = pytest.mark.parametrize("with_bias", [True, False], ids=["bias", ""])
EMULATED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU runs the kernels itself"
)


def torchs(x, first, bias, second):
    return F.linear(F.gelu(F.linear(x, first, bias), approximate="tanh"), second)


def problem(rows=(3, 128), width=256, inner=64, dtype=torch.float32, with_bias=True):
    """The inputs by name, and the output's gradient."""
    generator = torch.Generator(DEVICE).manual_seed(width)
    shapes = ((*rows, inner), (width, inner), (width,), (inner, width), (*rows, inner))
    x, first, bias, second, direction = (
        torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes
    )
    bias = bias * 0.5 if with_bias else None
    inputs = (x, first * inner**-0.5, bias, second * width**-0.5)
    return dict(zip(NAMES, inputs, strict=True)), direction


EXPORTS = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="to is_exporting() of 2.11, whose triton has no Hopper kernels, all is an export",
)
EAGER_AND_COMPILED = pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=EXPORTS)], ids=["eager", "compiled"]
)


@pytest.fixture
def on_hopper(monkeypatch):
    """`mlp` as on Hopper, but with the two kernels' results from torch. Returns the number of rows of their calls."""
    calls = []

    def forward(x, weight, bias, pre, out):
        calls.append(len(x))
        pre.copy_(x @ weight.T)
        out.copy_(F.gelu(pre.float() + bias.float(), approximate="tanh"))

    def backward(d_out, weight, pre, bias, d_pre):
        calls.append(len(d_out))
        d = torch.ops.aten.gelu_backward(
            (d_out @ weight).float(), pre.float() + bias.float(), approximate="tanh"
        )
        d_pre.copy_(d)
        return d.sum(0)

    monkeypatch.setattr(gelu_product, "gelu_product", forward)
    monkeypatch.setattr(gelu_product, "gelu_product_backward", backward)
    monkeypatch.setattr(room, "_has_gelu_product", torch.compiler.assume_constant_result(lambda device: True))
    monkeypatch.setattr(room, "MIN_ROWS", 128)
    torch.compiler.reset()
    return calls


@EMULATED
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("changed", [{}, {"STAGES": 3}, {"PART": 32, "PLACES": 4}], ids=str)
def test_kernels_in_the_least_favourable_order_of_events(monkeypatch, changed, seed):
    def launch(pointers, key, prepare, moved, describe):
        kernel, grid, numbers, _ = prepare()
        emulate(kernel, grid, (*describe(*moved), *pointers, *numbers), seed)

    constants = {name: gl.constexpr(value) for name, value in ({"GROUP": 2} | changed).items()}
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(gelu_product, name, replace(getattr(gelu_product, name), **constants))
    monkeypatch.setattr(gelu_product, "launch", launch)
    monkeypatch.setattr(gelu_product, "sm_count", lambda device: 1 + seed % 4)
    inner = (64, 384, 320)[seed % 3]
    inputs, direction = problem((384,), 512, inner, torch.bfloat16)
    x, first, bias, second = inputs.values()
    hidden, pre, d_pre = (torch.full((384, 512), float("nan"), dtype=x.dtype) for _ in range(3))
    gelu_product.gelu_product(x, first, bias, pre, hidden)
    torch.testing.assert_close(pre.double(), x.double() @ first.double().T, rtol=1e-2, atol=1e-3)
    pre[0, : len(HUGE)] = HUGE
    exact = (pre.double() + bias.double()).requires_grad_()
    expected = F.gelu(exact, approximate="tanh")
    torch.testing.assert_close(hidden[1:].double(), expected[1:].detach(), rtol=1e-2, atol=1e-2)
    d_bias = gelu_product.gelu_product_backward(direction, second, pre, bias, d_pre)
    (expected,) = torch.autograd.grad(expected, exact, direction.double() @ second.double())
    torch.testing.assert_close(d_pre.double(), expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(d_bias.double(), expected.sum(0), rtol=1e-5, atol=1e-4)


@WITH_BIAS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_as_exact_as_torchs(on_hopper, dtype, with_bias):
    inputs, direction = problem(dtype=dtype, with_bias=with_bias)
    ours, theirs = (results(each, inputs, direction) for each in (mlp, torchs))
    assert on_hopper == [384, 384]
    assert_all_as_exact(results(torchs, double(inputs), direction), ours, theirs)


@EAGER_AND_COMPILED
def test_under_autocast(on_hopper, compiled):
    inputs, direction = problem()
    call = torch.compile(mlp, fullgraph=True, backend="aot_eager") if compiled else mlp
    with torch.autocast(DEVICE, torch.bfloat16):
        ours, theirs = (results(each, inputs, direction) for each in (call, torchs))
    assert on_hopper == [384, 384]
    assert ours["out"].dtype is torch.bfloat16
    assert_all_as_exact(results(torchs, double(inputs), direction), ours, theirs)


@EAGER_AND_COMPILED
def test_gradients_of_weights_are_added_to_what_is_there(on_hopper, compiled):
    inputs, direction = problem()
    call = torch.compile(mlp, fullgraph=True, backend="aot_eager") if compiled else mlp
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    weights = leaves["first"], leaves["second"]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
        sum_in_product(weight, torch.bfloat16)
    with torch.autocast(DEVICE, torch.bfloat16):
        theirs = results(torchs, inputs, direction)
        for _ in range(2):
            with summing():
                out = call(*leaves.values())
            d_x, d_bias = torch.autograd.grad(out, (leaves["x"], leaves["bias"]), direction.to(out.dtype))
    assert on_hopper == [384] * 4
    d_first, d_second = (weight.grad / 2 for weight in weights)
    ours = {"out": out.detach(), "d_x": d_x, "d_first": d_first, "d_bias": d_bias, "d_second": d_second}
    assert_all_as_exact(results(torchs, double(inputs), direction), ours, theirs)


def test_recomputed(on_hopper):
    inputs, direction = problem(dtype=torch.bfloat16)

    def recomputed(*inputs):
        return torch.utils.checkpoint.checkpoint(mlp, *inputs, use_reentrant=False)

    torch.testing.assert_close(
        results(recomputed, inputs, direction), results(mlp, inputs, direction), rtol=0, atol=0
    )
    assert on_hopper == [384] * 5


def test_operators_pass_opcheck(on_hopper):
    inputs, direction = problem(dtype=torch.bfloat16)
    x, first, bias, second = (each.requires_grad_() for each in inputs.values())
    # The fourth of its checks differentiates the hidden layer, which has no gradient.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(room.gelu_mlp, (x, first, bias, second, None, None), test_utils=checks)
    pre = torch.randn(3, 128, 256, dtype=x.dtype, device=DEVICE)
    torch.library.opcheck(room.gelu_mlp_backward, (direction, second.detach(), pre, bias.detach()))


def test_an_exported_program_takes_any_number_of_rows(on_hopper):
    class Module(torch.nn.Module):
        def forward(self, *inputs):
            return mlp(*inputs)

    inputs, _ = problem(dtype=torch.float16)
    shapes = ({0: torch.export.Dim("rows", min=2, max=64)}, None, None, None)
    exported = torch.export.export(Module(), tuple(inputs.values()), dynamic_shapes=(shapes,)).module()
    for rows in (3, 5):
        inputs["x"] = torch.randn(rows, 128, 64, device=DEVICE, dtype=torch.float16)
        torch.testing.assert_close(exported(*inputs.values()), torchs(*inputs.values()), rtol=1e-2, atol=1e-2)
    assert not on_hopper


def test_fake_tensors_of_a_gpu_take_none():
    with FakeTensorMode():
        sizes = ((2048, 64), (128, 64), (128,), (64, 128))
        inputs = [torch.empty(size, device="cuda", dtype=torch.bfloat16) for size in sizes]
        assert mlp(*inputs).shape == (2048, 64)


def test_compiled_autograd_differentiates_an_eager_forward(on_hopper):
    inputs, direction = problem(dtype=torch.bfloat16)
    expected = results(mlp, inputs, direction)
    with compiled_autograd(torch.compile(backend="eager", fullgraph=True)):
        torch.testing.assert_close(results(mlp, inputs, direction), expected)
    assert on_hopper == [384] * 4


def test_torchs_flop_counter_counts_all_six_products(on_hopper):
    inputs, direction = problem(dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        results(mlp, inputs, direction)
    assert counter.get_total_flops() == 6 * 2 * 384 * 64 * 256


@pytest.mark.parametrize(
    ("trained", "products"), [({"x"}, 4), ({"first"}, 4), ({"bias"}, 3), ({"second"}, 3), ({"x", "bias"}, 4)]
)
def test_what_is_frozen_costs_its_gradient_no_product(on_hopper, trained, products):
    """Beside the forward's two: one for the gradient of the hidden layer, one for each other gradient."""
    inputs, direction = problem(dtype=torch.bfloat16)
    every = results(mlp, inputs, direction)
    leaves = {name: x.detach().requires_grad_(name in trained) for name, x in inputs.items()}
    with FlopCounterMode(display=False) as counter:
        mlp(**leaves).backward(direction)
    assert counter.get_total_flops() == products * 2 * 384 * 64 * 256
    for name, leaf in leaves.items():
        assert leaf.grad is None if name not in trained else torch.equal(leaf.grad, every[f"d_{name}"])


@pytest.mark.parametrize("name", NAMES)
def test_a_second_derivative_is_refused(on_hopper, name):
    inputs, _ = problem(dtype=torch.bfloat16)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    (gradient,) = torch.autograd.grad(mlp(**leaves).sum(), leaves[name], create_graph=True)
    with pytest.raises(FusedError, match="no second derivative"):
        gradient.sum().backward()


def test_a_bias_of_another_shape_is_refused(on_hopper):
    inputs, _ = problem(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"bias is \(255,\); it must be \(256,\)"):
        mlp(**inputs | {"bias": inputs["bias"][1:]})


@pytest.mark.parametrize(
    "what",
    [{"rows": (127,)}, {"width": 192}, {"inner": 96}, {"dtype": torch.float32}, {"rows": (64,)}],
    ids=str,
)
def test_other_shapes_and_float32_take_the_layers_one_by_one(on_hopper, what):
    inputs, direction = problem(**({"dtype": torch.float16} | what))
    results(mlp, inputs, direction)
    assert not on_hopper


def kept(function, inputs, direction):
    """Bytes that are kept for the backward, of inputs and others."""
    sizes = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.update({x.data_ptr(): x.untyped_storage().nbytes()}) or x, lambda x: x
    ):
        results(function, inputs, direction)
    return sum(sizes.values())


@WITH_BIAS
def test_it_keeps_no_more_than_the_layers_one_by_one(on_hopper, monkeypatch, with_bias):
    inputs, direction = problem(dtype=torch.float16, with_bias=with_bias)
    together = kept(mlp, inputs, direction)
    monkeypatch.setattr(room, "MIN_ROWS", 1024)
    assert together == kept(mlp, inputs, direction)
    assert on_hopper == [384, 384]


def at_size(rows, width, dtype, with_bias=True):
    inputs, direction = problem((rows // 128, 128), 4 * width, width, with_bias=with_bias)
    return {name: None if x is None else x.to(dtype) for name, x in inputs.items()}, direction


@pytest.mark.gpu
@WITH_BIAS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [768, 1024, 1280, 1600])
def test_at_the_sizes_of_gpt2(width, dtype, with_bias):
    inputs, direction = at_size(8448, width, dtype, with_bias)
    assert room._fits(inputs["x"], inputs["first"], inputs["second"])
    ours, theirs = (results(each, inputs, direction) for each in (mlp, torchs))
    assert_all_as_close(results(torchs, double(inputs), direction), ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compiled_in_micro_steps_at_size(dtype):
    torch.compiler.reset()
    inputs, direction = at_size(16384, 768, torch.float32)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    weights = leaves["first"], leaves["second"]
    call = torch.compile(mlp, fullgraph=True)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
        sum_in_product(weight, dtype)
    with torch.autocast("cuda", dtype):
        theirs = results(torchs, inputs, direction)
        for _ in range(2):
            with summing():
                out = call(*leaves.values())
            d_x, d_bias = torch.autograd.grad(out, (leaves["x"], leaves["bias"]), direction.to(out.dtype))
    d_first, d_second = (weight.grad / 2 for weight in weights)
    ours = {"out": out.detach(), "d_x": d_x, "d_first": d_first, "d_bias": d_bias, "d_second": d_second}
    assert_all_as_close(results(torchs, double(inputs), direction), ours, theirs)


@pytest.mark.gpu
def test_repeats_bit_for_bit_at_size():
    inputs, direction = at_size(65536, 768, torch.bfloat16)
    assert_repeats(results, mlp, inputs, direction, times=20)


@pytest.mark.gpu
def test_huge_values_give_the_limits_of_gelus_derivative():
    inputs, _ = at_size(4096, 768, torch.bfloat16)
    inputs["bias"][: len(HUGE)] = HUGE

    def d_x(function, inputs):
        x = inputs["x"].detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(**inputs | {"x": x}), x, torch.ones_like(x))
        return gradient.double()

    torch.testing.assert_close(d_x(mlp, inputs), d_x(torchs, double(inputs)), rtol=2e-2, atol=3e-2)
