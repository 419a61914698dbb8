"""One rank of `python -m benchmarks scaling`: torchrun starts it; see scaling.py.

    torchrun --nproc_per_node=2 -m benchmarks.scaling_rank '[["MODEL", "LAYOUT", ["model=nano", ...]]]' STEPS FOLDER

Rank 0 prints one line of JSON for each of the named settings.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from reproduce.timing import recorded
from training.command_line import composed
from training.distributed import World, world
from training.metrics import memory, performance
from training.trainer import Trainer

WARM_UP = 3  # steps that Throughput leaves out: they compile and pick algorithms


def measure(settings: list[str], steps: int, folder: Path, ranks: World) -> dict[str, Any]:
    """Take steps as train.py does, without evaluation, checkpoint or logging between them."""
    config = composed(*settings, f"trainer.steps={WARM_UP + steps}", "trainer.eval_every=0", "logger=none")
    run = Trainer(config, folder, ranks)
    losses, meter = [], run.throughput
    batches = run.load(run.batches, 0, config.trainer.steps)
    clocks: dict[str, list[float]] = {}
    with ExitStack() as recording:
        for step, (inputs, targets) in enumerate(meter.waiting(batches)):
            if step == WARM_UP - 1 and ranks.is_main:  # of its own GPU, once all is compiled
                clocks = recording.enter_context(recorded(ranks.device))
            losses.append(run.train_step(step, inputs, targets)[0])
            meter.step()
    flops = run.model.flops_per_token(config.model.seq_len)
    measured = performance(meter.mark(), config.trainer.batch_tokens, flops, ranks)
    return {
        **run.plan.computation.facts(),
        "blocks_at_once": run.plan.blocks_at_once,
        "ranks": ranks.size,
        "parameters": run.model.num_parameters(),
        "batch_tokens": config.trainer.batch_tokens,
        "micro_batch": run.plan.computation.micro_batch,
        **measured,
        **{name: max(ranks.gather(peak)) for name, peak in memory(ranks.device).items()},
        "clocks": clocks,
        "losses": (ranks.sum(torch.stack(losses)) / ranks.size).tolist(),
        "weights": _digest(run.model, ranks),
    }


def _digest(model: torch.nn.Module, ranks: World) -> str:
    """Of all weights' bits, of what each rank has of them: sums, since gigabytes take a host long to hash."""
    sums = []
    for weight in model.state_dict().values():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        sums.append(local.detach().view(torch.int32).sum(dtype=torch.int64))
    everyone: list[Any] = [None] * ranks.size
    dist.all_gather_object(everyone, torch.stack(sums).tolist())
    return hashlib.sha256(str(everyone).encode()).hexdigest()[:16]


def main() -> None:
    named, steps, folder = json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    with world("auto") as ranks:
        for number, (model, name, settings) in enumerate(named):
            sample = measure(settings, steps, folder / str(number), ranks)
            if ranks.is_main:
                print(json.dumps({"model": model, "name": name, **sample}), flush=True)
            torch.compiler.reset()  # what is compiled holds the model, and the next one may need its memory
            gc.collect()


if __name__ == "__main__":
    main()
