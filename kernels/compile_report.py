"""Compile flash's kernels and GELU's products for GPUs that are not present; fail on what would be slow there.

    python -m kernels.compile_report [--arch 80 90 100 gfx942] [--head-dim 64 128 256] [--with triton==3.9.0]

Every shipped tile of both tiers, and one of each kernel in kernels/history, is compiled ahead of time by Triton and
ptxas (for AMD, LLVM); no GPU or driver is needed. --once leaves out combinations, where a spill may hide: it compiles
Hopper kernels at these head_dims without a feature, and what else each feature and compile-time value of a kernel
needs to be there once. The table has registers per thread, bytes spilled, shared memory, the tensor core instruction,
asynchronous loads and ptxas's warnings. The exit code is 1 if a kernel spills more than compile_budgets.toml allows,
does not use tensor cores or (except history and AMD) asynchronous loads, has its wgmma serialised, creates a barrier
that no warp uses, or does not compile. --with compiles with another Triton, which pip downloads (other_triton.py).
"""

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .other_triton import REPORT, WITH, report_of_another
from .versions import OLDEST_GLUON, has_gluon, no_triton, numbers_of, remedy, unknown_pair

if __name__ == "__main__" and (code := report_of_another()) is not None:
    sys.exit(code)  # before the installed triton matters, which may be absent
if os.environ.get("TRITON_INTERPRET") == "1":
    sys.exit("kernels.compile_report compiles kernels, which TRITON_INTERPRET=1 prevents: unset it")
if lacking := no_triton():
    sys.exit(f"kernels.compile_report needs {lacking}")
if not has_gluon():
    sys.exit(
        f"kernels.compile_report needs a triton with Gluon, which this one is without ({remedy(again=True)})"
    )

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from .compile_jobs import APART, FLASH3, GELU, HISTORY, STORED_P, TYPE_NAMES, Job, distinct, once, shipped
from .features import FEATURES
from .flash import dropout
from .flash.decode import decode_kernel
from .flash.hopper import backward, backward_schedule, dq, forward, forward_schedule, wide_dkdv, wide_dq
from .flash.hopper import spec as forward_spec
from .flash.hopper.descriptors import layout_of, tile_width
from .flash.hopper.dropout import drop_of
from .flash.hopper.primitives import compile_options
from .flash.hopper.split_tiles import box_width
from .flash.portable.backward import dkdv_kernel, dq_kernel
from .flash.portable.forward import forward_kernel
from .flash.portable.spec import specify
from .flash.portable.tiles import AMD, ARCHITECTURES, KERNELS, Tile
from .history import flash3, stored_p
from .launch import FUSION
from .layers import gelu_product

HOPPER = {
    "hopper_forward": forward.hopper_forward_kernel,
    "hopper_backward": backward.hopper_backward_kernel,
    "hopper_dkdv": wide_dkdv.dkdv_kernel,
    "hopper_dq": wide_dq.dq_kernel,
    "flash3_in_turn": flash3.in_turn_kernel,
    "flash3_unspecialised": flash3.unspecialised_kernel,
    **dict.fromkeys(GELU, gelu_product.gelu_product_kernel),
}
FUNCTIONS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel, "decode": decode_kernel}
FUNCTIONS |= HOPPER | {name: function for name, (function, *_) in (HISTORY | STORED_P).items()}
TENSOR_CORES = {80: "mma.sync", 90: "wgmma", 100: "tcgen05", AMD: "mfma"}
GPUS = {str(each): each for each in ARCHITECTURES} | {"gfx942": AMD}  # as --arch names them
OPTIONAL_POINTERS = {"OutLow": "*bf16", "Seed": "*i64"} | dict.fromkeys(["DLse", "Slopes", "Sinks"], "*fp32")
OPTIONAL_POINTERS |= dict.fromkeys(["DocumentStart", "DocumentEnd", "KvLengths", "Blocks"], "*i32")
OPTIONAL_POINTERS |= dict.fromkeys(["KeyEnd", "RowStart"], "*i32")  # hopper/bounds.py
# What else changes what is compiled: grouped heads, which are not a feature.
FORMS: dict[str, tuple[Mapping[str, object], tuple[str, ...]]] = {"": ({}, ()), "gqa": ({"group": 4}, ())}
FORMS |= {name: (feature.options, feature.pointers) for name, feature in FEATURES.items()}
BUDGETS = tomllib.loads(Path(__file__).with_name("compile_budgets.toml").read_text())
UNSEEN = ("share", "unseen", "stride_zb", "stride_zh", "stride_zn")  # the numbers of `backward_loads.Zeros`
HEADS = 12  # in the packed qkv whose strides the kernels are compiled for


