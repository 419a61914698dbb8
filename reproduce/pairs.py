"""C12 over several initial weights: what does attention change in the loss, against what the weights change?

One pair of runs says little: the same run, rounded in another order, ends up to 0.012 nats away. So the difference of
flash from naive is taken over every pair of runs that differ in attention alone: those of `perplexity`, and those of
results/<gpu>/pairs.json. That file is of no experiment: the jobs pair_* (.ci/gpu) train, and `python -m benchmarks
recipes` keeps their curves.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from . import plots
from .comparison.seeds import half_width
from .experiment import Results, Verdict, Verdicts
from .perplexity_figures import runs

FILE, PICTURE = "pairs.json", "pairs.C12.svg"
NAIVE, FLASH = "naive", "flash"
FEWEST = 3  # of two, Student's t leaves all open


class Trained(NamedTuple):
    """A whole run: what it shares with its pair, its attention, and its validation loss in nats by step."""

    document: str
    device: str
    steps: int
    batch_tokens: int
    weights: int  # the seed that they were drawn by
    attention: str
    losses: dict[int, float]

    @property
    def end(self) -> float:
        return self.losses[max(self.losses)]


class Pair(NamedTuple):
    naive: Trained
    flash: Trained

    @property
    def apart(self) -> float:
        """Nats that flash ends above naive."""
        return self.flash.end - self.naive.end


def of_perplexity(results: Results) -> list[Trained]:
    """Its whole runs of GPT-2 small by naive and flash; the control with half the micro-batch is no pair's."""
    where = results["device"]
    return [
        Trained(
            f"perplexity on {where}", where, run["steps"], run["batch_tokens"], run["init_seed"], run["attention"],
            dict(map(tuple, run["validation"])),
        )
        for name, run in runs(results, "gpt2").items()
        if name.split("_")[-1] in (NAIVE, FLASH, "seed") and "partial" not in run
    ]  # fmt: skip


def of_recipes(kept: dict[str, Any]) -> list[Trained]:
    """The whole runs of a document of `python -m benchmarks recipes`."""
    found = []
    for run in kept.values():
        settings, where = run["settings"], run["device"]
        if run["state"] == "complete":
            weights = settings.get("init_seed", settings["seed"])
            steps, batch = settings["trainer.steps"], settings["trainer.batch_tokens"]
            losses = dict(map(tuple, run["validation"]))
            found.append(
                Trained(f"{FILE} on {where}", where, steps, batch, weights, run["facts"]["attention"], losses)
            )
    return found


def matched(trained: list[Trained]) -> list[Pair]:
    """Naive and flash of the same document and weights; of a run that was repeated the last."""
    by_place: dict[Any, dict[str, Trained]] = defaultdict(dict)
    for run in _longest(trained):
        by_place[run.document, run.weights][run.attention] = run
    return [Pair(each[NAIVE], each[FLASH]) for each in by_place.values() if {NAIVE, FLASH} <= each.keys()]


def weights_gap(trained: list[Trained]) -> float | None:
    """Nats between the ends of runs that differ in their weights alone, on average; in a pair or not."""
    alike: dict[Any, list[float]] = defaultdict(list)
    for run in _longest(trained):
        alike[run.document, run.attention].append(run.end)
    gaps = [abs(a - b) for ends in alike.values() for a, b in itertools.combinations(ends, 2)]
    return statistics.fmean(gaps) if gaps else None


def _longest(trained: list[Trained]) -> list[Trained]:
    length = max(((run.steps, run.batch_tokens) for run in trained), default=None)
    return [run for run in trained if (run.steps, run.batch_tokens) == length]


class Mean(NamedTuple):
    """How far flash ends above naive, and the rule: the interval of the mean holds 0, and neither end is as far from
    it as runs of other weights are from each other."""

    mean: float
    half: float
    gap: float

    @classmethod
    def of(cls, apart: list[float], gap: float) -> Mean:
        return cls(statistics.fmean(apart), half_width(apart), gap)

    @property
    def spare(self) -> float:
        """Nats by which the end that is further from 0 is nearer to it than the gap; below 0 it is not."""
        return self.gap - abs(self.mean) - self.half

    @property
    def holds(self) -> bool:
        return abs(self.mean) <= self.half and self.spare > 0

    def __str__(self) -> str:
        ends = f"{self.mean - self.half:+.4f} to {self.mean + self.half:+.4f}"
        return f"{round(self.mean, 4) + 0.0:+.4f} nats, 95 % interval {ends}"  # no -0.0000

    @property
    def told(self) -> str:
        """Itself, and by how much it keeps the rule or misses it."""
        kept = f"keeps the rule by {self.spare:.4f}" if self.holds else "misses the rule"
        return f"{self}, {kept}, with its weights' gap {self.gap:.4f}"


