"""Attention in chunks with checkpointing, in PyTorch (Rabe and Staats 2021, arXiv 2112.05682): the memory of flash
attention without a custom kernel, and without its speed.

Each chunk of queries attends to one chunk of keys at a time, and the partial outputs are combined by their
log-sum-exp. Scores and probabilities go through memory as in standard attention, but for one pair of chunks at a
time; the backward recomputes them pair by pair.
"""

import torch
from torch.utils.checkpoint import checkpoint

from ..arguments import check_inputs, check_scale, in_autocast_dtype, refuse_features

Tensor = torch.Tensor
QUERIES, KEYS = 1024, 4096  # chunk sizes of the paper's listing


def chunked_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None, **features: object
) -> Tensor:
    """softmax(q k^T * scale) v with at most QUERIES x KEYS scores per head at a time. Arguments and errors as
    `naive_attention`; other features are refused."""
    features.pop("dropout_seed", None)  # without dropout_p it means nothing, and with it the call is refused
    refuse_features("chunked", features)
    q, k, v = in_autocast_dtype(q, k, v)
    check_inputs(q, k, v, causal)
    group, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    q = q * check_scale(scale, q.shape[-1])
    if not k.shape[2]:
        return q * 0
    outs = []
    for number, rows in enumerate(q.split(QUERIES, 2)):
        position = number * QUERIES + offset if causal else None
        out = checkpoint(_query_chunk, rows, k, v, position, use_reentrant=False)
        if causal and position < 0:  # type: ignore[operator]  # fully masked queries averaged all keys instead
            blind = torch.arange(position, position + rows.shape[2], device=q.device) < 0  # type: ignore[arg-type]
            out = out.masked_fill(blind[:, None], 0.0)
        outs.append(out)
    return torch.cat(outs, 2)


def _query_chunk(q: Tensor, k: Tensor, v: Tensor, position: int | None) -> Tensor:
    """Attention of one chunk of queries, the first of which is at `position` among the keys; None: no causal mask."""
    outs, sums = [], []
    for number, (keys, values) in enumerate(zip(k.split(KEYS, 2), v.split(KEYS, 2), strict=True)):
        diagonal = None if position is None else position - number * KEYS
        if number and diagonal is not None and diagonal + q.shape[2] <= 0:
            break  # no query of this chunk sees these or later keys
        out, lse = checkpoint(_summary, q, keys, values, diagonal, use_reentrant=False)
        outs.append(out)
        sums.append(lse)
    shares = torch.softmax(torch.stack(sums), 0).unsqueeze(-1).to(v.dtype)
    return sum(share * out for share, out in zip(shares, outs, strict=True))


def _summary(q: Tensor, k: Tensor, v: Tensor, diagonal: int | None) -> tuple[Tensor, Tensor]:
    """Attention to one chunk of keys, and its log-sum-exp. Query i sees keys up to i + diagonal; None: all."""
    scores = q @ k.transpose(-2, -1)
    if diagonal is not None and diagonal + 1 < k.shape[2]:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(diagonal + 1)
        # Finite, so that a query that sees none of these keys gets weight 0 rather than NaN.
        scores = scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
    lse = torch.logsumexp(scores.to(torch.promote_types(scores.dtype, torch.float32)), -1)
    return torch.softmax(scores, -1) @ v, lse