@dataclass(frozen=True)
class Report:
    """The compilers' figures for a job."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_cores: str
    async_loads: str
    warnings: tuple[str, ...]
    idle_barriers: int = 0

    def __str__(self) -> str:
        memory = f"{self.spill_bytes:4} B spilled {self.shared_bytes / 1024:6.1f} KB shared"
        return f"{self.registers:3} registers {memory} {self.tensor_cores:8} {self.async_loads:8}"

    def problems(self, job: Job) -> list[str]:
        """The reasons why this tile must not ship; empty if it may."""
        if job.dtype is torch.float32:  # full precision on FMA units: reported, not checked
            return []
        found = [f"wgmma serialised ({warning})" for warning in self.warnings]
        if self.spill_bytes > _budget(job):
            found.append(f"{self.spill_bytes} bytes spilled")
        # Too few rows for wgmma and tcgen05.
        few = job.kernel == "decode" and job.tile and job.tile.block_m < 64
        expected = "mma.sync" if few else TENSOR_CORES[job.architecture]
        if self.tensor_cores != expected:
            found.append(f"tensor cores: {self.tensor_cores}, not {expected}")
        if self.idle_barriers:
            found.append(f"{self.idle_barriers} arrays of barriers that no warp uses")
        if self.async_loads == "none" and job.kernel not in HISTORY | STORED_P and job.architecture != AMD:
            found.append("no asynchronous loads")
        return found


def _budget(job: Job) -> int:
    """The bytes that a job may spill with this Triton: its feature's limit, else its kernel's, else that of all."""
    gpu = "gfx942" if job.architecture == AMD else f"sm_{job.architecture}"
    kernel = f"{gpu} {job.kernel} d{job.head_dim}"
    exceptions = BUDGETS["triton"].get(triton.__version__, {})
    of_kernel = exceptions.get(kernel, BUDGETS["spilled_bytes"])
    return exceptions.get(f"{kernel} {job.feature.partition(' ')[0]}", of_kernel)


def outcome(job: Job) -> tuple[str, list[str]]:
    """A job's figures, and why it must not ship: its problems, or the error with which it does not compile."""
    try:
        report = compile_job(job)
    except Exception as error:  # anything from Triton or ptxas, in a release that we do not know
        innermost: BaseException = error
        while innermost.__cause__:
            innermost = innermost.__cause__
        return "", [f"does not compile: {str(innermost).strip().splitlines()[-1]}"]
    return str(report), report.problems(job)


def compile_job(job: Job) -> Report:
    """Compile one job from scratch; take the figures from the assembly and ptxas's log."""
    return report_of(job, *compile_kernel(job))


def report_of(job: Job, compiled: triton.compiler.CompiledKernel, log: str) -> Report:
    """The figures of what `compile_kernel` returned."""
    if job.architecture == AMD:
        return _read_amd(compiled.asm["amdgcn"], compiled.metadata.shared)
    report = _read(compiled.asm["ptx"], log, compiled.metadata.shared)
    if job.kernel in HOPPER and job.kernel != "flash3_unspecialised":
        report = replace(report, idle_barriers=idle_barriers(compiled.asm["ttgir"]))
    return report


def compile_kernel(job: Job) -> tuple[triton.compiler.CompiledKernel, str]:
    """The compiled kernel, whose `asm` has every compilation stage, and ptxas's log."""
    function, on_hopper = FUNCTIONS[job.kernel], job.kernel in HOPPER
    types, values, options = _arguments(job)
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(function.arg_names):
        if name in values:
            signature[name], constants[index,] = "constexpr", values[name]
            continue
        signature[name] = types[name]
        if signature[name].startswith("*") or name.startswith("stride"):
            attributes[index,] = [["tt.divisibility", 16]]  # otherwise no vector loads
    source = GluonASTSource if on_hopper else ASTSource
    target = GPUTarget("cuda", job.architecture, 32)
    if job.architecture == AMD:
        target = GPUTarget("hip", "gfx942", 64)
    dropout.HAS_PTX = gl.constexpr(job.architecture != AMD)  # set at import by the installed PyTorch
    log, knobs = io.StringIO(), triton.knobs
    with tempfile.TemporaryDirectory() as cache, contextlib.redirect_stdout(log), knobs.cache.scope():
        knobs.cache.dir = cache  # a cached kernel would have no log
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(
            source(function, signature, constants, attributes), target=target, options=FUSION | options
        )
    return compiled, log.getvalue()


