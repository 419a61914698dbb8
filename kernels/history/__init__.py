"""The algorithms that led to `kernels.flash`, as the papers state them: to be compared with it, not to be used.

    softmax.py   softmax of a row in three passes (safe), and in two (online)
    two_pass.py  attention in two passes over the keys: online softmax statistics, then the output
    one_pass.py  attention in one pass over the keys, a query a program
    chunked.py   attention in chunks with checkpointing, in PyTorch: flash attention's memory without its speed
    stored_p.py  one kernel that stores the probabilities, as Apex's FMHA did, of short rows without a causal mask
    flash1.py    FlashAttention of 2022: one pass, with keys in the outer loop and queries in the inner one
    flash2.py    FlashAttention-2 of 2023, with each of its changes undone
    flash3.py    FlashAttention-3's forward of 2024, with each of its schedules undone; on Hopper

Each step saves memory, traffic or work; `python -m reproduce history` counts and times them. two_pass, chunked and
flash1 are registered under these names; triton is imported when one that needs it is loaded, not before.
"""

from ..flash.dispatch import refuses_kernels
from ..registry import AttentionFn, AttentionRequest, register_attention

NAMES = ("two_pass", "chunked", "flash1")


def refuses(request: AttentionRequest) -> str | None:
    """The reason why the Triton attentions cannot serve `request`, or None."""
    return refuses_kernels(request) or request.beyond(set())


@register_attention("two_pass", refuses=refuses, lazy=True)
def load_two_pass() -> AttentionFn:
    from .two_pass import two_pass_attention

    return two_pass_attention


@register_attention("chunked", refuses=lambda request: request.beyond(set()), lazy=True)
def load_chunked() -> AttentionFn:
    from .chunked import chunked_attention

    return chunked_attention


@register_attention("flash1", refuses=refuses, lazy=True)
def load_flash1() -> AttentionFn:
    from .flash1 import flash1_attention

    return flash1_attention
