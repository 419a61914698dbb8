"""What each step from the textbook softmax to FlashAttention-2 saves: the algorithms of `kernels.history`, compared
with each other and with `kernels.flash`.

    softmax     safe in three passes, online in two; with top-k in one (Online normalizer calculation, Figures 1-4)
    tiles       FlashAttention's own loop order, against the size of its tiles (FlashAttention, Figure 2 middle)
    backward    delta in a separate pass, or from dO * O (FlashAttention, Algorithm 4); statistics saved for it
    order       outer loop over keys or over queries (FlashAttention-2, Figures 4-7); one program per head or many
    changes     FlashAttention-2's others undone: what is saved, when the output is divided, what warps split

On a CPU, memory accesses, matrix products and saved bytes are counted for one head or row. On a GPU, the papers'
shapes are timed.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from kernels import AttentionError, get_attention
from kernels.flash.dispatch import machine_lacks
from kernels.flash.portable.tiles import Tile
from kernels.launch import sm_count

from . import counting, timing
from .attention import Inputs, Workload, attend_with, check, input_sets, race
from .experiment import Options, Sample, Timing
from .history_figures import IN_TURN, UNSPECIALISED, draw, judge
from .peers import OURS, PORTABLE

__all__ = ["TINY", "Settings", "draw", "judge", "run"]

ATTENTIONS = ("two_pass", "flash1", "flash")


# At 16384 tokens the backward in two passes took a quarter of the time of the whole experiment.
LONGEST = {"two_pass": 8192}
ABLATION = Workload("ablation", 4, 16, 8448, 128, False)  # FlashAttention-3's Table 2
NEEDED = ("top",)


@dataclass(frozen=True)
class Settings(Timing):
    # Length for the counts (one head of head_dim 64) and for the timed tiles.
    length: int = 1024
    # Keys per tile of FlashAttention, the paper's B_c. With 256 or more, only 32 queries per tile fit into registers.
    tile_keys: tuple[int, ...] = (64, 128, 256, 512)
    # Elements per row of the counted softmax.
    counted_row: int = 10000
    # The paper's row counts and lengths, and longer rows, which today's caches do not keep from pass to pass.
    rows: tuple[int, ...] = (4000, 10)
    row_lengths: tuple[int, ...] = (1000, 4000, 10000, 25000, 100000)
    top: tuple[int, ...] = (5, 10, 15, 30)
    # FlashAttention-2's workload, 16k tokens and hidden 2048; the most useful first.
    lengths: tuple[int, ...] = (1024, 4096, 16384, 512, 2048, 8192)
    head_dims: tuple[int, ...] = (64, 128)
    # Numbers of heads for one sequence of 16384 tokens.
    heads: tuple[int, ...] = (1, 2, 4, 8, 32, 128)


TINY = Settings(
    length=128, tile_keys=(64,), counted_row=100, rows=(2,), row_lengths=(100,), top=(3,), lengths=(64,),
    head_dims=(32,), heads=(1,), processes=1, rounds=1, seconds=0.0,
)  # fmt: skip


def run(options: Options) -> None:
    if options.device.type == "cpu":
        _count(options)
    if options.device.type == "cuda" or options.tiny:
        _time(options)


# ---- what a CPU counts ----------------------------------------------------------------------------


def _count(options: Options) -> None:
    settings = options.settings
    for name in softmaxes(1):
        count = partial(count_softmax, name, settings.counted_row, settings.top[0])
        options.sample(count, kind="softmax count", softmax=name, length=settings.counted_row)
    workload = Workload("figure2", 1, 1, settings.length, 64, False)
    for keys in settings.tile_keys:
        count = partial(count_tile, tile_of(keys), workload)
        options.sample(count, kind="tile count", keys=keys, **asdict(workload))
    workload = replace(workload, length=settings.length // 4)
    for change in changes():
        count = partial(count_change, change, workload)
        options.sample(count, kind="change count", change=change, **asdict(workload))
    for name in ATTENTIONS:
        count = partial(count_backward, name, workload)
        options.sample(count, kind="backward count", backend=name, **asdict(workload))
        right = partial(check, name, workload, torch.float16, options.device)
        options.sample(right, kind="check", backend=name)


def softmaxes(k: int) -> dict[str, Callable[[torch.Tensor], object]]:
    """The softmax contenders by name, as functions of a (rows, length) tensor; k is for those with top-k."""
    from kernels.history.softmax import online_softmax, online_softmax_topk, safe_softmax

    return {
        "safe": safe_softmax,
        "online": online_softmax,
        "safe, top-k": lambda x: safe_softmax(x).topk(k),
        "online, top-k": lambda x: online_softmax(x).topk(k),
        "online with top-k": lambda x: online_softmax_topk(x, k),
    }


def count_softmax(name: str, length: int, k: int) -> Sample:
    """{"accesses"}: memory accesses per element of a float32 row."""
    softmax, x = softmaxes(k)[name], torch.randn(1, length)
    with counting.counting() as traffic:
        softmax(x)
    return {"accesses": (traffic.read + traffic.written) / x.nbytes, "k": k}


def tile_of(keys: int) -> Tile:
    """FlashAttention's forward tile with that many keys, and the number of warps that spills least on sm_90."""
    return Tile(64 if keys < 256 else 32, keys, 4 if keys <= 64 or keys == 256 else 8, 1)


