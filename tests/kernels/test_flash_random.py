"""Flash with random features, shapes, dtypes and strides against float64. A few cases by default, about 10 s.

    TILEGPT_RANDOM_CASES=1000 python -m pytest -n 0 -m "" tests/kernels/test_flash_random.py

On a GPU the calls are longer, bfloat16 and head_dim 256 are drawn too, and the tier decides between kernels.
"""

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import kernels
from kernels.naive import naive_attention
from tests.kernels.accuracy import golden, reordered
from tests.random_cases import random_cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONGEST = 1100 if DEVICE == "cuda" else 280
HEAD_DIMS = (16, 20, 32, 64, 64, 80, 128, 128, 144, *([256] if DEVICE == "cuda" else []))
DTYPES = (torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else []))


class Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int


def draw_shape(choose: random.Random) -> Shape:
    """Half of the lengths are near multiples of the kernels' tiles."""

    def length() -> int:
        near = choose.choice((16, 64, 128, 192, 256, 512, 1024)) + choose.randint(-1, 1)
        return min(near, LONGEST) if choose.random() < 0.5 else choose.randint(1, LONGEST)

    kv_heads, q_len = choose.choice((1, 1, 2)), length()
    return Shape(
        batch=choose.choice((1, 1, 2)),
        heads=kv_heads * choose.choice((1, 1, 2, 3)),
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=q_len if choose.random() < 0.5 else length(),
        head_dim=choose.choice(HEAD_DIMS),
    )


