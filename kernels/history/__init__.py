"""The algorithms that led to `kernels.flash`, as the papers state them: to be measured beside it, not to be used.

    softmax.py   the softmax of a row in three passes over it, and in two: online softmax
    two_pass.py  attention whose softmax is online: one pass over the keys for it, another for the output
    chunked.py   attention a chunk at a time with checkpointing, in PyTorch: the memory without the speed
    flash1.py    FlashAttention of 2022: one pass, keys outside and queries inside

Each step saves memory, traffic or work; `python -m reproduce history` counts and times them. The attentions are
registered by these names; triton is imported when one that needs it is loaded, not before.
"""

from ..flash import refuses_kernels
from ..registry import AttentionFn, AttentionRequest, register_attention

NAMES = ("two_pass", "chunked", "flash1")


def refuses(request: AttentionRequest) -> str | None:
    """Why the attentions in Triton cannot serve `request`, or None."""
    return refuses_kernels(request) or request.unsupported(set())


@register_attention("two_pass", refuses=refuses, lazy=True)
def load_two_pass() -> AttentionFn:
    from .two_pass import two_pass_attention

    return two_pass_attention


@register_attention("chunked", refuses=lambda request: request.unsupported(set()), lazy=True)
def load_chunked() -> AttentionFn:
    from .chunked import chunked_attention

    return chunked_attention


@register_attention("flash1", refuses=refuses, lazy=True)
def load_flash1() -> AttentionFn:
    from .flash1 import flash1_attention

    return flash1_attention
