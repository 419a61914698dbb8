"""Whether a training step repeats bit for bit while processes share one GPU; by hand, about three minutes.

    python -m tests.training.contention [--seconds 80]
    TRITON_INTERPRET=1 python -m tests.training.contention --device cpu --seconds 5

As many processes as run the GPU tests repeat a step of one batch with weights that stay as they are, and say which
gradients differ from the first time, last layer first, as the backward comes to them. Some replay CUDA graphs, some
do not, some have the portable attention, some find NaN in the memory that they are given, and some run the Hopper
kernels' attention alone, each the forms of a head_dim in turns, with NaN in all that they do not write. The exit
status is 1 if a step differs or a process fails. --device cpu runs four processes, to see that it works.

Processes that share a GPU take turns on it, in the middle of a kernel. A bug that shows only so was found with this:
kernels/LOG.md, "A barrier that nobody used".
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels import get_attention
from tests.kernels.accuracy import inputs, unequal_documents
from tests.training import test_gpu
from training.config import AttentionConfig, Config, Precision
from training.distributed import world
from training.trainer import Trainer

# Features beside each other of the processes that run attention alone, each process with a head_dim.
FORMS = {
    "attention 64": ("", "padding, dropout", "own offsets", "window, padding"),
    "attention 128": ("", "window over twice as many keys", "own offsets, padding"),
    "attention 256": ("", "dropout", "window, padding"),
}
SHARE = ["graphs"] * 5 + ["no graphs"] * 2 + ["poisoned"] * 2 + ["portable"] * 2 + list(FORMS)
Tensor = torch.Tensor


def config(mode: str, folder: Path, on_cpu: bool) -> Config:
    """The config of the test in test_gpu.py that once had a NaN; on a CPU, a smaller one."""
    text = folder / "text.txt"
    text.write_text("\n\n".join(" ".join(str(i * j % 97) for j in range(150)) for i in range(60)))
    tested = test_gpu.config(text, "auto", Precision.fp32 if on_cpu else Precision.bf16)
    model = replace(tested.model, seq_len=64, n_layer=1) if on_cpu else tested.model
    graphs = False if mode in ("no graphs", "poisoned") else None
    trainer = replace(tested.trainer, batch_tokens=4 * model.seq_len, micro_batch=4, cuda_graphs=graphs)
    attention = AttentionConfig("flash", tier="triton") if mode == "portable" else tested.attention
    return replace(tested, model=model, attention=attention, trainer=trainer)


def repeat_training(mode: str, seconds: float, folder: Path, device: str) -> int:
    with world(device) as ranks:
        run = Trainer(config(mode, folder, device == "cpu"), folder / "run", ranks)
        inputs, targets = (torch.from_numpy(each).to(ranks.device) for each in run.batches.batch(0))
        parameters = dict(run.model.named_parameters())
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        count = itertools.count()

        def step() -> dict[str, Tensor]:
            if mode == "poisoned" and next(count) % 20 == 0:  # each takes 100 MiB more
                poison_free_memory()
            torch._foreach_zero_([parameter.grad for parameter in parameters.values()])
            if run.plan.computation.graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with run.plan.autocast():
                loss = run.train_model(inputs, targets, dropout_seed=None)
            loss.backward()
            return {"loss": loss.detach()} | {name: each.grad for name, each in parameters.items()}

        for _ in range(3):  # compile, and record the graphs
            step()
        return compare(mode, step, seconds)


def repeat_attention(mode: str, seconds: float, device: str) -> int:
    on_cpu = device == "cpu"
    attention = partial(get_attention("flash"), tier="triton" if on_cpu else "hopper", return_lse=True)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new tensors, the sum of dQ too, with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    head_dim, dtype = (32, torch.float16) if on_cpu else (int(mode.split()[1]), torch.bfloat16)
    batch, length, heads = (1, 64, 2) if on_cpu else (4, 1024, 12)
    calls = {}
    for form in FORMS[mode]:
        kv_len = length * (2 if "twice" in form else 1)
        sizes = {"batch": batch, "heads": heads, "kv_heads": heads, "device": device}
        given: dict[str, object] = unequal_documents(length, kv_len, batch, device) if "own" in form else {}
        if "window" in form:
            given["window"] = length // 8, 0
        if "padding" in form:
            lengths = torch.arange(1, batch + 1) * kv_len // (batch + 1)
            given["kv_lengths"] = lengths.to(device, torch.int32)
        if "dropout" in form:
            given |= {"dropout_p": 0.1, "dropout_seed": 1}
        calls[form] = inputs(length, kv_len, head_dim, dtype, **sizes), given

    def poison_processors() -> None:
        if not on_cpu:
            poison[(264,)](num_warps=4)

    def step() -> dict[str, Tensor]:
        results = {}
        for form, ((*qkv, d_out), given) in calls.items():
            poison_processors()
            out, lse = attention(*qkv, **given)
            poison_processors()
            gradients = torch.autograd.grad(out, qkv, d_out)
            lse = lse.clamp(min=-1000)  # -inf where a query sees no key
            got = zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True)
            results |= {f"{form}: {name}": each.detach() for name, each in got}
        return results

    return compare(mode, step, seconds)


def poison_free_memory() -> None:
    """Leave NaN in nearly all memory that the allocator holds and nobody uses."""
    held, reserved = [], torch.cuda.memory_reserved()
    for mib in (64, 16, 4, 1.25, 1, 1 / 4, 1 / 16, 1 / 64, 1 / 256):  # until it needs more
        while torch.cuda.memory_reserved() == reserved:
            held.append(torch.full((int(mib * 2**18),), float("nan"), device="cuda"))
        reserved = torch.cuda.memory_reserved()


@gluon.jit
def poison():
    """Leave NaN in the shared memory of the processors, 192 KiB at a program."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    memory = gl.allocate_shared_memory(gl.float32, [24, 2048], flat)
    for part in gl.static_range(24):
        memory.index(part).store(gl.full([2048], float("nan"), gl.float32, layout))


