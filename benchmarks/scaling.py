"""tokens/s, peak memory and equality of several GPUs against one: python -m benchmarks scaling --gpus 1 2

Every figure is of real training steps (scaling_rank.py), started by torchrun: GPT-2 small and XL at 131,072 tokens a
step, and a GPT of 7 B parameters for a few steps; whole on each GPU, and in parts; with --models 32k to 256k, GPT-2
small with one sequence of so many tokens, which the GPUs share. Each layout of small runs twice: equal runs must end
with the same bits. The tokens are those of Python's own source under a made-up vocabulary of GPT-2's size, so nothing
is downloaded, and losses compare layouts with each other, not with other runs.

A layout that fails, for example for want of memory, is recorded as such, and the next one goes on in a new launch.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from reproduce.common import as_lines, text_table
from reproduce.results import slug
from training.environment import device_name, environment

Sample = dict[str, Any]

MODELS = {
    "small": ["model=gpt2_small", "trainer.batch_tokens=131072", "trainer.micro_batch=16"],
    "xl": ["model=gpt2_xl", "trainer.batch_tokens=131072", "trainer.micro_batch=8"],
    "7b": [
        *("model=gpt2_xl", "model.n_layer=32", "model.n_head=32", "model.n_embd=4096"),
        *("trainer.batch_tokens=32768", "trainer.micro_batch=4"),
    ],
    "tiny": [  # to see that it works: seconds on a CPU
        *("model=nano", "model.n_layer=2", "model.seq_len=64", "trainer.batch_tokens=1024"),
        *("trainer.micro_batch=2", "trainer.compile=false"),
    ],
}
# GPT-2 small with one long sequence a step, which several GPUs share; on one too as a ring does it.
LONG = {
    f"{length // 1024}k": [
        "model=gpt2_small", f"model.seq_len={length}", f"trainer.batch_tokens={length}", "trainer.micro_batch=1",
        "attention.precise_delta=false",
    ]
    for length in (32768, 65536, 131072, 262144)
}  # fmt: skip
MODELS |= LONG
WHOLE, FULL, CONTEXT = "whole", "full", "context"
SHARED = ["parallel.context={gpus}"]
LAYOUTS = {
    WHOLE: ["trainer.cuda_graphs=false"],
    "whole, CUDA graphs": ["trainer.cuda_graphs=true"],
    "whole, CUDA graphs, bf16 gradients": ["trainer.cuda_graphs=true", "parallel.gradient_dtype=bf16"],
    "optimizer": ["parallel.shard=optimizer"],
    FULL: ["parallel.shard=full"],
    "full, blocks again": ["parallel.shard=full", "parallel.recompute=block"],
    "full, all but attention again": ["parallel.shard=full", "parallel.recompute=attention_kept"],
    CONTEXT: [*SHARED, "parallel.gather_keys=false"],
    f"{CONTEXT}, CUDA graphs": [*SHARED, "parallel.gather_keys=false", "trainer.cuda_graphs=true"],
    f"{CONTEXT}, keys gathered": [*SHARED, "parallel.gather_keys=true", "trainer.cuda_graphs=false"],
    f"{CONTEXT}, keys gathered, CUDA graphs": [
        *SHARED,
        "parallel.gather_keys=true",
        "trainer.cuda_graphs=true",
    ],
}
# Sequences a GPU's micro-step has in parts, at most: FSDP costs the host 6 to 10 ms a block and micro-step, so fewer
# would measure the host. The memory is for 80 GB on two GPUs.
IN_PARTS = {
    "small": dict.fromkeys(("optimizer", FULL, "full, blocks again", "full, all but attention again"), 64),
    "xl": {FULL: 16, "full, blocks again": 32, "full, all but attention again": 16},
}
SEQUENCES = 128  # a step, of these two
# A model of which one GPU cannot hold 16 bytes a parameter is measured in parts alone.
ONLY = {"7b": ("full, blocks again", "full, all but attention again"), "tiny": tuple(LAYOUTS)}
RING = tuple(each for each in LAYOUTS if each.startswith(CONTEXT))
SHORT = tuple(each for each in LAYOUTS if each not in RING)
TWICE = ("small", "tiny")


def layouts_of(model: str, gpus: int, asked: list[str]) -> Iterator[tuple[str, list[str]]]:
    """What is measured of a model on so many GPUs; on one, `whole` is as train.py does it, with CUDA graphs."""
    known = ONLY.get(model, SHORT)
    if model in LONG:
        known = (WHOLE,) if gpus == 1 else RING
    for name in asked:
        if name not in known or (gpus == 1 and name != WHOLE):
            continue
        if not torch.cuda.is_available() and "CUDA" in name:
            continue
        settings = [each.format(gpus=gpus) for each in LAYOUTS[name]] if gpus > 1 else []
        if at_once := IN_PARTS.get(model, {}).get(name):
            settings += [f"trainer.micro_batch={min(at_once, SEQUENCES // gpus)}"]
        for _ in range(2 if model in TWICE and gpus > 1 else 1):
            yield name, settings


def launched(named: list, gpus: int, steps: int, folder: Path, minutes: float) -> Iterator[Sample]:
    """A sample for each of the named settings, as soon as it is there, in as many launches as it takes.

    named: (model, layout, settings) each. minutes: of a launch, at most.
    """
    while named:
        command = ["torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}", "-m"]
        rank = ["benchmarks.scaling_rank", json.dumps(named), str(steps), str(folder)]
        with tempfile.TemporaryFile("w+") as told:
            launcher = subprocess.Popen(
                [sys.executable, "-m", *command, *rank], stdout=subprocess.PIPE, stderr=told, text=True
            )
            # A signal that torchrun passes on: ranks are no children of ours, and one that hangs would keep its GPU.
            late = threading.Timer(60 * minutes, launcher.terminate)
            late.start()
            try:
                for line in launcher.stdout:
                    if line.startswith("{"):
                        yield json.loads(line)
                        named = named[1:]
                launcher.wait()
            finally:  # after Ctrl-C too, else Python would wait for the timer
                in_time = late.is_alive()
                late.cancel()
                launcher.terminate()
            told.seek(0)
            reason = _reason(told.read()) if in_time else f"not done after {minutes:g} minutes"
        if named:
            model, name, _ = named[0]
            yield {"model": model, "name": name, "ranks": gpus, "failed": reason}
            named = [each for each in named if each[:2] != [model, name]]


def _reason(told: str) -> str:
    """The first line of a rank's output that names an error, or else what torchrun says of the first that failed."""
    error = r"^(?:\[rank\d+\]: )?([\w.]*(?:[Ee]rror|Exception)(?:: \S.*)?)$"
    ended = r"Root Cause[\s\S]*?traceback : (Signal .+)"
    found = re.search(error, told, re.MULTILINE) or re.search(ended, told)
    return found[1][:300] if found else "no reason was printed"


