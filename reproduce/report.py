"""`python -m reproduce report`: results/ as one page, as REPORT.md and as report.html, which needs no other file.

The first screen has a picture, three figures, and the claims counted; then a line a claim, which opens to its
figures. A GPU's figures come first, what a CPU counted in an appendix. A figure that is in no results file is "not
measured". A file that cannot be used loses only its own rows, and the page says so.
"""

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

from . import headline, long_run, pairs
from .attention_figures import peaks
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
from .perplexity_verdicts import judge_between_devices, judge_extended
from .plots import can_draw
from .report_notes import EARLIER, name_of, notes
from .results import changed_since, host_load, read_all, slug
from .sparse import judge_against_others

HOW_TO_READ = (
    "A figure is ours only if a file in results/ holds it; all else is not measured.",
    "Milliseconds, days and out-of-memory points of another GPU are not compared.",
    "A time is the median of its processes, with their range; a bound must hold in each of them. Faster means that "
    "the ranges do not overlap: one process has none.",
    "Standard attention is the fastest of the eager forms timed here. On an H200 at 1024 to 4096 tokens that is "
    "standard+cut, always with padding, and under a causal mask but at head_dim 256 and 1024 tokens: it reads the "
    "mask only where it hides something, takes as little as 0.57 of the others' time, and no paper's baseline did "
    "so. C6 is missed by it alone. In training steps (C11, C13, C23) it was not timed, so C13's verdict is over a "
    "slower form.",
    "Of figures of one kind the first table has the least flattering; a figure that several GPUs have counts once, "
    "by the worst that could be compared.",
)
IN_PART = "reproduced in part"
# Of a claim that nothing but counts is compared for: no run could contradict what a kernel is written to do.
BY_COUNT = "by count alone"
COMPARED = {REPRODUCED, NOT_REPRODUCED}
WORST_FIRST = (NOT_REPRODUCED, REPRODUCED, NOT_COMPARABLE)
# The states of a claim, in the order in which they are counted.
STATES = (REPRODUCED, IN_PART, BY_COUNT, NOT_REPRODUCED, NOT_COMPARABLE, NOT_MEASURED)
# Headers: of the first screen, of a claim's figures, and of what produced them. Cells are Markdown.
FIRST_COLUMNS = ("", "figure", "the paper", "ours", "verdict")
COLUMNS = ("what", "paper", "ours", "ours/paper", "status", "why", "from")
RUN_COLUMNS = ("experiment", "state", "device", "command", "took", "date", "versions", "commit")
RUN_COLUMNS += ("host load", "changed since")
# The figures of the first screen: subject -> (claim, kind -> words in their names); of the first kind that there
# is the figures, of the others whether they are reproduced. Like for like: eager steps, the same shape for memory.
FIRST = {
    "speed": ("C11", {"": "gpt2_small, whole stack: ours with flash"}),
    "memory": ("C8", {"": "peak memory at 4096"}),
    "perplexity": (
        "C12",
        {"mean": "flash minus naive, mean over", "one pair": "validation curve of flash against naive,"},
    ),
}


@dataclass(frozen=True)
class Figure:
    """A verdict, and the results file that it comes from, relative to the page; none for what is not measured.

    others: the file of what it was compared with, if that is another one.
    """

    verdict: Verdict
    source: str = ""
    gpu: bool = True
    others: str = ""

    @property
    def link(self) -> str:
        """Where it was measured, in Markdown: a link to the file."""
        basis = self.verdict.basis
        link = f"[{basis}]({self.source})" if self.source and basis else basis
        return f"{link}, [the others]({self.others})" if self.others else link


# Claims without a picture of their own, and those whose pictures show their figures.
PICTURED_AT = {"C9": "C7", "C17": "C24", "C20": "C24", "C26": "C2", "C28": "C27", "C30": "C7", "C32": "C8"}


