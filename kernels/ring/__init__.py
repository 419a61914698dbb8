"""Attention over a sequence that several GPUs share: each holds a part of it, and keys and values travel in a ring.

    mine = shard_positions(length, dist.get_rank(), dist.get_world_size())  # what this rank holds
    q, k, v = (x[:, :, mine] for x in (q, k, v))  # each (batch, heads, length / ranks, head_dim)
    out = ring_attention(q, k, v)  # out like q; the backward returns the gradients of all ranks' losses in q, k and v

Ring Attention (Liu et al. 2023, arXiv 2310.01889), with the blocks of the causal mask shared out evenly: the sequence
is cut into twice as many chunks as there are ranks, and rank r holds chunks r and 2 * ranks - 1 - r, the "zigzag" of
Llama 3's context parallelism (arXiv 2407.21783, section 3.3.2). Striped Attention (Brandon et al. 2023, arXiv
2311.09431) balances by single tokens instead, which leaves no block whole.

`passes` has the order of work, `gathered` that of short sequences, whose keys travel at once, `group` the exchange,
`blocks` the layout, `compute` what one block costs.
"""

from .api import ring_attention
from .blocks import shard_positions
from .gathered import gathers_keys
from .group import RingGroup

__all__ = ["RingGroup", "gathers_keys", "ring_attention", "shard_positions"]
