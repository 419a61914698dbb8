"""What a race means for `auto`: python .ci/gpu/rows.py RACE.json ..., of files/race.py's parts combined and untimed.

Prints rows of kernels/flash/faster.py's FASTER as these samples alone ask for them, with the times over the
portable kernels' for a comment; then, of features with each other, of lengths apart and of bounds without the causal
mask (BY_QUERY), what they took; and all points at which today's `auto` takes the slower kernels. Edit the table and
run it again.
"""

import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import statistics

import torch

from kernels.flash.dispatch import hopper_needs
from kernels.flash.faster import TILE
from kernels.registry import AttentionRequest

GAIN = 0.98  # a gain below 2 % is none


class Cell:
    """A pass of a sample: the median of its time on the Hopper kernels over that on the portable ones."""

    def __init__(self, sample: dict, which: str) -> None:
        self.which, self.sample = which, sample
        self.names, self.head_dim, self.queries = sample["features"], sample["head_dim"], sample["length"]
        self.tiles = sample["heads_in_all"] * -(-self.queries // TILE)
        hopper, portable = (sample["ms"][name][which] for name in ("hopper", "portable"))
        self.ratio = statistics.median(a / b for a, b in zip(hopper, portable, strict=True))

    @property
    def apart(self) -> int:
        return self.queries if "longer" in self.sample["feature"] else 0

    @property
    def beside(self) -> str:
        """What keeps it apart from the rows of its features."""
        by_query = not self.sample["causal"] and not {"cu_seqlens", "window"}.isdisjoint(self.names)
        return "unequal lengths" if self.apart else "causal=False" if by_query else ""

    def auto_needs(self) -> str | None:
        """What `auto` asks for to take the Hopper kernels here, or None: it takes them."""
        call = self.queries, self.queries + self.apart, self.sample["causal"]
        asked = torch.device("cuda"), torch.bfloat16, self.head_dim, frozenset(self.names), "auto"
        return hopper_needs(self.which, AttentionRequest(*asked, *call, heads=self.sample["heads_in_all"]))

    def __str__(self) -> str:
        mask = "causal" if self.sample["causal"] else "full"
        where = f"d{self.head_dim} {mask} {self.queries} tiles {self.tiles}"
        return f"{self.which:9}{self.sample['feature'] or 'plain':22}{where:30}{self.ratio:.2f}"


def taken(cells: list[Cell], queries: int, tiles: int) -> list[Cell]:
    return [each for each in cells if each.queries >= queries and each.tiles >= tiles]


def row(cells: list[Cell]) -> tuple[int, int] | None:
    """The queries and tiles from which on every cell gains, with most cells; None if none does."""
    corners = itertools.product(*({getattr(each, by) for each in cells} for by in ("queries", "tiles")))
    good = [at for at in corners if (on := taken(cells, *at)) and all(each.ratio <= GAIN for each in on)]
    return max(good, key=lambda at: (len(taken(cells, *at)), *at), default=None)


def span(cells: list[Cell]) -> str:
    found = [each.ratio for each in cells]
    return f"{min(found):.2f} to {max(found):.2f}" if found else "none"


def main(*paths: str) -> None:
    samples = [sample for path in paths for sample in json.loads(Path(path).read_text())["samples"]]
    raced = [sample for sample in samples if {"hopper", "portable"} <= sample["ms"].keys()]
    cells = [Cell(sample, which) for which in ("forward", "backward") for sample in raced]
    kinds: dict[tuple, list[Cell]] = {}
    for each in sorted(cells, key=lambda each: (each.which == "backward", each.names, each.head_dim)):
        kinds.setdefault((each.which, each.beside, *each.names), []).append(each)
    for (which, beside, *names), of_kind in kinds.items():
        combined = beside or len(names) > 1
        named = " ".join([*names, beside]).strip()
        print(f"{which}, {named}:" if combined else f'("{which}", "{named}"):')
        for head_dim, group in itertools.groupby(of_kind, key=lambda each: each.head_dim):
            at, of_dim = row(group := list(group)), f"{head_dim}, {head_dim}"
            asked = f"Faster({of_dim}, {', '.join(map(str, at))})," if at else "no row"
            on = taken(group, *at) if at else []
            left = span([each for each in group if each not in on])
            print(f"    {asked:30}# {span(on)}; below {left}; tiles {sorted({each.tiles for each in group})}")
    print(f"\nauto is wrong at, by more than {1 - GAIN:.0%}:")
    for each in sorted(cells, key=lambda each: abs(each.ratio - 1), reverse=True):
        needed = each.auto_needs()
        if each.ratio > 1 / GAIN if needed is None else each.ratio < GAIN:
            print(f"{each}  {'hopper' if needed is None else 'portable: ' + needed}")
    print(f"{len(raced)} samples; {len(samples) - len(raced)} did not run on both")


if __name__ == "__main__":
    main(*sys.argv[1:])
