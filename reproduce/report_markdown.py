"""The report as Markdown; pictures and results files are linked."""

from __future__ import annotations

import shlex
from pathlib import Path

from .claims import CLAIMS, PAPERS
from .common import markdown_table
from .experiment import NOT_MEASURED
from .report import HOW_TO_READ, Figure, Page, ratio_of, short_commit, summary, texts, unrepeated
from .results import changed_since

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
WHERE = (
    "The column figures says how many of those that could be compared are reproduced. Every figure, with what it had "
    "to reach and the file that holds it, is in [appendix A](#a-every-figure-of-a-gpu); what a CPU counted in "
    "[appendix B](#b-counted-on-a-cpu)."
)


def as_markdown(page: Page, directory: Path) -> str:
    lines = ["# The papers' claims, reproduced", ""]
    lines += [f"![At a glance]({_link(path, directory)})\n" for path in page.headlines]
    if first := page.first():
        rows = [
            [
                subject,
                f.verdict.what,
                f.verdict.paper,
                f.verdict.ours or NOT_MEASURED,
                f.verdict.status,
                f.verdict.basis,
            ]
            for subject, f in first
        ]
        lines += markdown_table(("", "figure", "the paper", "ours", "verdict", "on"), rows)
    lines += [f"**{summary(page)}**", "", f"{HOW_TO_READ} {WHERE}", ""]
    lines += [f"- {note}" for note in page.notes] + [""] * bool(page.notes)
    lines += ["## The claims", ""]
    rows = [
        [
            f"[{name}](#{name.lower()})",
            claim.statement,
            claim.source,
            page.state(name),
            page.tally(name) or claim.missing,
        ]
        for name, claim in CLAIMS.items()
    ]
    lines += markdown_table(("", "claim", "source", "verdict", "figures"), rows)
    lines += ["; ".join(f"{short}: {paper}" for short, paper in PAPERS.items()) + ".", ""]
    lines += ["# Appendix", "", "## A. Every figure of a GPU", ""]
    for name, claim in CLAIMS.items():
        lines += [f"### {name}", "", f"{claim.statement} {claim.source}.", "", *_table(page.on_gpu(name))]
        lines += [f"Estimate, not a run: {claim.estimate}.", ""] if claim.estimate else []
        lines += _pictures(page, name, True, directory)
    lines += ["## B. Counted on a CPU", ""]
    for name, claim in CLAIMS.items():
        if on_cpu := page.on_cpu(name):
            lines += [f"{name}. {claim.statement}", "", *_table(on_cpu)]
        lines += _pictures(page, name, False, directory)
    lines += ["## C. Runs", "", *markdown_table(RUN_COLUMNS, runs(page))]
    if written := list(texts(page)):
        lines += ["", "## D. Texts", "", "What GPT-2 small writes, from an empty prompt and one seed.", ""]
        for name, text in written:
            lines += [f"{name}:", "", *(f"    {line}" for line in text.strip().splitlines()), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(figures: list[Figure]) -> list[str]:
    rows = []
    for figure, why in zip(figures, unrepeated(figures), strict=True):
        v = figure.verdict
        source = f"[{v.basis}]({figure.source})" if figure.source and v.basis else v.basis
        rows.append([v.what, v.paper, v.ours or NOT_MEASURED, ratio_of(v), v.status, why, source])
    return markdown_table(COLUMNS, rows) if rows else []


def _pictures(page: Page, claim: str, gpu: bool, directory: Path) -> list[str]:
    return [f"![{claim}]({_link(path, directory)})\n" for path in page.pictures_below(claim, gpu)]


def _link(path: Path, directory: Path) -> str:
    return path.relative_to(directory).as_posix()


def runs(page: Page) -> list[list[str]]:
    """A row for each document that says what produced it."""
    rows = []
    for document in page.documents:
        environment = document["environment"]
        versions = f"torch {environment['torch']}, triton {environment['triton']}"
        took = f"{document['seconds']:.0f} s"
        row = [
            document["experiment"],
            document["state"],
            document["device"],
            shlex.join(document["command"]),
            took,
        ]
        changed = ", ".join(changed_since(document))
        rows.append([*row, document["date"], versions, short_commit(document), changed])
    return rows
