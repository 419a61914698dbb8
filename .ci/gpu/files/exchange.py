"""How DistributedDataParallel exchanges gradients beside CUDA graphs: variants in turns, on every rank of torchrun.

    python -m torch.distributed.run --standalone --nproc_per_node=2 exchange.py FOLDER SECONDS SETTINGS...

Each variant changes what training/parallel/replicate.py or torch.compile does, from outside, and trains as
`benchmarks scaling` does. $JOB_OUT/exchange.json has each one's samples: milliseconds by phase, losses, a hash of the
weights (which tells whether it computes the same bits as `main`). Rank 0 prints a table after every round.
"""

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.insert(0, os.getcwd())
import torch
import torch.distributed as dist

from benchmarks.scaling import vocabulary
from benchmarks.scaling_rank import measure
from training import building
from training.distributed import world
from training.parallel import replicate

# A turn of all takes about three minutes: compiling is most of it the first time.
ROUNDS, STEPS = (1, 1) if "TRY" in os.environ else (2, 15)
Patch = Callable[[], contextlib.AbstractContextManager]


def one_graph() -> contextlib.AbstractContextManager:
    """torch.compile does not cut at buckets: one graph a pass, and the exchange after the backward."""
    return mock.patch.object(torch._dynamo.config, "optimize_ddp", False)


def buckets(megabytes: int) -> contextlib.AbstractContextManager:
    ddp = partial(replicate.DistributedDataParallel, bucket_cap_mb=megabytes)
    return mock.patch.object(replicate, "DistributedDataParallel", ddp)


def views() -> contextlib.AbstractContextManager:
    """Gradients stay parts of the buckets, as without graphs: 296 copies fewer, 1.1 ms of the last micro-step."""

    def replicated(*arguments: object, views: bool) -> torch.nn.Module:
        return replicate.replicated(*arguments, views=True)

    return mock.patch.object(building, "replicated", replicated)


def average() -> contextlib.AbstractContextManager:
    """NCCL divides while it sums, so no kernel divides before: 0.4 ms."""

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    return mock.patch.object(replicate, "allreduce_hook", hook)


@contextlib.contextmanager
def together(*patches: Patch) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch())
        yield


bf16 = "parallel.gradient_dtype=bf16"
VARIANTS: dict[str, tuple[list[Patch], list[str]]] = {
    "main": ([], []),
    "views": ([views], []),
    "average": ([average], []),
    "views, average": ([views, average], []),
    "buckets of 100 MB": ([partial(buckets, 100)], []),
    "buckets of 100 MB, views, average": ([partial(buckets, 100), views, average], []),
    "one graph": ([one_graph], []),
    "one graph, views, average": ([one_graph, views, average], []),
    "bf16": ([], [bf16]),
    "bf16, views": ([views], [bf16]),
}


def table(samples: list[dict]) -> str:
    lines = [f"{'variant':36}{'step ms':>18}{'exchange ms':>13}{'GiB':>6}  weights"]
    for name in dict.fromkeys(each["name"] for each in samples):
        own = [each for each in samples if each["name"] == name]
        steps = " ".join(f"{each['perf/step_ms']:.2f}" for each in own)
        peak = own[-1].get("perf/peak_allocated_gib", 0.0)
        same = "as main" if own[-1]["weights"] == samples[0]["weights"] else "OTHER"
        lines.append(f"{name:36}{steps:>18}{own[-1]['perf/exchange_ms']:>13.2f}{peak:>6.1f}  {same}")
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
                if not torch.cuda.is_available() and average in patches:
                    continue  # gloo cannot
                with together(*patches):
                    run = folder / f"{number} {name}"
                    sample = measure([*settings, *common, *more], STEPS, run, ranks)
                samples.append({"name": name, **sample})
                torch.compiler.reset()
                gc.collect()
                if ranks.is_main:
                    Path(os.environ["JOB_OUT"], "exchange.json").write_text(json.dumps(samples, indent=1))
            if ranks.is_main:
                print(table(samples), flush=True)


if __name__ == "__main__":
    main()