def compare(mode: str, step: Callable[[], dict[str, Tensor]], seconds: float) -> int:
    """Repeat a step, print what differs from the first time, and return how much was wrong."""
    first = {name: tensor.clone() for name, tensor in step().items()}
    not_finite = [name for name, tensor in first.items() if not tensor.isfinite().all()]
    print(f"{mode}: not finite at first: {not_finite or 'nothing'}", flush=True)
    began, steps, wrong = time.monotonic(), 0, 0
    while time.monotonic() - began < seconds:
        got, steps = step(), steps + 1
        different = torch.stack([(got[name] != tensor).sum() for name, tensor in first.items()]).tolist()
        if any(different):
            wrong += 1
            for name, count in reversed(list(zip(first, different, strict=True))):
                if count:
                    print(f"{mode}, step {steps}: {name} {count} differ, {int(got[name].isnan().sum())} NaN")
    print(f"{mode}: {steps} steps, {wrong} of them wrong", flush=True)
    return wrong + len(not_finite)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mode", help="what one process of them does")
    options = parser.parse_args()
    if options.mode in FORMS:
        return repeat_attention(options.mode, options.seconds, options.device)
    if options.mode is not None:
        with tempfile.TemporaryDirectory() as folder:
            return repeat_training(options.mode, options.seconds, Path(folder), options.device)
    command = [sys.executable, "-m", __spec__.name, "--device", options.device]

    def together(modes: list[str], seconds: float) -> int:
        started = [subprocess.Popen([*command, "--mode", mode, "--seconds", str(seconds)]) for mode in modes]
        return sum(each.wait() != 0 for each in started)

    if options.device == "cpu":
        return together(["graphs", *FORMS], options.seconds)
    together(list(dict.fromkeys(SHARE)), 1)  # fills the caches
    failed = together(SHARE, options.seconds)
    print(f"{len(SHARE)} processes, {failed} of them failed")
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
