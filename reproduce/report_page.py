"""The report's content, for Markdown and HTML alike: claims with their figures, and the rows of its tables."""

import math
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .claims import CLAIMS, Claim
from .experiment import NOT_COMPARABLE, NOT_MEASURED, NOT_REPRODUCED, REPRODUCED, Results, Verdict
from .perplexity_figures import runs
from .report_notes import EARLIER, host_load
from .results import changed_since, faster_since

HOW_TO_READ = (
    "A figure is ours only if a file in results/ holds it; all else is not measured.",
    "Milliseconds, TFLOP/s, days and out-of-memory points of another GPU are not compared.",
    "A time is the median of its processes, with their range; a bound must hold in each of them. Faster means that "
    "the ranges do not overlap: one process has none.",
    "The papers state figures, not tolerances: each bound is ours. Set before their runs: C25's, C12's for one run "
    "and, before the last four of seven pairs, C12's for the mean; all others with results at hand, and some changed "
    "since: read both figures, not the verdict alone.",
    "A speed of ours may exceed the paper's; an effect (as in C8, C18, C19, C25) may not, beyond its bound.",
    "A row over standard attention is over its fastest form: in training in the same mode, eager or compiled; in "
    "attention alone, and in C15 and C16, the fastest eager one. Often that is standard+cut, which skips what the "
    "mask hides, as no paper's baseline did; in training it was timed only on the H200. Rows name their baseline.",
    "Of several figures of one kind the first table shows the least flattering; a figure that several GPUs have "
    "counts once, by the worst that could be compared.",
)
IN_PART = "reproduced in part"
# A claim whose compared figures are all counts, which follow from how a kernel is written: no run can contradict it.
BY_COUNT = "by count alone"
COMPARED = {REPRODUCED, NOT_REPRODUCED}
WORST_FIRST = (NOT_REPRODUCED, REPRODUCED, NOT_COMPARABLE)
# The states of a claim, in the order in which they are counted.
STATES = (REPRODUCED, IN_PART, BY_COUNT, NOT_REPRODUCED, NOT_COMPARABLE, NOT_MEASURED)
# Headers: of the first screen, of a claim's figures, and of what produced them. Cells are Markdown.
FIRST_COLUMNS = ("", "figure", "the paper", "ours", "verdict")
COLUMNS = ("what", "paper", "ours", "ours/paper", "status", "bound, notes", "from")
RUN_COLUMNS = ("experiment", "state", "device", "command", "took", "date", "versions", "commit")
RUN_COLUMNS += ("host load", "changed since")
# The first table: subject -> (claim, kind -> words by which its figures are found). The first kind that there is
# gives the figures; of all kinds it has the status. Like for like: eager steps, the same shape for memory.
FIRST = {
    "speed": ("C11", {"": "gpt2_small, whole stack: ours with flash"}),
    "memory": ("C8", {"": "peak memory at 4096"}),
    "perplexity": (
        "C12",
        {
            "mean": "flash minus naive, mean over",
            "one pair": "validation curve of flash against naive,",
        },
    ),
}


@dataclass(frozen=True)
class Figure:
    """A verdict and where it comes from.

    source: its results file, relative to the page; empty if not measured. others: the file of what it was compared
    with, if that is another. gpu: whether a GPU measured it, not a CPU.
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
        """(status -> how many figures that were measured, the same of those that were counted).

        A figure that several GPUs have counts once, with the worst status; a CPU's not where a GPU has it too.
        """
        names = {figure.verdict.what for figure in self.on_gpu}
        shown = self.on_gpu + [each for each in self.on_cpu if each.verdict.what not in names]
        verdicts = [figure.verdict for figure in shown]
        had = [each for each in verdicts if each.status != NOT_MEASURED]
        measured: dict[str, str] = {}
        counted: dict[str, str] = {}
        for each in sorted(had, key=lambda each: WORST_FIRST.index(each.status), reverse=True):
            # Counted of what a kernel does or allocates, as it is written, so that nothing was measured; or not.
            found = counted if "counted" in each.basis else measured
            found[each.what] = each.status  # the worst is the last
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
    headlines: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def first_rows(page: Page) -> list[list[str]]:
    """A row for each subject of FIRST: of each kind the least flattering figure, as every GPU has it now."""
    rows = []
    for subject, (claim, names) in FIRST.items():
        figures = [each for each in page.claims[claim].on_gpu if EARLIER not in each.verdict.basis]
        by_kind = ([each for each in figures if words in each.verdict.what] for words in names.values())
        kinds = {kind: _worst(found) for kind, found in zip(names, by_kind, strict=True) if found}
        kinds = kinds or {"": _worst(page.claims[claim].on_gpu)}
        of_several, (shown, *_) = len(kinds) > 1, kinds.values()
        ours = [f"{each.link}: {each.verdict.ours}" if each.verdict.ours else NOT_MEASURED for each in shown]
        ours = [told + _older(page, subject, each) for told, each in zip(ours, shown, strict=True)]
        statuses = []
        for kind, found in kinds.items():
            for v in (each.verdict for each in found):
                of = [kind] * of_several + [v.basis] * (len(found) > 1 or found is not shown)
                statuses.append(f"{', '.join(of)}: {v.status}" if of else v.status)
        verdict = shown[0].verdict
        rows.append([subject, verdict.what, verdict.paper, "; ".join(ours), "; ".join(statuses)])
    return rows


def _older(page: Page, subject: str, figure: Figure) -> str:
    """The words "by older code" if the code of the figure's document has changed since, or become faster."""
    of, basis = page.claims[figure.verdict.claim].claim.experiment, figure.verdict.basis
    newest = [each for each in page.documents if each["experiment"] == of and each["state"] != EARLIER]
    own = [each for each in newest if each["device"] in basis]
    older = any(changed_since(each) or (subject == "speed" and faster_since(each)) for each in own)
    return ", by older code" * older


def _worst(figures: list[Figure]) -> list[Figure]:
    """The least flattering figure, as measured on every GPU that has it."""
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
    """A row for each document, in RUN_COLUMNS: what produced it, and which of its code has changed since."""
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


def counted(page: Page) -> list[tuple[str, list[str]]]:
    """The states that claims are in, each in words, with its claims."""
    words = {NOT_COMPARABLE: "measured but not comparable", BY_COUNT: "compared by count alone"}
    found: dict[str, list[str]] = {state: [] for state in STATES}
    for name, judged in page.claims.items():
        found[judged.state].append(name)
    return [(words.get(state, state), names) for state, names in found.items() if names]


def missed(page: Page) -> list[str]:
    """A line for each claim that is not reproduced: the figure that is furthest from the paper's, and its bound."""
    lines = []
    for name, judged in page.claims.items():
        if judged.state == NOT_REPRODUCED:
            lost = [each.verdict for each in judged.figures if each.verdict.status == NOT_REPRODUCED]
            v = max(lost, key=lambda each: abs(math.log(each.ratio or 1)))
            bound = f"bound: {v.why.partition(';')[0]}" * bool(v.why)
            of = "; ".join(filter(None, (v.basis, bound)))
            lines.append(f"{name}, {v.what}: {v.ours}, the paper {v.paper}" + f" ({of})" * bool(of))
    return lines


def summary(page: Page) -> str:
    """The claims counted, in a sentence; those that are not simply reproduced are named."""
    parts = []
    for state, names in counted(page):
        named = f" ({', '.join(names)})" * (state != REPRODUCED)
        parts.append(f"{len(names)} {'is' if len(names) == 1 else 'are'} {state}{named}")
    return f"Of the papers' {len(CLAIMS)} claims, {'; '.join(parts)}."
