"""Our Triton attention, registered as `flash`. Triton is imported when it is loaded, not before."""

from ..registry import AttentionFn, register_attention
from .dispatch import refuses, tier_of, why_portable


@register_attention("flash", refuses=refuses, lazy=True, tier=tier_of, why=why_portable)
def load() -> AttentionFn:
    """The attention function; imports triton."""
    from .api import flash_attention

    return flash_attention