def form(job: Job) -> frozenset[tuple[str, str]]:
    """All that the compilers are told, as names and values: jobs of the same form are one kernel."""
    types, values, options = _arguments(job)
    told = {"gpu": job.architecture, "kernel": job.kernel, **types, **options}
    for name, value in values.items():
        parts = vars(value) if is_dataclass(value) else {"": value}
        told |= {f"{name}.{part}": each for part, each in parts.items()}
    return frozenset((name, str(value)) for name, value in told.items())


def _arguments(job: Job) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    """The types of a kernel's arguments, the values of those that are compile-time, and the compiler's options."""
    on_hopper = job.kernel in HOPPER
    names = FUNCTIONS[job.kernel].arg_names
    values = _hopper_constants(job) if on_hopper else _constants(job)
    values = {name: value for name, value in values.items() if name in names}
    moved = {name for name in names if name.endswith("_desc")}
    if job.kernel == "hopper_forward" and values["SPEC"].OUT_BY_TMA.value:
        moved.add("Out")
    types = {
        name: _descriptor(name, job) if name in moved else _type(name, job)
        for name in names
        if name not in values
    }
    # The Hopper kernels specify the warps of their other partitions themselves; num_warps is the first consumer's.
    if on_hopper:
        options = {"num_warps": 4, **compile_options(tile_width(job.head_dim), values.get("DQ_DELAY", 0))}
        if job.kernel == "flash3_unspecialised":
            options = {"num_warps": flash3.WARPS}
    else:
        assert job.tile
        options = {"num_warps": job.tile.warps, "num_stages": job.tile.stages}
        if job.kernel in STORED_P:
            whole = values["WHOLE"]
            options |= stored_p.options_of(FUNCTIONS[job.kernel], job.tile, whole, job.architecture)
    return types, values, options


def _constants(job: Job) -> dict[str, Any]:
    """The compile-time arguments: the tile, absent optional tensors, and the token strides of a packed qkv and its
    output."""
    if job.kernel in HISTORY:
        ways = {"ONCE": True, "SLICES": 1} if job.kernel == "flash2_forward" else {}
        return {"SPEC": specify(job.tile, job.head_dim, job.causal), **ways}
    tokens = HEADS * job.head_dim
    packed = dict.fromkeys(["stride_qm", "stride_kn", "stride_vn"], 3 * tokens)
    plain = dict.fromkeys(["stride_om", "stride_dom", "stride_dqm", "stride_dkn", "stride_dvn"], tokens)
    if job.kernel in STORED_P:
        assert job.tile
        spec = specify(job.tile, job.head_dim, False, dropout_p=0.1)
        return {"SPEC": spec, "WHOLE": job.length <= job.tile.block_n, **packed, **plain}
    options, tensors = FORMS[job.feature]
    spec = specify(job.tile, job.head_dim, job.causal, **options)
    absent = dict.fromkeys(name for name in OPTIONAL_POINTERS if name not in tensors)
    return {"SPEC": spec, **packed, **plain, **absent}


