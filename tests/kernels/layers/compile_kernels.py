"""Compile the kernels of `add_norm`, `linear_gelu`, `embedding`, `dropout` and `adamw` for GPUs that are not here.

    python -m tests.kernels.layers.compile_kernels [MODULES] [--arch 80 90 100] [--width 768 1600 16384]

One line per kernel, in bfloat16 with a float32 residual stream and parameters, with bias and every gradient: the GPU
architecture, its name, the model's width, registers, bytes spilled, bytes of shared memory, 16-byte loads, 2-byte
loads and stores.
"""

import argparse
import contextlib
import importlib
import io
import itertools
import re
import tempfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.philox import row_threshold

DROP_BELOW = row_threshold(0.1)
NUMBERS = {"rows": "i32", "count": "i32", "eps": "fp32", "decay": "fp32"}
# The rest is float32.
BFLOAT16 = ("Update", "Normalised", "DNormalised", "DUpdate", "Pre", "Out", "DOut", "DPre")
POINTERS = dict.fromkeys(BFLOAT16, "*bf16") | {"InOrder": "*i32", "Places": "*i64", "Seed": "*i64"}
POINTERS |= {"Tensors": "*i64", "Chunks": "*i32"}


def kernels(module: ModuleType, width: int) -> Iterator[tuple[Any, dict[str, object], int]]:
    """(kernel, its compile-time arguments, warps) of the forward and the backward."""
    if module.__name__.endswith("embedding"):
        block, warps, _ = module._grid(module.TILE, 1, width)
        constants = {"WIDTH": width, "BLOCK": block, "CHUNK": module.TILE.chunk, "ROWS": module.TILE.rows}
        yield module.sum_runs_kernel, constants, warps
        yield module.join_pieces_kernel, constants, warps
        return
    if module.__name__.endswith(".dropout"):
        block = min(triton.next_power_of_2(width), module.COLUMNS)
        constants = {"WIDTH": width, "BLOCK": block, "DROP_BELOW": DROP_BELOW}
        yield module.drop_kernel, constants, module.WARPS
        return
    if module.__name__.endswith("adamw"):
        constants = {"BETA1": 0.9, "BETA2": 0.95, "EPS": 1e-8, "ALIGNED": True, "BLOCK": module.BLOCK}
        yield module.adamw_kernel, constants, module.WARPS
        return
    for tile, suffix in ((module.FORWARD, ""), (module.BACKWARD, "_backward")):
        if module.__name__.endswith(".add_norm"):
            tile, block, warps, _ = module._grid(tile, 1, width, torch.device("cpu"))
            constants = {"WIDTH": width, "ROWS": tile.rows, "STAGES": tile.stages, "BLOCK": block}
            constants |= {"VECTOR": 4, "WITH_BIAS": True}
            layer_norm = {"RMS": False, "WITH_SHIFT": True}
            rms_norm = {"RMS": True, "WITH_SHIFT": False, "Shift": None}
            plain, dropout = {"DROP_BELOW": 0, "Seed": None}, {"DROP_BELOW": DROP_BELOW}
            for form in (layer_norm | plain, layer_norm | dropout, rms_norm | plain):
                yield getattr(module, f"add_norm{suffix}_kernel"), constants | form, warps
        else:
            constants = {
                "WIDTH": 4 * width,
                "ROWS": tile.rows,
                "STAGES": tile.stages,
                "COLUMNS": tile.columns,
            }
            yield getattr(module, f"bias_gelu{suffix}_kernel"), constants, tile.warps


def compile_kernel(
    kernel: Any, values: dict[str, object], warps: int, architecture: int
) -> tuple[triton.compiler.CompiledKernel, str]:
    """The compiled kernel, whose `asm` has every stage of it, and ptxas's log."""
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in values:
            signature[name], constants[index,] = "constexpr", values[name]
        elif name in NUMBERS:
            signature[name] = NUMBERS[name]
        else:
            signature[name] = POINTERS.get(name, "*fp32")
            attributes[index,] = [["tt.divisibility", 16]]
    log = io.StringIO()
    with tempfile.TemporaryDirectory() as cache, contextlib.redirect_stdout(log):
        triton.knobs.cache.dir = cache  # a cached kernel would have no log
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(
            ASTSource(kernel, signature, constants, attributes),
            target=GPUTarget("cuda", architecture, 32),
            options={"num_warps": warps},
        )
    return compiled, log.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "modules", nargs="*", default=["add_norm", "linear_gelu", "embedding", "dropout", "adamw"]
    )
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--width", type=int, nargs="+", default=[768, 1600, 16384])
    options = parser.parse_args()
    modules = [importlib.import_module(f"kernels.layers.{name}") for name in options.modules]
    for architecture, width, module in itertools.product(options.arch, options.width, modules):
        for kernel, constants, warps in kernels(module, width):
            compiled, log = compile_kernel(kernel, constants, warps, architecture)
            registers = re.search(r"Used (\d+) registers", log).group(1)
            spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", log)))
            ptx = compiled.asm["ptx"]
            wide = len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\.cg.* 0x10", ptx))
            narrow = len(re.findall(r"(?:ld|st)\.global\S*\.b16 ", ptx))
            name = compiled.metadata.name
            print(
                f"sm_{architecture} {name} {width}: {registers} registers, {spilled} B spilled, "
                f"{compiled.metadata.shared} B shared, {wide} wide, {narrow} narrow"
            )


if __name__ == "__main__":
    main()
