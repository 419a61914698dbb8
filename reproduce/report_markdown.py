"""The report as Markdown; pictures and results files are linked."""

from __future__ import annotations

from pathlib import Path

from . import report
from .claims import CLAIMS, PAPERS
from .common import markdown_table

WHERE = (
    "The column figures says how many of those that could be compared are reproduced. Every figure, with what it had "
    "to reach and the file that holds it, is in [appendix A](#a-every-figure-of-a-gpu); what a CPU counted in "
    "[appendix B](#b-counted-on-a-cpu)."
)


def as_markdown(page: report.Page, directory: Path) -> str:
    lines = ["# The papers' claims, reproduced", ""]
    lines += [f"![At a glance]({_link(path, directory)})\n" for path in page.headlines]
    lines += markdown_table(report.FIRST_COLUMNS, page.first())
    lines += [f"**{report.summary(page)}**", "", f"{report.HOW_TO_READ} {WHERE}", ""]
    lines += [f"- {note}" for note in page.notes] + [""] * bool(page.notes)
    lines += ["## The claims", ""]
    rows = []
    for name, claim in CLAIMS.items():
        row = [f"[{name}](#{name.lower()})", claim.statement, claim.source, page.state(name)]
        rows.append([*row, page.tally(name) or claim.missing])
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
    lines += ["## C. Runs", "", *markdown_table(report.RUN_COLUMNS, report.run_rows(page))]
    if written := list(report.texts(page)):
        lines += ["", "## D. Texts", "", "What GPT-2 small writes, from an empty prompt and one seed.", ""]
        for name, text in written:
            lines += [f"{name}:", "", *(f"    {line}" for line in text.strip().splitlines()), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(figures: list[report.Figure]) -> list[str]:
    return markdown_table(report.COLUMNS, report.figure_rows(figures)) if figures else []


def _pictures(page: report.Page, claim: str, gpu: bool, directory: Path) -> list[str]:
    return [f"![{claim}]({_link(path, directory)})\n" for path in page.pictures_below(claim, gpu)]


def _link(path: Path, directory: Path) -> str:
    return path.relative_to(directory).as_posix()