def _hopper_constants(job: Job) -> dict[str, Any]:
    if job.kernel in GELU:
        return {"SPEC": _gelu_spec(job)} | ({"Partials": None} if job.kernel == GELU[0] else {})
    if job.kernel in FLASH3:
        return {"SPEC": flash3.spec_of(job.length, job.length)}
    words = job.feature.split()
    listed, padded = "block_mask" in words, "kv_lengths" in words
    bounded = "cu_seqlens" in words or "window" in words
    by_query = bounded and ("cu_seqlens_k" in words or padded or not job.causal)  # `masks.by_query`
    causal = job.causal and not by_query
    tables = by_query and "cu_seqlens" in words
    absent = {} if "cu_seqlens" in words or tables else dict.fromkeys(["DocumentStart", "DocumentEnd"])
    if not tables:
        absent |= dict.fromkeys(["KeyEnd", "RowStart"])
    if tables or not by_query:
        absent["right"] = None
    if not listed:
        absent |= dict.fromkeys(["KeyBlocks", "QueryBlocks"])
    if "precise_delta" not in words:
        absent["OutLow"] = None
    if not padded:
        absent["KvLengths"] = None
    if "sinks" not in words:
        absent["Sinks"] = None
    if "alibi_slopes" not in words:
        absent["Slopes"] = None
    dropout_p = 0.1 if "dropout_p" in words else 0.0
    drop = drop_of(dropout_p)
    if drop is None:
        absent["Seed"] = None
    softcap = 30.0 if "softcap" in words else 0.0
    lengths = job.length, job.length + sum(apart for word, apart in APART.items() if word in words)
    no_left = {} if bounded else {"left": None}  # above head_dim 128; the others ignore it
    group = FORMS["gqa"][0]["group"] if "gqa" in words else 1
    if job.kernel == "hopper_dkdv":
        wide = {"GROUP": group, "HEAD_DIM": job.head_dim, "CAUSAL": causal, "DROP": drop, "SOFTCAP": softcap}
        return {**wide, **absent, **no_left}
    uses: dict[str, Any] = {"bounded": bounded, "listed": listed, "padded": padded, "drop": drop}
    uses |= {"softcap": softcap, "precise": "precise_delta" in words, "group": group}
    uses["full"] = not job.causal and "cu_seqlens_k" not in words
    uses["window"] = bounded and "cu_seqlens" not in words and not padded and job.kernel == "hopper_forward"
    uses["late"] = "late" in words
    spec = forward_spec.specify(job.head_dim, causal, *lengths, **uses)
    if job.kernel == "hopper_dq":
        return {"SPEC": spec, **absent, **no_left}
    if job.kernel == "hopper_forward":
        return {"SPEC": spec, **absent} | ({} if spec.DYNAMIC.value else {"Counter": None})
    width = tile_width(job.head_dim)
    row_blocks = job.length // backward_schedule.BLOCK_M[width]
    columns = backward.choose_columns(job.head_dim, dropout_p)
    if bounded or listed:
        dq_delay = backward.choose_dq_delay_of_few(columns, by_query and not (tables or padded))
    else:
        dq_delay = backward.choose_dq_delay(width, job.causal, row_blocks, padded, softcap > 0)
    partial = lengths[1] % backward_schedule.KEYS.value != 0
    rules = {"GROUP": 1, "CAUSAL": causal, "MASKED": causal or bounded or partial or padded}
    if not causal or bounded or listed or drop or padded:
        absent["tail_head"] = None
    if "unseen" not in words:
        absent |= dict.fromkeys(["ZeroK", "ZeroV", *UNSEEN])
    rules |= {
        "COLUMNS": columns,
        "DQ_DELAY": dq_delay,
        "BOUNDED": bounded,
    }
    rules |= {"LISTED": listed, "DROP": drop, "SOFTCAP": softcap}
    return rules | absent


def _gelu_spec(job: Job) -> gelu_product.Spec:
    return gelu_product.FORWARD if job.kernel == GELU[0] else gelu_product.BACKWARD


def _descriptor(name: str, job: Job) -> str:
    """The type of a TMA descriptor: its block, and the block's layout in shared memory."""
    block: tuple[int, ...]
    if name == "dq_sum_desc":
        block, dtype = dq.sum_block(_hopper_constants(job)["COLUMNS"]), torch.float32
    elif job.kernel in GELU:
        place = FUNCTIONS[job.kernel].arg_names.index(name)
        block, dtype = gelu_product.blocks_of(_gelu_spec(job))[place], torch.bfloat16
    else:
        queries, keys = (
            (backward_schedule.BLOCK_M[tile_width(job.head_dim)], backward_schedule.KEYS.value)
            if job.kernel == "hopper_backward"
            else (forward_schedule.ROWS.value, forward_spec.block_n(job.head_dim))
        )
        rows = queries if name in ("q_desc", "do_desc", "out_desc", "Out") else keys
        if job.kernel == "flash3_unspecialised":
            rows = flash3.BLOCK.value
        split = job.kernel in ("hopper_forward", "hopper_dkdv", "hopper_dq") and name != "Out"
        columns = box_width(job.head_dim) if split else tile_width(job.head_dim)
        block, dtype = (1, 1, rows, columns), torch.bfloat16
    return f"tensordesc<{TYPE_NAMES[dtype]}{list(block)},{layout_of(block, dtype)!r}>"


def _type(name: str, job: Job) -> str:
    if name in OPTIONAL_POINTERS:
        return OPTIONAL_POINTERS[name]
    if name in (
        HISTORY[job.kernel][2] if job.kernel in HISTORY else {"Lse", "Delta", "Partial", "Partials", "Bias"}
    ):
        return "*fp32"
    if name in ("Turns", "Counter", "KeyBlocks", "QueryBlocks", "Lengths"):
        return "*i32"
    if name[0].isupper():
        return f"*{TYPE_NAMES[job.dtype]}"
    return "fp32" if name == "scale" else "i32"


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, f"no {pattern} in the compiler's output"
    return match.group(1)


