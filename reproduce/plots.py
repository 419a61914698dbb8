"""One style for every picture: a light grid, no frame, and the same colour for a backend everywhere."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
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
# Other names, in benchmarks, for what runs the same attention; transformers' own generation is gray.
SAME = {
    "flash": ("tilegpt", "split-KV", "split-KV, CUDA graph"),
    "sdpa": ("PyTorch's attention", "PyTorch's attention, CUDA graph"),
    "fa4": ("flash_attention_4", "fa4 itself"),
    "sdpa_flash": ("transformers, sdpa", "transformers, sdpa, static cache"),
}
FIXED |= {name: FIXED[attention] for attention, names in SAME.items() for name in names}
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
}
LINES = {"cut": "s-."}  # of a variant beside another one of the same colour, which has dashes


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
        written = title.splitlines()
        lines = [part for line in written for part in textwrap.wrap(line, 44 * columns)]  # letters that fit
        size = (4.6 * columns, 3.4 * rows + 0.3 + 0.2 * (len(lines) - len(written)))
        fig, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        for spare in axes.flat[panels:]:
            spare.axis("off")
        fig.suptitle("\n".join(lines), x=0.01, ha="left", fontweight="bold")
        yield list(axes.flat[:panels])
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(fig)
        if path.suffix == ".svg":
            path.write_text(_same_everywhere(path.read_text("utf-8")), "utf-8")


def _same_everywhere(svg: str) -> str:
    """The picture as every CPU draws it: coordinates differ in their last digits, and matplotlib's ids hash those."""

    def rounded(attribute: re.Match[str]) -> str:
        return re.sub(r"-?\d+\.\d+", lambda x: f"{round(float(x[0]), 2) + 0.0:g}", attribute[0])  # no -0

    svg = re.sub(r' (?:d|x|y|width|height|transform)="[^"]*"', rounded, svg)
    ids: dict[str, str] = {}
    one = r'(?:(?<= id=")|(?<="#)|(?<=\(#))\w*[0-9a-f]{10}(?=["\)])'
    svg = re.sub(one, lambda found: ids.setdefault(found[0], f"p\0{len(ids)}"), svg)
    # A page has several pictures, whose ids must differ.
    return svg.replace("\0", hashlib.sha256(svg.encode()).hexdigest()[:10] + "-")


Panel = Callable[["Axes"], None]
MOST_IN_A_PANEL = 6  # entries of a legend that still leave room for the lines


def of(claim: str, panel: Panel) -> Panel:
    """The panel, as that claim's."""
    panel.claim = claim  # type: ignore[attr-defined]
    return panel


def draw(path: Path, title: str, panels: Iterable[Panel], *, columns: int = 3, claim: str = "") -> bool:
    """A picture of panels, such as those of `lines` and `bars`.

    There is one legend below them if one panel shows all that any does, or much, else each has its own.

    Args:
        claim: draw what is `of` that claim alone.

    Returns whether there is anything to draw, without which a claim gets no picture.
    """
    panels = [panel for panel in panels if not claim or getattr(panel, "claim", "") == claim]
    if claim and not panels:
        return False
    with picture(path, max(1, len(panels)), columns=columns, title=title) as axes:
        for axis, panel in zip(axes, panels, strict=False):  # none measured: one empty panel
            panel(axis)
        shown = [set(axis.get_legend_handles_labels()[1]) for axis in axes]
        if set.union(*shown) in shown or max(map(len, shown)) > MOST_IN_A_PANEL:
            legend_below(axes)
        else:
            for axis in axes:
                legend(axis)
    return bool(panels)


