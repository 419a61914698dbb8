"""A tree's training step, built, checked, then run as it is asked on stdin: worker.py MODEL BATCH ACCUMULATION

The working folder is the tree. Orders: "steps N", "profile FILE". Answers are lines of JSON.
"""

import json
import os
import sys
import time

sys.path.insert(0, os.getcwd())
import torch
from torch.profiler import profile

from kernels import get_attention
from model.config import GPTConfig
from reproduce import contenders

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever prints does not disturb the talk

CONFIGS = {
    "small": GPTConfig(),
    "medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "tiny": GPTConfig(vocab_size=60, seq_len=16, n_layer=1, n_head=2, n_embd=16),
}
config, batch, accumulation = CONFIGS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = device.type == "cuda"


def answer(**what: object) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def synchronize() -> None:
    if on_gpu:
        torch.cuda.synchronize()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: each.grad.detach().float().clone() for name, each in named if each.grad is not None}


def reference(made: contenders.Contender) -> tuple[float, dict[str, torch.Tensor]]:
    """Float32 loss and gradients of the same weights with PyTorch's layers, a sequence at a time."""
    exact = contenders.initial_model(config, get_attention("sdpa" if on_gpu else "naive"), device)
    exact.load_state_dict(made.model.state_dict())
    total = 0.0
    for tokens, targets in zip(made.tokens[0].split(1), made.targets[0].split(1), strict=True):
        loss = exact(tokens, targets) / batch
        loss.backward()
        total += loss.item()
    return total, gradients(exact)


def found(made: contenders.Contender) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of two micro-steps with one batch, as the model is trained."""
    made.model.zero_grad(set_to_none=not made.graphs)
    add = getattr(contenders, "add_gradients", None)  # of the variants
    for _ in range(2):
        if made.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with made._autocast():
            loss = made._loss(made.tokens[0], made.targets[0], torch.full((), 1, device=device))
        if add and made.graphs:
            add(loss / 2, made.model)
        else:
            (loss / 2).backward()
    value, of_all = loss.item(), gradients(made.model)
    made.model.zero_grad(set_to_none=not made.graphs)
    return value, of_all


def check(made: contenders.Contender) -> dict[str, object]:
    """The norm of each gradient's error, relative; and whether a second time gives the same bits."""
    gib = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    value, first = found(made)
    repeats = all(torch.equal(first[name], each) for name, each in found(made)[1].items())
    exact_loss, exact = reference(made)
    errors = {
        name: ((first[name] - each).norm() / each.norm().clamp(min=1e-30)).item() if name in first else 1.0
        for name, each in exact.items()
    }
    return {
        "loss": value,
        "exact_loss": exact_loss,
        "errors": errors,
        "repeats": repeats,
        "gib": gib,
        "skipped": torch._dynamo.utils.counters["inductor"]["cudagraph_skips"],
    }


made = contenders.Contender(
    "flash+fused" if on_gpu else "sdpa+fused",
    config,
    device=device,
    dtype=torch.bfloat16,
    micro_batch=batch,
    accumulation=accumulation,
    compiler="inductor" if on_gpu else None,
    graphs=on_gpu,
)
number = 0


def steps(count: int) -> float:
    """Milliseconds of a step, taken back to back as a run takes them."""
    global number
    synchronize()
    began = time.perf_counter()
    for _ in range(count):
        for _ in made.step(number):
            pass
        number += 1
    synchronize()
    return 1e3 * (time.perf_counter() - began) / count


steps(3)
# After steps: graphs are replayed, and weights have changed since they were recorded.
answer(checked=check(made))
if on_gpu:
    torch.cuda.empty_cache()  # the reference's, for the other variants
for line in sys.stdin:
    order, argument = line.split()
    if order == "steps":
        answer(ms=steps(int(argument)))
    else:
        with profile() as recorded:
            steps(1)
        by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=by, row_limit=60, max_name_column_width=90)
        with open(argument, "w") as file:
            file.write(table)
        answer(profiled=argument)