def draw_features(choose: random.Random, generator: torch.Generator, shape: Shape) -> dict[str, object]:
    """Each feature in a quarter of the calls, where it is allowed."""
    batch, heads, _, q_len, kv_len, _ = shape
    blocks = (choose.choice((1, batch)), choose.choice((1, heads)), -(-q_len // 128), -(-kv_len // 128))
    documents = choose.randint(0, 6)
    offsets, of_keys = (
        [0, *sorted(choose.choices(range(batch * length + 1), k=documents)), batch * length]
        for length in (q_len, kv_len)
    )
    window = tuple(choose.choice((-1, 0, 1, 63, 64, 100, kv_len, 2**31 - 1)) for _ in range(2))

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    features = {
        "scale": choose.choice((0.05, 0.3)),
        "window": window,
        "softcap": choose.choice((2.0, 30.0, 1e3)),
        "alibi_slopes": torch.rand(heads, generator=generator, device=DEVICE) / 4,
        "sinks": torch.randn(heads, generator=generator, device=DEVICE).requires_grad_(),
        "kv_lengths": ints([choose.randint(0, kv_len) for _ in range(batch)]),
        "cu_seqlens": ints(offsets),
        "block_mask": torch.rand(blocks, generator=generator, device=DEVICE) < 0.7,
        "dropout_p": choose.choice((0.1, 0.5)),
        "precise_delta": True,
    }
    used = {name: value for name, value in features.items() if choose.random() < 0.25}
    if "cu_seqlens" in used and (q_len != kv_len or choose.random() < 0.5):
        used["cu_seqlens_k"] = ints(of_keys)
        used.pop("alibi_slopes", None)
    if "dropout_p" in used:
        used["dropout_seed"] = choose.randint(-(2**63), 2**63 - 1)
    return used | {"causal": choose.random() < 0.7}


def laid_out(x: Tensor, choose: random.Random, expands: bool) -> Tensor:
    """The numbers of x (batch, heads, length, head_dim), or of a part of it, with strides that flash must take."""
    match choose.choice(("dense", "dense", "tokens", "tokens", "heads", "padded", "expanded", "offset")):
        case "tokens":  # heads inside tokens, as a linear layer produces them
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "heads":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        case "padded":
            return torch.cat([x, x], -1)[..., : x.shape[3]]
        case "expanded" if expands:  # one row or head for all
            return x[:1].expand(x.shape) if choose.random() < 0.5 else x[:, :1].expand(x.shape)
        case "offset":  # no multiple of 16 bytes
            return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x


def gradients(
    attention, tensors: list[Tensor], d_out: Tensor, d_lse: Tensor | None, **options
) -> list[Tensor]:
    """out, lse, dq, dk, dv and, with sinks, theirs."""
    out, lse = attention(*tensors, return_lse=True, **options)
    leaves = [*tensors, options["sinks"]] if "sinks" in options else tensors
    loss = (out, d_out) if d_lse is None else ((out, lse), (d_out, d_lse))
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss[0], leaves, loss[1])]


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)
@pytest.mark.parametrize("number", random_cases(14))
def test_random_calls_are_as_accurate_as_standard_attention(number: int) -> None:
    """Four times the error of the same computation in PyTorch, reordered, plus four ulp of the largest value, and
    what rounding lse to float32 does to P = exp(S - lse)."""
    choose, generator = random.Random(number), torch.Generator(DEVICE).manual_seed(number)
    shape, dtype = draw_shape(choose), choose.choice(DTYPES)
    options = draw_features(choose, generator, shape)

    def normal(heads: int, length: int) -> Tensor:
        size = (shape.batch, heads, length, shape.head_dim)
        return torch.randn(size, generator=generator, device=DEVICE).to(dtype)

    sizes = ((shape.heads, shape.q_len), *((shape.kv_heads, shape.kv_len),) * 2)
    tensors = [laid_out(normal(*size), choose, expands=True).requires_grad_() for size in sizes]
    d_out = laid_out(normal(*sizes[0]), choose, expands=True)
    d_out = d_out.mT.contiguous().mT if choose.random() < 0.1 else d_out  # a last stride other than 1
    d_lse = None if choose.random() < 0.7 else torch.randn_like(tensors[0][..., 0], dtype=torch.float32)

    flash, tier = kernels.get_attention("flash"), choose.choice(("auto", "hopper", "triton"))
    try:
        got = gradients(flash, tensors, d_out, d_lse, tier=tier, **options)
    except kernels.AttentionError as error:  # most calls have something that those kernels lack
        if not str(error).startswith("attention.tier=hopper cannot run this call"):
            raise
        got = gradients(flash, tensors, d_out, d_lse, tier="auto", **options)

    doubled = {
        name: value.detach().double().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in options.items()
    }
    wide = [x.detach().double().requires_grad_() for x in tensors]
    want = gradients(
        naive_attention, wide, d_out.double(), None if d_lse is None else d_lse.double(), **doubled
    )
    fixed = {name: x.detach() if isinstance(x, Tensor) else x for name, x in options.items()}
    exact = golden(tensors, d_out, **fixed)
    order = torch.Generator().manual_seed(number)
    peers = [reordered(tensors, d_out, order, **fixed) for _ in range(2)]

    def assert_close(name: str, x: Tensor, exactly: Tensor, allowed: Tensor | float) -> None:
        error = (x.double() - exactly).abs()
        worst = error.max().item() if error.numel() else 0.0
        said = f"{name}: {worst:.2e}, allowed {allowed}; {shape}, {dtype}, {options}"
        assert (error <= allowed).all(), said

    seen = want[1].where(want[1] > -torch.inf, 0.0)
    of_lse = torch.finfo(torch.float32).eps * seen.abs().max().item()
    for name, x, exactly in zip(
        ("out", "dq", "dk", "dv"), (got[0], *got[2:5]), (want[0], *want[2:5]), strict=True
    ):
        size = exactly.abs().max().item()
        of_peers = max((peer[name] - exact[name]).abs().max().item() for peer in peers)
        assert x.dtype is dtype
        assert_close(name, x, exactly, 4 * (of_peers + (torch.finfo(dtype).eps + of_lse) * size))
    torch.testing.assert_close(got[1].double(), want[1], atol=2e-5, rtol=2e-5)
    if "sinks" in options:
        p = torch.exp(doubled["sinks"].detach()[:, None] - want[1])
        terms = (d_out.double() * want[0]).abs().sum(-1) + (0 if d_lse is None else d_lse.abs())
        assert_close("d_sinks", got[5], want[5], 4 * torch.finfo(dtype).eps * (p * terms).sum((0, 2)))
