"""README's picture: attention's TFLOP/s and memory against length, tokens/s of GPT-2 small, and its loss curves."""

from __future__ import annotations

from pathlib import Path

from . import pairs, plots
from .attention_figures import peaks, rates
from .contenders import FUSED, NANOGPT, NANOGPT_BIASES
from .experiment import Results
from .perplexity_figures import draw_clock, draw_gaps, draw_tokens, runs
from .standard import CUT
from .timing import timed
from .training_figures import find, rate

# In drawing order: ours is last, so that it lies on top.
ATTENTIONS = {
    "standard": "standard",
    CUT: "standard, cut to its mask",
    "sdpa_flash": "PyTorch, FlashAttention-2",
    "sdpa_cudnn": "PyTorch, cuDNN",
    "fa4": "FlashAttention-4",
    "flash": "flash (ours)",
}
STEPS = {
    f"flash{FUSED}": "ours",
    "flash": "with PyTorch's layers",
    "sdpa": "and its attention",
    NANOGPT: "nanoGPT, no biases",
    NANOGPT_BIASES: "nanoGPT",
    "naive": "ours, naive attention",
}
LOSSES = ("naive", "flash", "sdpa")
OTHERS = "#9aa3ad"


def draw(
    attention: Results,
    training: Results,
    path: Path,
    perplexity: Results | None = None,
    trained: list[pairs.Trained] | None = None,
) -> None:
    """Draw a panel each of speed, memory and training, and a row of losses where they were measured.

    `attention` and `training` are results of one GPU; `perplexity` may be another's, since curves against tokens do
    not depend on it. trained: the runs of every pair, of all GPUs; without pairs the last panel is `perplexity`'s.
    """
    title = f"On one {attention['device']}"
    if perplexity and perplexity["device"] != attention["device"]:
        title += f"; the loss of GPT-2 small on one {perplexity['device']}"
    with plots.picture(path, 3 if perplexity is None else 6, title=title) as axes:
        _draw_rates(axes[0], attention)
        _draw_memory(axes[1], attention)
        _draw_steps(axes[2], training)
        if perplexity:
            compared = runs(perplexity, "gpt2")
            few = {name: run for name, run in compared.items() if name in LOSSES}
            draw_tokens(axes[3], few)
            draw_clock(axes[4], few)
            if trained and pairs.matched(trained):
                pairs.panel(axes[5], trained)
                band = axes[5].get_legend_handles_labels()[0][-1]
                plots.legend(axes[5], handles=[band])  # which pair is which: the report's picture says
            else:
                draw_gaps(axes[5], compared)


def _draw_rates(axis: plots.Axes, results: Results) -> None:
    samples = timed(results, kind="time", figure="fa2", head_dim=64, causal=True)
    _draw_lines(axis, {name: rates(samples, name) for name in ATTENTIONS})
    axis.set_ylim(0, axis.get_ylim()[1] * 1.15)
    axis.set_ylabel("TFLOP/s, forward and backward")
    axis.set_title("Attention, causal, head_dim 64, bf16")


def _draw_memory(axis: plots.Axes, results: Results) -> None:
    measured = peaks(results)
    shown = ("standard", "sdpa_cudnn", "flash")
    gib = {name: {n: b / 2**30 for n, b in measured.get(name, {}).items()} for name in shown}
    _draw_lines(axis, gib, below="sdpa_cudnn")
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda gib, _: f"{gib:g} GiB" if gib >= 1 else f"{1024 * gib:g} MiB")
    axis.set_ylabel("peak, forward and backward")
    axis.set_title("Memory of attention, 16 x 8 heads of 64")


def _draw_lines(axis: plots.Axes, series: dict[str, dict[int, float]], below: str = "") -> None:
    """A line for each attention: length -> y. below: the one that is wide, to be seen where another lies on it."""
    for name, points in series.items():
        if points:
            line = zip(*sorted(points.items()), strict=True)
            wide = {"linewidth": 5, "markersize": 9} if name == below else {}
            of, plus, variant = name.partition("+")
            style = plots.LINES[variant] if plus else "o-"
            axis.plot(*line, style, color=plots.colour(of), label=ATTENTIONS[name], **wide)
    plots.length_axis(axis, sorted({length for points in series.values() for length in points}))
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
    axis.set_title(f"GPT-2 small, {sample['micro_batch']} sequences a forward")
