"""Argument handling shared by `two_pass`, `stored_p`, `flash1` and `flash2`."""

import torch

from ..arguments import check_inputs, in_autocast_dtype, refuse_features
from ..flash.dispatch import refuses_inputs
from ..flash.portable.spec import specify
from ..flash.portable.tiles import Tile
from ..launch import FUSION, INTERPRETED
from ..operators import has_tangent
from ..registry import AttentionError

Tensor = torch.Tensor
# float32 does not use tensor cores. The interpreter's time goes by tiles.
INTERPRETER = Tile(64, 64, 4, 1)
SINGLE = {64: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)}


def prepared(
    name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, features: dict[str, object]
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with a last stride of 1 and equal numbers of heads; AttentionError for what `name` cannot do."""
    features.pop("dropout_seed", None)  # without dropout_p it means nothing, and with it the call is refused
    refuse_features(name, features)
    q, k, v = in_autocast_dtype(q, k, v)
    check_inputs(q, k, v, causal)
    if reason := refuses_inputs(q.device, q.dtype, q.shape[-1], INTERPRETED):
        raise AttentionError(f"attention={name}: {reason}")
    if max(q.shape[:2]) > 65535:  # they are grid axes of the launch
        raise AttentionError(f"attention={name} takes batch and heads up to 65535, got {tuple(q.shape[:2])}")
    if has_tangent(q, k, v):
        raise AttentionError(f"attention={name} has no forward-mode derivative; use attention=naive")
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def tile_of(tiles: dict[int, Tile], q: Tensor) -> Tile:
    """The tile for q. tiles: largest head_dim served -> tile, for 16-bit dtypes."""
    if INTERPRETED:
        return INTERPRETER
    table = SINGLE if q.dtype is torch.float32 else tiles
    return next(tile for largest, tile in table.items() if q.shape[-1] <= largest)


def compiled_for(tile: Tile, q: Tensor, causal: bool) -> dict[str, object]:
    """A kernel's compile-time argument and launch options."""
    spec = specify(tile, q.shape[-1], causal)
    return {"SPEC": spec, "num_warps": tile.warps, "num_stages": tile.stages, **FUSION}


def strides(*tensors: Tensor) -> list[int]:
    """The batch, head and row strides of each tensor (batch, heads, length, head_dim)."""
    return [stride for x in tensors for stride in x.stride()[:3]]