def _read(ptx: str, log: str, shared_bytes: int) -> Report:
    instructions = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma.sync": "mma.sync"}
    loads = {"TMA": "cp.async.bulk.tensor", "cp.async": "cp.async.c"}
    return Report(
        registers=int(_found(r"Used (\d+) registers", log)),
        spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill stores", log))),
        shared_bytes=shared_bytes,
        tensor_cores=next((name for name, text in instructions.items() if text in ptx), "none"),
        async_loads="+".join(name for name, text in loads.items() if text in ptx) or "none",
        warnings=tuple(re.findall(r"C75\d\d", log)),
    )


def idle_barriers(ttgir: str) -> int:
    """The number of barrier arrays of a Hopper kernel that are passed to no warp.

    Triton reuses their memory for a tile, which PTX forbids for an mbarrier; tiles were corrupted by barrier state
    when processes shared the GPU (LOG.md). A barrier used only by the first warpgroup would count too; there is none.
    """
    given = set(_found(r"ttg\.warp_specialize\((.*?)\)", ttgir).split(", "))
    arrays = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<\d+x1xi64", ttgir)
    parts = {name: re.findall(rf"(%\w+) = ttg\.memdesc_index {name}\[", ttgir) for name in arrays}
    return sum(given.isdisjoint([name, *parts[name]]) for name in arrays)


def _read_amd(assembly: str, shared_bytes: int) -> Report:
    def figure(name: str) -> int:
        return int(_found(rf"\.{name}:\s+(\d+)", assembly))

    return Report(
        registers=figure("vgpr_count"),
        spill_bytes=4 * figure("vgpr_spill_count"),
        shared_bytes=shared_bytes,
        tensor_cores="mfma" if "v_mfma" in assembly else "none",
        async_loads="none",
        warnings=(),
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if any tile must not ship."""
    if (code := report_of_another(arguments)) is not None:
        return code
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(
        f"python -m {REPORT}", description=about, parents=[WITH], allow_abbrev=False
    )
    parser.add_argument("--arch", nargs="+", default=list(GPUS), choices=GPUS)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument(
        "--feature", choices=sorted(FORMS.keys() - {""}), help="compile every tile with this feature instead"
    )
    tile_help = "compile this tile instead of the shipped ones"
    parser.add_argument("--tile", type=int, nargs=4, metavar=("M", "N", "WARPS", "STAGES"), help=tile_help)
    parser.add_argument("--kernel", choices=list(FUNCTIONS), nargs="+", default=list(FUNCTIONS))
    parser.add_argument("--once", action="store_true", help="each compile-time value, not each combination")
    options = parser.parse_args(arguments)
    architectures = [GPUS[name] for name in options.arch]
    jobs = [job for job in shipped(architectures, options.head_dim) if job.kernel in options.kernel]
    if options.feature:
        plain = [job for job in jobs if job.causal and job.kernel in KERNELS and not job.feature]
        jobs = [replace(job, feature=options.feature) for job in plain]
    if options.tile:
        tile = Tile(*options.tile)
        jobs = [replace(job, tile=tile) for job in jobs if job.tile and job.dtype is torch.bfloat16]
    left_out, own = "", triton.__version__
    if numbers_of(own) < OLDEST_GLUON and 90 in architectures and HOPPER.keys() & options.kernel:
        oldest = ".".join(map(str, OLDEST_GLUON))
        left_out = f"the Hopper kernels are left out: they need triton {oldest} or newer, not {own}"
    if not jobs:
        none = "no kernel is of all that --arch, --head-dim and --kernel name"
        sys.exit(f"kernels.compile_report: {left_out or none}")
    forms = distinct(jobs, form)
    jobs = once(forms, options.head_dim) if options.once else list(forms)
    started, failed = time.perf_counter(), 0
    print(f"triton {own}, {len(jobs)} kernels{left_out and '; ' + left_out}")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for job, (figures, problems) in zip(jobs, pool.map(outcome, jobs), strict=True):
            failed += bool(problems)
            print(job, figures, "FAILED: " + ", ".join(problems) if problems else "ok", flush=True)
    unknown = f"; {words}" if (words := unknown_pair()) else ""
    print(f"{failed} of {len(jobs)} must not ship; {time.perf_counter() - started:.0f} s{unknown}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