@dataclass
class Judged:
    """A claim with its figures, and the pictures of them."""

    claim: Claim
    figures: list[Figure] = field(default_factory=list)
    gpu_pictures: list[Path] = field(default_factory=list)
    cpu_pictures: list[Path] = field(default_factory=list)
    also: list[str] = field(default_factory=list)  # lines of Markdown, of what is pictured here too
    pictured_at: str = ""  # the claim whose picture shows these figures too

    @property
    def on_gpu(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.gpu]

    @property
    def on_cpu(self) -> list[Figure]:
        return [figure for figure in self.figures if not figure.gpu]

    @property
    def statuses(self) -> tuple[Counter[str], Counter[str]]:
        """Of every figure, those by count apart, in the second; of one that several GPUs have the worst.

        A CPU's is left out where a GPU has it too.
        """
        names = {figure.verdict.what for figure in self.on_gpu}
        shown = self.on_gpu + [each for each in self.on_cpu if each.verdict.what not in names]
        verdicts = [figure.verdict for figure in shown]
        had = [each for each in verdicts if each.status != NOT_MEASURED]
        measured: dict[str, str] = {}
        counted: dict[str, str] = {}
        for each in sorted(had, key=lambda each: WORST_FIRST.index(each.status), reverse=True):
            (counted if each.by_count else measured)[each.what] = each.status  # the worst is the last
        statuses = Counter(measured.values())
        if missing := {each.what for each in verdicts} - {each.what for each in had}:
            statuses[NOT_MEASURED] = len(missing)
        return statuses, Counter(counted.values())

    @property
    def state(self) -> str:
        """One of STATES; with a part that is not measured, a claim is reproduced in part at most.

        What was measured makes a claim reproduced, if only in part; a count that differs from the paper's takes
        from it.
        """
        measured, counted = self.statuses
        if counted.keys() & COMPARED and not measured.keys() & COMPARED:
            return BY_COUNT
        found = measured.keys() | (counted.keys() - {REPRODUCED})
        if REPRODUCED in found and found & {NOT_REPRODUCED, NOT_MEASURED}:
            return IN_PART
        return next(state for state in STATES if state in found)

    @property
    def tally(self) -> str:
        """How many of what could be compared are reproduced: "3 of 4, 1 of 1 by count, 1 not measured"."""
        measured, counted = self.statuses
        parts = []
        for found, how in ((measured, ""), (counted, " by count")):
            if compared := found[REPRODUCED] + found[NOT_REPRODUCED]:
                parts.append(f"{found[REPRODUCED]} of {compared}{how}")
        if parts and (missing := measured[NOT_MEASURED]):
            parts.append(f"{missing} {NOT_MEASURED}")
        return ", ".join(parts)


@dataclass
class Page:
    """The report's content, independent of its format."""

    claims: dict[str, Judged] = field(default_factory=lambda: {name: Judged(c) for name, c in CLAIMS.items()})
    documents: list[Results] = field(default_factory=list)
    # (experiment, device) -> the newest's file
    sources: dict[tuple[str, str], str] = field(default_factory=dict)
    long_runs: list[Results] = field(default_factory=list)
    headlines: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def first_rows(page: Page) -> list[list[str]]:
    """A row for each subject, in FIRST_COLUMNS: of each kind the least flattering, on every GPU that has it now."""
    rows = []
    for subject, (claim, names) in FIRST.items():
        figures = [each for each in page.claims[claim].on_gpu if EARLIER not in each.verdict.basis]
        by_kind = ([each for each in figures if words in each.verdict.what] for words in names.values())
        kinds = {kind: _worst(found) for kind, found in zip(names, by_kind, strict=True) if found}
        kinds = kinds or {"": _worst(page.claims[claim].on_gpu)}
        of_several, (shown, *_) = len(kinds) > 1, kinds.values()
        ours = [f"{each.link}: {each.verdict.ours}" if each.verdict.ours else NOT_MEASURED for each in shown]
        statuses = []
        for kind, found in kinds.items():
            for v in (each.verdict for each in found):
                of = [kind] * of_several + [v.basis] * (len(found) > 1 or found is not shown)
                statuses.append(f"{', '.join(of)}: {v.status}" if of else v.status)
        verdict = shown[0].verdict
        rows.append([subject, verdict.what, verdict.paper, "; ".join(ours), "; ".join(statuses)])
    return rows


def _worst(figures: list[Figure]) -> list[Figure]:
    """The least flattering, on every GPU that has it."""
    what = min(figures, key=_flattery).verdict.what
    return [each for each in figures if each.verdict.what == what]


def _flattery(figure: Figure) -> tuple[bool, bool, float]:
    v = figure.verdict
    return v.status == NOT_MEASURED, v.status != NOT_REPRODUCED, math.inf if v.ratio is None else v.ratio


def figure_rows(figures: list[Figure]) -> list[list[str]]:
    """A row for each, in COLUMNS; what it had to reach is "as above" where the one before had to reach the same."""
    rows, before = [], None
    for figure in figures:
        v = figure.verdict
        why = "as above" if v.why and v.why == before else v.why
        ratio, before = "" if v.ratio is None else f"{v.ratio:.2f}", v.why
        rows.append([v.what, v.paper, v.ours or NOT_MEASURED, ratio, v.status, why, figure.link])
    return rows