def of_pairs(trained: list[Trained]) -> Mean | None:
    """Over every pair among these runs, held against the gap of their weights; None if they are too few."""
    apart, gap = [pair.apart for pair in matched(trained)], weights_gap(trained)
    return None if len(apart) < FEWEST or gap is None else Mean.of(apart, gap)


def counted_once(found: list[Pair]) -> list[float]:
    """How far apart each weights' pairs are, on average over the GPUs that ran them."""
    by_weights: dict[int, list[float]] = defaultdict(list)
    for pair in found:
        by_weights[pair.naive.weights].append(pair.apart)
    return [statistics.fmean(each) for each in by_weights.values()]


def by_card(trained: list[Trained]) -> dict[str, list[Trained]]:
    return {
        card: [run for run in trained if run.device == card]
        for card in sorted({run.device for run in trained})
    }


def judge(trained: list[Trained]) -> list[Verdict]:
    """C12 by the mean over all pairs; the rule was set before the last four of seven, which its number includes."""
    found, mean = matched(trained), of_pairs(trained)
    verdicts = Verdicts(", ".join(sorted({pair.naive.device for pair in found})))
    if mean is None:
        return verdicts
    gap, apart, shown = mean.gap, sorted(pair.apart for pair in found), str(mean)
    tokens = found[0].naive.steps * found[0].naive.batch_tokens / 1e6
    what = f"flash minus naive, mean over {len(found)} pairs of runs of {tokens:.0f} M tokens"
    why = (
        "the rule, set before the last of them were run: the interval holds 0, and its ends are nearer to it than "
        f"runs of other weights are apart on average, {gap:.4f}"
    )
    if before := weights_gap([run for run in trained if not run.document.startswith(FILE)]):
        why += f" (by those run before it, {before:.4f})"
    once = counted_once(found)
    if FEWEST <= len(once) < len(found):
        told = Mean.of(once, gap).told
        why += f"; the same weights on two GPUs are two pairs; counted once, {len(once)} pairs: {told}"
    for card, its in by_card(_longest(trained)).items():
        if 0 < len(matched(its)) < len(found):
            own = of_pairs(its)
            why += f"; {card} alone, {len(matched(its))} pairs: {own.told if own else 'too few to tell'}"
            shown += f"; {card} alone misses the bound" * bool(own and not own.holds)
            if own and own.holds and not own._replace(gap=gap).holds:
                why += f", misses it with {gap:.4f}"
    why += f". By pair: {', '.join(f'{each:+.4f}' for each in apart)}"
    verdicts.add("C12", what, "the same", shown, mean.holds, why)
    return verdicts


def draw(trained: list[Trained], path: Path) -> None:
    """A picture of `panel` alone."""
    with plots.picture(path, title="Pairs that differ in attention alone; early gaps are cut off") as (axis,):
        panel(axis, trained)
        plots.legend_below([axis])


def panel(axis: plots.Axes, trained: list[Trained]) -> None:
    """How far flash is above naive in each pair against tokens, and the band of other weights."""
    found, gap, second_half = matched(trained), weights_gap(trained) or 0.0, []
    for naive, flash in found:
        steps = sorted(naive.losses.keys() & flash.losses.keys())
        tokens = [step * naive.batch_tokens / 1e6 for step in steps]
        apart = [flash.losses[step] - naive.losses[step] for step in steps]
        axis.plot(tokens, apart, label=f"{naive.device.removeprefix('NVIDIA ')}, weights {naive.weights}")
        second_half += apart[len(apart) // 2 :]
    axis.axhspan(-gap, gap, color="#7F7F7F", alpha=0.15, label="other weights, on average")
    axis.axhline(0, color="#7F7F7F", linewidth=1)
    edge = 1.2 * max(gap, *map(abs, second_half))
    axis.set(xlabel="M tokens", ylabel="validation loss above naive's (nats)", ylim=(-edge, edge))
    cards = len({naive.device for naive, _ in found})
    axis.set_title(f"Flash minus naive, {len(found)} pairs" + f", {cards} GPUs" * (cards > 1))
