"""The shape of a GPT-2. No torch here, so that a command line can be parsed without loading it."""

from dataclasses import dataclass


@dataclass
class GPTConfig:
    """Shape and recipe switches; the defaults are GPT-2 small. Raises ValueError when they disagree."""

    vocab_size: int = 50257  # token ids the model reads and predicts; the tokenizer decides it
    seq_len: int = 1024  # the longest sequence, in tokens: one learned position embedding each
    n_layer: int = 12  # transformer blocks
    n_head: int = 12  # attention heads per block; n_embd / n_head is the head dimension
    n_embd: int = 768  # width of the residual stream; the MLP is four times as wide
    dropout: float = 0.0  # probability, for embeddings, residual branches and attention weights alike
    document_end: int | None = (
        None  # token id after which a new document begins, unseen by the next; None: one text
    )
    scale_attn_by_inverse_layer_idx: bool = False  # divide the scores of block i (from 0) by i + 1 (Mistral)

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
            below, above = (
                self.n_embd // self.n_head * self.n_head,
                -(-self.n_embd // self.n_head) * self.n_head,
            )
            widths = " or ".join(str(width) for width in (below, above) if width)
            heads = [count for count in range(1, self.n_embd + 1) if self.n_embd % count == 0]
            fewer = max(count for count in heads if count < self.n_head)
            more = [count for count in heads if count > self.n_head][:1]
            counts = " or ".join(str(count) for count in [fewer, *more])
            raise ValueError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: "
                f"set n_embd={widths}, or n_head={counts}"
            )

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def qkv_rows(self) -> list[int]:
        """Rows of c_attn that compute q, k and v, in this order."""
        return [self.n_embd] * 3

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding matrix: vocab_size rounded up to 64, the width GPU matrix products want."""
        return -(-self.vocab_size // 64) * 64
