"""The arguments of flash's operators besides q, k and v, as two tuples: Tensors and Options.

An operator's schema is flat: it is called with `*tensors, *options`, which `unflatten` makes into the tuples again.
"""

from typing import NamedTuple

from torch import Tensor


class Tensors(NamedTuple):
    """Tensor arguments of the features (kernels/features.py); None where a feature is not in use."""

    seed: Tensor | None = None  # 0-d int64
    alibi_slopes: Tensor | None = None  # (heads,), as sinks
    sinks: Tensor | None = None
    document_starts: Tensor | None = None  # see `masks.document_bounds`
    document_ends: Tensor | None = None
    kv_lengths: Tensor | None = None  # int32 (batch,)
    key_blocks: Tensor | None = None  # see `masks.block_lists`
    query_blocks: Tensor | None = None


class Options(NamedTuple):
    """All other arguments."""

    causal: bool
    scale: float
    dropout_p: float = 0.0
    left: int = -1  # the window's sides, -1 for one without a limit
    right: int = -1
    softcap: float = 0.0
    tier: str = "auto"
    precise_delta: bool = False
    ragged: bool = False  # document_starts and _ends are each query's keys: `masks.keys_of_queries`

    def within(self, q_len: int, kv_len: int) -> "Options":
        """A copy with -1 for each side of the window that masks nothing: the kernels add positions to it, which might
        overflow int32. Used inside the operators: outside, torch.compile would specialise a graph for each result.
        """
        left = self.left if self.left < kv_len - 1 else -1
        right = self.right if self.right < q_len - 1 else -1
        return self._replace(left=left, right=right)

    def constants(self) -> dict[str, float]:
        """The options that the portable kernels are compiled for, as arguments of `portable.spec.specify`."""
        return {
            name: getattr(self, name)
            for name in ("causal", "dropout_p", "left", "right", "softcap", "ragged")
        }


def unflatten(asked: tuple[object, ...]) -> tuple[Tensors, Options]:
    """The last arguments of an operator, by name. (_make would check their number, which takes longer.)"""
    return tuple.__new__(Tensors, asked[:TENSORS]), tuple.__new__(Options, asked[TENSORS:])


TENSORS = len(Tensors._fields)
