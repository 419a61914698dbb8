"""README's picture: attention's TFLOP/s and memory against length, tokens/s of GPT-2 small, and its loss curves."""

from __future__ import annotations

from pathlib import Path

from . import plots
from .attention_figures import tflops
from .contenders import FUSED, NANOGPT, NANOGPT_BIASES
from .experiment import Results, pick
from .perplexity_figures import draw_clock, draw_gaps, draw_tokens, runs
from .timing import timed
from .training_figures import find, rate

# In drawing order: ours is last, so that it lies on top.
ATTENTIONS = {
    "standard": "standard",
    "sdpa_flash": "PyTorch, FlashAttention-2",
    "sdpa_cudnn": "PyTorch, cuDNN",
    "fa4": "FlashAttention-4",
    "flash": "tilegpt",
}
STEPS = {
    f"flash{FUSED}": "tilegpt",
    "flash": "with torch's layers",
    NANOGPT: "nanoGPT, no biases",
    NANOGPT_BIASES: "nanoGPT",
    "naive": "naive attention",
}
OTHERS = "#9aa3ad"


def draw(attention: Results, training: Results, path: Path, perplexity: Results | None = None) -> None:
    """Draw a panel each of speed, memory and training, and a row of loss curves where they were measured.

    `attention` and `training` are results of one GPU; `perplexity` may be another's, since curves against tokens do
    not depend on it.
    """
    title = f"On one {attention['device']}"
    if perplexity:
        title += f"; the loss of GPT-2 small on one {perplexity['device']}"
    with plots.picture(path, 3 if perplexity is None else 6, title=title) as axes:
        _draw_rates(axes[0], attention)
        _draw_memory(axes[1], attention)
        _draw_steps(axes[2], training)
        if perplexity:
            for axis, panel in zip(axes[3:], (draw_tokens, draw_clock, draw_gaps), strict=True):
                panel(axis, runs(perplexity, "gpt2"))


def _draw_rates(axis: plots.Axes, results: Results) -> None:
    samples = timed(results, kind="time", figure="fa2", head_dim=64, causal=True)
    for name, label in ATTENTIONS.items():
        points = [(s["length"], tflops(s, name, "both").median) for s in samples if name in s["ms"]]
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=plots.colour(name), label=label)
    plots.length_axis(axis, [sample["length"] for sample in samples])
    axis.set_ylim(0, axis.get_ylim()[1] * 1.15)
    axis.set_ylabel("TFLOP/s, forward and backward")
    axis.set_title("Attention, causal, head_dim 64, bf16")
    plots.legend(axis, loc="upper left", reverse=True)


def _draw_memory(axis: plots.Axes, results: Results) -> None:
    for name in ("standard", "flash"):
        measured = pick(results, kind="memory", figure="fa1", mask="plain", backend=name)
        points = sorted((sample["length"], sample["peak_bytes"] / 2**30) for sample in measured)
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=plots.colour(name), label=ATTENTIONS[name])
            plots.length_axis(axis, [length for length, _ in points])
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda gib, _: f"{gib:g}" if gib >= 1 else f"1/{1 / gib:g}")
    axis.set_ylabel("peak GiB, forward and backward")
    axis.set_title("Memory of attention, 16 x 8 heads of 64")
    plots.legend(axis, loc="upper left", reverse=True)


def _draw_steps(axis: plots.Axes, results: Results) -> None:
    sample = find(results, "compiled")
    shown = [name for name in STEPS if rate(sample, name)]
    for place, name in enumerate(shown):
        thousands = rate(sample, name).median / 1e3
        axis.barh(
            place, thousands, color=plots.colour("flash") if name.startswith("flash") else OTHERS, height=0.62
        )
        plots.beside(axis, thousands, place, f"{thousands:.0f}")
    axis.set_yticks(range(len(shown)), [STEPS[name] for name in shown])
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlim(0, axis.get_xlim()[1] * 1.1)
    axis.set_xlabel("thousand tokens/s")
    axis.set_title("Training GPT-2 small, compiled, bf16")
