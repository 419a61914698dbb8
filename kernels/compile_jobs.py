"""What compile_report compiles: every tile and form of the kernels that ship, each a Job."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton

from .flash.decode import LARGEST_TILE, tile_of
from .flash.portable.tiles import AMD, KERNELS, Tile, candidates
from .history import flash1, flash2, two_pass
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
TYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
RAGGED = "ragged"  # Hopper kernels: kv_len = q_len + 1, so blocks of keys and the diagonal do not align


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
        what = f"{self.kernel:18}{TYPE_NAMES[self.dtype]} d{self.head_dim:<4}{mask:7}"
        return f"{gpu:7}{what} {self.tile or f'n{self.length}'!s:14} {self.feature:16}"


def shipped(architectures: list[int], head_dims: list[int]) -> list[Job]:
    """Jobs for every tile of the table, causal and full, with dropout and grouped heads where they matter; for
    decoding; for history's kernels; and for every form of the Hopper kernels."""
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
        if architecture == 90 and numbers_of(triton.__version__) >= OLDEST_GLUON:
            forms = {64: _narrow, 128: _narrow, 256: _wide}
            for head_dim in sorted(forms.keys() & set(head_dims)):
                jobs += forms[head_dim](head_dim)
    return jobs


def _with_features(head_dim: int) -> list[Job]:
    """The Hopper kernels' forms with key padding, dropout in the forward and sinks, as `dispatch` lets through."""
    jobs = []
    features = ("kv_lengths", "kv_lengths dropout_p", "dropout_p", f"dropout_p {RAGGED}", "sinks")
    names, lengths = ("hopper_forward", "hopper_backward"), (512, 16384)
    for feature, name, causal, length in itertools.product(features, names, (True, False), lengths):
        refused = head_dim > 64 and feature in ("kv_lengths dropout_p", f"dropout_p {RAGGED}")
        if "kv_lengths" in feature if name == "hopper_backward" else not refused:
            jobs.append(Job(90, name, head_dim, causal, None, feature=feature, length=length))
    return jobs


def _narrow(head_dim: int) -> list[Job]:
    """The forms of the Hopper kernels at head_dim 64 or 128."""
    jobs = []
    kernels = ("hopper_forward", "hopper_backward")
    for causal, feature in itertools.product((True, False), ("", RAGGED)):
        # Long loops: the backward delays dQ's product, and the forward schedules tiles dynamically; from 4096 on
        # (2048 if not causal) the forward has three consumers at head_dim 64.
        for name, length in itertools.product(kernels, (512, 2048, 16384)):
            if length == 2048 and (name, head_dim, causal) != ("hopper_forward", 64, True):
                continue  # the same kernel as for 16384
            jobs.append(Job(90, name, head_dim, causal, None, feature=feature, length=length))
    for name, feature in itertools.product(kernels, ("cu_seqlens", "window")):
        jobs.append(Job(90, name, head_dim, True, None, feature=feature))
    for name, causal in itertools.product(kernels, (True, False)):
        jobs.append(Job(90, name, head_dim, causal, None, feature="block_mask"))
    # The forward always masks its last block; the backward only for the diagonal or a partial block.
    jobs.append(Job(90, "hopper_backward", head_dim, False, None, feature=f"block_mask {RAGGED}"))
    # Of precise_delta the backward has only `delta_kernel`.
    one_pass = {"dropout_p": "hopper_backward", "precise_delta": "hopper_forward"}
    lengths = itertools.product((True, False), (512, 16384), ("", f" {RAGGED}"))
    for (feature, name), (causal, length, ragged) in itertools.product(one_pass.items(), lengths):
        jobs.append(Job(90, name, head_dim, causal, None, feature=feature + ragged, length=length))
    # Sinks, and what rounding took from out, are a tile's last step, beside whatever else `dispatch` lets through.
    masks = ("cu_seqlens", "window", "block_mask")
    beside = {"precise_delta": masks, "sinks": (*masks, "kv_lengths")}
    if head_dim == 64:
        beside["sinks"] += ("dropout_p", "kv_lengths dropout_p")
    for feature, others in beside.items():
        jobs += [Job(90, "hopper_forward", head_dim, True, None, feature=f"{feature} {x}") for x in others]
    # Tiles filled up with zeros; an odd multiple of 8, at which offsets need most care.
    jobs += [Job(90, name, head_dim - 56, True, None) for name in kernels if head_dim == 128]
    return jobs + _with_features(head_dim)


def _wide(head_dim: int) -> list[Job]:
    """Those of the Hopper kernels above head_dim 128."""
    jobs = []
    for causal, feature in itertools.product((True, False), ("", RAGGED)):
        for length in (512, 16384):
            jobs.append(Job(90, "hopper_forward", head_dim, causal, None, feature=feature, length=length))
        jobs.append(Job(90, "hopper_dq", head_dim, causal, None, feature=feature))
    jobs += [Job(90, "hopper_dkdv", head_dim, causal, None) for causal in (True, False)]
    bounds = ("cu_seqlens", "window")
    for feature in (*bounds, "precise_delta", *(f"precise_delta {each}" for each in bounds)):
        jobs.append(Job(90, "hopper_forward", head_dim, True, None, feature=feature))
    kernels = ("hopper_forward", "hopper_dkdv", "hopper_dq")
    return jobs + [Job(90, name, 136, causal, None) for name in kernels for causal in (True, False)]


Form = frozenset[tuple[str, str]]


def distinct(jobs: list[Job], form: Callable[[Job], Form]) -> dict[Job, Form]:
    """The jobs and their forms, each form once. What tells two jobs apart, as their length, need not tell kernels."""
    found = {form(job): job for job in reversed(jobs)}
    return {job: each for each, job in reversed(found.items())}


def pairwise(forms: dict[Job, Form]) -> list[Job]:
    """The jobs without a feature, and others until every two values of a kernel's form stand in one again."""
    kernels: dict[tuple[int, str], dict[Job, set[tuple]]] = {}
    for job, form in forms.items():
        pairs = set(itertools.combinations(sorted(form), 2))
        kernels.setdefault((job.architecture, job.kernel), {})[job] = pairs
    selected = {job for job in forms if not job.feature}  # what most calls run
    for pairs_of in kernels.values():
        covered = (pairs_of[job] for job in selected & pairs_of.keys())
        missing = set().union(*pairs_of.values()).difference(*covered)
        while missing:
            job = max(pairs_of, key=lambda job: len(pairs_of[job] & missing))
            selected.add(job)
            missing -= pairs_of[job]
    return [job for job in forms if job in selected]
