"""One CPU training step of this model against nanoGPT's, in one process: python -m benchmarks step --nanogpt PATH

PATH is a nanoGPT `model.py`. A step is forward, backward and AdamW in float32, eager; both models attend through
torch's scaled_dot_product_attention. Three comparisons per shape, each a ratio of step times, ours over theirs:

    same function       nanoGPT with tanh GELU, our weights and our vocabulary; loss and gradients are checked first
    as published        nanoGPT as it is: exact-erf GELU, and GPT-2's vocabulary padded to 50304 inside the softmax
    its own optimizer   the same, stepped by its own configure_optimizers (on a CPU: AdamW, not fused)

Ours always takes tanh GELU and torch's fused AdamW, and so does nanoGPT in the first two. Steps take turns, so a
busy machine slows both; the ratio is the median over pairs, with its quartiles. Every sample goes into the JSON.
"""

import argparse
import contextlib
import io
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import GPTConfig
from model.gpt import GPT
from reproduce import nanogpt, timing
from reproduce.common import as_lines, text_table
from training.environment import environment

SHAPES = {  # name: (config, sequences per step)
    "nano": (GPTConfig(vocab_size=257, seq_len=64, n_layer=4, n_head=4, n_embd=128), 8),
    "gpt2_small": (GPTConfig(seq_len=256), 2),
}
LR = 1e-4


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def build(path: str, ours: GPT, *, same: bool) -> nn.Module:
    """nanoGPT's model in our shape with our weights (names agree but for `transformer.`)."""
    vocab_size = ours.config.vocab_size if same else None
    theirs = nanogpt.build(path, ours.config, biases=True, vocab_size=vocab_size)
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            to = theirs.get_parameter(f"transformer.{name}")
            to.copy_(weight[: len(to)] if name == "wte.weight" else weight)
    for block in theirs.transformer.h if same else ():
        block.mlp.gelu = nn.GELU(approximate="tanh")
    return theirs


def check_agreement(ours: GPT, theirs: nn.Module, tokens: Tensor, targets: Tensor) -> dict[str, float]:
    """Loss and gradients of the two, before timing. Raises AssertionError when they differ."""
    our_loss, their_loss = ours(tokens, targets), theirs(tokens, targets)[1]
    our_loss.backward()
    their_loss.backward()
    torch.testing.assert_close(our_loss, their_loss, rtol=1e-5, atol=0)
    worst = 0.0
    for name, weight in ours.named_parameters():
        grad = theirs.get_parameter(f"transformer.{name}").grad
        worst = max(worst, ((weight.grad[: len(grad)] - grad).norm() / grad.norm()).item())
    assert worst < 1e-4, f"gradients differ by {worst:.1e}"
    losses = {"loss": our_loss.item(), "nanogpt_loss": their_loss.item()}
    return {**losses, "worst_relative_gradient_difference": worst}


def stepper(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> timing.Call:
    def step(number: int) -> Iterator[None]:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield

    return step


def compare(path: str, name: str, duration: float) -> dict:
    """All three comparisons of one shape, their steps taken in turn for `duration` seconds."""
    config, batch = SHAPES[name]
    stream = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(config.vocab_size, (2, batch, config.seq_len), generator=stream)
    ours = GPT(config, sdpa)
    same, published, own = (build(path, ours, same=same) for same in (True, False, False))
    agreement = check_agreement(ours, same, tokens, targets)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints
        own_optimizer = own.configure_optimizers(0.0, LR, (0.9, 0.999), "cpu")

    def fused(model: nn.Module) -> torch.optim.Optimizer:
        model.zero_grad()
        return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    steps = {
        "ours": stepper(lambda: ours(tokens, targets), fused(ours)),
        "same function": stepper(lambda: same(tokens, targets)[1], fused(same)),
        "as published": stepper(lambda: published(tokens, targets)[1], fused(published)),
        "its own optimizer": stepper(lambda: own(tokens, targets)[1], own_optimizer),
    }
    how = {"seconds": duration / len(steps), "rounds": (5, 1_000_000)}
    timed = timing.time_alternating(steps, torch.device("cpu"), **how)
    seconds = {key: [ms / 1e3 for ms in step] for key, (step,) in timed.ms.items()}
    ratios = {key: summary(seconds["ours"], seconds[key]) for key in steps if key != "ours"}
    sizes = ("vocab_size", "seq_len", "n_layer", "n_head", "n_embd")
    shape = {size: getattr(config, size) for size in sizes} | {"batch": batch}
    return {"shape": shape, "agreement": agreement, "ratios": ratios, "seconds": seconds}


def summary(ours: list[float], theirs: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return {"median": middle, "quartile_1": low, "quartile_3": high}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks step", description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", required=True, help="path of nanoGPT's model.py")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=90, help="time spent on each shape")
    parser.add_argument("--out", type=Path, default=Path("results/cpu/nanogpt_step.json"))
    arguments = parser.parse_args(argv)
    command = f"python -m benchmarks step --nanogpt model.py --shapes {' '.join(arguments.shapes)}"
    machine = environment(torch.device("cpu")) | {"load_average": os.getloadavg()}
    del machine["command"]  # the paths of this machine
    report = {"command": f"{command} --seconds {arguments.seconds:g}", "environment": machine, "shapes": {}}
    rows = []
    for name in arguments.shapes:
        result = report["shapes"][name] = compare(arguments.nanogpt, name, arguments.seconds)
        medians = {key: 1e3 * statistics.median(seconds) for key, seconds in result["seconds"].items()}
        for key, ratio in result["ratios"].items():
            times = [f"{medians['ours']:.1f}", f"{medians[key]:.1f}", f"{ratio['median']:.3f}"]
            rows.append([f"{name}  {key}", *times, f"{ratio['quartile_1']:.3f} to {ratio['quartile_3']:.3f}"])
    print(text_table(["shape  nanoGPT", "ours ms", "theirs ms", "ratio", "quartiles"], rows))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(as_lines(report))
    print(f"wrote {arguments.out}")
    return 0
