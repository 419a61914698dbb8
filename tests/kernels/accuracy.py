"""The accuracy gate: how wrong a kernel may be, measured against what PyTorch does in the same precision."""

import math
from collections.abc import Sequence

import torch

from kernels.naive import naive_attention


def inputs(
    q_len: int,
    kv_len: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    batch=1,
    heads=1,
    kv_heads=1,
    seed=0,
    device="cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random normal q, k, v (leaves that want gradients) and a gradient of the output."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int, length: int) -> torch.Tensor:
        return torch.randn(batch, heads, length, head_dim, generator=generator, device=device, dtype=dtype)

    q, k, v = normal(heads, q_len), normal(kv_heads, kv_len), normal(kv_heads, kv_len)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), normal(heads, q_len)


def golden(tensors: Sequence[torch.Tensor], d_out: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv in float64, from the naive oracle."""
    q, k, v = (x.detach().double().requires_grad_() for x in tensors)
    options = {key: _double(value) for key, value in options.items()}
    out, lse = naive_attention(q, k, v, return_lse=True, **options)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_out.double())
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def reordered(tensors: Sequence[torch.Tensor], d_out: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    """The same from PyTorch in the inputs' own precision, with the scale moved from the scores to k."""
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    scale = options.pop("scale", None) or 1 / math.sqrt(q.shape[-1])
    out = naive_attention(q, k * scale, v, scale=1.0, **options)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_out)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def assert_as_accurate(
    got: dict[str, torch.Tensor],
    tensors: Sequence[torch.Tensor],
    d_out: torch.Tensor,
    *,
    rtol: float = 2.0,
    ulp: float = 2.0,
    **options,
) -> None:
    """Hold out, lse, dq, dk, dv to FlashAttention-3's gate, and to a tighter one on the mean error.

    Against float64: max error <= rtol * max error of `reordered` + ulp, and mean error <= 1.25 * its mean error
    + ulp / 4 (2 * in float32, where no rounding to 16 bits drowns the order of operations). lse, float32 in every
    precision, within 1e-5 of its size.
    """
    mean_rtol = 2.0 if d_out.dtype is torch.float32 else 1.25
    want, peer = golden(tensors, d_out, **options), reordered(tensors, d_out, **options)
    q, k, v = (x.detach().double() for x in tensors)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    # dq and dk are sums of P * (dP - delta), where dP - delta may cancel to nothing (a query that sees one key):
    # what is left then is the rounding of dP, a float32 in every precision.
    d_scores = (d_out.double() @ v.transpose(-2, -1)).abs().max().item() if v.shape[2] and q.shape[2] else 0.0
    cancelled = 4 * torch.finfo(torch.float32).eps * d_scores * max(_largest(q), _largest(k))
    for name in ("out", "dq", "dk", "dv"):
        assert torch.isfinite(got[name]).all(), f"{name} is not finite"
        error, peer_error = (got[name].double() - want[name]).abs(), (peer[name].double() - want[name]).abs()
        if not error.numel():
            continue
        ulps = ulp * torch.finfo(got[name].dtype).eps * max(_largest(want[name]), 0.5)
        floor = ulps + (cancelled if name in ("dq", "dk") else 0.0)
        worst, allowed = error.max().item(), rtol * peer_error.max().item() + floor
        assert worst <= allowed, f"{name}: max error {worst:.2e}, allowed {allowed:.2e}"
        mean, allowed = error.mean().item(), mean_rtol * peer_error.mean().item() + floor / 4
        assert mean <= allowed, f"{name}: mean error {mean:.2e}, allowed {allowed:.2e}"
    if "lse" in got:
        assert got["lse"].dtype is torch.float32
        torch.testing.assert_close(got["lse"].double(), want["lse"], atol=1e-5, rtol=1e-5)


def run(
    attention, tensors: Sequence[torch.Tensor], d_out: torch.Tensor, **options
) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv of an attention function."""
    out, lse = attention(*tensors, return_lse=True, **options)
    dq, dk, dv = torch.autograd.grad(out, tensors, d_out)
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _double(value: object) -> object:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
