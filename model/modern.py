"""GPT with parts of later models (Llama, Gemma, ...) in place of GPT-2's, each by its switch in GPTConfig.

The forward is GPT's: parts are replaced when the model is built, and where a switch is off, the part is GPT-2's.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cache import KVCache
from .config import GPTConfig, MLPKind
from .fused import FusedGPT, FusedLayers
from .gpt import GPT, MLP, AttentionFn, Block, CausalSelfAttention, Embedding, Linear
from .part import Part

EPS = 1e-5  # of every RMSNorm: LayerNorm's


def build_gpt(
    config: GPTConfig, attention: AttentionFn, *, layers: FusedLayers | None = None, **options: Any
) -> GPT:
    """The model that `config` describes: GPT-2, or with a switch on, a model with that part.

    layers: FusedGPT's, for the fused form; ValueError if that lacks such a part. options: GPT's.
    """
    if layers is None:
        return (ModernGPT if config.switches else GPT)(config, attention, **options)
    return (FusedModernGPT if config.switches else FusedGPT)(config, attention, layers, **options)


class ModernAttention(CausalSelfAttention):
    """Attention with a window, a softcap or sinks, which are further options of the function."""

    def __init__(self, config: GPTConfig, layer: int, attention: AttentionFn, packed: AttentionFn | None):
        super().__init__(config, layer, attention, packed)
        self.more: dict[str, Any] = {}
        if window := config.window_of(layer):
            self.more["window"] = (window - 1, -1)  # keys to the left and to the right
        if config.softcap:
            self.more["softcap"] = config.softcap
        self.sinks = nn.Parameter(torch.empty(config.n_head)) if config.sinks else None

    def options(self, dropout_seed: Tensor | None, cu_seqlens: Tensor | None) -> dict[str, Any]:
        options = super().options(dropout_seed, cu_seqlens) | self.more
        return options if self.sinks is None else options | {"sinks": self.sinks}


class UnpackedAttention(ModernAttention):
    """ModernAttention with grouped heads, qk_norm or rope: q, k and v differ, so the packed form is not called."""

    part: Part | None = None  # see part.compute_part

    def __init__(self, config: GPTConfig, layer: int, attention: AttentionFn, packed: AttentionFn | None):
        super().__init__(config, layer, attention, packed)
        self.c_attn = Linear(config.n_embd, sum(config.qkv_rows))
        self.head_counts = [rows // config.head_dim for rows in config.qkv_rows]
        self.q_norm = HeadNorm(config.head_dim, EPS) if config.qk_norm else nn.Identity()
        self.k_norm = HeadNorm(config.head_dim, EPS) if config.qk_norm else nn.Identity()
        self.rope_theta = config.rope_theta if config.rope else None

    def heads(
        self, x: Tensor, dropout_seed: Tensor | None, cu_seqlens: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, -1, self.head_dim)
        q, k, v = qkv.split(self.head_counts, dim=2)  # (B, T, H, D), and k and v (B, T, kv_heads, D)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            at: int | Tensor = 0 if cache is None else cache.length
            if self.part is not None:
                at = self.part.positions(T, x.device)
            q, k = rotated(q, at, self.rope_theta), rotated(k, at, self.rope_theta)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        out = self.attention(q, k, v, **self.options(dropout_seed, cu_seqlens))  # (B, H, T, D)
        return out.transpose(1, 2).reshape(B, T, C)


class HeadNorm(nn.RMSNorm):
    """RMSNorm in its gain's dtype: torch has no kernel for 16-bit heads, as from autocast, with a wider gain."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def rotated(x: Tensor, at: int | Tensor, theta: float) -> Tensor:
    """x (B, T, heads, D) with dimensions d and d + D/2 turned by position * theta^(-2d/D), in float32 or wider.

    at: the position of the first token, or of each, int64 (T,).

    Su et al. 2021, arXiv 2104.09864, equation 34, with the pairs as Llama has them. The table is computed where it is
    used: T * D / 2 numbers, which torch.compile shares between the layers.
    """
    T, half = x.size(1), x.size(-1) // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    speeds = theta ** (torch.arange(half, device=x.device, dtype=dtype) / -half)
    positions = at if isinstance(at, Tensor) else torch.arange(at, at + T, device=x.device)
    angles = positions.to(dtype)[:, None, None] * speeds  # (T, 1, D/2)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.split(half, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class ReLU2(MLP):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.c_fc(x)).square()  # (B, T, 4C)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class SwiGLU(MLP):
    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.c_fc = Linear(config.n_embd, config.mlp_width)
        self.c_gate = Linear(config.n_embd, config.mlp_width)
        self.c_proj = Linear(config.mlp_width, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.c_gate(x)) * self.c_fc(x)  # (B, T, mlp_width)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


MLPS = {MLPKind.gelu: MLP, MLPKind.relu2: ReLU2, MLPKind.swiglu: SwiGLU}


def norm(config: GPTConfig) -> Any:  # GPT has a LayerNorm there
    return nn.RMSNorm(config.n_embd, EPS) if config.rmsnorm else nn.LayerNorm(config.n_embd)


class ModernGPT(GPT):
    """GPT with the parts that config's switches name. Arguments as GPT's.

    Where a switch is on, attention also gets k and v (B, n_kv_head, T, D), window=(left, -1), softcap, or learned
    sinks (n_head,). `packed` is called unless heads are grouped, or q and k normalised or rotated.
    """

    def build(self, attention: AttentionFn, packed: AttentionFn | None) -> None:
        config = self.config
        self.wte = Embedding(config.padded_vocab_size, config.n_embd)
        if not config.rope:
            self.wpe = Embedding(config.seq_len, config.n_embd)
        self.h = nn.ModuleList(self.make_block(layer, attention, packed) for layer in range(config.n_layer))
        self.ln_f = norm(config)

    def make_block(self, layer: int, attention: AttentionFn, packed: AttentionFn | None) -> Block:
        config, block = self.config, super().make_block(layer, attention, packed)
        unpacked = config.switches.keys() & {"n_kv_head", "qk_norm", "rope"}
        block.attn = (UnpackedAttention if unpacked else ModernAttention)(config, layer, attention, packed)
        block.ln_1, block.ln_2 = norm(config), norm(config)
        block.mlp = MLPS[config.mlp](config)
        return block

    def with_positions(self, x: Tensor, start: int) -> Tensor:
        return x if self.config.rope else super().with_positions(x, start)

    def num_parameters(self, *, position_embeddings: bool = True) -> int:
        """As GPT's; rotary positions have none."""
        return super().num_parameters(position_embeddings=position_embeddings or self.config.rope)

    def flops_per_token(self, seq_len: int) -> int:
        """As GPT's, 6 N + 12 n_embd keys for every layer; a windowed layer's queries have `window` keys each."""
        windows = (self.config.window_of(layer) or seq_len for layer in range(self.config.n_layer))
        keys = sum(min(window, seq_len) for window in windows)
        return 6 * self.num_parameters(position_embeddings=False) + 12 * self.config.n_embd * keys


class FusedModernGPT(ModernGPT, FusedGPT):
    """ModernGPT, with the same parameters, computing with the functions in `layers` as FusedGPT does.

    The MLP can only be GPT-2's: ValueError with another.
    """

    def __init__(self, config: GPTConfig, attention: AttentionFn, layers: FusedLayers, **options: Any):
        if lacking := config.fused_lacks:
            raise ValueError(f"{lacking}: the fused layers have no such part; leave `layers` out")
        super().__init__(config, attention, layers, **options)
