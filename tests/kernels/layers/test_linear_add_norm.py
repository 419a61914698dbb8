"""Linear layer, residual and LayerNorm in one function, against the same in float64 and against torch's own."""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from kernels.layers import FusedError, check_fused
from kernels.layers import linear_add_norm as room
from kernels.layers.checks import check_device, make_known_to_inductor
from kernels.layers.linear_add_norm import linear_add_norm
from kernels.philox import row_mask
from tests.kernels.accuracy import assert_all_as_close, assert_all_as_exact, double
from tests.kernels.bits import assert_repeats

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INNER = 24
NAMES = ("x", "y", "weight", "bias", "gain", "shift")


def torchs(x, y, weight, bias, gain, shift, dropout_p=0.0, dropout_seed=None, eps=1e-5):
    update = F.linear(y, weight, bias)
    if dropout_p:
        mask = row_mask(dropout_seed, dropout_p, update.shape[:-1].numel(), update.shape[-1], update.device)
        update = update * mask.view(update.shape) / (1 - dropout_p)
    x = x + update
    return x, F.layer_norm(x, x.shape[-1:], gain, shift, eps)


def problem(dtype, shape=(7, 48), inner=INNER, stream=None, seed=0):
    """The inputs by name (the stream in another dtype if one is given) and the outputs' gradients; all values are
    representable in bfloat16, so that no dtype rounds them."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    width = shape[-1]
    shapes = (shape, (*shape[:-1], inner), (width, inner), (width,), (width,), (width,))
    x, *others = (torch.randn(each, generator=generator, device=DEVICE) for each in shapes)
    drawn = (torch.randn(shape, generator=generator, device=DEVICE) for _ in range(2))
    directions = [each.bfloat16().to(dtype) for each in drawn]
    inputs = (x.to(stream or dtype), *(each.to(dtype) for each in others))
    return dict(zip(NAMES, inputs, strict=True)), directions


def results(function, inputs, directions, used=(True, True), **options):
    """Outputs and gradients by name; the loss is the product with `directions` of the outputs that are `used`."""
    inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    outputs = function(*inputs.values(), **options)
    loss = sum((out.double() * d).sum() for out, d, use in zip(outputs, directions, used, strict=True) if use)
    gradients = torch.autograd.grad(loss, inputs.values(), allow_unused=True)
    found = {"x_new": outputs[0].detach(), "normalised": outputs[1].detach()}
    named = zip(inputs, gradients, strict=True)
    return found | {f"d_{name}": gradient for name, gradient in named if gradient is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(7, 48), (2, 3, 100), (1, 768), (5, 1), (5, 33)])
def test_outputs_and_gradients_as_exact_as_torchs(dtype, shape):
    inputs, directions = problem(dtype, shape)
    exact = results(torchs, double(inputs), directions)
    ours, theirs = (results(each, inputs, directions) for each in (linear_add_norm, torchs))
    assert_all_as_exact(exact, ours, theirs, rounded_by_one(inputs, directions) if shape[-1] == 1 else {})


def rounded_by_one(inputs, directions, dropout_p=0.0):
    """With a width of 1, how far the gradients may be off, by name: g - mean(g) is 0, and torch's is, but fused with
    the product g = gain * d_normalised it is what g was rounded by, half an ulp, times rstd = eps**-0.5."""
    rows, half_ulp = len(inputs["x"]), torch.finfo(torch.float32).eps / 2
    d_x = half_ulp * (inputs["gain"] * directions[1]).abs().max() * 1e-5**-0.5
    weight, y = (inputs[name].abs().max() / (1 - dropout_p) for name in ("weight", "y"))
    d_bias = d_x * rows / (1 - dropout_p)
    return {"d_x": d_x, "d_y": d_x * weight, "d_weight": d_x * y * rows, "d_bias": d_bias}


@pytest.mark.parametrize("used", [(True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_exact_if_only_one_output_is_used(dtype, used):
    """In bfloat16 with a float32 residual stream, where stream and product have separate gradients."""
    inputs, directions = problem(torch.float32)
    with torch.autocast(DEVICE, dtype, enabled=dtype is not torch.float32):
        ours, theirs = (results(each, inputs, directions, used) for each in (linear_add_norm, torchs))
    theirs["normalised"] = theirs["normalised"].to(dtype)
    assert_all_as_exact(results(torchs, double(inputs), directions, used), ours, theirs)


def test_autocast_keeps_the_stream_in_float32():
    inputs, _ = problem(torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        x_new, normalised = linear_add_norm(*inputs.values())
    assert (x_new.dtype, normalised.dtype) == (torch.float32, torch.bfloat16)


def test_a_float16_residual_stream_with_a_float32_product_is_accurate():
    inputs, directions = problem(torch.float32, stream=torch.float16)
    exact = results(torchs, double(inputs), directions)
    ours = results(linear_add_norm, inputs, directions)
    assert (ours["x_new"].dtype, ours["normalised"].dtype) == (torch.float16, torch.float32)
    for name, x in exact.items():
        assert (ours[name] - x).abs().max() <= 1e-3 * x.abs().max(), name


def test_an_input_without_rows_gives_empty_outputs():
    inputs, directions = problem(torch.float32, (0, 48))
    found = results(linear_add_norm, inputs, directions)
    assert found["x_new"].shape == found["normalised"].shape == (0, 48)
    assert not any(found[f"d_{name}"].any() for name in NAMES[2:])


def test_inputs_of_any_strides():
    inputs, directions = problem(torch.float32, (4, 6, 48))
    plain = results(linear_add_norm, inputs, directions)
    strided = {
        "x": inputs["x"].transpose(0, 1).contiguous().transpose(0, 1),
        "y": inputs["y"],
        "weight": inputs["weight"].T.contiguous().T,
        **{name: inputs[name].repeat_interleave(2)[::2] for name in NAMES[3:]},
    }
    turned = [each.transpose(0, 2).contiguous().transpose(0, 2) for each in directions]
    torch.testing.assert_close(results(linear_add_norm, strided, turned), plain)
    every = [torch.ones((), device=DEVICE).expand_as(each) for each in directions]  # strides of 0
    ours, theirs = (
        torch.autograd.grad(
            each(*(x.requires_grad_() for x in inputs.values())), list(inputs.values()), every
        )
        for each in (linear_add_norm, torchs)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(7, 48), (2, 3, 100), (5, 1), (5, 33)])
def test_dropout_follows_the_mask(dtype, shape, used):
    inputs, directions = problem(dtype, shape)
    dropout = {"dropout_p": 0.25, "dropout_seed": 2**40 + 3}
    exact = results(torchs, double(inputs), directions, used, **dropout)
    ours, theirs = (results(each, inputs, directions, used, **dropout) for each in (linear_add_norm, torchs))
    besides = rounded_by_one(inputs, directions, dropout["dropout_p"]) if shape[-1] == 1 else {}
    assert_all_as_exact(exact, ours, theirs, besides)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_under_autocast_and_compiled(dtype):
    inputs, directions = problem(torch.float32, (40, 48))
    compiled = torch.compile(linear_add_norm, fullgraph=True, backend="aot_eager")
    dropout = {"dropout_p": 0.3, "dropout_seed": torch.tensor(5, device=DEVICE)}
    with torch.autocast(DEVICE, dtype, enabled=dtype is not torch.float32):
        ours = results(linear_add_norm, inputs, directions, **dropout)
        torch.testing.assert_close(results(compiled, inputs, directions, **dropout), ours)
        update = ours["x_new"] - inputs["x"]
        other = results(linear_add_norm, inputs, directions, **dropout | {"dropout_seed": 6})
    assert torch.equal(update != 0, row_mask(5, 0.3, 40, 48, DEVICE))
    assert not torch.equal(other["x_new"], ours["x_new"])


def test_an_invalid_dropout_probability_or_seed_is_refused():
    inputs, _ = problem(torch.float32)
    for options, message in (
        ({"dropout_p": 1.0, "dropout_seed": 1}, "dropout_p must be at least 0 and below 1"),
        ({"dropout_p": 0.1}, "needs dropout_seed"),
        ({"dropout_p": 0.1, "dropout_seed": torch.tensor(1.0)}, "0-d int64 tensor, got torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_add_norm(**inputs, **options)


def test_eps_is_added_to_the_variance():
    inputs, directions = problem(torch.float32)
    ours, theirs = (results(each, inputs, directions, eps=0.1) for each in (linear_add_norm, torchs))
    torch.testing.assert_close(ours, theirs)


def test_a_row_with_a_large_mean_keeps_its_accuracy():
    """The variance of 1000 + N(0, 1) is computed from centred values: a difference of squares would have lost it.

    Many rows, since how a single row's mean is rounded, by us or by torch, is chance. Ours may be off by half an ulp
    in each of the 6 levels of a sum of 48: on an H200 by 1.02e-4, torch 2.15's by 4.97e-5. A difference of squares is
    off by 50 times what is allowed.
    """
    inputs, directions = problem(torch.float32, (100, 48))
    inputs["x"] += 1000
    exact = results(torchs, double(inputs), directions)
    ours, theirs = (results(each, inputs, directions) for each in (linear_add_norm, torchs))
    deviation = exact["x_new"].std(-1, correction=0, keepdim=True)
    of_mean = 6 * torch.finfo(torch.float32).eps / 2 * exact["x_new"].mean(-1, keepdim=True)
    besides = {"normalised": (of_mean * inputs["gain"] / deviation).abs().max()}
    assert_all_as_exact(exact, ours, theirs, besides)


def test_huge_values_stay_finite():
    inputs, directions = problem(torch.float32)
    inputs["x"] *= 1e17
    for name, x in results(linear_add_norm, inputs, directions).items():
        assert x.isfinite().all(), name


def test_repeats_bit_for_bit():
    assert_repeats(results, linear_add_norm, *problem(torch.float32, (50, 48)), times=2)


@pytest.mark.slow
def test_operators_pass_opcheck_and_compile_without_graph_breaks():
    inputs, (d_x_new, d_normalised) = problem(torch.float32, (5, 48))
    x, y, weight, *vectors = (each.requires_grad_() for each in inputs.values())
    update = F.linear(y, weight).detach().bfloat16().requires_grad_()
    seed = torch.tensor(3, device=DEVICE)
    for bias, dropout in ((vectors[0], (None, 0.0)), (None, (None, 0.0)), (vectors[0], (seed, 0.1))):
        torch.library.opcheck(room.add_norm, (x, update, bias, *vectors[1:], *dropout, 1e-5, False))
    torch.library.opcheck(room.add_norm, (x, update, None, vectors[1], None, None, 0.0, 1e-5, True))
    x_new, _, statistics = (
        each.detach() for each in room.add_norm(x, update, *vectors, None, 0.0, 1e-5, False)
    )
    for d, *rest in (
        (d_normalised, None, 0.0, True, True, False),
        (d_normalised.bfloat16(), None, 0.0, True, True, False),
        (d_normalised, None, 0.0, True, False, False),
        (d_normalised, None, 0.0, False, True, True),
        (d_normalised, seed, 0.1, True, True, False),
    ):
        arguments = (d_x_new, d, x_new, statistics, vectors[1].detach(), *rest)
        torch.library.opcheck(room.add_norm_backward, arguments)
    compiled = torch.compile(linear_add_norm, fullgraph=True, backend="aot_eager")
    for used in ((True, True), (False, True)):
        ours = results(compiled, inputs, (d_x_new, d_normalised), used)
        torch.testing.assert_close(ours, results(linear_add_norm, inputs, (d_x_new, d_normalised), used))


def test_only_inputs_that_require_a_gradient_get_one():
    inputs, _ = problem(torch.float32)
    inputs["bias"].requires_grad_()
    linear_add_norm(*inputs.values())[1].square().sum().backward()
    assert [name for name, each in inputs.items() if each.grad is not None] == ["bias"]
    with torch.no_grad():
        assert not linear_add_norm(*inputs.values())[0].requires_grad


def test_inputs_of_wrong_shape_dtype_or_device_are_refused():
    inputs, _ = problem(torch.float32)
    for name in ("x", "bias", "gain", "shift"):
        with pytest.raises(ValueError, match=rf"^{name} is \((6, 48|47,)\); it must be \((7, 48|48,)\)"):
            linear_add_norm(**inputs | {name: inputs[name][1:]})
        with pytest.raises(ValueError, match=f"^{name} is torch.float64"):
            linear_add_norm(**inputs | {name: inputs[name].double()})
        with pytest.raises(ValueError, match=f"^{name} is on meta, but the linear layer's output on"):
            linear_add_norm(**inputs | {name: inputs[name].to("meta")})
    with pytest.raises(ValueError, match=r"^gain is None; it must be \(48,\)"):
        linear_add_norm(**inputs | {"gain": None})
    with pytest.raises(ValueError, match="RMSNorm has no shift: rms=True needs shift=None"):
        linear_add_norm(**inputs, rms=True)


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        FusedError, match=r"model\.block=fused needs a CUDA device, .* use model\.block=torch"
    ):
        check_fused(torch.device("cpu"), "model.block")
    check_device.cache_clear()
    with pytest.raises(FusedError, match="linear_add_norm needs a CUDA device, not cpu"):
        check_device("linear_add_norm", "cpu")


def test_an_operator_gets_an_inductor_fallback_before_pytorch_2_13(monkeypatch):
    """Without one, the inductor of such a PyTorch takes forever to describe it after a few of our layers."""
    from torch._inductor import lowering

    known = {}
    monkeypatch.setattr(lowering, "lowerings", known)
    monkeypatch.setattr(
        lowering, "make_fallback", lambda operator, layout_constraint: known.setdefault(operator)
    )
    make_known_to_inductor(room.add_norm)
    assert bool(known) == (torch.__version__ < "2.13")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    make_known_to_inductor(room.add_norm)
    assert list(known) == [room.add_norm]


@pytest.mark.slow
def test_compiled_fused_kernels_load_16_bytes_and_spill_nothing():
    """For all fused layers at once, about 10 s: a process for each would import Triton and PyTorch again."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    widths = ("1600", "16384")  # 768 is the same code with fewer registers
    command = [sys.executable, "-m", "tests.kernels.layers.compile_kernels", "--width", *widths]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * len(widths) * (3 + 3 + 2 + 2 + 1 + 1)
    for line in lines:
        figures = r"(\d+): \d+ registers, (\d+) B spilled, (\d+) B shared, (\d+) wide, (\d+) narrow"
        width, spilled, shared, wide, narrow = map(int, re.search(figures, line).groups())
        assert shared <= 99 * 1024, line  # what the smallest GPU of these, sm_86, has
        if width > 4096:  # a row is more than the registers hold
            continue
        assert (spilled, narrow) == (0, 0), line
        assert wide >= (2 if "drop_kernel" in line else 4), line


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.1, "dropout_seed": 7}], ids=["plain", "dropout"])
@pytest.mark.parametrize(
    ("rows", "width"), [(8192, 768), (65536, 768), (4096, 1600), (1000, 5120), (300, 16384), (20, 40000)]
)
def test_under_autocast_at_the_size_of_gpt2_and_above(rows, width, dropout):
    inner = min(width, 4096)  # squares of the widest would take 60 GB, of which the kernels see nothing
    inputs, directions = problem(torch.float32, (rows, width), inner)
    inputs["weight"] *= inner**-0.5
    with torch.autocast("cuda", torch.bfloat16):
        ours, theirs = (results(each, inputs, directions, **dropout) for each in (linear_add_norm, torchs))
    theirs["normalised"] = theirs["normalised"].bfloat16()  # as the next linear layer reads it
    assert_all_as_close(results(torchs, double(inputs), directions, **dropout), ours, theirs)


@pytest.mark.gpu
def test_repeats_bit_for_bit_at_size():
    with torch.autocast("cuda", torch.bfloat16):
        assert_repeats(results, linear_add_norm, *problem(torch.float32, (65536, 768), inner=64), times=49)
