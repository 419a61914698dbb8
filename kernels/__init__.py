"""Attention algorithms behind one signature, selected by name.

    name, attention = resolve_attention("auto", device=device, dtype=torch.bfloat16, head_dim=64)
    out = attention(q, k, v, causal=True)

`attention_tier` says which of a backend's sets of kernels runs; `why_portable` says why the one for Hopper does not.

See also `kernels.layers`, a model's other layers, and `kernels.ring`, attention over a sequence that several GPUs
share.

`kernels.arguments` documents the arguments; `kernels.naive` implements all of them in the slow and obvious way.
`flash_attention` and `decode_attention` are loaded on first use, since they import triton.
"""

import os
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

# `python -m kernels.tune` loads this package before the module. An import raises; a command ends with one line.
if any(word.startswith(f"{__name__}.") for word in sys.orig_argv):
    if find_spec("torch") is None:
        checkout = Path(__file__).parent.joinpath("../requirements.txt").is_file()
        sys.exit(
            f"error: not installed: torch (pip install {'-r requirements.txt' if checkout else 'torch'})"
        )
    try:
        import_module("torch")
    except (ImportError, OSError) as error:
        reason = str(error).partition("\n")[0]
        number = version("torch").partition("+")[0]
        fix = f"pip install --force-reinstall torch=={number}, and no other CUDA in LD_LIBRARY_PATH"
        sys.exit(f"error: torch cannot be imported: {reason} ({fix})")
# With TRITON_INTERPRET=1 `import triton` needs NumPy; without it the error has more lines than this one.
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") and not find_spec("numpy"):
    raise ModuleNotFoundError("TRITON_INTERPRET=1 needs NumPy (pip install numpy)", name="numpy")

from . import fa4, flash, history, library, naive  # each registers its backends
from .registry import (
    ATTENTION,
    AttentionError,
    AttentionFn,
    AttentionRequest,
    attention_tier,
    bind,
    breaks_graph,
    get_attention,
    packed_form,
    register_attention,
    resolve_attention,
    why_portable,
    with_packed,
)

if TYPE_CHECKING:
    from .flash.api import flash_attention
    from .flash.decode import decode_attention

_HOME = {"flash_attention": ".flash.api", "decode_attention": ".flash.decode"}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]


def register() -> None:
    """Register the flash kernels with PyTorch, to run under scaled_dot_product_attention (see `flash.under_sdpa`)."""
    import_module(".flash.under_sdpa", __name__).register()


def register_sharding() -> None:
    """Let the flash kernels take DTensors sharded by batch or by heads (see `flash.sharding`)."""
    import_module(".flash.sharding", __name__).register()


def register_transformers() -> None:
    """Register the flash kernels with transformers as attn_implementation="tilegpt" (see `under_transformers`)."""
    # In a checkout, transformers would take us for the Hub's package `kernels`, where that is installed.
    if __name__ == "kernels":
        ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "kernels"}
        hidden: dict[str, Any] = dict.fromkeys(ours)  # None: not to be imported
        sys.modules.update(hidden)
        try:
            import_module("transformers.modeling_utils")
        finally:
            sys.modules.update(ours)
    import_module(".under_transformers", __name__).register()


__all__ = [
    "ATTENTION",
    "AttentionError",
    "AttentionFn",
    "AttentionRequest",
    "attention_tier",
    "bind",
    "breaks_graph",
    "decode_attention",
    "fa4",
    "flash",
    "flash_attention",
    "get_attention",
    "history",
    "library",
    "naive",
    "packed_form",
    "register",
    "register_attention",
    "register_sharding",
    "register_transformers",
    "resolve_attention",
    "why_portable",
    "with_packed",
]
