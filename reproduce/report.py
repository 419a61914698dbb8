"""`python -m reproduce report`: results/ as one page, as REPORT.md and as report.html, which needs no other file.

The first screen has a picture, three figures, and the claims counted; then a line a claim, which opens to its
figures. A GPU's figures come first, what a CPU counted in an appendix. A figure that is in no results file is "not
measured". A file that cannot be used loses only its own rows, and the page says so.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import headline
from .claims import CLAIMS, Claim
from .common import results_folder, writing
from .experiment import (
    EXPERIMENTS,
    NOT_COMPARABLE,
    NOT_MEASURED,
    NOT_REPRODUCED,
    REPRODUCED,
    Results,
    Verdict,
)
from .perplexity_figures import compares, runs
from .plots import can_draw
from .results import changed_since, read_all, slug

HOW_TO_READ = (
    "A figure is ours only if a file in results/ holds it; all else is not measured. Milliseconds, days and "
    "out-of-memory points of another GPU are not compared. A time is the median of its processes, with their range; "
    "a bound must hold in each of them, and faster means that the ranges do not overlap."
)
IN_PART = "reproduced in part"
# The states of a claim, in the order in which they are counted.
STATES = (REPRODUCED, IN_PART, NOT_REPRODUCED, NOT_COMPARABLE, NOT_MEASURED)
# Headers: of the first screen, of a claim's figures, and of what produced them. Cells are Markdown.
FIRST_COLUMNS = ("", "figure", "the paper", "ours", "verdict", "on")
COLUMNS = ("what", "paper", "ours", "ours/paper", "status", "why", "from")
RUN_COLUMNS = (
    "experiment",
    "state",
    "device",
    "command",
    "took",
    "date",
    "versions",
    "commit",
    "changed since",
)
# The figures of the first screen: subject -> (claim, words in the figure's name). Like for like, so that the least
# flattering of several figures is shown: eager steps for speed, the same shape for memory.
FIRST = {
    "speed": ("C11", "gpt2_small, whole stack"),
    "memory": ("C8", "peak memory at 4096"),
    "perplexity": ("C12", ""),
}


@dataclass(frozen=True)
class Figure:
    """A verdict, and the results file that it comes from, relative to the page; none for what is not measured."""

    verdict: Verdict
    source: str = ""
    gpu: bool = True


@dataclass
class Page:
    """The report's content, independent of its format."""

    figures: dict[str, list[Figure]] = field(default_factory=lambda: {name: [] for name in CLAIMS})
    documents: list[Results] = field(default_factory=list)
    # (experiment, whether on a GPU) -> its pictures
    pictures: dict[tuple[str, bool], list[Path]] = field(default_factory=dict)
    headlines: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def on_gpu(self, claim: str) -> list[Figure]:
        return [figure for figure in self.figures[claim] if figure.gpu]

    def on_cpu(self, claim: str) -> list[Figure]:
        return [figure for figure in self.figures[claim] if not figure.gpu]

    def counted(self, claim: str) -> list[Figure]:
        """Each figure once: a CPU's is left out where a GPU has it too."""
        on_gpu = self.on_gpu(claim)
        names = {figure.verdict.what for figure in on_gpu}
        return on_gpu + [each for each in self.on_cpu(claim) if each.verdict.what not in names]

    def pictures_below(self, claim: str, gpu: bool) -> list[Path]:
        """The pictures that are shown below a claim: those of its experiment, below the first of its claims."""
        experiment = CLAIMS[claim].experiment
        first = next(each.name for each in CLAIMS.values() if each.experiment == experiment)
        return self.pictures.get((experiment, gpu), []) if claim == first else []

    def state(self, claim: str) -> str:
        """One of STATES, by the figures that could be compared."""
        found = {figure.verdict.status for figure in self.counted(claim)}
        return IN_PART if {REPRODUCED, NOT_REPRODUCED} <= found else next(s for s in STATES if s in found)

    def tally(self, claim: str) -> str:
        """How many of the figures that could be compared are reproduced: "3 of 4"."""
        counts = Counter(figure.verdict.status for figure in self.counted(claim))
        compared = counts[REPRODUCED] + counts[NOT_REPRODUCED]
        return f"{counts[REPRODUCED]} of {compared}" if compared else ""

    def first(self) -> list[list[str]]:
        """The rows of the first screen."""
        rows = []
        for subject, (claim, words) in FIRST.items():
            figures = self.on_gpu(claim)
            v = next((each for each in figures if words in each.verdict.what), figures[0]).verdict
            rows.append([subject, v.what, v.paper, v.ours or NOT_MEASURED, v.status, v.basis])
        return rows


