"""Linear layer and GELU in one function, against the same in float64 and against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from kernels.layers import linear_gelu as room
from kernels.layers.linear_gelu import linear_gelu
from tests.kernels.accuracy import assert_all_as_close, assert_all_as_exact, double, results
from tests.kernels.bits import assert_repeats

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INNER = 24
NAMES = ("x", "weight", "bias")


def torchs(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def problem(dtype, leading=(7,), width=100, inner=INNER, seed=0):
    """The inputs by name, and what the output's gradient is like."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shapes = ((*leading, inner), (width, inner), (width,), (*leading, width))
    x, weight, bias, direction = (
        torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes
    )
    weight *= inner**-0.5
    return dict(zip(NAMES, (x, weight, bias), strict=True)), direction


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("leading", "width"), [((7,), 100), ((2, 3), 33), ((1,), 1280), ((40,), 192)])
def test_output_and_gradients_as_exact_as_torchs(dtype, leading, width):
    inputs, direction = problem(dtype, leading, width)
    exact = results(torchs, double(inputs), direction)
    assert_all_as_exact(exact, results(linear_gelu, inputs, direction), results(torchs, inputs, direction))


def test_under_autocast():
    inputs, direction = problem(torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        ours, theirs = (results(each, inputs, direction) for each in (linear_gelu, torchs))
    assert ours["out"].dtype is torch.bfloat16
    assert_all_as_exact(results(torchs, double(inputs), direction), ours, theirs)


@pytest.mark.parametrize("width", [1024, 1100])
def test_gradients_are_exact_if_a_program_processes_many_rows(width):
    rows = 3 * room.BACKWARD.programs * room.BACKWARD.rows + 1
    inputs, direction = problem(torch.float32, (rows,), width)
    exact = results(torchs, double(inputs), direction)
    assert_all_as_exact(exact, results(linear_gelu, inputs, direction), results(torchs, inputs, direction))


def test_an_input_without_rows_gives_an_empty_output():
    inputs, direction = problem(torch.float32, (0,))
    found = results(linear_gelu, inputs, direction)
    assert found["out"].shape == (0, 100)
    assert not found["d_bias"].any()


@pytest.mark.filterwarnings("ignore:overflow")  # of numpy, in the interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_values_give_the_limits_of_gelu_and_its_derivative(dtype):
    """GELU(x) goes to x and to 0, its derivative to 1 and to 0; nowhere is there a NaN."""
    sizes = torch.tensor([5e0, 8e0, 1e1, 2e1, 1e2, 1e3, 1e5, 1e10, 1e19, 1e20, 1e25, 1e38, 3e38])
    pre = torch.cat([-sizes, sizes]).to(DEVICE, dtype)[None].requires_grad_()
    out = room.bias_gelu(pre, torch.zeros(26, device=DEVICE))
    (d_pre,) = torch.autograd.grad(out, pre, torch.ones_like(out))
    exact = pre.detach().double().clamp(-1e50, 1e50).requires_grad_()
    expected = F.gelu(exact, approximate="tanh")
    (d_expected,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-5)
    d_expected = torch.where(d_expected.isfinite(), d_expected, (exact > 0).double())
    torch.testing.assert_close(d_pre.double(), d_expected, rtol=1e-2, atol=1e-4)


def test_nan_stays_nan():
    pre = torch.full((1, 4), float("nan"), device=DEVICE, requires_grad=True)
    out = room.bias_gelu(pre, torch.zeros(4, device=DEVICE))
    (d_pre,) = torch.autograd.grad(out.sum(), pre)
    assert out.isnan().all()
    assert d_pre.isnan().all()


def test_inputs_of_any_strides():
    inputs, direction = problem(torch.float32, (4, 6))
    plain = results(linear_gelu, inputs, direction)
    strided = {
        "x": inputs["x"].transpose(0, 1).contiguous().transpose(0, 1),
        "weight": inputs["weight"].T.contiguous().T,
        "bias": inputs["bias"].repeat_interleave(2)[::2],
    }
    turned = direction.transpose(0, 2).contiguous().transpose(0, 2)
    torch.testing.assert_close(results(linear_gelu, strided, turned), plain)
    pre = torch.randn(100, 4, device=DEVICE).T.requires_grad_()
    out = room.bias_gelu(pre, inputs["bias"])
    torch.testing.assert_close(out, F.gelu(pre + inputs["bias"], approximate="tanh"))
    out.sum().backward()  # a gradient whose strides are all 0
    assert pre.grad.isfinite().all()


def test_repeats_bit_for_bit():
    assert_repeats(results, linear_gelu, *problem(torch.float32, (50,)), times=2)


def test_operators_pass_opcheck_and_compile_without_graph_breaks():
    inputs, direction = problem(torch.float32)
    pre, bias = direction.clone().requires_grad_(), inputs["bias"].clone().requires_grad_()
    torch.library.opcheck(room.bias_gelu, (pre, bias))
    torch.library.opcheck(room.bias_gelu_backward, (direction, pre.detach(), bias.detach()))
    compiled = torch.compile(linear_gelu, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(compiled, inputs, direction), results(linear_gelu, inputs, direction))


def test_inputs_of_wrong_shape_or_dtype_are_refused():
    inputs, _ = problem(torch.float32)
    with pytest.raises(ValueError, match=r"bias is \(99,\); it must be \(100,\)"):
        linear_gelu(**inputs | {"bias": inputs["bias"][1:]})
    with pytest.raises(ValueError, match="float64"):
        linear_gelu(*double(inputs).values())


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(8192, 768), (65536, 768), (4096, 1600)])
def test_under_autocast_at_the_size_of_gpt2(rows, width):
    inputs, direction = problem(torch.float32, (rows,), 4 * width, inner=width)
    with torch.autocast("cuda", torch.bfloat16):
        ours, theirs = (results(each, inputs, direction) for each in (linear_gelu, torchs))
    assert_all_as_close(results(torchs, double(inputs), direction), ours, theirs)


@pytest.mark.gpu
def test_repeats_bit_for_bit_at_size():
    with torch.autocast("cuda", torch.bfloat16):
        assert_repeats(results, linear_gelu, *problem(torch.float32, (65536,), 3072, inner=64), times=49)
