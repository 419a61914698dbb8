"""One call of an attention against float64, for tests over many backends and shapes; and what SDPA is asked for."""

import random
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from kernels import ATTENTION, AttentionRequest, get_attention
from kernels.naive import naive_attention

Gradients = dict[str, Tensor]


class Asked(TorchFunctionMode):
    """Notes what SDPA is asked for."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            self.lengths = [x.shape[2] for x in args]
            self.options = kwargs
        return function(*args, **kwargs or {})


class Call(NamedTuple):
    """The shape, dtype and mask of a call."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    scale: float | None = None
    packed: bool = False  # in memory (batch, length, heads, head_dim), as a linear layer produces q, k and v

    def is_refused(self, name: str, device: str) -> bool:
        request = AttentionRequest(torch.device(device), self.dtype, self.head_dim, length=self.q_len)
        return ATTENTION[name].refuses(request) is not None

    def inputs(self, device: str, seed: int = 0) -> tuple[list[Tensor], Tensor]:
        """q, k, v that want gradients, and a gradient of the output."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(heads: int, length: int) -> Tensor:
            shape = (self.batch, heads, length, self.head_dim)
            if self.packed:
                shape = (self.batch, length, heads, self.head_dim)
            x = torch.randn(shape, generator=generator, device=device).to(self.dtype)
            return x.transpose(1, 2) if self.packed else x

        shapes = ((self.heads, self.q_len), *((self.kv_heads, self.kv_len),) * 2)
        tensors = [normal(*shape).requires_grad_() for shape in shapes]
        return tensors, normal(self.heads, self.q_len)


def draw(number: int, dtypes: tuple[torch.dtype, ...], longest: int) -> Call:
    """A random call; half of the lengths are near multiples of the kernels' tiles."""
    choose = random.Random(number)

    def length() -> int:
        if choose.random() < 0.5:
            return choose.randint(1, longest)
        return min(max(choose.choice((1, 16, 64, 128, 192, 256)) + choose.randint(-1, 1), 1), longest)

    kv_heads = choose.choice((1, 2, 3))
    q_len = length()
    return Call(
        batch=choose.choice((1, 2, 3)),
        heads=kv_heads * choose.choice((1, 1, 2, 4)),
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=q_len if choose.random() < 0.3 else length(),
        head_dim=choose.choice((8, 16, 20, 32, 40, 64, 64, 80, 96, 128, 192, 256)),
        dtype=choose.choice(dtypes),
        causal=choose.random() < 0.7,
        scale=choose.choice((None, None, 0.05, 1.0)),
        packed=choose.random() < 0.5,
    )


def assert_matches_float64(name: str, call: Call, device: str, seed: int = 0) -> None:
    """Output and gradients at most three times as far from float64 as standard attention in the call's dtype, the
    worse of naive's and torch's, plus four ulp of the largest value, plus four float32 ulp of what dP - delta is a
    difference of: for a single key dq and dk are 0, which standard attention hits exactly. Plus, what half an ulp of
    the output does to them through delta = rowsum(dO * O): with two keys standard attention, which has no delta, was
    10 times as accurate as torch's flash. dv may be as far off, relatively, as P = exp(S - lse) of rounded S and lse,
    of which standard attention has no lse: torch's float32 kernel was off by 2.5e-7 where 2.1e-7 had been allowed."""
    tensors, d_out = call.inputs(device, seed)
    exact = _run(
        naive_attention, call, [x.detach().double().requires_grad_() for x in tensors], d_out.double()
    )
    norms = [x.detach().float().norm(dim=-1).amax() if x.numel() else 0.0 for x in (d_out, *tensors)]
    scale = call.scale or call.head_dim**-0.5
    scores = scale * norms[1] * norms[2]
    terms = scale * norms[0] * norms[3] * max(norms[1], norms[2])
    # Times half an ulp it is delta's error, as a random walk.
    rounded = (d_out.double() * exact["out"]).norm(dim=-1)
    largest = max(x.detach().abs().max() if x.numel() else 0.0 for x in tensors[:2])
    of_delta = scale * rounded.max() * largest * torch.finfo(call.dtype).eps / 2 if rounded.numel() else 0.0
    peers = [_run(get_attention(each), call, tensors, d_out) for each in ("naive", "sdpa_math")]
    for part, x in _run(get_attention(name), call, tensors, d_out).items():
        want = exact[part]
        assert x.shape == want.shape, part
        assert x.dtype is call.dtype, part
        if not x.numel():
            continue
        ulp = torch.finfo(x.dtype).eps * want.abs().max()
        allowed = 3 * max((peer[part] - want).abs().max() for peer in peers) + 4 * ulp
        if part in ("dq", "dk"):
            allowed += 4 * torch.finfo(torch.float32).eps * terms + of_delta
        if part == "dv":
            allowed += torch.finfo(torch.float32).eps * scores * want.abs().max()
        error = (x - want).abs().max()
        assert error <= allowed, f"{part} of {name} is off by {error:.2e}, allowed {allowed:.2e}: {call}"


def _run(attention, call: Call, tensors: list[Tensor], d_out: Tensor) -> Gradients:
    out = attention(*tensors, causal=call.causal, scale=call.scale)
    gradients = torch.autograd.grad(out, tensors, d_out)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