def figure_rows(figures: list[Figure]) -> list[list[str]]:
    """A row for each, in COLUMNS; what it had to reach is "as above" where the one before had to reach the same."""
    rows, before = [], None
    for figure in figures:
        v = figure.verdict
        why = "as above" if v.why and v.why == before else v.why
        ratio, before = "" if v.ratio is None else f"{v.ratio:.2f}", v.why
        source = f"[{v.basis}]({figure.source})" if figure.source and v.basis else v.basis
        rows.append([v.what, v.paper, v.ours or NOT_MEASURED, ratio, v.status, why, source])
    return rows


def run_rows(page: Page) -> list[list[str]]:
    """A row for each document that says what produced it, in RUN_COLUMNS."""
    rows = []
    for document in page.documents:
        row = [*(document[name] for name in RUN_COLUMNS[:3]), shlex.join(document["command"])]
        row += [f"{document['seconds']:.0f} s", document["date"]]
        environment = document["environment"]
        row += [f"torch {environment['torch']}, triton {environment['triton']}", short_commit(document)]
        rows.append([*row, ", ".join(changed_since(document))])
    return rows


def main(argv: list[str]) -> int:
    """Write the two files and print their paths."""
    from .report_html import as_html
    from .report_markdown import as_markdown

    directory = results_folder("reproduce report", __doc__, argv)
    page = build(directory)
    with writing(directory / "REPORT.md", "--results FOLDER"):
        (directory / "REPORT.md").write_text(as_markdown(page, directory), encoding="utf-8")
        (directory / "report.html").write_text(as_html(page), encoding="utf-8")
    print(summary(page))
    for note in page.notes:
        print(f"note: {note}")
    print(f"{directory / 'REPORT.md'}  {directory / 'report.html'}")
    return 0


def build(directory: Path) -> Page:
    """Judge every document below `directory`, draw its picture, and add rows for what is not measured."""
    page = Page()
    documents = read_all(directory, EXPERIMENTS, page.notes.append)
    for document in sorted(documents, key=lambda each: not ran_on_gpu(each)):
        experiment = EXPERIMENTS[document["experiment"]]
        where = f"{experiment.name} on {document['device']}"
        if document["state"] != "complete":
            page.notes.append(f"{where} is partial: it was interrupted or ran out of time")
        # One bad document must not lose the others' rows.
        try:
            verdicts = experiment.module.judge(document)
            picture = _draw(experiment.module, document, directory)
        except Exception as error:
            page.notes.append(f"{where} cannot be judged: {type(error).__name__}: {error}")
            continue
        suffix = ".json" if document["state"] == "complete" else ".partial.json"
        source = f"{slug(document['device'])}/{experiment.name}{suffix}"
        for verdict in verdicts:
            page.figures[verdict.claim].append(Figure(verdict, source, ran_on_gpu(document)))
        page.documents.append(document)
        if picture:
            page.pictures.setdefault((experiment.name, ran_on_gpu(document)), []).append(picture)
    page.notes += [*_older(page.documents), *_late(page.documents), *_alone(page.documents)]
    page.headlines = list(_headlines(page, directory))
    for name, claim in CLAIMS.items():
        page.figures[name] += [Figure(verdict) for verdict in _missing(claim, page)]
    return page


def _headlines(page: Page, directory: Path) -> Iterator[Path]:
    """The picture that README shows, for each GPU on which attention and training were both measured."""
    by_name = {(each["device"], each["experiment"]): each for each in page.documents if ran_on_gpu(each)}
    curves = [each for (_, name), each in by_name.items() if name == "perplexity" and compares(each)]
    for device in sorted({device for device, _ in by_name}):
        needed = [by_name.get((device, name)) for name in ("attention", "training")]
        if all(needed) and can_draw():
            path = directory / slug(device) / "headline.svg"
            own = by_name.get((device, "perplexity"))
            headline.draw(*needed, path, own if own in curves else next(iter(curves), None))
            yield path