def _flash1_forward(tile: Tile, inputs: Inputs, number: int = 0) -> torch.Tensor:
    from kernels.history.flash1 import forward_with

    workload = inputs.workload
    q, k, v = (x.detach() for x in inputs.qkv)
    return forward_with(tile, q, k, v, workload.causal, workload.head_dim**-0.5)[0]


def count_tile(tile: Tile, workload: Workload) -> Sample:
    """{"bytes", "statistics", "tile"}: bytes that FlashAttention's forward moves, and those for maximum and sum."""
    inputs = Inputs(workload, torch.float16, torch.device("cpu"))
    with counting.counting() as traffic:
        _flash1_forward(tile, inputs)
    passes = -(-workload.length // tile.block_n)
    return {
        "bytes": traffic.read + traffic.written,
        "statistics": 2 * 4 * workload.length * (2 * passes - 1),  # float32; the first pass reads none
        "tile": (tile.block_m, tile.block_n),
    }


def changes() -> dict[str, Any]:
    """FlashAttention-2 as printed, and with one of its changes undone."""
    from kernels.history.flash2 import PRINTED, Way

    return {"printed": PRINTED, "maximum and sum": Way(lse=False), "divided each step": Way(once=False)}


def attend_in(way: Any) -> Callable[[Inputs, int], torch.Tensor]:
    from kernels.history.flash2 import flash2_attention

    return lambda inputs, number: flash2_attention(*inputs.qkv, causal=inputs.workload.causal, way=way)


def count_change(change: str, workload: Workload) -> Sample:
    """{"forward", "backward", "key_tiles"}: bytes moved, and tiles of keys, each of which reads what was saved."""
    from kernels.history.inputs import INTERPRETER

    inputs, attend = Inputs(workload, torch.float16, torch.device("cpu")), attend_in(changes()[change])
    with counting.counting() as traffic:
        out = attend(inputs, 0)
        forward = traffic.copy()
        torch.autograd.grad(out, inputs.qkv, inputs.d_out)
    backward, tiles = traffic.since(forward), -(-workload.length // INTERPRETER.block_n)
    moved = {"forward": forward.read + forward.written, "backward": backward.read + backward.written}
    return {**moved, "key_tiles": tiles}


def count_backward(backend: str, workload: Workload) -> Sample:
    """{"products", "saved"}: matrix products of the backward, in units of length^2 * head_dim multiply-adds, and the
    bytes of statistics saved for it per query."""
    inputs = Inputs(workload, torch.float16, torch.device("cpu"))
    saved: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attend_with(backend)(inputs, 0)
    with counting.counting() as traffic:
        torch.autograd.grad(out, inputs.qkv, inputs.d_out)
    statistics = [x for x in saved if x.shape == out.shape[:3]]
    queries = workload.batch * workload.heads * workload.length
    return {
        "products": traffic.flops / (2 * queries * workload.length * workload.head_dim),
        "saved": sum(x.nbytes for x in statistics) / queries,
    }


# ---- what a GPU times -----------------------------------------------------------------------------


def _time(options: Options) -> None:
    settings = options.settings
    batch, heads, tokens, hidden = (1, 1, 64, 32) if options.tiny else (64, 16, 16384, 2048)
    tiles = {head_dim: fastest_tiles(head_dim, tokens, hidden, options) for head_dim in settings.head_dims}
    for head_dim in (each for each in settings.head_dims if "backward" in tiles[each]):
        workload = _middle(head_dim, tokens, hidden)
        options.timed(partial(time_passes, workload, options), kind="passes", **asdict(workload))
    for length in settings.lengths:
        for head_dim in settings.head_dims:
            for causal in (False, True):
                shape = (tokens // length, hidden // head_dim, length, head_dim)
                workload = Workload("fa2", *shape, causal)
                checked = partial(_checked, workload=workload, options=options, tiles=tiles[head_dim])
                right = options.right(ATTENTIONS, checked, head_dim=head_dim, causal=causal)
                measure = partial(time_order, right, workload, options, tiles[head_dim])
                options.timed(measure, kind="order", **asdict(workload))
    shape = (tokens // settings.length or 1, hidden // 64 or 1, min(settings.length, tokens), 64)
    workload = Workload("changes", *shape, False)
    options.timed(partial(time_changes, workload, options), kind="changes", **asdict(workload))
    options.timed(partial(time_warps, workload, options), kind="warps", **asdict(workload))
    workload = Workload("ablation", 1, 1, 64, 32, False) if options.tiny else ABLATION
    options.timed(partial(time_forms, workload, options), kind="ablation", **asdict(workload))
    for length in (settings.length,) if options.tiny else (settings.length, 8 * settings.length):
        workload = Workload("figure2", max(1, batch * settings.length // length), heads, length, 64, False)
        options.timed(partial(time_tiles, workload, options), kind="tiles", **asdict(workload))
    for heads in settings.heads:
        workload = Workload("programs", 1, heads, tokens, 64, False)
        options.timed(partial(time_programs, workload, options), kind="programs", **asdict(workload))
    for rows in settings.rows:
        for length in settings.row_lengths:
            for k in settings.top:
                where = {"rows": rows, "length": length, "k": k}
                options.timed(partial(time_softmax, options=options, **where), kind="softmax", **where)


def fastest_tiles(head_dim: int, tokens: int, hidden: int, options: Options) -> dict[str, Tile]:
    """flash1's fastest tiles for that head_dim, of its table, at the middle of the lengths."""
    from kernels.history import flash1

    workload, found = _middle(head_dim, tokens, hidden), {}
    for kernel in ("forward", "backward"):
        tiles = {str(tile): tile for tile in flash1.CANDIDATES.get((kernel, head_dim), ())}
        where = {"kind": "flash1 tiles", "kernel": kernel, **asdict(workload)}
        measure = partial(time_flash1, kernel, tiles, workload, options)
        times = options.sample(measure, **where).get("ms", {}) if tiles else {}
        if times:
            found[kernel] = tiles[min(times, key=lambda name: statistics.median(times[name][kernel]))]
    return found


def _middle(head_dim: int, tokens: int, hidden: int) -> Workload:
    length = min(4096, tokens)
    return Workload("fa2", tokens // length, hidden // head_dim, length, head_dim, False)


def time_flash1(kernel: str, tiles: dict[str, Tile], workload: Workload, options: Options) -> Sample:
    """flash1, forward and backward, with each of the tiles in one of its kernels."""
    from kernels.history import flash1

    sets = input_sets(workload, torch.float16, options.device)

    def call_of(tile: Tile) -> timing.Call:
        def call(number: int) -> Iterator[None]:
            inputs = sets[number % len(sets)]
            with flash1.forced(**{kernel: tile}):
                out = attend_with("flash1")(inputs, number)
                yield
                torch.autograd.grad(out, inputs.qkv, inputs.d_out)
                yield

        return call

    calls = {name: call_of(tile) for name, tile in tiles.items()}
    return timing.race(calls, options, ("forward", "backward"))


def time_passes(workload: Workload, options: Options) -> Sample:
    """`attention.race` of the backward in one pass and in two, both with two_pass's tile; flash1's may be faster."""
    from kernels.history import flash1, two_pass

    with flash1.forced(backward=two_pass.BACKWARD[workload.head_dim]):
        attends = {name: attend_with(name) for name in ("two_pass", "flash1")}
        return race(attends, input_sets(workload, torch.float16, options.device), options)


def time_changes(workload: Workload, options: Options) -> Sample:
    """`attention.race` of FlashAttention-2 and of what is left of it without each change."""
    attends = {name: attend_in(way) for name, way in changes().items()}
    return race(attends, input_sets(workload, torch.float16, options.device), options)


def time_warps(workload: Workload, options: Options) -> Sample:
    """The forward with queries split over two warps, and with keys, by the number of queries in a tile."""
    from kernels.history.flash2 import SPLIT_KEYS, SPLIT_QUERIES

    ways = {"queries": SPLIT_QUERIES} | {f"keys, {way.tile.block_m}": way for way in SPLIT_KEYS}
    forms = {name: torch.no_grad()(attend_in(way)) for name, way in ways.items()}
    return race(forms, input_sets(workload, torch.float16, options.device), options, backward=False)


def _checked(name: str, workload: Workload, options: Options, tiles: dict[str, Tile]) -> Sample:
    """`attention.check` with flash1's tiles."""
    from kernels.history import flash1

    with flash1.forced(**tiles):
        return check(name, workload, torch.float16, options.device)


def time_order(right: list[str], workload: Workload, options: Options, tiles: dict[str, Tile]) -> Sample:
    """`attention.race` of the historical attentions, flash, and flash's portable kernels, if all are right.

    tiles: flash1's.
    """
    from kernels.history import flash1

    if wrong := ", ".join(name for name in ATTENTIONS if name not in right):
        raise AttentionError(f"{wrong}: wrong or refused here, so nothing is timed")
    portable = partial(get_attention(OURS), tier="triton")
    names = [name for name in ATTENTIONS if workload.length <= LONGEST.get(name, workload.length)]
    attends = {name: attend_with(name) for name in names}
    attends[PORTABLE] = lambda inputs, number: portable(*inputs.qkv, causal=workload.causal)
    with flash1.forced(**tiles):
        return race(attends, input_sets(workload, torch.float16, options.device), options)


def time_forms(workload: Workload, options: Options) -> Sample:
    """The forward by the device's kernels, which on Hopper are specialised and pipelined by hand; by those with one
    of these undone; and by the portable one, in which Triton pipelines."""

    def forward_of(function: Callable[..., object]) -> Callable[[Inputs, int], object]:
        return lambda inputs, number: function(*(x.detach() for x in inputs.qkv))

    ours = partial(get_attention(OURS), causal=False)
    forms = {OURS: forward_of(ours), PORTABLE: forward_of(partial(ours, tier="triton"))}
    if machine_lacks(options.device) is None and workload.head_dim == 128:
        from kernels.history.flash3 import flash3_forward

        forms |= {
            IN_TURN: forward_of(partial(flash3_forward, form="in turn")),
            UNSPECIALISED: forward_of(partial(flash3_forward, form="unspecialised")),
        }
    return race(forms, input_sets(workload, torch.float16, options.device), options, backward=False)


def time_tiles(workload: Workload, options: Options) -> Sample:
    """FlashAttention's forward by the number of keys in its tile."""
    forms = {str(keys): partial(_flash1_forward, tile_of(keys)) for keys in options.settings.tile_keys}
    return race(forms, input_sets(workload, torch.float16, options.device), options, backward=False)


def time_programs(workload: Workload, options: Options) -> Sample:
    """The two-pass forward with one program per head and with many, one per tile; and the GPU's processors."""
    from kernels.history.two_pass import forward_in

    def forward(programs: int | None, inputs: Inputs, number: int) -> object:
        q, k, v = (x.detach() for x in inputs.qkv)
        return forward_in(programs, q, k, v, workload.causal, workload.head_dim**-0.5)

    forms = {"one": partial(forward, 1), "many": partial(forward, None)}
    timed = race(forms, [Inputs(workload, torch.float16, options.device)], options, backward=False)
    return {**timed, "processors": sm_count(options.device)}


def time_softmax(rows: int, length: int, k: int, options: Options) -> Sample:
    """The softmaxes of float32 rows."""
    count = timing.input_sets(8 * rows * length, options.device)
    sets = [torch.randn(rows, length, device=options.device) for _ in range(count)]
    forms = {name: lambda x, number, form=form: form(x) for name, form in softmaxes(k).items()}
    return race(forms, sets, options, backward=False)
