"""README's map of where ours stands: its time over the fastest other library's, at each point timed on one GPU.

Forward and backward apart, as one can be ahead where the other is behind. The upper maps are attention without a
feature, at every length, and the first paper's padding and dropout; the lower ones are features, windows and
documents. Blue is ahead. Framed is what is behind: ours takes longer there in every process (`aims.held`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from reproduce import plots
from reproduce.experiment import Results, Sample
from reproduce.peers import MASK_NAMES, OURS
from reproduce.timing import took

from . import attention, documents, features
from .aims import judged, rival

# By experiment: the libraries that ours is held to at a point.
LIBRARIES: dict[str, Callable[[Sample], list[str]]] = {
    "attention": attention.libraries,
    "features": features.libraries,
    "documents": documents.libraries,
}
TITLE = "Our time over the fastest other's"
PASSES = ("forward", "backward")
# Ratios of the strongest blue and red; those beyond them look the same.
STRONGEST = (0.6, 1.4)


class Place(NamedTuple):
    """A cell's. In the upper maps, without a feature, the column is the length, else (head_dim, length)."""

    feature: bool
    row: str
    column: tuple[int, ...]


class Cell(NamedTuple):
    """Our time over the fastest other library's, and whether that is behind."""

    ratio: float
    behind: bool


Cells = dict[tuple[Place, str], Cell]  # by place and pass


def cells(measured: Iterable[Results]) -> Cells:
    """What the documents of one GPU have; of two of an experiment, the first's where both have a point."""
    found: Cells = {}
    for document in (each for each in measured if each["experiment"] in LIBRARIES):
        for sample in judged(document):
            place, names = _place(sample), LIBRARIES[document["experiment"]](sample)
            for phase in PASSES:
                if best := rival(sample, OURS, names, phase):
                    ratio = took(sample, OURS, phase) / best.times
                    found.setdefault((place, phase), Cell(ratio.median, best.faster))
    return found


def _place(sample: Sample) -> Place:
    """Where a sample of any of the experiments stands."""
    length, head_dim = sample["length"], sample["head_dim"]
    mask = "causal" if sample.get("causal", True) else "full"
    if "bound" in sample:
        return Place(True, f"{sample['bound']} of {sample['size']}", (head_dim, length))
    if sample.get("feature", features.HEAD_DIM) != features.HEAD_DIM:
        row = features.NAMES[sample["feature"]] + ", full" * (not sample["causal"])
        return Place(True, row, (head_dim, length))
    row = f"{head_dim} {mask}"
    if sample.get("figure") in ("fa1", "gpt2", "stored"):  # others have 16k tokens and a width of 2048
        row += f", {sample['batch']} x {sample['heads']} heads"
        row += f", {MASK_NAMES[sample['mask']]}" * (sample["mask"] != "plain")
    return Place(False, row, (length,))


def draw(measured: Iterable[Results], device: str, path: Path) -> None:
    """Draw the maps, if there is anything to draw."""
    found = cells(measured)
    kinds = sorted({place.feature for place, _ in found})
    if not kinds:
        return
    title = f"{TITLE}, {device}; framed: ours takes longer"
    with plots.picture(path, len(PASSES) * len(kinds), columns=len(PASSES), title=title) as axes:
        most = max(len({place.row for place, _ in found if place.feature == kind}) for kind in kinds)
        figure = axes[0].figure
        figure.set_size_inches(11, len(kinds) * (0.7 + 0.23 * most))
        # A browser's letters are wider than those of the font that matplotlib measures.
        figure.get_layout_engine().set(rect=(0.02, 0, 0.98, 1))
        for axis, (kind, phase) in zip(axes, ((k, p) for k in kinds for p in PASSES), strict=True):
            _map(axis, found, kind, phase)


def _order(row: str) -> tuple[bool, bool, str]:
    """Numbers by size; of the upper maps' rows other shapes last, causal before full."""
    by_size = re.sub(r"\d+", lambda number: number[0].zfill(5), row)
    return "heads" in row, row[0].isdigit() and "full" in row, by_size


def _map(axis: plots.Axes, found: Cells, feature: bool, phase: str) -> None:
    """A map of a pass: a row for each kind of attention, a column for each length (and head_dim)."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.patches import Rectangle

    places = [place for place, _ in found if place.feature == feature]
    rows = sorted({place.row for place in places}, key=_order)
    columns = sorted({place.column for place in places})
    ratios = [[math.nan] * len(columns) for _ in rows]
    for (place, its), cell in found.items():
        if place.feature == feature and its == phase:
            x, y = columns.index(place.column), rows.index(place.row)
            ratios[y][x] = cell.ratio
            faint = STRONGEST[0] + 0.12 < cell.ratio < STRONGEST[1] - 0.12
            how = {"fontweight": "bold" if cell.behind else "normal", "color": "black" if faint else "white"}
            axis.text(x, y, f"{cell.ratio:.2f}", ha="center", va="center", fontsize=7, **how)
            if cell.behind:
                frame = Rectangle((x - 0.46, y - 0.44), 0.92, 0.88, fill=False, edgecolor="#b2182b", zorder=2)
                axis.add_patch(frame)
    edges = ([n - 0.5 for n in range(len(each) + 1)] for each in (columns, rows))
    shade = {"cmap": "RdBu_r", "norm": TwoSlopeNorm(1, *STRONGEST), "edgecolors": "white", "linewidth": 0.6}
    axis.pcolormesh(*edges, ratios, **shade)
    axis.set_xticks(range(len(columns)), [plots.length_name(column[-1]) for column in columns], fontsize=7)
    labels = rows if phase == PASSES[0] else [""] * len(rows)  # those of the map to its left
    axis.set_yticks(range(len(rows)), labels, fontsize=7)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(visible=False)
    axis.tick_params(length=0)
    for head_dim in {column[0] for column in columns if feature}:
        its = [x for x, column in enumerate(columns) if column[0] == head_dim]
        middle = (its[0] + its[-1]) / 2
        axis.annotate(
            f"head_dim {head_dim}", (middle, 0), (0, -16), ("data", "axes fraction"), "offset points",
            ha="center", va="top", fontsize=7,
        )  # fmt: skip
        axis.axvline(its[-1] + 0.5, color="black", linewidth=0.6)
    axis.set_title(phase + (", with a feature" if feature else ", by head_dim and mask"))