def run_rows(page: Page) -> list[list[str]]:
    """A row for each document that says what produced it, in RUN_COLUMNS."""
    rows = []
    for document in page.documents:
        environment = document["environment"]
        commit, changes, _ = (document["commit"] or "unknown").partition("+")
        row = [*(document[name] for name in RUN_COLUMNS[:3]), shlex.join(document["command"])]
        row += [f"{document['seconds']:.0f} s", document["date"]]
        row += [f"torch {environment['torch']}, triton {environment['triton']}"]
        # Of joined parts: the first to the last.
        commit = " to ".join(each[:9] for each in commit.split(" to "))
        row += [commit + "+changes" * bool(changes), host_load(document)]
        rows.append([*row, _by_module(changed_since(document))])
    return rows


def _by_module(names: list[str]) -> str:
    """Names of definitions, or of several in a module that and how many: "kernels.naive.attend, model.gpt (2)"."""
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return ", ".join(
        name if not more else f"{each} ({1 + len(more)})" for each, (name, *more) in modules.items()
    )


def texts(page: Page) -> Iterator[tuple[str, str]]:
    """(what wrote it, text) of naive's and flash's last checkpoints, sampled with one seed."""
    for document in page.documents:
        if document["experiment"] == "perplexity":
            for name, run in runs(document, "gpt2").items():
                if name in ("naive", "flash") and "text" in run:
                    yield f"{name}, {run['steps']:,} steps on {document['device']}", run["text"]


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
    names: set[str] = set()
    for document in sorted(documents, key=lambda each: not ran_on_gpu(each)):
        if (name := name_of(document)) in names:
            document["state"] = EARLIER
            page.notes.append(f"{name}: what it lacks is an earlier, complete run's")
        elif document["state"] != "complete":
            page.notes.append(f"{name} is partial: not all of it was run")
        names.add(name)
        # One bad document must not lose the others' rows.
        try:
            _add(page, document, directory)
        except Exception as error:
            page.notes.append(f"{name_of(document)} cannot be judged: {type(error).__name__}: {error}")
    curves = [each for each in page.documents if each["experiment"] == "perplexity"]
    _add_between_devices(page, curves)
    _add_pairs(page, curves, directory)
    for verdict in judge_against_others(page.documents):
        device = verdict.basis.partition(",")[0]
        own, others = (page.sources[name, device] for name in ("sparse", "attention"))
        page.claims["C10"].figures.append(Figure(verdict, own, others=others))
    page.notes += notes(page.documents)
    for file in sorted(directory.glob(f"*/{long_run.FILE}")):
        try:
            _add_long_run(page, json.loads(file.read_text()), file.with_suffix(".svg"))
        except Exception as error:
            page.notes.append(f"{file} cannot be shown: {type(error).__name__}: {error}")
    page.headlines = list(_headlines(page.documents, directory)) if can_draw() else []
    for name, judged in page.claims.items():
        judged.figures += map(Figure, _missing(judged, page.documents))
        at = PICTURED_AT.get(name, "")
        if at and page.claims[at].gpu_pictures and any(figure.source for figure in judged.on_gpu):
            judged.pictured_at = at
    return page


def _add(page: Page, document: Results, directory: Path) -> None:
    """Add a document's verdicts and its picture; of an earlier run, the verdicts that the newer one lacks."""
    experiment, gpu = EXPERIMENTS[document["experiment"]], ran_on_gpu(document)
    verdicts = experiment.module.judge(document)
    folder, earlier = slug(document["device"]), document["state"] == EARLIER
    for claim in experiment.claims if can_draw() and not earlier else ():
        picture = directory / folder / f"{experiment.name}.{claim}.svg"
        if experiment.module.draw(document, picture, claim):
            judged = page.claims[claim]
            (judged.gpu_pictures if gpu else judged.cpu_pictures).append(picture)
    newer = f"{folder}/{experiment.name}.partial.json"
    source = newer if document["state"] == "partial" else f"{folder}/{experiment.name}.json"
    for verdict in verdicts:
        figures = page.claims[verdict.claim].figures
        if earlier:
            known = [each.verdict for each in figures if each.source == newer]
            known = [each.what for each in known if each.status != NOT_MEASURED]
            if verdict.status == NOT_MEASURED or verdict.what in known:
                continue
            verdict = replace(verdict, basis=f"{verdict.basis}, {EARLIER}")
        figures.append(Figure(verdict, source, gpu))
    page.documents.append(document)
    page.sources.setdefault((experiment.name, document["device"]), source)


