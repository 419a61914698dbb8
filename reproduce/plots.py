"""One style for every picture: a light grid, no frame, and the same colour for a backend everywhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colour-blind-safe colours, then some of Tol's; brown replaces his teal, too close to their green.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
COLOURS += ("#882255", "#999933", "#332288", "#5B3A29", "#AA4499", "#DDCC77", "#CC6677", "#9A8CFF", "#661100")
FIXED = {"flash": "#0072B2", "standard": "#D55E00", "naive": "#E69F00", "sdpa": "#009E73", "paper": "#000000"}
FIXED |= {"flash1": "#882255", "two_pass": "#999933"}
FIXED |= {"fa4": "#CC79A7", "sdpa_cudnn": "#56B4E9", "sdpa_flash": "#7F7F7F", "flex": "#5B3A29"}
FIXED |= {"chunked": "#332288", "sdpa_efficient": "#AA4499", "sdpa_math": "#DDCC77"}
STYLE = {
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",  # keeps text as text: smaller files, and searchable
    "svg.hashsalt": "tilegpt",  # the same picture gives the same file
}


def can_draw() -> bool:
    """Whether matplotlib is installed; only the pictures need it."""
    return importlib.util.find_spec("matplotlib") is not None


def colour(name: str, others: tuple[str, ...] = ()) -> str:
    """The colour of a series: its fixed one, or else one chosen by its place among `others`."""
    if name in FIXED:
        return FIXED[name]
    free = [each for each in COLOURS if each not in FIXED.values()]
    names = sorted(each for each in {*others, name} if each not in FIXED)
    return free[names.index(name) % len(free)]


@contextmanager
def picture(path: Path, panels: int = 1, *, columns: int = 3, title: str) -> Iterator[list[Axes]]:
    """Give the axes of `panels` panels in a grid of `columns`; save to `path` (.svg or .png) when the block ends."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from cycler import cycler

    columns = min(columns, panels)
    rows = -(-panels // columns)
    with mpl.rc_context(STYLE | {"axes.prop_cycle": cycler(color=COLOURS)}):
        size = (4.6 * columns, 3.4 * rows + 0.3)
        fig, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        for spare in axes.flat[panels:]:
            spare.axis("off")
        fig.suptitle(title, x=0.01, ha="left", fontweight="bold")
        yield list(axes.flat[:panels])
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(fig)


def length_axis(axis: Axes, lengths: list[int]) -> None:
    """Make x a log2 axis of sequence lengths, labelled 512, 1k, 2k."""
    axis.set_xlabel("sequence length")
    if not lengths:
        return
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(n) if n < 1024 else f"{n // 1024}k" for n in lengths])
    axis.minorticks_off()


def beside(axis: Axes, end: float, place: float, text: str, **options: object) -> None:
    """A text 3 points to the right of the end of a horizontal bar. (An SVG viewer drops a leading space.)"""
    axis.annotate(text, (end, place), (3, 0), textcoords="offset points", va="center", **options)


def legend(axis: Axes, **options: object) -> None:
    """Add a small legend if anything on the axis has a label."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(**{"fontsize": 8, **options})


def legend_below(axes: list[Axes]) -> None:
    """Add one small legend for all panels, below them; the figure grows by its height."""
    handles = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if not handles:
        return
    figure = axes[0].figure
    columns = int(figure.get_figwidth() / 2.2)  # inches of the longest label
    figure.set_figheight(figure.get_figheight() + 0.18 * -(-len(handles) // columns))
    figure.legend(handles.values(), handles.keys(), fontsize=8, loc="outside lower left", ncols=columns)
