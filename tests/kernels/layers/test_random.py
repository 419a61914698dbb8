"""The fused layers on random shapes, dtypes and strides, against float64. TILEGPT_RANDOM_CASES makes them more."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.layers import linear_cross_entropy as head
from kernels.layers.dropout import dropout
from kernels.layers.embedding import embedding
from kernels.layers.linear_add_norm import linear_add_norm
from kernels.layers.linear_cross_entropy import linear_cross_entropy
from kernels.layers.linear_gelu import linear_gelu
from kernels.philox import row_mask
from tests.random_cases import random_cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 2, 3, 7, 16, 33, 64, 100, 127, 128, 129, 256, 300, 1023, 1024, 1025, 2050)


class Draw(random.Random):
    """A case's choices, all from its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.generator = torch.Generator().manual_seed(number)

    def leading(self) -> tuple[int, ...]:
        return tuple(self.choice((0, 1, 1, 2, 3, 5, 9)) for _ in range(self.choice((0, 1, 1, 2, 2, 3))))

    def width(self) -> int:
        return self.choice(WIDTHS)

    def tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, size: float = 1.0, expands: bool = False
    ) -> Tensor:
        """Normal numbers in memory of random strides: dense, transposed, a part of a larger tensor, or equal rows."""
        kinds = ("dense", "dense", "transposed", "part", "expanded" if expands and len(shape) > 1 else "part")
        kind = self.choice(kinds) if shape else "dense"
        if kind == "expanded":
            stored = (1, *shape[1:])
        elif kind == "part":
            stored = (*shape[:-1], shape[-1] + 3)
        else:
            stored = shape[::-1] if kind == "transposed" else shape
        x = (torch.randn(stored, generator=self.generator) * size).to(DEVICE, dtype)
        if kind == "transposed":
            return x.permute(*reversed(range(len(shape))))
        return x.expand(shape) if kind == "expanded" else x[..., : shape[-1]] if kind == "part" else x


