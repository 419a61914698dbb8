"""The accuracy gate: how wrong a kernel may be, measured against what PyTorch does in the same precision."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from unittest import mock

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


# (left side of a window or None, whether there are documents): the restrictions of the causal mask to test.
BOUNDS = [(left, False) for left in (0, 1, 64, 127, 200, 5000)] + [(left, True) for left in (None, 64, 200)]


def documents(length: int, batch: int, device: str = "cpu") -> torch.Tensor:
    """cu_seqlens for `batch` rows of `length` tokens: documents that end at, just before and just after multiples of
    64 and 128, within and across rows. The second is empty; with several rows, the third is longer than a row."""
    generator = torch.Generator().manual_seed(length)
    sizes = torch.tensor([1, 2, 63, 64, 65, 0, 127, 128, 129, 200, 320, 700])
    picked = sizes[torch.randint(len(sizes), (batch * length,), generator=generator)]
    picked[1:2] = 0
    if batch > 1:
        picked[2:3] = length + 1
    picked = picked.cumsum(0)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), picked[picked < batch * length]])
    return torch.cat([ends, torch.tensor([batch * length])]).to(device, torch.int32)


def unequal_documents(q_len: int, kv_len: int, batch: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """cu_seqlens as `documents`, and cu_seqlens_k of as many: a fifth have no key, and the second, which has no
    query, has a quarter of the keys."""
    queries = documents(q_len, batch, device)
    generator = torch.Generator().manual_seed(q_len + kv_len)
    count = len(queries) - 1
    shares = torch.rand(count, generator=generator) ** 3 * (torch.rand(count, generator=generator) < 0.8)
    shares[1:2] = shares.sum() / 3
    ends = (shares.cumsum(0) / shares.sum().clamp(min=1e-9) * batch * kv_len).round().to(torch.int32)
    ends[-1] = batch * kv_len
    return {"cu_seqlens": queries, "cu_seqlens_k": torch.cat([ends.new_zeros(1), ends]).to(device)}


# (q_len, kv_len) for block masks; if the difference is a multiple of a block, also tested with the causal mask.
LISTED = [(1, 1), (128, 128), (129, 129), (200, 200), (1000, 1000), (1024, 1024), (256, 512), (1100, 844)]
LISTED += [(1, 239), (113, 203), (700, 30), (65, 1300)]


def block_mask(q_len: int, kv_len: int, batch: int, heads: int, share: float = 0.4, device: str = "cpu"):
    """A random block mask with a block of queries that sees no keys, and a block of keys that no query sees."""
    shape = (batch, heads, -(-q_len // 128), -(-kv_len // 128))
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(q_len)) < share
    mask[..., mask.shape[2] // 2, :] &= mask.shape[2] < 3
    mask[..., mask.shape[3] // 2] &= mask.shape[3] < 3
    return mask.to(device)


def golden(tensors: Sequence[torch.Tensor], d_out: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv in float64, from the naive oracle."""
    q, k, v = (x.detach().double().requires_grad_() for x in tensors)
    options = {key: _double(value) for key, value in options.items()}
    out, lse = naive_attention(q, k, v, return_lse=True, **options)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_out.double())
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


class FlashSoftmax(torch.autograd.Function):
    """Softmax in FlashAttention's order: P = exp(S - lse), and in the backward P * (dP - delta) with delta =
    rowsum(dO * O), where PyTorch has rowsum(P * dP). As in FlashAttention, lse and delta are float32."""

    @staticmethod
    def forward(ctx, scores: torch.Tensor, delta: list[torch.Tensor]) -> torch.Tensor:
        wide = scores.float()
        probabilities = (wide - wide.logsumexp(-1, keepdim=True)).exp().to(scores.dtype)
        ctx.save_for_backward(probabilities)
        ctx.delta = delta  # a list, filled later: delta needs the output, which does not exist yet
        return probabilities

    @staticmethod
    def backward(ctx, d_probabilities: torch.Tensor) -> tuple[torch.Tensor, None]:
        (probabilities,) = ctx.saved_tensors
        return (probabilities * (d_probabilities - ctx.delta[0])).to(probabilities.dtype), None


def reordered(
    tensors: Sequence[torch.Tensor], d_out: torch.Tensor, generator: torch.Generator, **options
) -> dict[str, torch.Tensor]:
    """out, dq, dk, dv from PyTorch in the inputs' own precision with its operations reordered: FlashAttention's
    softmax, the scale moved from the scores to k, and the summation order of the products permuted over head_dim and,
    where every query sees every key, also over queries and keys."""
    queries, keys, dims = (
        torch.randperm(length, generator=generator).to(d_out.device)
        for length in (d_out.shape[2], tensors[1].shape[2], d_out.shape[3])
    )
    if options.get("causal", True) or set(options) - {"causal", "scale"}:
        queries, keys = queries.sort().values, keys.sort().values
    rows = {"out": queries, "dq": queries, "dk": keys, "dv": keys}
    q, k, v = (
        x.detach()[:, :, order][..., dims].requires_grad_()
        for x, order in zip(tensors, (queries, keys, keys), strict=True)
    )
    d_out = d_out[:, :, queries][..., dims]
    scale = options.pop("scale", None) or 1 / math.sqrt(q.shape[-1])
    delta = []
    softmax = mock.Mock(side_effect=lambda scores, dim: FlashSoftmax.apply(scores, delta))
    with mock.patch.object(torch, "softmax", softmax):
        out = naive_attention(q, k * scale, v, scale=1.0, **options)
    softmax.assert_called_once()
    terms = d_out.float() * out.detach().float()
    # Summed one by one like a matrix product, but from the end: in the same order dP - delta could be exactly 0.
    delta.append(sum(reversed(terms.split(1, dim=-1))))
    results = (out.detach(), *torch.autograd.grad(out, (q, k, v), d_out))
    return {
        name: x[:, :, order.argsort()][..., dims.argsort()]
        for (name, order), x in zip(rows.items(), results, strict=True)
    }