def lines(
    title: str,
    series: Mapping[str, Mapping[float, float]],
    *,
    across: str = "",
    up: str = "",
    log: str = "",
    ticks: bool = True,
    paper: Mapping[str, Mapping[float, float]] | None = None,
) -> Panel:
    """A panel of a line for each series, {x: y}, in drawing order: the last lies on top.

    across: label of x; without one, x is a sequence length. log: "x", "y" or both. ticks: label just the x that there
    are. paper: dotted lines of a paper's figures, in the colour of the series that its label begins with.
    """
    named = {name: name.split(",")[0].partition("+")[0] for name in (*series, *(paper or {}))}
    of_backends = any(each in FIXED for each in named.values())  # other series take the colours in order

    def panel(axis: Axes) -> None:
        from matplotlib.ticker import LogFormatter

        class Plain(LogFormatter):  # 6 and 0.6, where its own are 6 times a power of ten or 6e-01
            def __call__(self, x: float, pos: int | None = None) -> str:
                return f"{x:,g}" if super().__call__(x, pos) else ""

        for name, points in series.items():
            # A variant, such as standard+compiled, is dashed and hollow, in the colour of what it varies.
            if points:
                _, plus, variant = name.partition("+")
                line, fill = (LINES.get(variant, "o--"), "none") if plus else ("o-", "full")
                xs, ys = zip(*sorted(points.items()), strict=True)
                shade = colour(named[name], tuple(named.values())) if of_backends else None
                axis.plot(xs, ys, line, color=shade, fillstyle=fill, label=name)
        for name, points in (paper or {}).items():
            if points:
                shade = colour(named[name].split()[0].rstrip(":"))
                axis.plot(*zip(*points.items(), strict=True), ":", color=shade, label=name)
        xs = sorted({x for points in series.values() for x in points})
        if not across:
            length_axis(axis, xs)
        else:
            axis.set_xlabel(across)
            if "x" in log:
                axis.set_xscale("log")
            if ticks:
                axis.set_xticks(xs, [f"{x:g}" for x in xs])
                axis.minorticks_off()
        if "y" in log:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:,g}")
            axis.yaxis.set_minor_formatter(Plain())
        else:
            axis.set_ylim(bottom=0)
        axis.set_ylabel(up)
        axis.set_title(title)

    return panel


def bars(
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    *,
    across: str,
    ends: Mapping[str, str] | None = None,
    shade: str | None = None,
    backends: bool = False,
) -> Panel:
    """A panel of a horizontal bar for each row, of parts one after another.

    ends: what stands at a bar's end. Of a single part, shade: its colour; backends: each row has its own.
    """

    def panel(axis: Axes) -> None:
        left = dict.fromkeys(rows, 0.0)
        for part in dict.fromkeys(part for parts in rows.values() for part in parts):
            those = [row for row in rows if part in rows[row]]
            widths = [rows[row][part] for row in those]
            shades = [colour(row, tuple(rows)) for row in those] if backends else shade
            how = {"height": 0.65, "label": part or None, "color": shades}
            axis.barh(those, widths, left=[left[row] for row in those], **how)
            left |= {row: left[row] + rows[row][part] for row in those}
        for place, (row, end) in enumerate(left.items()):
            number = f"{end:,.0f}" if end >= 1000 else f"{end:.3g}"
            beside(axis, end, place, (ends or {}).get(row, number), fontsize=7)
        axis.set_xlim(0, max(left.values()) * (1.55 if ends else 1.15))
        axis.set_ylim(max(len(rows), 4) - 0.5, -0.5)
        axis.tick_params(axis="y", labelsize=min(8, 180 / max(1, len(rows))))
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(across)
        axis.set_title(title, fontsize=9)

    return panel


def length_axis(axis: Axes, lengths: list[int]) -> None:
    """Make x a log2 axis of sequence lengths, labelled 512, 1k, 2k."""
    axis.set_xlabel("sequence length")
    if not lengths:
        return
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, list(map(length_name, lengths)))
    axis.minorticks_off()


def length_name(tokens: int) -> str:
    """A power of two as 512, 1k, 2k."""
    return str(tokens) if tokens < 1024 else f"{tokens // 1024}k"


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
