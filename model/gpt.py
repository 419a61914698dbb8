"""GPT-2 as published: learned positions, pre-LayerNorm, biases, tanh GELU, tied embeddings.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Parameter names are those of the
released checkpoints. Axes: B batch, T tokens, C = n_embd, H heads, D = head_dim, V = padded vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cache import KVCache
from .config import GPTConfig
from .maps import attention_maps

AttentionFn = Callable[..., Tensor]  # GPT's docstring says what it must do
LossFn = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # as cross_entropy below
Seeds = tuple[Tensor | None, ...]  # of a block's dropouts: attention, its projection, the MLP


class Linear(nn.Linear):
    product = staticmethod(F.linear)  # (x, weight, bias or None) -> x @ weight.T + bias

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)

    def reset_parameters(self) -> None:
        """Nothing: GPT.init_weights draws every weight, and torch's global generator stays untouched."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing, as in Linear."""


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int, attention: AttentionFn, packed: AttentionFn | None):
        super().__init__()
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)
        self.attention = attention
        self.packed = packed
        self.layer = layer
        self.n_head, self.head_dim = config.n_head, config.head_dim
        self.dropout = config.dropout
        self.scale = 1.0 / math.sqrt(config.head_dim)
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1

    def forward(
        self, x: Tensor, dropout_seed: Tensor | None, cu_seqlens: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        out = self.c_proj(self.heads(x, dropout_seed, cu_seqlens, cache))
        return F.dropout(out, self.dropout, self.training)

    def heads(
        self, x: Tensor, dropout_seed: Tensor | None, cu_seqlens: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        """The heads' outputs side by side, before the output projection: (B, T, C) -> (B, T, C)."""
        B, T, C = x.shape
        options = self.options(dropout_seed, cu_seqlens)
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, self.head_dim)
        if self.packed is not None and cache is None:
            out = self.packed(qkv, **options)  # (B, H, T, D)
        else:
            # unbind, not split: its backward writes dq, dk and dv straight into one (B, T, 3, H, D) buffer
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # three views (B, H, T, D)
            if cache is not None:
                k, v = cache.append(self.layer, k, v)
            out = self.attention(q, k, v, **options)  # (B, H, T, D)
        return out.transpose(1, 2).reshape(B, T, C)

    def options(self, dropout_seed: Tensor | None, cu_seqlens: Tensor | None) -> dict[str, Any]:
        """The keyword arguments of the attention function."""
        options: dict[str, Any] = {"causal": True, "scale": self.scale}
        if self.training and self.dropout > 0.0:
            options |= {"dropout_p": self.dropout, "dropout_seed": dropout_seed}
        if cu_seqlens is not None:
            options["cu_seqlens"] = cu_seqlens
        return options


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.c_fc(x), approximate="tanh")  # (B, T, 4C)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int, attention: AttentionFn, packed: AttentionFn | None):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config, layer, attention, packed)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, seeds: Seeds, cu_seqlens: Tensor | None, cache: KVCache | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), seeds[0], cu_seqlens, cache)
        return x + self.mlp(self.ln_2(x))


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Mean NLL in nats, 0-d float32, of targets (N,) under softmax(hidden (N, C) @ weight (V, C).T).

    Targets of -1 do not count (if none counts: 0). Rows of weight from vocab_size on are padding: they have
    probability 0 and get no gradient.
    """
    logits = F.linear(hidden, weight)
    # Exact without a gradient: softmax's is 0 there. A slice would copy all logits, in the forward and the backward.
    with torch.no_grad():
        logits[:, vocab_size:] = float("-inf")
    total = F.cross_entropy(logits.float(), targets, ignore_index=-1, reduction="sum")
    return total / (targets != -1).sum().clamp(min=1)


def document_offsets(tokens: Tensor, end: int) -> Tensor:
    """Where the documents of packed tokens (B, T) begin, as flash kernels take it: int32 (B T + 1,), ascending.

    A document ends with the token `end`, or with its row. The offsets are padded with B T, that is with empty
    documents, so that their shape does not depend on the data and nothing waits for the device.
    """
    first = torch.ones_like(tokens, dtype=torch.bool)
    first[:, 1:] = tokens[:, :-1] == end
    index = torch.arange(tokens.numel() + 1, dtype=torch.int32, device=tokens.device)
    return torch.where(F.pad(first.flatten(), (0, 1)), index, tokens.numel()).sort().values


def dropout_seeds(seed: Tensor, count: int) -> list[Seeds]:
    """Seeds for `count` blocks, 0-d int64; a `seed` close to this one gives none of the same.

    They lie 16 bytes apart in memory: kernels with other pointers are launched slowly (kernels/launch.py).
    """
    numbers = seed * (6 * count) + torch.arange(6 * count, device=seed.device)
    return [three.unbind() for three in numbers.view(count, 3, 2)[..., 0]]


class GPT(nn.Module):
    """GPT-2 with the attention (and the loss) it is given.

    attention: (q, k, v, *, causal, scale[, dropout_p, dropout_seed, cu_seqlens]) -> out, all (B, H, T, D); they are
        views of one packed buffer. With more keys than queries, causal lets the last query see all keys.
        The optional arguments are only passed when they apply.
    packed: computes the same from that one buffer (B, T, 3, H, D), whose gradient is then one tensor too. It is
        called instead of `attention` where nothing is cached. None: there is no such form.
    loss: as `cross_entropy` here; a fused linear-plus-loss function of the same signature can take its place.
    generator: draws the initial weights (see init_weights); None: one seeded with 0. A model built under
        `torch.device("meta")` draws none.
    """

    def __init__(
        self,
        config: GPTConfig,
        attention: AttentionFn,
        *,
        packed: AttentionFn | None = None,
        loss: LossFn = cross_entropy,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if not callable(attention):
            raise TypeError(
                f"attention is {attention!r}: pass the function alone, as get_attention(name) returns it"
            )
        self.config = config
        self.loss = loss
        self.build(attention, packed)
        if not self.wte.weight.is_meta:
            self.init_weights(generator or torch.Generator().manual_seed(0))

    def build(self, attention: AttentionFn, packed: AttentionFn | None) -> None:
        config = self.config
        if config.switches:
            raise ValueError(f"{', '.join(config.switches)}: GPT-2 has no such part; model.build_gpt does")
        self.wte = Embedding(config.padded_vocab_size, config.n_embd)  # also the output projection
        self.wpe = Embedding(config.seq_len, config.n_embd)
        self.h = nn.ModuleList(self.make_block(layer, attention, packed) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)

    def make_block(self, layer: int, attention: AttentionFn, packed: AttentionFn | None) -> Block:
        return Block(self.config, layer, attention, packed)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Draw all weights: N(0, 0.02), residual projections N(0, 0.02 / sqrt(2 n_layer)), biases 0, gains 1.

        They are drawn on the generator's device and copied, so it gives the same weights on any device.
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = residual_std if name.endswith("c_proj.weight") else 0.02
                draw = torch.empty(parameter.shape, device=generator.device)
                parameter.copy_(draw.normal_(0.0, std, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith(("bias", "sinks")) else 1.0)
        self.wte.weight[self.config.vocab_size :] = 0.0

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, dropout_seed: Tensor | None = None
    ) -> Tensor:
        """tokens, targets: int64 (B, T), ids below vocab_size (not checked: that would wait for the device).
        Returns the logits (B, T, vocab_size), or with targets the mean NLL over targets != -1 (nats, 0-d float32).

        dropout_seed: 0-d int64 tensor, a new one for each call; needed to train with dropout > 0. It decides the
        masks of the attention; the others are drawn from torch's default generator.
        """
        hidden = self.hidden(tokens, dropout_seed=dropout_seed)
        if targets is None:
            return self.logits(hidden)
        return self.loss(hidden.flatten(0, 1), self.wte.weight, targets.flatten(), self.config.vocab_size)

    def hidden(
        self, tokens: Tensor, *, dropout_seed: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Final hidden states (B, T, C). With a cache, tokens continue those it holds and are added to it.

        With a cache, config.document_end has no effect. To read packed documents with one, pass one document per call
        and set cache.first = cache.length after its end, as `generate` does.
        """
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be (batch, length), got shape {tuple(tokens.shape)}")
        start = 0 if cache is None else cache.length
        end = start + tokens.size(1)
        if end > self.config.seq_len:
            raise ValueError(
                f"{end} tokens, but seq_len={self.config.seq_len}: pass fewer, or train with a larger seq_len"
            )
        seeds = self.seeds(dropout_seed)
        cu_seqlens = None
        if self.config.document_end is not None and cache is None:  # a cache's `first` hides other documents
            cu_seqlens = document_offsets(tokens, self.config.document_end)
        x = self.embed(tokens, start, seeds[0])
        for block, own in zip(self.h, seeds[1:], strict=True):
            x = block(x, own, cu_seqlens, cache)
        if cache is not None:
            cache.length = end
        return self.final_norm(x)

    def seeds(self, dropout_seed: Tensor | None) -> list[Seeds]:
        """Dropout seeds: the embedding's (it uses the first of three), then each block's; None without dropout."""
        count = 1 + len(self.h)
        if not self.training or self.config.dropout == 0.0:
            return [(None, None, None)] * count
        if isinstance(dropout_seed, Tensor) and not dropout_seed.ndim and dropout_seed.dtype is torch.int64:
            return dropout_seeds(dropout_seed, count)
        raise ValueError(
            f"training with dropout={self.config.dropout} needs dropout_seed, a 0-d int64 tensor"
        )

    def embed(self, tokens: Tensor, start: int, seeds: Seeds) -> Tensor:
        """(B, T) at positions from `start` on -> (B, T, C)."""
        x = self.with_positions(self.wte(tokens), start)
        return F.dropout(x, self.config.dropout, self.training)

    def with_positions(self, x: Tensor, start: int) -> Tensor:
        return x + self.wpe.weight[start : start + x.size(1)]

    def final_norm(self, x: Tensor) -> Tensor:
        return self.ln_f(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) -> (..., vocab_size): the padding of the vocabulary is cut off."""
        return F.linear(hidden, self.wte.weight)[..., : self.config.vocab_size]

    def attention_maps(self, tokens: Tensor) -> Tensor:
        """The attention weights of tokens (B, T): (n_layer, B, n_head, T, T), see model/maps.py."""
        return attention_maps(self, tokens)

    def num_parameters(self, *, position_embeddings: bool = True) -> int:
        """Number of parameters as published: tied weights once, without the padding of the vocabulary."""
        count = sum(parameter.numel() for parameter in self.parameters())
        count -= (self.config.padded_vocab_size - self.config.vocab_size) * self.config.n_embd
        return count if position_embeddings else count - self.wpe.weight.numel()

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward FLOPs per token: 6 N + 12 n_layer n_embd seq_len.

        N is the parameters without position embeddings; attention counts as full, causal or not
        (Chowdhery et al. 2022, PaLM, appendix B). Recomputation is not counted.
        """
        n = self.num_parameters(position_embeddings=False)
        return 6 * n + 12 * self.config.n_layer * self.config.n_embd * seq_len
