"""The shape of a GPT-2. No torch here, so that a command line can be parsed without loading it."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any


class MLPKind(Enum):
    gelu = "gelu"  # GPT-2's: tanh GELU, 4 n_embd wide
    relu2 = "relu2"  # ReLU squared, as wide (So et al. 2021, arXiv 2109.08668)
    swiglu = "swiglu"  # gated by SiLU, 8/3 n_embd wide: as many weights (Shazeer 2020, arXiv 2002.05202)


# Settings of parts that GPT-2 does not have.
SWITCHES = ("n_kv_head", "window", "softcap", "sinks", "qk_norm", "rope", "rmsnorm", "mlp")


@dataclass
class GPTConfig:
    """The model's shape and switches for parts of later models; the defaults are GPT-2 small. Raises ValueError."""

    vocab_size: int = 50257  # token ids the model reads and predicts; the tokenizer decides it
    seq_len: int = 1024  # the longest sequence, in tokens: one learned position embedding each
    n_layer: int = 12  # transformer blocks
    n_head: int = 12  # attention heads per block; n_embd / n_head is the head dimension
    n_embd: int = 768  # width of the residual stream; the MLP is four times as wide
    dropout: float = 0.0  # probability, for embeddings, residual branches and attention weights alike
    # Token id that ends a document, which the next one does not see; None: one text. train.py: data.document_mask.
    document_end: int | None = None
    scale_attn_by_inverse_layer_idx: bool = False  # divide the scores of block i (from 0) by i + 1 (Mistral)
    # Heads of keys and values, which n_head / n_kv_head heads of queries share (arXiv 2305.13245). null: n_head.
    n_kv_head: int | None = None
    # Tokens that a query sees in the windowed layers, itself included (arXiv 2004.05150). null: no layer is windowed.
    window: int | None = None
    # Which layers those are: S has the window, L sees all; repeated over the layers (SL: Gemma 2, arXiv 2408.00118).
    window_pattern: str = "SL"
    # Scores become softcap * tanh(scores / softcap) (Gemma 2: 50). 0: they stay as they are.
    softcap: float = 0.0
    # A learned logit per head that takes part in the softmax and has no value (gpt-oss, arXiv 2508.10925).
    sinks: bool = False
    # RMSNorm of the queries and keys of each head, with a learned gain (arXiv 2302.05442, as in Qwen3).
    qk_norm: bool = False
    # Rotary positions (arXiv 2104.09864) instead of the table of learned ones.
    rope: bool = False
    # The base of rotary positions: the slowest pair of a head turns once in about 2 pi rope_theta tokens.
    rope_theta: float = 10000.0
    # RMSNorm (arXiv 1910.07467) in place of every LayerNorm.
    rmsnorm: bool = False
    # What is between the two layers of an MLP.
    mlp: MLPKind = MLPKind.gelu

    def __post_init__(self) -> None:
        for name in ("vocab_size", "seq_len", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout}: it must be at least 0.0 and below 1.0")
        if self.document_end is not None and not 0 <= self.document_end < self.vocab_size:
            raise ValueError(
                f"document_end={self.document_end}: it must be a token id, 0 to {self.vocab_size - 1} with "
                "this vocab_size"
            )
        if self.n_embd % self.n_head:
            below = self.n_embd // self.n_head * self.n_head
            widths = " or ".join(str(width) for width in (below, below + self.n_head) if width)
            heads = [count for count in range(1, self.n_embd + 1) if self.n_embd % count == 0]
            fewer = max(count for count in heads if count < self.n_head)
            more = [count for count in heads if count > self.n_head][:1]
            counts = " or ".join(map(str, [fewer, *more]))
            raise ValueError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: "
                f"set n_embd={widths}, or n_head={counts}"
            )
        self._check_switches()

    def _check_switches(self) -> None:
        if self.n_kv_head is not None and (self.n_kv_head < 1 or self.n_head % self.n_kv_head):
            counts = ", ".join(str(n) for n in range(1, self.n_head + 1) if self.n_head % n == 0)
            raise ValueError(
                f"n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}: it may be {counts}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: it must be at least 1 token, or null for no window")
        if not self.window_pattern or set(self.window_pattern) - {"S", "L"}:
            raise ValueError(
                f"window_pattern={self.window_pattern}: it must be of S (windowed) and L (not), such as SL or SSSL"
            )
        if self.window is None and self.window_pattern != GPTConfig.window_pattern:
            raise ValueError(
                f"window_pattern={self.window_pattern} needs window=N; without a window use window_pattern=SL"
            )
        if not 0.0 <= self.softcap < math.inf:
            raise ValueError(f"softcap={self.softcap}: it must be positive and finite, or 0 for none")
        if self.rope and self.head_dim % 2:
            raise ValueError(
                f"rope=true turns pairs, but the head dimension n_embd / n_head is {self.head_dim}: make it even"
            )
        if not 0.0 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta={self.rope_theta}: it must be positive and finite")
        if not self.rope and self.rope_theta != GPTConfig.rope_theta:
            raise ValueError(f"rope_theta={self.rope_theta} needs rope=true: GPT-2's positions are learned")
        kinds = [kind.value for kind in MLPKind]
        if self.mlp not in [*MLPKind, *kinds]:
            raise ValueError(f"mlp={self.mlp}: it must be one of {', '.join(kinds)}")
        self.mlp = MLPKind(self.mlp)  # "swiglu" will do

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def switches(self) -> dict[str, Any]:
        """The SWITCHES that are on (differ from GPT-2), with their values."""
        off = {"n_kv_head": self.n_head, "window": None, "softcap": 0.0, "mlp": MLPKind.gelu}
        values = {name: getattr(self, name) for name in SWITCHES} | {"n_kv_head": self.kv_heads}
        return {name: value for name, value in values.items() if value != off.get(name, False)}

    @property
    def fused_lacks(self) -> str | None:
        """A switch that is on and that the fused layers (model/fused.py) cannot compute, or None."""
        return "mlp" if "mlp" in self.switches else None

    @property
    def attention_features(self) -> dict[str, Any]:
        """Arguments besides GPT-2's that attention gets in some layer, to ask a backend whether it takes them."""
        window = None if self.window is None else (self.window - 1, -1)
        return {"window": window, "softcap": self.softcap, "sinks": self.sinks or None}

    def window_of(self, layer: int) -> int | None:
        return self.window if self.window_pattern[layer % len(self.window_pattern)] == "S" else None

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def qkv_rows(self) -> list[int]:
        """Rows of c_attn that compute q, k and v, in this order."""
        return [self.n_embd, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]

    @property
    def mlp_width(self) -> int:
        """Rows of c_fc. SwiGLU's three matrices, 8/3 n_embd wide up to a multiple of 64, hold as much as two."""
        return -(-8 * self.n_embd // 192) * 64 if self.mlp is MLPKind.swiglu else 4 * self.n_embd

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding matrix: vocab_size rounded up to a multiple of 64, which suits matrix products."""
        return -(-self.vocab_size // 64) * 64
