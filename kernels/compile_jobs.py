"""What compile_report compiles: every tile and form of the kernels that ship, each a Job."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton

from .features import FEATURES
from .flash.decode import LARGEST_TILE, tile_of
from .flash.dispatch import NO_FORM, hopper_needs
from .flash.portable.tiles import AMD, KERNELS, Tile, candidates
from .history import flash1, flash2, stored_p, two_pass
from .registry import AttentionRequest
from .versions import OLDEST_GLUON, numbers_of

# name -> (kernel, tiles, names of its float32 tensors)
HISTORY = {
    "flash1_forward": (flash1.forward_kernel, flash1.FORWARD, {"RowMax", "RowSum"}),
    "flash1_backward": (flash1.backward_kernel, flash1.BACKWARD, {"RowMax", "RowSum", "DQ"}),
    "flash2_forward": (flash2.forward_kernel, flash2.FORWARD, {"Saved", "RowSum"}),
    "flash2_backward": (flash2.backward_kernel, flash2.BACKWARD, {"Saved", "RowSum", "Delta", "DQ"}),
    "two_pass_forward": (two_pass.forward_kernel, two_pass.FORWARD, {"Lse"}),
    "two_pass_backward": (two_pass.backward_kernel, two_pass.BACKWARD, {"Lse", "DK", "DV"}),
}
# name -> (kernel, its tiles by most keys)
STORED_P = {
    "stored_p_forward": (stored_p.forward_kernel, stored_p.FORWARD),
    "stored_p_backward": (stored_p.backward_kernel, stored_p.BACKWARD),
}
TYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
# Hopper kernels. kv_len - q_len: with 1, blocks of keys and the diagonal do not align; with 64, half blocks do.
APART = {"": 0, "ragged": 1, "shifted": 64}
# Long loops: the backward delays dQ's product, the forward changes its schedule (spec.py), and from 4096 on (2048 if
# not causal) it has three consumers at head_dim 64. Short ones: at head_dim 64, TMA stores out up to 256, not at 512;
# at head_dim 128, the exponentials change places above 512.
LENGTHS = (256, 512, 1024, 2048, 16384)
# Head_dims whose tiles are filled up with zeros (columns.py), by width: with one feature at a time. MORE: without,
# at one length; 72, 136 and 200 are odd multiples of 8, where offsets need the most care.
FILLED = {64: (32,), 128: (96,), 256: (160, 200, 208)}
# Two that only go together up to 192 (dispatch.py).
TOGETHER = {160: ({"dropout_p", "precise_delta"}, {"alibi_slopes", "kv_lengths"})}
MORE, OF_MORE = {128: (72,), 256: (136, 192)}, 512
GELU = ("gelu_product", "gelu_product_backward")
FLASH3 = ("flash3_in_turn", "flash3_unspecialised")  # also in kernels/history
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Job:
    """One kernel with one tile for one GPU. A Hopper kernel has no choice of tile, but depends on the length."""

    architecture: int
    kernel: str
    head_dim: int
    causal: bool
    tile: Tile | None
    dtype: torch.dtype = torch.bfloat16
    feature: str = ""
    length: int = 512

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        gpu = "gfx942" if self.architecture == AMD else f"sm_{self.architecture}"
        what = f"{self.kernel:22}{TYPE_NAMES[self.dtype]} d{self.head_dim:<4}{mask:7}"
        return f"{gpu:7}{what} {self.tile or f'n{self.length}'!s:14} {self.feature:16}"


def shipped(architectures: list[int], head_dims: list[int]) -> list[Job]:
    """Jobs for every tile of the table, causal and full, with dropout and grouped heads where they matter; for
    decoding; for history's kernels; for every form of the Hopper kernels; and for the products with GELU."""
    jobs = []
    for architecture in architectures:
        for kernel in KERNELS:
            for head_dim in head_dims:
                for causal in (True, False):
                    for tile in candidates(kernel, architecture, head_dim, torch.bfloat16, causal):
                        job = Job(architecture, kernel, head_dim, causal, tile)
                        jobs.append(job)
                        if not causal or head_dim > (128 if architecture in (90, AMD) else 127):
                            continue
                        jobs.append(replace(job, feature="dropout_p"))
                        if kernel == "dkdv":  # the other kernels only index another head
                            jobs.append(replace(job, feature="gqa"))
            if architecture == 80 and 64 in head_dims:
                (tile,) = candidates(kernel, architecture, 64, torch.float32, True)
                jobs.append(Job(architecture, kernel, 64, True, tile, torch.float32))
        if architecture != AMD:
            for rows, each in itertools.product((16, LARGEST_TILE), head_dims):
                jobs.append(Job(architecture, "decode", each, True, tile_of(rows, each, torch.bfloat16)))
        if 64 in head_dims and architecture != AMD:
            jobs += [Job(architecture, name, 64, True, tiles[64]) for name, (_, tiles, _) in HISTORY.items()]
            jobs += storing(architecture)
        if architecture == 90 and numbers_of(triton.__version__) >= OLDEST_GLUON:
            for head_dim in head_dims:
                jobs += _hopper(head_dim)
                jobs += [job for each in FILLED.get(head_dim, ()) for job in _hopper(each, features=1)]
            if 128 in head_dims:  # the width of their tiles
                jobs += [Job(architecture, name, 128, False, None) for name in (*GELU, *FLASH3)]
    return jobs


