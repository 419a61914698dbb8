"""How DistributedDataParallel exchanges gradients beside CUDA graphs: variants in turns, on every rank of torchrun.

    python -m torch.distributed.run --standalone --nproc_per_node=2 exchange.py FOLDER SECONDS SETTINGS...

Each variant changes what training/ or torch.compile does, from outside, and trains as `benchmarks scaling` does.
$JOB_OUT/exchange.json has each one's samples: milliseconds by phase, losses, a hash of the weights (which tells
whether it computes the same bits as `main`). After each, that file is written, and rank 0 prints a table. What each
should save: kernels/log/step.md.
"""

import contextlib
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, os.getcwd())
import torch
import torch.distributed as dist

from benchmarks.scaling import vocabulary
from benchmarks.scaling_rank import measure
from training import building, trainer
from training.distributed import world
from training.parallel import replicate

# A turn of all takes about four minutes: compiling is most of it the first time.
ROUNDS, STEPS = (1, 1) if "TRY" in os.environ else (3, 25)
Patch = Callable[[], contextlib.AbstractContextManager]


class Undivided:
    """Micro-steps without an exchange through the model itself, in two graphs; only the last through its DDP's."""

    def __init__(self, whole: Callable[..., torch.Tensor], replicas: torch.nn.Module) -> None:
        self.whole, self.replicas, self.chosen = whole, replicas, replicas

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.chosen = self.whole
        yield
        self.chosen = self.replicas

    def __call__(self, *tensors: Any, **named: Any) -> torch.Tensor:
        return self.chosen(*tensors, **named)


def undivided() -> contextlib.AbstractContextManager:
    def build(plan: Any, *others: Any) -> building.Built:
        built = building.build(plan, *others)
        model = built.model
        if not plan.how.compiled:
            built.train_model = Undivided(model, built.train_model)
            return built

        # Code of its own: torch.compile keeps what it compiled by code, and does not ask for DDP before it takes it.
        def whole(*tensors: Any, **named: Any) -> torch.Tensor:
            return model(*tensors, **named)

        mode = "reduce-overhead" if plan.how.graphs else None
        built.train_model = Undivided(torch.compile(whole, mode=mode), built.train_model)
        return built

    return mock.patch.object(trainer, "build", build)


def one_graph() -> contextlib.AbstractContextManager:
    """torch.compile does not cut at buckets: one graph a pass, and the exchange after the backward."""
    return mock.patch.object(torch._dynamo.config, "optimize_ddp", False)


def buckets(megabytes: int) -> contextlib.AbstractContextManager:
    ddp = partial(replicate.DistributedDataParallel, bucket_cap_mb=megabytes)
    return mock.patch.object(replicate, "DistributedDataParallel", ddp)


def views() -> contextlib.AbstractContextManager:
    """Gradients stay parts of the buckets, as without graphs: no copies into them and back."""

    def replicated(*arguments: Any, views: bool) -> torch.nn.Module:
        return replicate.replicated(*arguments, views=True)

    return mock.patch.object(building, "replicated", replicated)


@contextlib.contextmanager
def average(processors: int | None = None) -> Iterator[None]:
    """NCCL divides while it sums, so no kernel divides before; on so many processors at least. gloo cannot."""
    own = None
    if processors:
        options = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas = processors
        own = dist.new_group(pg_options=options)

    def hook(
        dtype: torch.dtype, group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        sent = buffer.to(dtype)  # itself in float32, and then copy_ does nothing
        work = dist.all_reduce(sent, dist.ReduceOp.AVG, group=own or group, async_op=True)
        return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))

    hooks = {"allreduce_hook": torch.float32, "bf16_compress_hook": torch.bfloat16}
    with mock.patch.multiple(replicate, **{name: partial(hook, dtype) for name, dtype in hooks.items()}):
        yield
    if own:
        dist.destroy_process_group(own)


@contextlib.contextmanager
def together(*patches: Patch) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch())
        yield


bf16 = "parallel.gradient_dtype=bf16"
large, whole, many = partial(buckets, 100), partial(buckets, 4096), partial(average, 32)
NCCL = {average, many}
# What may land first; then what tells which part of it saved how much.
VARIANTS: dict[str, tuple[list[Patch], list[str]]] = {
    "main": ([], []),
    "undivided, views, average": ([undivided, views, average], []),
    "undivided, views, average, 100 MB": ([undivided, views, average, large], []),
    "undivided, views": ([undivided, views], []),
    "one graph, views, average, a bucket": ([one_graph, views, average, whole], []),
    "undivided, views, average, bf16": ([undivided, views, average], [bf16]),
    "undivided, views, average, bf16, 100 MB": ([undivided, views, average, large], [bf16]),
    "one graph, views, average, bf16": ([one_graph, views, average, whole], [bf16]),
    "undivided, views, average, 32 CTAs": ([undivided, views, many], []),
    "views": ([views], []),
}


def table(samples: list[dict]) -> str:
    lines = [f"{'variant':40}{'step ms':>21}{'exchange ms':>13}{'GiB':>6}{'s':>5}  weights"]
    for name in dict.fromkeys(each["name"] for each in samples):
        own = [each for each in samples if each["name"] == name]
        steps = " ".join(f"{each['perf/step_ms']:.2f}" for each in own)
        peak = own[-1].get("perf/peak_allocated_gib", 0.0)
        same = "as main" if own[-1]["weights"] == samples[0]["weights"] else "OTHER"
        exchange, seconds = own[-1]["perf/exchange_ms"], own[0]["seconds"]
        lines.append(f"{name:40}{steps:>21}{exchange:>13.2f}{peak:>6.1f}{seconds:>5.0f}  {same}")
    return "\n".join(lines)


def main() -> None:
    folder, end, settings = Path(sys.argv[1]), time.monotonic() + float(sys.argv[2]), sys.argv[3:]
    samples: list[dict] = []
    with world("auto" if torch.cuda.is_available() else "cpu") as ranks:
        if ranks.is_main:
            vocabulary(folder)
        dist.barrier()
        common = [f"data.tokenizer={folder / 'vocabulary.tiktoken'}", f"data.cache_dir={folder / 'cache'}"]
        for number in range(ROUNDS):
            for name, (patches, more) in VARIANTS.items():
                if ranks.share(time.monotonic() > end):  # rank 0's clock decides for all
                    return
                if not torch.cuda.is_available() and NCCL & set(patches):
                    continue
                began = time.monotonic()
                run = folder / f"{number} {name}"
                try:
                    with together(*patches):
                        sample = measure([*settings, *common, *more], STEPS, run, ranks)
                    samples.append({"name": name, "seconds": time.monotonic() - began, **sample})
                except Exception:  # the next may do what this one cannot
                    print(f"{name} failed on rank {ranks.rank}:\n{traceback.format_exc()}", flush=True)
                torch.compiler.reset()
                gc.collect()
                if ranks.is_main:
                    Path(os.environ["JOB_OUT"], "exchange.json").write_text(json.dumps(samples, indent=1))
                    print(table(samples), flush=True)


if __name__ == "__main__":
    main()
