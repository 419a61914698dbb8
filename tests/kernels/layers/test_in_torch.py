"""The fused layers inside PyTorch: one graph for all lengths, torch.export, compiled autograd, extreme widths."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.compiled_autograd import _enable as compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from kernels import get_attention
from kernels.layers import FusedError
from kernels.layers.dropout import dropout
from kernels.layers.embedding import embedding
from kernels.layers.linear_add_norm import linear_add_norm
from kernels.layers.linear_cross_entropy import linear_cross_entropy
from kernels.layers.linear_gelu import linear_gelu
from kernels.layers.mlp import mlp
from kernels.philox import row_mask
from model.config import GPTConfig
from model.gpt import GPT
from tests.kernels.accuracy import assert_all_as_exact
from training.config import Layers
from training.layers import make_gpt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(len(shape)), device=DEVICE)


def tokens(*shape: int, below: int = 40) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(shape[-1])).to(DEVICE)


class Layer(torch.nn.Module):
    """A fused layer with its parameters; called with inputs (length, ...)."""

    def __init__(self, function: Callable[..., object], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.own = torch.nn.ParameterList(torch.nn.Parameter(normal(*shape)) for shape in shapes)
        self.function = function

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        # Torch 2.11's Dynamo unpacks no ParameterList.
        own = [self.own[index] for index in range(len(self.own))]
        results = self.function(*inputs, *own)
        return results if isinstance(results, tuple) else (results,)


# name -> (the layer, inputs of a length)
LAYERS = {
    "linear_gelu": (lambda: Layer(linear_gelu, (32, 16), (32,)), lambda n: (normal(n, 16),)),
    "mlp": (lambda: Layer(mlp, (32, 16), (32,), (16, 32)), lambda n: (normal(n, 16),)),
    "linear_add_norm": (
        lambda: Layer(linear_add_norm, (16, 8), (16,), (16,), (16,)),
        lambda n: (normal(n, 16), normal(n, 8)),
    ),
    "linear_add_norm with dropout": (
        lambda: Layer(
            lambda *each: linear_add_norm(*each, dropout_p=0.2, dropout_seed=3), (16, 8), (16,), (16,), (16,)
        ),
        lambda n: (normal(n, 16), normal(n, 8)),
    ),
    "embedding": (lambda: Layer(embedding, (40, 16)), lambda n: (tokens(n),)),
    "dropout": (lambda: Layer(lambda x, gain: dropout(x * gain, 0.3, 1), (16,)), lambda n: (normal(n, 16),)),
    "linear_cross_entropy": (
        lambda: Layer(
            lambda hidden, targets, head: linear_cross_entropy(hidden, head, targets, 39), (40, 16)
        ),
        lambda n: (normal(n, 16), tokens(n, below=39)),
    ),
}


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> tuple[Layer, Callable[[int], tuple[Tensor, ...]]]:
    make, inputs = LAYERS[request.param]
    return make(), inputs


def gradients(layer: Layer, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(sum(x.square().sum() for x in results), list(layer.own))


def test_one_graph_serves_every_length(layer) -> None:
    module, inputs = layer
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for length in (9, 5, 12):
        given = inputs(length)
        for x in given:
            torch._dynamo.mark_dynamic(x, 0)
        results, wanted = compiled(*given), module(*given)
        torch.testing.assert_close(results, wanted)
        torch.testing.assert_close(gradients(module, results), gradients(module, wanted))
    assert counter.frame_count == 1


def test_an_exported_layer_takes_any_length(layer) -> None:
    module, inputs = layer
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(module, inputs(9), dynamic_shapes=(tuple({0: length} for _ in inputs(9)),))
    for each in (5, 33):
        torch.testing.assert_close(exported.module()(*inputs(each)), module(*inputs(each)))


@pytest.mark.one_in(5)
def test_compiled_autograd_differentiates_an_eager_forward(layer) -> None:
    module, inputs = layer
    wanted = gradients(module, module(*inputs(9)))
    results = module(*inputs(9))
    with compiled_autograd(torch.compile(backend="eager", fullgraph=True)):
        found = gradients(module, results)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", ["embedding", "linear_add_norm", "linear_gelu"])
def test_a_second_derivative_is_refused(name: str) -> None:
    make, inputs = LAYERS[name]
    module = make()
    squares = sum(x.square().sum() for x in module(*inputs(9)))
    gradient, *_ = torch.autograd.grad(squares, list(module.own), create_graph=True)
    with pytest.raises(FusedError, match="no second derivative"):
        gradient.sum().backward()


def fused_gpt(dropout_p: float) -> GPT:
    config = GPTConfig(vocab_size=40, seq_len=64, n_layer=1, n_head=2, n_embd=32, dropout=dropout_p)
    generator = torch.Generator().manual_seed(0)
    layers = {"loss": Layers.fused, "block": Layers.fused}
    return make_gpt(config, get_attention("naive"), **layers, generator=generator).to(DEVICE)


@pytest.mark.slow
def test_one_graph_of_the_fused_gpt_trains_at_every_length() -> None:
    model = fused_gpt(dropout_p=0.1)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    seed = torch.tensor(5, device=DEVICE)
    for length in (9, 5, 30):
        given = tokens(2, length)
        torch._dynamo.mark_dynamic(given, 1)
        loss, wanted = (each(given, given, dropout_seed=seed) for each in (compiled, model))
        torch.testing.assert_close(loss, wanted)
    parameters = list(model.parameters())
    torch.testing.assert_close(*(torch.autograd.grad(each, parameters) for each in (loss, wanted)))
    assert counter.frame_count == 1


def test_an_exported_fused_gpt_takes_any_length() -> None:
    model = fused_gpt(dropout_p=0.0)
    shapes = {1: torch.export.Dim("length", min=2, max=64)}
    exported = torch.export.export(model, (tokens(2, 9),), dynamic_shapes={"tokens": shapes}).module()
    for length in (5, 33):
        torch.testing.assert_close(exported(tokens(2, length)), model(tokens(2, length)))


def exact_results(function, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Outputs and gradients by number."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum(
        (x * torch.linspace(-1, 1, x.shape[-1], device=x.device, dtype=x.dtype)).sum() for x in results
    )
    return dict(enumerate((*(x.detach() for x in results), *torch.autograd.grad(loss, inputs))))


def torchs_add_norm(x, y, weight, bias, gain, shift):
    x = x + F.linear(y, weight, bias)
    return x, F.layer_norm(x, x.shape[-1:], gain, shift)


@pytest.mark.parametrize("width", [4097, 16384, 20000])
def test_a_row_of_linear_add_norm_may_be_wide(width: int) -> None:
    """On a GPU the width once wanted more shared memory than there is."""
    shapes = ((3, width), (3, 8), (width, 8), (width,), (width,), (width,))
    inputs = tuple(normal(*shape) for shape in shapes)
    exact = exact_results(torchs_add_norm, tuple(x.double() for x in inputs))
    ours, theirs = (exact_results(each, inputs) for each in (linear_add_norm, torchs_add_norm))
    assert_all_as_exact(exact, ours, theirs)


@pytest.mark.slow
def test_a_row_of_dropout_may_be_longer_than_a_block_of_triton() -> None:
    x = normal(2, 2**20 + 3)
    keep = row_mask(7, 0.3, *x.shape, x.device)
    torch.testing.assert_close(dropout(x, 0.3, 7), torch.where(keep, x / 0.7, 0.0))


def test_dropout_of_a_number_is_that_of_a_row_of_one() -> None:
    for seed in range(8):
        x = torch.tensor(2.0, device=DEVICE, requires_grad=True)
        out = dropout(x, 0.5, seed)
        assert out.shape == ()
        assert torch.equal(out, dropout(x[None], 0.5, seed)[0])
        (d_x,) = torch.autograd.grad(out, x)
        assert torch.equal(d_x, out / 2)


def test_a_width_of_zero_gives_what_torch_gives() -> None:
    empty = torch.empty(3, 0, device=DEVICE)
    none = torch.empty(0, device=DEVICE)
    cases = (
        (
            linear_gelu,
            lambda x, w, b: F.gelu(F.linear(x, w, b)),
            (normal(3, 4), torch.empty(0, 4, device=DEVICE), none),
        ),
        (
            linear_add_norm,
            torchs_add_norm,
            (empty, normal(3, 4), torch.empty(0, 4, device=DEVICE), none, none, none),
        ),
        (lambda x: dropout(x, 0.5, 1), torch.clone, (empty,)),
        (
            lambda w: embedding(tokens(3), w),
            lambda w: F.embedding(tokens(3).to(w.device), w),
            (torch.empty(40, 0, device=DEVICE),),
        ),
    )
    for ours, torchs, inputs in cases:
        # Of torch on a CPU: on a GPU its embedding's gradient reads out of bounds (2.13), and all that follows fails.
        theirs = exact_results(torchs, tuple(x.cpu() for x in inputs))
        torch.testing.assert_close(exact_results(ours, inputs), theirs, check_device=False)


@pytest.mark.parametrize("width", [2**18 + 1, 2**21])
def test_a_width_that_no_kernel_takes_is_refused(width: int) -> None:
    x, vector = torch.zeros(1, width, device=DEVICE), torch.zeros(width, device=DEVICE)
    with pytest.raises(FusedError, match=f"take a width up to 262144, not {width}; use model.block=torch"):
        linear_add_norm(x, torch.zeros(1, 1, device=DEVICE), vector[:, None], vector, vector, vector)