def texts(page: Page) -> Iterator[tuple[str, str]]:
    """(what wrote it, text) of naive's and flash's last checkpoints, sampled with one seed."""
    for document in page.documents:
        if document["experiment"] == "perplexity":
            for name, run in runs(document, "gpt2").items():
                if name in ("naive", "flash") and "text" in run:
                    yield f"{name}, {run['steps']:,} steps on {document['device']}", run["text"]


def _listed(documents: Iterable[Results]) -> str:
    """Experiments by device: "attention, history on NVIDIA H200; ..."."""
    names: dict[str, list[str]] = {}
    for document in documents:
        names.setdefault(document["device"], []).append(document["experiment"])
    return "; ".join(f"{', '.join(experiments)} on {device}" for device, experiments in names.items())


def _alone(documents: list[Results]) -> Iterator[str]:
    """One note that lists the results that were timed in a single process."""
    timings = [(each, [s for s in each["samples"] if "ms" in s]) for each in documents]
    if alone := [d for d, timed in timings if timed and not any(s.get("process") for s in timed)]:
        yield f"timed in one process, so their figures have no range yet: {_listed(alone)}"


def _older(documents: list[Results]) -> Iterator[str]:
    """One note that lists the results made by code that has changed since."""
    if older := [each for each in documents if changed_since(each)]:
        yield f"code has changed since these were run (Runs tells what): {_listed(older)}"


def _late(documents: list[Results]) -> Iterator[str]:
    """A note for each run with late rounds (see `timing.Timed`), whose times may include waiting for the host."""
    for document in documents:
        rounds: Counter[str] = Counter()
        for sample in document["samples"]:
            rounds.update(sample.get("late", {}))
        if rounds:
            listed = ", ".join(f"{name} in {count}" for name, count in rounds.most_common())
            where = f"{document['experiment']} on {document['device']}"
            yield f"in some rounds of {where} the device waited for the host, so their times may include it: {listed}"


def _draw(module: object, document: Results, directory: Path) -> Path | None:
    if not can_draw():
        return None
    path = directory / slug(document["device"]) / f"{document['experiment']}.svg"
    module.draw(document, path)
    return path


def _missing(claim: Claim, page: Page) -> Iterator[Verdict]:
    """A "not measured" row if no document has a row for the claim, or none from a GPU where it takes a GPU."""
    if not claim.experiment:
        yield Verdict(claim.name, "the claim", claim.paper, why=claim.missing)
        return
    if page.on_gpu(claim.name) or (page.figures[claim.name] and not claim.on_gpu):
        return
    why = f"needs a CUDA device: python -m reproduce {claim.experiment}"
    if any(each["experiment"] == claim.experiment and ran_on_gpu(each) for each in page.documents):
        why = f"no run of {claim.experiment} on a GPU has measured it yet"
    yield Verdict(claim.name, claim.on_gpu or "the claim", claim.paper, why=why)


def ran_on_gpu(document: Results) -> bool:
    return document["environment"]["device"].startswith("cuda")


# ---- words -------------------------------------------------------------------------------------------

_ONES = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("", "", "twenty", "thirty")


def in_words(number: int) -> str:
    """0 to 39: no, one, ... thirty-nine."""
    if number < 20:
        return _ONES[number]
    return _TENS[number // 10] + (f"-{_ONES[number % 10]}" if number % 10 else "")


def summary(page: Page) -> str:
    """The claims counted by claim, in a sentence; those that are not simply reproduced are named."""
    names = {state: [name for name in CLAIMS if page.state(name) == state] for state in STATES}
    words = {NOT_COMPARABLE: "measured but not comparable", NOT_MEASURED: "not measured"}
    parts = []
    for state, claims in names.items():
        if claims:
            named = "" if state == REPRODUCED else f" ({', '.join(claims)})"
            verb = "is" if len(claims) == 1 else "are"
            parts.append(f"{in_words(len(claims))} {verb} {words.get(state, state)}{named}")
    return f"Of the papers' {in_words(len(CLAIMS))} claims, {'; '.join(parts)}."


def short_commit(document: Results) -> str:
    commit, changes, _ = (document["commit"] or "unknown").partition("+")
    return commit[:9] + ("+changes" if changes else "")
