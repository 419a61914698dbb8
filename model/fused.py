"""GPT-2 whose layers other than attention are functions that it is given: our fused kernels, in a run on a GPU.

One function adds to the residual stream and computes the LayerNorm that follows. After a block's last addition that
is the next block's ln_1, so blocks pass on a Stream: the residual and an update that is not added yet, which the next
block adds. That way each block reads only its own parameters, as FSDP needs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from .cache import KVCache
from .config import GPTConfig
from .gpt import GPT, AttentionFn, Block, Linear, Seeds


class FusedLayers(NamedTuple):
    """The functions that replace torch's:

    linear_gelu: (x, weight, bias) -> tanh GELU of x @ weight.T + bias
    dropout_add_norm: (x, update, bias, gain, shift, dropout_p, dropout_seed, eps, rms) -> x + dropout(update + bias),
        and the LayerNorm of that; with rms its RMSNorm, and shift is None
    embedding: (tokens, weight) -> weight[tokens]
    dropout: (x, dropout_p, dropout_seed) -> dropout(x)
    linear: (x, weight, bias or None) -> x @ weight.T + bias; if left out, torch's
    mlp: (x, weight, bias, projection) -> linear(linear_gelu(x, weight, bias), projection); if left out, these two
    """

    linear_gelu: Callable[[Tensor, Tensor, Tensor], Tensor]
    dropout_add_norm: Callable[..., tuple[Tensor, Tensor]]
    embedding: Callable[[Tensor, Tensor], Tensor]
    dropout: Callable[[Tensor, float, Tensor], Tensor]
    linear: Callable[..., Tensor] = F.linear
    mlp: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None


class Stream(NamedTuple):
    """The residual stream between blocks, as a sum not yet taken: x + dropout(update + bias), or x alone."""

    x: Tensor  # (B, T, C)
    update: Tensor | None = None  # (B, T, C)
    bias: Tensor | None = None  # (C,)
    seed: Tensor | None = None  # of the dropout


class FusedBlock(Block):
    """A Block in FusedLayers' functions. Of its submodules only c_attn is called: hooks of the others do not run."""

    def __init__(
        self,
        config: GPTConfig,
        layer: int,
        attention: AttentionFn,
        packed: AttentionFn | None,
        layers: FusedLayers,
    ):
        super().__init__(config, layer, attention, packed)
        self.layers = layers
        self.dropout = config.dropout

    def forward(  # type: ignore[override]
        self, stream: Stream, seeds: Seeds, cu_seqlens: Tensor | None, cache: KVCache | None
    ) -> Stream:
        x, h = add_norm(self.layers, stream, self.ln_1, self.dropout)
        y = self.attn.heads(h, seeds[0], cu_seqlens, cache)
        stream = Stream(x, self.layers.linear(y, self.attn.c_proj.weight), self.attn.c_proj.bias, seeds[1])
        x, h = add_norm(self.layers, stream, self.ln_2, self.dropout)
        first, second = self.mlp.c_fc, self.mlp.c_proj
        if self.layers.mlp:
            update = self.layers.mlp(h, first.weight, first.bias, second.weight)
        else:
            y = self.layers.linear_gelu(h, first.weight, first.bias)
            update = self.layers.linear(y, second.weight)
        # The bias is copied: the next block reads it, and FSDP has freed this block's parameters by then.
        return Stream(x, update, second.bias.clone(), seeds[2])


class FusedGPT(GPT):
    """GPT, with the same parameters, computing with the functions in `layers`.

    The other arguments are GPT's. forward's dropout_seed decides all dropout masks.
    """

    def __init__(self, config: GPTConfig, attention: AttentionFn, layers: FusedLayers, **options: Any):
        self.layers = layers
        super().__init__(config, attention, **options)
        for module in self.h.modules():
            if isinstance(module, Linear):
                module.product = layers.linear

    def make_block(self, layer: int, attention: AttentionFn, packed: AttentionFn | None) -> Block:
        return FusedBlock(self.config, layer, attention, packed, self.layers)

    def embed(self, tokens: Tensor, start: int, seeds: Seeds) -> Stream:  # type: ignore[override]
        x = self.with_positions(self.layers.embedding(tokens, self.wte.weight), start)
        return Stream(x if seeds[0] is None else self.layers.dropout(x, self.config.dropout, seeds[0]))

    def final_norm(self, stream: Stream) -> Tensor:  # type: ignore[override]
        return add_norm(self.layers, stream, self.ln_f, self.config.dropout)[1]


def add_norm(
    layers: FusedLayers, stream: Stream, norm: nn.LayerNorm | nn.RMSNorm, dropout: float
) -> tuple[Tensor, Tensor]:
    """The stream as one tensor, and `norm` of it."""
    x, update, bias, seed = stream
    if update is None:
        return x, norm(x)
    dropout_p = 0.0 if seed is None else dropout
    rms = isinstance(norm, nn.RMSNorm)
    shift = None if rms else norm.bias
    return layers.dropout_add_norm(x, update, bias, norm.weight, shift, dropout_p, seed, norm.eps, rms)