def run(function: Callable, inputs: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
    """Results and gradients; the loss is their product with `directions`."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    directions = [d.to(x.dtype) for x, d in zip(results, directions, strict=True)]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, inputs, directions)]


def assert_as_exact(
    ours: Callable, torchs: Callable, inputs: list[Tensor], directions: list[Tensor], besides: Sequence = ()
) -> None:
    """Each result at most three times as far from float64 as torch's, rounded where ours are, plus four ulp of the
    narrowest dtype given, and one of float64's 1: there 1 + tanh is 0 where ours has GELU's tail of 1e-27. Result n
    may be off by besides[n] more."""
    exact = run(torchs, [x.double() for x in inputs], [d.double() for d in directions])
    found, peers = (run(each, inputs, directions) for each in (ours, torchs))
    ulp = max(torch.finfo(x.dtype).eps for x in inputs)
    for number, (x, peer, want) in enumerate(zip(found, peers, exact, strict=True)):
        assert (x.shape, x.dtype) == (want.shape, peer.dtype), number
        if x.numel():
            error, reference = (x - want).abs().max(), (peer - want).abs().max()
            allowed = 3 * reference + 4 * ulp * want.abs().max() + torch.finfo(torch.float64).eps
            allowed += besides[number] if besides else 0.0
            assert error <= allowed, f"result {number} is off by {error:.2e}, allowed {allowed:.2e}"


def wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


@pytest.mark.parametrize("number", random_cases(8))
def test_random_linear_gelu(number: int) -> None:
    draw = Draw(number)
    leading, inner, width = draw.leading(), draw.choice((1, 8, 40)), draw.width()
    dtype, of_bias = draw.choice(DTYPES), draw.choice(DTYPES)
    size = draw.choice((1.0, 1.0, 30.0))
    inputs = [
        draw.tensor((*leading, inner), dtype, expands=True),
        draw.tensor((width, inner), dtype, size * inner**-0.5),
        *([] if number % 4 == 3 else [draw.tensor((width,), of_bias)]),
    ]

    def torchs(x, weight, bias=None):
        pre = F.linear(x, weight)
        moved = wide(pre) if bias is None else wide(pre) + wide(bias)
        return F.gelu(moved, approximate="tanh").to(pre.dtype)

    assert_as_exact(linear_gelu, torchs, inputs, [draw.tensor((*leading, width), dtype, expands=True)])


@pytest.mark.parametrize("number", random_cases(20))
def test_random_linear_add_norm(number: int) -> None:
    draw = Draw(number)
    leading, inner, width = draw.leading(), draw.choice((1, 8, 40)), draw.width()
    stream, dtype, of_vectors = (draw.choice(DTYPES) for _ in range(3))
    eps, seed = draw.choice((1e-5, 1e-5, 0.1)), draw.randrange(-(2**63), 2**63)
    dropout_p = draw.choice((0.0, 0.0, 0.1, 0.6))
    has_bias = draw.random() < 0.7
    rms = number % 4 == 3
    names = ["gain", *["shift"] * (not rms and number % 4 < 2), *["bias"] * has_bias]
    vectors = [draw.tensor((width,), of_vectors) for _ in names]
    inputs = [
        draw.tensor((*leading, width), stream, draw.choice((1.0, 30.0))),
        draw.tensor((*leading, inner), dtype, expands=True),
        draw.tensor((width, inner), dtype, inner**-0.5),
        *vectors,
    ]

    def ours(x, y, weight, *vectors):
        of = dict.fromkeys(("bias", "shift")) | dict(zip(names, vectors, strict=True))
        return linear_add_norm(x, y, weight, **of, dropout_p=dropout_p, dropout_seed=seed, eps=eps, rms=rms)

    def torchs(x, y, weight, *vectors):
        of = dict(zip(names, vectors, strict=True))
        bias, gain, shift = (
            None if of.get(name) is None else wide(of[name]) for name in ("bias", "gain", "shift")
        )
        product = F.linear(y, weight)
        update = wide(product) if bias is None else wide(product) + bias
        if dropout_p:
            keep = row_mask(seed, dropout_p, x.numel() // width, width, x.device).view(x.shape)
            update = torch.where(keep, update / (1 - dropout_p), 0.0)
        x = (wide(x) + update).to(x.dtype)
        if rms:
            normalised = F.rms_norm(wide(x), (width,), gain, eps)
        else:
            normalised = F.layer_norm(wide(x), (width,), gain, shift, eps)
        return x, normalised.to(product.dtype)

    directions = [draw.tensor((*leading, width), each, expands=True) for each in (stream, dtype)]
    assert_as_exact(ours, torchs, inputs, directions)


@pytest.mark.parametrize("number", random_cases(8))
def test_random_embedding(number: int) -> None:
    draw = Draw(number)
    rows, width, dtype = draw.choice((1, 5, 200)), draw.width(), draw.choice(DTYPES)
    leading = draw.choice((draw.leading(), (draw.randrange(300),)))
    used = max(1, draw.choice((1, rows // 10, rows)))  # few: long runs of a token
    tokens = torch.randint(used, leading, generator=draw.generator).to(
        DEVICE, draw.choice((torch.int64, torch.int32))
    )
    table, direction = draw.tensor((rows, width), dtype), draw.tensor((*leading, width), dtype, expands=True)
    out, found = run(lambda weight: embedding(tokens, weight), [table], [direction])
    assert torch.equal(out, F.embedding(tokens, table))
    exact = torch.zeros(rows, width, dtype=torch.float64, device=DEVICE)
    exact.index_add_(0, tokens.flatten(), direction.double().reshape(-1, width))
    terms = torch.zeros_like(exact).index_add_(
        0, tokens.flatten(), direction.double().abs().reshape(-1, width)
    )
    error = (found - exact).abs() - torch.finfo(dtype).eps * exact.abs()
    assert (error <= 4e-7 * terms + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("number", random_cases(8))
def test_random_dropout(number: int) -> None:
    draw = Draw(number)
    shape = draw.choice((draw.leading(), (*draw.leading(), draw.width())))
    dtype, dropout_p = draw.choice(DTYPES), draw.choice((1e-3, 0.1, 0.5, 0.999))
    seed = draw.randrange(-(2**63), 2**63)
    x, direction = (draw.tensor(shape, dtype, expands=True) for _ in range(2))
    width = shape[-1] if shape else 1
    keep = row_mask(seed, dropout_p, x.numel() // max(width, 1), width, x.device).view(shape)
    found = run(lambda x: dropout(x, dropout_p, seed), [x], [direction])
    for result, of in zip(found, (x, direction), strict=True):
        torch.testing.assert_close(result, torch.where(keep, of.double() / (1 - dropout_p), 0.0).to(dtype))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", random_cases(16))
def test_random_linear_cross_entropy(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Draw(number)
    rows, width, vocab_size = (
        draw.choice((0, 1, 7, 150, 300)),
        draw.choice((1, 8, 40)),
        draw.choice((1, 50, 1000)),
    )
    padded = vocab_size + draw.choice((0, 0, 1, 64))
    of_hidden, of_weight = draw.choice(DTYPES), draw.choice(DTYPES)
    inputs = [
        draw.tensor((rows, width), of_hidden, expands=True),
        draw.tensor((padded, width), of_weight, draw.choice((0.3, 3.0))),
    ]
    targets = torch.randint(-(vocab_size // 4), vocab_size, (rows,), generator=draw.generator).to(DEVICE)
    monkeypatch.setattr(head, "CHUNK_BYTES", draw.choice((2**29, padded * 400)))
    options = {}
    if number % 2:  # each other option is off half of the time
        if draw.random() < 0.5:
            inputs.append(draw.tensor((padded,), draw.choice(DTYPES)))
        options = {
            "reduction": draw.choice(("mean", "sum", "none")),
            "ignore_index": draw.choice((None, -100, 0)),
            "label_smoothing": draw.choice((0.0, 0.1)),
            "z_loss": draw.choice((0.0, 1e-2)),
            "softcap": draw.choice((0.0, 5.0)),
        }
        if vocab_size == 1:  # softmax - 1 is 0 in torch; ours adds the z-loss's part before it subtracts
            options["z_loss"] = 0.0

    def ours(hidden, weight, bias=None):
        return linear_cross_entropy(hidden, weight, targets, vocab_size, bias=bias, **options)

    def torchs(hidden, weight, bias=None):
        return loss_of_torch(hidden, weight, bias, targets, vocab_size, **options)

    direction = (
        torch.ones(()) if options.get("reduction") != "none" else torch.randn(rows, generator=draw.generator)
    )
    besides = rounded_by_cap(inputs, direction, options) if rows and options.get("softcap") else ()
    assert_as_exact(ours, torchs, inputs, [direction.to(DEVICE)], besides)


def rounded_by_cap(inputs: list[Tensor], direction: Tensor, options: dict) -> list[float]:
    """How far the loss and the gradients may be off since float32 rounds the capped logits.

    The loss is a difference of them. Of a single one it is 0 in torch; on a GPU ours is what the logit was rounded
    by, half an ulp, as its product with the cap is fused with the difference. Gradients have the factor 1 - tanh^2,
    which near 0 is off by 2 ulp of 1, and a sum over rows by a random walk of those.
    """
    rows, eps = len(inputs[0]), torch.finfo(torch.float32).eps
    hidden, weight = (x.abs().max().item() for x in inputs[:2])
    of_loss = options["softcap"] * eps / 2 * (rows if options["reduction"] == "sum" else 1)
    of_logit = 2 * eps * direction.abs().max().item() / (rows if options["reduction"] == "mean" else 1)
    of_sum = of_logit * rows**0.5
    return [of_loss, 2 * of_logit * weight, of_sum * hidden, of_sum][: 1 + len(inputs)]


def loss_of_torch(
    hidden, weight, bias, targets, vocab_size, reduction="mean", ignore_index=None, label_smoothing=0.0,
    z_loss=0.0, softcap=0.0,
):  # fmt: skip
    """The loss with all logits, in float32 or float64."""
    if hidden.dtype is not torch.float64:
        weight = weight.to(hidden.dtype)
    logits = F.linear(hidden, weight)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    logits = wide(logits)[:, :vocab_size]
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    targets = targets.masked_fill(targets == (-1 if ignore_index is None else ignore_index), -1).clamp(min=-1)
    losses = F.cross_entropy(
        logits, targets, ignore_index=-1, reduction="none", label_smoothing=label_smoothing
    )
    losses = losses + z_loss * torch.where(targets >= 0, logits.logsumexp(1).square(), 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / ((targets >= 0).sum().clamp(min=1) if reduction == "mean" else 1)
