"""The token embedding's gradient, against the same in float64 and against itself."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from kernels.layers import FusedError
from kernels.layers import embedding as room
from kernels.layers.checks import check_device
from kernels.layers.embedding import TILE, embedding
from kernels.operators import NAMESPACE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNK = TILE.chunk
ROWS = 40  # of the table


def problem(runs, dtype=torch.float32, width=48, rows=ROWS):
    """Tokens, the first runs[0] times and so on, in any order; a table, and what the output's gradient is like."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    names = torch.randperm(rows, generator=generator, device=DEVICE)[: len(runs)].sort().values
    tokens = names.repeat_interleave(torch.tensor(runs, dtype=torch.long, device=DEVICE))
    tokens = tokens[torch.randperm(len(tokens), generator=generator, device=DEVICE)]
    shapes = (rows, width), (len(tokens), width)
    table, direction = (torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes)
    return tokens, table.requires_grad_(), direction


def gradient(tokens, table, direction, function=embedding):
    (found,) = torch.autograd.grad(function(tokens, table), table, direction)
    return found


def exact(tokens, table, direction):
    zeros = torch.zeros(table.shape, dtype=torch.float64, device=table.device)
    return zeros.index_add_(0, tokens.flatten(), direction.double().flatten(0, -2))


def assert_exact(problem):
    tokens, table, _ = problem
    found = gradient(*problem)
    assert found.dtype is table.dtype
    # Of float32 sums of a few hundred numbers of about 1. In 16 bits there is one rounding, at the end.
    close = {"rtol": torch.finfo(table.dtype).eps, "atol": 2e-5}
    torch.testing.assert_close(found.double(), exact(*problem), **close)
    assert torch.equal(embedding(tokens, table), F.embedding(tokens, table))


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param((1,), id="one token"),
        pytest.param((1,) * ROWS, id="all different"),
        pytest.param((5, 1, CHUNK - 7, 1, 2), id="a run up to a chunk's end"),
        pytest.param((CHUNK, CHUNK, 3), id="runs that are chunks"),
        pytest.param((CHUNK - 1, CHUNK, CHUNK + 1), id="runs that come in and go on"),
        pytest.param((CHUNK + 1, CHUNK - 2, 1), id="a run into the next chunk's first place"),
        pytest.param((3, 7 * CHUNK, 2), id="a run of more chunks than are added at once"),
        pytest.param((CHUNK + 1,), id="all the same"),
    ],
)
def test_gradient_is_exact_for_all_runs_of_equal_tokens(runs):
    assert_exact(problem(runs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 48, 64])
def test_gradient_is_exact_in_16_bits_and_at_other_widths(dtype, width):
    assert_exact(problem((3, CHUNK, 1), dtype, width))


def test_gradient_of_no_tokens_is_zero():
    assert not gradient(*problem(())).any()


def test_tokens_and_gradients_of_any_strides():
    tokens, table, direction = problem((4, 1, 7))
    plain = gradient(tokens.view(3, 4), table, direction.view(3, 4, -1))
    turned = tokens.view(3, 4).T, table, direction.view(3, 4, -1).transpose(0, 1)
    torch.testing.assert_close(gradient(*turned), plain)
    assert gradient(tokens, table, torch.ones((), device=DEVICE).expand(12, 48)).sum() == 12 * 48
    torch.testing.assert_close(gradient(tokens.int(), table, direction), gradient(tokens, table, direction))


def repeats(problem, count):
    first, *others = (gradient(*problem) for _ in range(count))
    return all(torch.equal(other, first) for other in others)


def test_repeats_bit_for_bit():
    assert repeats(problem((3, 2 * CHUNK, 1)), 2)


def test_the_operators_pass_torchs_own_checks():
    tokens, table, direction = problem((4, 1, 7))
    torch.library.opcheck(room.token_rows, (tokens, table, None))
    torch.library.opcheck(room.embedding_gradient, (direction, tokens, ROWS))


def test_torch_compile_sees_torchs_forward_and_our_gradient():
    """So that torch.compile can fuse the forward with what follows it."""
    seen = []

    def noting(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    def model(tokens, table):
        return embedding(tokens, table) * 2

    given = problem((4, 1, 7))
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=noting))
    torch.testing.assert_close(gradient(*given, compiled), gradient(*given, model), rtol=0, atol=0)
    ours = [each for each in seen if each.startswith(NAMESPACE)]
    assert "aten.embedding.default" in seen
    assert ours == [str(room.embedding_gradient)]


def test_an_unsupported_dtype_or_device_is_refused(monkeypatch):
    tokens, table, _ = problem((4, 1, 7))
    with pytest.raises(ValueError, match=r"weight is torch\.float64"):
        embedding(tokens, table.double())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    check_device.cache_clear()
    with pytest.raises(FusedError, match="embedding needs a CUDA device, not cpu"):
        embedding(tokens.cpu(), table.cpu())


def test_a_meta_tensor_needs_no_device(monkeypatch):
    """As for the other layers, forward and backward, without the interpreter too."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    check_device.cache_clear()
    table = torch.empty(8, 16, device="meta", requires_grad=True)
    out = embedding(torch.empty(2, 3, dtype=torch.int64, device="meta"), table)
    out.sum().backward()
    assert out.shape == (2, 3, 16)
    assert table.grad.shape == (8, 16)


def at_size(dtype):
    """16 x 1,024 tokens of GPT-2's, one of them as often as the commonest is in text."""
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = torch.randint(50257, (16, 1024), generator=generator, device="cuda")
    common = torch.rand(tokens.shape, generator=generator, device="cuda") < 0.04
    table = torch.zeros(50304, 768, dtype=dtype, device="cuda", requires_grad=True)
    direction = torch.randn(16, 1024, 768, generator=generator, device="cuda").to(dtype)
    return tokens.masked_fill(common, 13), table, direction


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_exact_and_repeated_bit_for_bit_at_size(dtype, compiled):
    given = at_size(dtype)
    assert_exact(given)
    function = torch.compile(embedding, fullgraph=True) if compiled else embedding
    first = gradient(*given)
    assert all(torch.equal(gradient(*given, function), first) for _ in range(50))