def storing(architecture: int) -> list[Job]:
    """The kernels that store the probabilities, with key padding and dropout."""
    return [
        Job(architecture, name, stored_p.HEAD_DIM, False, tile, length=most)
        for name, (_, tiles) in STORED_P.items()
        for most, tile in tiles.items()
    ]


def _hopper(head_dim: int, features: int | None = None) -> list[Job]:
    """Every form of the Hopper kernels that `dispatch` lets through with tier="hopper", some of them repeatedly.
    features: how many at a time; None: any number."""
    backward = ("hopper_backward",) if head_dim <= 128 else ("hopper_dkdv", "hopper_dq")
    jobs = []
    for which, kernels in {"forward": ("hopper_forward",), "backward": backward}.items():
        served = (name for name, each in FEATURES.items() if each.hopper)
        uses = [name for name in served if name not in NO_FORM[which]][::-1]
        most = len(uses) if features is None else features
        sets = [each for count in range(most + 1) for each in itertools.combinations(uses, count)]
        sets += [tuple(name for name in uses if name in two) for two in TOGETHER.get(head_dim, ())]
        for used, causal, length, apart in itertools.product(sets, (True, False), LENGTHS, APART):
            if apart and "cu_seqlens" in used and "cu_seqlens_k" not in used:
                continue  # such documents have as many keys as queries
            call = (length, length + APART[apart], causal)
            request = AttentionRequest(CUDA, torch.bfloat16, head_dim, frozenset(used), "hopper", *call)
            if hopper_needs(which, request) is None:
                feature = " ".join([*used, apart]).strip()
                jobs += [
                    Job(90, each, head_dim, causal, None, feature=feature, length=length) for each in kernels
                ]
    # Few tiles whose costs depend on data are claimed late (`launch.LATE`).
    for job in [job for job in jobs if job.kernel == "hopper_forward"]:
        if "cu_seqlens" in job.feature or {"window", "kv_lengths"} <= set(job.feature.split()):
            jobs.append(replace(job, feature=f"{job.feature} late"))
    # Keys that a window hides from every query (`launch._clears_unseen`).
    windows = [job for job in jobs if job.kernel == "hopper_backward" and "window" in job.feature.split()]
    # Not beside padding, where `clear_kernel` sets them to 0, nor documents, which have as many keys as queries.
    others = {"cu_seqlens", "kv_lengths"}
    windows = [job for job in windows if head_dim == 128 and others.isdisjoint(job.feature.split())]
    jobs += [replace(job, feature=f"{job.feature} unseen") for job in windows]
    plain = [job for job in jobs if not job.feature]
    grouped = [replace(job, feature="gqa") for job in plain if job.kernel == "hopper_forward"]
    # dK/dV with dropout spilled with grouped heads, alone not.
    drawing = [job for job in jobs if job.kernel == "hopper_dkdv" and "dropout_p" in job.feature.split()]
    grouped += [replace(job, feature=f"{job.feature} gqa") for job in drawing]
    more = [job for job in plain if job.length == OF_MORE]
    return jobs + grouped + [replace(job, head_dim=each) for job in more for each in MORE.get(head_dim, ())]


Form = frozenset[tuple[str, str]]


def distinct(jobs: list[Job], form: Callable[[Job], Form]) -> dict[Job, Form]:
    """The jobs and their forms, each form once: jobs that differ, say in length, may have the same kernel."""
    found = {form(job): job for job in reversed(jobs)}
    return {job: each for each, job in reversed(found.items())}


def once(forms: dict[Job, Form], head_dims: list[int]) -> list[Job]:
    """The Hopper kernels' jobs of these head_dims without a feature, and others until each value and each feature
    that a kernel has on an architecture, at other head_dims too, is in one of its jobs."""
    kernels: dict[tuple[int, str], dict[Job, set[object]]] = {}
    for job, form in forms.items():
        kernels.setdefault((job.architecture, job.kernel), {})[job] = {*form, *job.feature.split()}
    # A portable kernel has a tile, and no schedule of its own for each length.
    selected = {job for job in forms if not (job.tile or job.feature) and job.head_dim in head_dims}
    for has in kernels.values():
        missing = set().union(*has.values()).difference(*(has[job] for job in selected & has.keys()))
        while missing:
            job = max(has, key=lambda job: len(has[job] & missing))
            selected.add(job)
            missing -= has[job]
    return [job for job in forms if job in selected]