def vocabulary(folder: Path) -> Path:
    """A tiktoken rank file of 50,256 tokens, so that the model has GPT-2's size: bytes, and words of four letters."""
    words = itertools.islice(itertools.product(b"etaoinshrdlcumwfgypb", repeat=4), 50_000)
    tokens = [bytes([value]) for value in range(256)] + [bytes(word) for word in words]
    path = folder / "vocabulary.tiktoken"
    path.write_text("".join(f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens)))
    return path


def table(samples: list[Sample]) -> str:
    """A row a layout: against one GPU, against the layout that is whole, and against its own second run."""
    alone = {
        s["model"]: s["perf/tokens_per_second"] for s in samples if s["ranks"] == 1 and "failed" not in s
    }
    header = ["model", "GPUs", "layout", "tokens/s", "x one", "exchange ms", "GiB a GPU", "loss", "two runs"]
    rows = []
    samples = sorted(samples, key=lambda s: list(MODELS).index(s["model"]))
    for key, group in itertools.groupby(samples, lambda s: (s["model"], s["ranks"], s["name"])):
        first, *again = group
        row = [str(each) for each in key]
        if "failed" in first:
            rows.append([*row, first["failed"][:40], *[""] * 5])
            continue
        speed, one = first["perf/tokens_per_second"], alone.get(key[0])
        row += [f"{speed:,.0f}", f"{speed / one:.3f}" if one else ""]
        row += [f"{first['perf/exchange_ms']:.1f}" if "perf/exchange_ms" in first else ""]
        peak = first.get("perf/peak_allocated_gib", first.get("perf/peak_resident_gib"))
        row += [f"{peak:.1f}" if peak else ""]
        rows.append([*row, f"{first['losses'][-1]:.5f}", equal(first, again[0]) if again else ""])
    return text_table(header, rows)


def equal(first: Sample, second: Sample) -> str:
    if "failed" in second:
        return "failed"
    return "equal" if all(first[each] == second[each] for each in ("losses", "weights")) else "DIFFER"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2], help="ranks; on a CPU, gloo's")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["small", "xl", "7b"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=20, help="measured steps, after the warm-up")
    parser.add_argument("--minutes", type=float, default=10, help="at most, for what one launch measures")
    parser.add_argument("--out", type=Path, help="default: results/GPUxN/scaling.json")
    parser.add_argument("more", nargs="*", metavar="key=value", help="settings of train.py, after --")
    asked = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and max(asked.gpus) > torch.cuda.device_count():
        parser.error(f"--gpus {max(asked.gpus)}: this machine has {torch.cuda.device_count()}")
    if device.type == "cpu" and asked.models != ["tiny"]:
        parser.error("no CUDA device: here only --models tiny, which shows that it works")
    out = asked.out or Path(f"results/{slug(device_name(device))}x{max(asked.gpus)}/scaling.json")
    command = f"python -m benchmarks scaling {' '.join(argv)}".strip()
    settings = (each for each in os.environ if each.startswith("NCCL_") and each != "NCCL_VERSION")
    nccl = {name: os.environ[name] for name in settings}  # its version is in environment
    report: dict[str, Any] = {
        "command": command,
        "environment": environment(device),
        "nccl": nccl,
        "samples": [],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        common = [f"data.tokenizer={vocabulary(folder)}", f"data.cache_dir={folder / 'cache'}", *asked.more]
        for gpus in sorted(asked.gpus):
            named = [
                [model, name, [*MODELS[model], *common, *layout]]
                for model in asked.models
                for name, layout in layouts_of(model, gpus, asked.layouts)
            ]
            for sample in launched(named, gpus, asked.steps, folder, asked.minutes):
                report["samples"].append(sample)
                out.write_text(as_lines(report))  # a killed session keeps what it has
                what = f"{sample['model']}, {gpus}: {sample['name']}"
                print(f"{what}: {sample.get('failed', 'measured')}", flush=True)
    print(table(report["samples"]))
    print(f"wrote {out}")
    return 0
