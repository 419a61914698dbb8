"""The report as Markdown; pictures and results files are linked."""

from pathlib import Path

from .claims import PAPERS
from .common import markdown_table
from .report_page import (
    COLUMNS,
    FIRST_COLUMNS,
    HOW_TO_READ,
    RUN_COLUMNS,
    Page,
    counted,
    figure_rows,
    first_rows,
    missed,
    run_rows,
    texts,
)

WHERE = (
    "The column figures says how many of those that could be compared are reproduced; those by count, which no run "
    "could contradict, make no claim reproduced.",
    "Appendix [A](#a-every-figure-of-a-gpu) has every figure, what it had to reach, and the file that holds it; "
    "[B](#b-counted-on-a-cpu) what a CPU counted; [C](#c-runs) which runs are partial, of older code or of fewer "
    "processes, and which figures that touches.",
    "`python -m reproduce report` also writes results/report.html, where claims unfold and a verdict filters them.",
)


def as_markdown(page: Page, directory: Path) -> str:
    lines = ["# The papers' claims, reproduced", ""]
    lines += [f"![At a glance]({_link(path, directory)})\n" for path in page.headlines]
    lines += markdown_table(FIRST_COLUMNS, first_rows(page))
    lines += [f"**Of the papers' {len(page.claims)} claims:**", ""]
    lines += [f"- **{len(names)} {state}**: {', '.join(names)}" for state, names in counted(page)]
    if lost := missed(page):
        lines += [
            "",
            "Not reproduced, by the figure that is furthest from the paper's:",
            "",
            *(f"- {each}" for each in lost),
        ]
    lines += ["", "## How to read this", "", *(f"- {line}" for line in (*HOW_TO_READ, *WHERE)), ""]
    lines += ["## The claims", ""]
    rows = []
    for name, judged in page.claims.items():
        row = [f"[{name}](#{name.lower()})", judged.claim.statement, judged.claim.source]
        rows.append([*row, judged.state, judged.tally])
    lines += markdown_table(("", "claim", "source", "verdict", "figures"), rows)
    lines += ["; ".join(f"{short}: {paper}" for short, paper in PAPERS.items()) + ".", ""]
    lines += ["# Appendix", "", "## A. Every figure of a GPU", ""]
    for name, judged in page.claims.items():
        lines += [f"### {name}", "", f"{judged.claim.statement} {judged.claim.source}.", ""]
        lines += markdown_table(COLUMNS, figure_rows(judged.on_gpu)) if judged.on_gpu else []
        if at := judged.pictured_at:
            lines += [f"Picture at [{at}](#{at.lower()}).", ""]
        lines += [f"{each}\n" for each in judged.also]
        lines += [f"![{name}]({_link(path, directory)})\n" for path in judged.gpu_pictures]
    lines += ["## B. Counted on a CPU", ""]
    for name, judged in page.claims.items():
        if judged.on_cpu:
            lines += [f"{name}. {judged.claim.statement}", ""]
            lines += markdown_table(COLUMNS, figure_rows(judged.on_cpu))
        lines += [f"![{name}]({_link(path, directory)})\n" for path in judged.cpu_pictures]
    lines += ["## C. Runs", "", *(f"- {note}" for note in page.notes), *[""] * bool(page.notes)]
    lines += markdown_table(RUN_COLUMNS, run_rows(page))
    if written := list(texts(page)):
        lines += ["", "## D. Texts", "", "What GPT-2 small writes, from an empty prompt and one seed.", ""]
        for name, text in written:
            lines += [f"{name}:", "", *(f"    {line}" for line in text.strip().splitlines()), ""]
    return "\n".join(lines).rstrip() + "\n"


def _link(path: Path, directory: Path) -> str:
    return path.relative_to(directory).as_posix()