def _add_between_devices(page: Page, curves: list[Results]) -> None:
    """C12 and C14, as far as they take the runs of several devices; a device's newest count."""
    newest: dict[str, Results] = {}
    for each in curves:
        newest.setdefault(each["device"], each)
    for pair in combinations(newest.values(), 2):
        links = ", ".join(
            f"[{each['device']}]({page.sources['perplexity', each['device']]})" for each in pair
        )
        for verdict in judge_between_devices(*pair):
            page.claims["C12"].figures.append(Figure(replace(verdict, basis=links)))
    for device, results in newest.items():
        source = page.sources["perplexity", device]
        found = judge_extended(results, list(newest.values()))
        page.claims["C14"].figures += (Figure(verdict, source) for verdict in found)


def _add_pairs(page: Page, curves: list[Results], directory: Path) -> None:
    """C12 by every pair of runs that differ in attention alone, where there are runs for it alone."""
    files = sorted(directory.glob(f"*/{pairs.FILE}"))
    if not files:
        return
    trained = [run for each in curves for run in pairs.of_perplexity(each)]
    trained += [run for file in files for run in pairs.of_recipes(json.loads(file.read_text()))]
    claim = page.claims["C12"]
    links = ", ".join(f"[{file.parent.name}]({file.relative_to(directory).as_posix()})" for file in files)
    claim.figures += (Figure(replace(each, basis=f"{each.basis}: {links}")) for each in pairs.judge(trained))
    if can_draw() and pairs.matched(trained):
        pairs.draw(trained, files[-1].with_name(pairs.PICTURE))
        claim.gpu_pictures.append(files[-1].with_name(pairs.PICTURE))


def _add_long_run(page: Page, document: Results, picture: Path) -> None:
    """Show it with the perplexity's runs; it belongs to no figure of the paper."""
    claim = page.claims["C12"]
    claim.also.append(long_run.line(document))
    if can_draw():
        long_run.draw(document, picture)
        claim.gpu_pictures.append(picture)
    page.long_runs.append(document)


def _headlines(documents: list[Results], directory: Path) -> Iterator[Path]:
    """The picture that README shows, for each GPU on which attention and training were both measured.

    The loss curves in it are of that GPU, or else of the one with the most of them.
    """
    newest = [each for each in documents if ran_on_gpu(each) and each["state"] != EARLIER]
    measured = {(each["device"], each["experiment"]): each for each in newest}
    curves = {gpu: each for (gpu, name), each in measured.items() if name == "perplexity" and compares(each)}
    most = max(curves.values(), key=lambda each: len(runs(each, "gpt2")), default=None)
    for device in sorted({device for device, _ in measured}):
        needed = [measured.get((device, name)) for name in ("attention", "training")]
        if all(needed) and peaks(needed[0]):  # else too little of attention for a picture
            path = directory / slug(device) / "headline.svg"
            headline.draw(*needed, path, curves.get(device, most))
            yield path


def _missing(judged: Judged, documents: list[Results]) -> Iterable[Verdict]:
    """A "not measured" row if no document has a row for the claim, or none from a GPU where it takes a GPU."""
    claim = judged.claim
    if judged.on_gpu or (judged.figures and not claim.on_gpu):
        return []
    why = f"needs a CUDA device: python -m reproduce {claim.experiment}"
    if any(each["experiment"] == claim.experiment and ran_on_gpu(each) for each in documents):
        why = f"no run of {claim.experiment} on a GPU has measured it yet"
    return [Verdict(claim.name, claim.on_gpu or "the claim", claim.paper, why=why)]


def ran_on_gpu(document: Results) -> bool:
    return document["environment"]["device"].startswith("cuda")


# ---- words -------------------------------------------------------------------------------------------


def counted(page: Page) -> list[tuple[str, list[str]]]:
    """The states that claims are in, each in words, with its claims."""
    words = {NOT_COMPARABLE: "measured but not comparable", BY_COUNT: "compared by count alone"}
    found: dict[str, list[str]] = {state: [] for state in STATES}
    for name, judged in page.claims.items():
        found[judged.state].append(name)
    return [(words.get(state, state), names) for state, names in found.items() if names]


def summary(page: Page) -> str:
    """The claims counted, in a sentence; those that are not simply reproduced are named."""
    parts = []
    for state, names in counted(page):
        named = f" ({', '.join(names)})" * (state != REPRODUCED)
        parts.append(f"{len(names)} {'is' if len(names) == 1 else 'are'} {state}{named}")
    return f"Of the papers' {len(CLAIMS)} claims, {'; '.join(parts)}."
