"""FLOPs and memory traffic, standard against flash: FlashAttention Figure 1 (right) and Figure 2 (left, middle).

On a CPU they are counted (`counting.py`; results/cpu/traffic.json). On a GPU the same shapes are timed, and hardware
counters read. Attention's traffic is proportional to batch * heads, so one head is counted; the paper's shape is that
times 1024.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from kernels.flash.portable.tiles import KERNELS, Tile, forced, tile_for

from . import counting, hardware_counters, peers, timing
from .attention import DROPPED, PADDED, Inputs, Workload, attend_with, backend_names, check, time_all
from .attention_figures import BASELINE, OURS
from .experiment import Options, Sample, Timing
from .standard import standard_passes
from .traffic_figures import draw, judge

__all__ = ["TINY", "Settings", "draw", "judge", "run"]

PASSES = ("matmul", "mask", "softmax", "dropout", "matmul 2")


@dataclass(frozen=True)
class Settings(Timing):
    # Names in kernels.ATTENTION, "standard" and its compiled form; if empty, all of them.
    backends: tuple[str, ...] = ()
    # Lengths counted, for one head of head_dim 64; 1024 is the paper's.
    lengths: tuple[int, ...] = (1024, 512, 256)
    # Sweep of the forward kernel's BLOCK_M at this BLOCK_N; counted at the last of `lengths`.
    block_m: tuple[int, ...] = (16, 32, 64, 128)
    block_n: int = 64
    # The GPU architecture whose tiles are used for the counts: compute capability * 10.
    architecture: int = 90
    # The paper's batch and heads, for timing on a GPU.
    batch: int = 64
    heads: int = 16
    # Left out because it is compiled again for every shape; `attention` times it.
    compiled: tuple[str, ...] = ("flex",)
    seconds: float = 0.3


TINY = Settings(
    backends=(BASELINE, "naive", OURS), lengths=(64,), block_m=(32, 64), batch=1, heads=1, seconds=0.0,
    processes=1, rounds=1,
)  # fmt: skip


def run(options: Options) -> None:
    """Run the experiment; see `experiment.py`."""
    if options.device.type == "cuda" or options.tiny:
        _time(options)
    if options.device.type == "cpu":
        _count(options)


# ---- what a CPU counts ----------------------------------------------------------------------------


def _count(options: Options) -> None:
    settings = options.settings
    names = backend_names(settings.backends)
    for length in settings.lengths:
        for mask in ("plain", PADDED) if length == settings.lengths[0] else ("plain",):
            workload = Workload("figure2", 1, 1, length, 64, False, mask)
            for backend in names:
                options.sample(
                    lambda b=backend, w=workload: count(b, w, settings.architecture),
                    kind="count", backend=backend, **asdict(workload),
                )  # fmt: skip
    workload = Workload("figure2", 1, 1, settings.lengths[-1], 64, False)
    for block_m in settings.block_m:
        options.sample(
            lambda m=block_m: count(OURS, workload, settings.architecture, (m, settings.block_n)),
            kind="tile count", backend=OURS, block_m=block_m, block_n=settings.block_n, **asdict(workload),
        )  # fmt: skip


def count(
    backend: str, workload: Workload, architecture: int, forward_tile: tuple[int, int] | None = None
) -> Sample:
    """{"forward": {"read", "written", "flops"}, "backward": ..., "tiles"}; "tiles" are those our kernels used."""
    peers.refuse(backend, workload, torch.float16, torch.device("cpu"))
    tiles = _tiles(architecture, workload) if backend == OURS else {}
    if forward_tile is not None:
        tiles["forward"] = replace(tiles["forward"], block_m=forward_tile[0], block_n=forward_tile[1])
    inputs = Inputs(workload, torch.float16, torch.device("cpu"))
    attend = attend_with(backend)
    with torch.no_grad():
        attend(inputs, 0)  # builds masks and does lookups, which are not to be counted
    with forced(**tiles), counting.counting() as traffic:
        out = attend(inputs, 0)
        forward = traffic.copy()
        torch.autograd.grad(out, inputs.qkv, inputs.d_out)
    return {"forward": asdict(forward), "backward": asdict(traffic.since(forward)), "tiles": _shapes(tiles)}


def _tiles(architecture: int, workload: Workload) -> dict[str, Tile]:
    """The tile of each of our kernels on that architecture."""
    shape = (workload.head_dim, torch.float16, workload.causal, workload.length)
    return {kernel: tile_for(kernel, architecture, *shape) for kernel in KERNELS}


def _shapes(tiles: dict[str, Tile]) -> dict[str, tuple[int, int]]:
    return {kernel: (tile.block_m, tile.block_n) for kernel, tile in tiles.items()}


# ---- what a GPU times and reads -------------------------------------------------------------------


def _time(options: Options) -> None:
    settings, device = options.settings, options.device
    length = settings.lengths[0]
    names = backend_names(settings.backends, (BASELINE, peers.COMPILED))
    names = [each for each in names if each not in settings.compiled]
    for mask in (PADDED, "plain"):
        workload = Workload("figure2", settings.batch, settings.heads, length, 64, False, mask)
        able = [each for each in names if _able(each, workload, options)]
        options.timed(
            partial(time_all, able, workload, options, torch.float16), kind="time", **asdict(workload)
        )
    dropped = replace(workload, mask=DROPPED)
    options.timed(partial(time_passes, dropped, options), kind="passes", **asdict(dropped))
    options.sample(
        lambda: {"rate": timing.copy_rate(device, 2**22 if options.tiny else 2**32)}, kind="copy rate"
    )
    plain = replace(workload, mask="plain")
    options.timed(partial(time_tiles, plain, options), kind="tiles", **asdict(plain))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the profiled program is a separate process that needs memory on the same device
    found = [
        options.sample(
            lambda b=backend: hardware_counters.read_counters(b, workload), kind="ncu", backend=backend,
            **asdict(workload),
        )
        for backend in (BASELINE, OURS)
    ]  # fmt: skip
    if refused := [each for each in found if "refused" in each]:
        one = refused[0]  # the other's command differs only in the backend's name
        options.say(f"  hardware counters: {one['refused']}; where they can be read:\n  {one['command']}")


def _able(backend: str, workload: Workload, options: Options) -> bool:
    def checked() -> Sample:
        peers.refuse(backend, workload, torch.float16, options.device)
        return check(backend, workload, torch.float16, options.device)

    return bool(options.sample(checked, kind="check", backend=backend, mask=workload.mask).get("passed"))


def time_passes(workload: Workload, options: Options) -> Sample:
    """Each pass of the standard forward, and, as a single pass, our forward and that of torch.compile."""
    inputs = Inputs(workload, torch.float16, options.device)

    def standard(number: int) -> Iterator[None]:
        with torch.no_grad():
            for _ in standard_passes(*inputs.qkv, inputs.bias(), inputs.dropout_p):
                yield

    def forward_of(attend: peers.Attend) -> timing.Call:
        def call(number: int) -> Iterator[None]:
            with torch.no_grad():
                attend(inputs, number)
            yield

        return call

    calls = {BASELINE: standard, OURS: forward_of(attend_with(OURS))}
    if options.device.type == "cuda":
        calls[peers.COMPILED] = forward_of(attend_with(peers.COMPILED))
    inputs.bias()
    return timing.race(calls, options, PASSES)


def time_tiles(workload: Workload, options: Options) -> Sample:
    """Our forward with each BLOCK_M; the default tile's other parameters stay."""
    inputs = Inputs(workload, torch.float16, options.device)
    attend = attend_with(OURS)
    forward = _tiles(_architecture(options.device), workload)["forward"]

    def call_of(block_m: int) -> timing.Call:
        tile = replace(forward, block_m=block_m, block_n=options.settings.block_n)

        def call(number: int) -> Iterator[None]:
            with torch.no_grad(), forced(forward=tile):
                attend(inputs, number)
            yield

        return call

    return timing.race({str(m): call_of(m) for m in options.settings.block_m}, options)


def _architecture(device: torch.device) -> int:
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