def assert_as_accurate(
    got: dict[str, torch.Tensor],
    tensors: Sequence[torch.Tensor],
    d_out: torch.Tensor,
    *,
    times: float = 2.0,
    **options,
) -> None:
    """Allow out, lse, dq, dk, dv twice the error of the same PyTorch computation reordered, plus two ulp.

    See `assert_within`. The peers are up to 8 random orders: where a query sees a single key, dq and dk are 0 except
    for the difference between two sums of the same terms, which in a single order may happen to be 0.
    """
    want = golden(tensors, d_out, **options)
    generator = torch.Generator().manual_seed(0)
    peers = (reordered(tensors, d_out, generator, **options) for _ in range(8))
    assert_within(got, want, peers, times)


def assert_within(
    got: dict[str, torch.Tensor],
    want: dict[str, torch.Tensor],
    peers: Iterable[dict[str, torch.Tensor]],
    times: float = 2.0,
) -> None:
    """Allow results `times` the error of the worst of their peers, each measured against `want` in float64.

    max error <= times * (the peers' max error + an ulp of the tensor's largest value), and mean error <= 1.25 * the
    peers' mean error + a quarter ulp of the tensor's mean. In float32, where no rounding to 16 bits masks the order
    of operations, the mean has the same limit as the max: for a single key P is exactly 1 in PyTorch but 2^(S - lse)
    of two rounded numbers in ours, 1.6 ulp off on an AMD EPYC, and dv consists of P alone. lse, which is float32 in
    every precision, must be within 1e-5 of its size.

    Another peer only raises the limits, so none is asked for once all results keep to them: most keep to the first.
    """
    if "lse" in got:
        assert got["lse"].dtype is torch.float32
        torch.testing.assert_close(got["lse"].double(), want["lse"], atol=1e-5, rtol=1e-5)
    results = {name: x for name, x in got.items() if name != "lse" and x.numel()}
    for name, result in results.items():
        assert torch.isfinite(result).all(), f"{name} is not finite"
    of_peers = dict.fromkeys(results, (0.0, 0.0))
    for peer in peers:
        too_large = []
        for name, result in results.items():
            of_peers[name] = tuple(map(max, of_peers[name], _errors(peer[name], want[name])))
            eps, size = torch.finfo(result.dtype).eps, want[name].abs()
            mean_times, ulps = (times, times) if result.dtype is torch.float32 else (1.25, 0.25)
            allowed = (
                times * (of_peers[name][0] + eps * size.max().item()),
                mean_times * of_peers[name][1] + ulps * eps * size.mean().item(),
            )
            for kind, error, limit in zip(("max", "mean"), _errors(result, want[name]), allowed, strict=True):
                if error > limit:
                    too_large.append(f"{name}: {kind} error {error:.2e}, allowed {limit:.2e}")
        if not too_large:
            return
    raise AssertionError("; ".join(too_large))


def _errors(x: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """The largest and the mean."""
    error = (x.double() - want).abs()
    return error.max().item(), error.mean().item()


def run(
    attention, tensors: Sequence[torch.Tensor], d_out: torch.Tensor, **options
) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv of an attention function."""
    out, lse = attention(*tensors, return_lse=True, **options)
    dq, dk, dv = torch.autograd.grad(out, tensors, d_out)
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def _double(value: object) -> object:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def double(inputs: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: _double(x) for name, x in inputs.items()}


def results(
    function: Callable, inputs: Mapping[str, torch.Tensor | None], direction: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Output and gradients by name."""
    inputs = {name: None if x is None else x.detach().requires_grad_() for name, x in inputs.items()}
    given = {name: x for name, x in inputs.items() if x is not None}
    out = function(*inputs.values())
    gradients = torch.autograd.grad(out, given.values(), direction.to(out.dtype))
    named = zip(given, gradients, strict=True)
    return {"out": out.detach()} | {f"d_{name}": gradient for name, gradient in named}


def assert_all_as_exact(
    exact: dict[str, torch.Tensor],
    ours: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
    besides: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Each of our results is at most twice as far from the exact one as torch's in the same dtype, plus two ulp, plus
    what the name has in `besides`."""
    for name, x in exact.items():
        assert ours[name].shape == x.shape, name
        assert ours[name].dtype == theirs[name].dtype, name
        if x.numel():
            ulp = torch.finfo(ours[name].dtype).eps * x.abs().max()
            error, reference = (ours[name] - x).abs().max(), (theirs[name] - x).abs().max()
            allowed = 2 * reference + 2 * ulp + besides.get(name, 0.0)
            assert error <= allowed, f"{name}: {error} with {reference} in torch"


def assert_all_as_close(
    exact: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]
) -> None:
    """Each of our results, over all elements, is at most 1.5 times as far from the exact one as torch's."""
    for name, x in exact.items():
        error, reference = ((y[name] - x).norm() for y in (ours, theirs))
        assert error <= 1.5 * reference + 1e-6 * x.norm(), f"{name}: {error} with {reference} in torch"
