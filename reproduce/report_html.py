"""The report as one HTML page: pictures are in it, results files are linked."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from . import report
from .claims import CLAIMS, PAPERS, Claim
from .common import html_table
from .experiment import NOT_COMPARABLE, NOT_MEASURED, NOT_REPRODUCED, REPRODUCED

# State of a claim or status of a figure -> CSS class.
MARKS = {
    REPRODUCED: "good",
    report.IN_PART: "part",
    NOT_REPRODUCED: "bad",
    NOT_COMPARABLE: "grey",
    NOT_MEASURED: "none",
}
WHERE = "Open a claim for its figures, what each had to reach, and the file that holds it."
SCRIPT = """
const buttons = [...document.querySelectorAll(".filter button")];
for (const button of buttons) button.onclick = () => {
  const on = button.getAttribute("aria-pressed") !== "true";
  for (const each of buttons) each.setAttribute("aria-pressed", on && each === button);
  for (const claim of document.querySelectorAll("details[data-state]"))
    claim.hidden = on && claim.dataset.state !== button.dataset.state;
};
const open = () => document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", "");
addEventListener("hashchange", open);
open();
"""


def as_html(page: report.Page) -> str:
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    claims = "".join(_claim(page, name, claim) for name, claim in CLAIMS.items())
    notes = "".join(f"<li>{escape(note)}</li>" for note in page.notes)
    papers = "; ".join(f"{short}: {paper}" for short, paper in PAPERS.items())
    parts = [
        "<h1>The papers' claims, reproduced</h1>",
        *map(_picture, page.headlines),
        _table(report.FIRST_COLUMNS, page.first(), "first"),
        f"<p class=summary>{escape(report.summary(page))}</p>",
        f"<p class=dim>{escape(report.HOW_TO_READ)} {escape(WHERE)}</p>",
        _filter(page),
        f"<section id=claims>{claims}</section>",
        f"<p class=dim>{escape(papers)}.</p>",
        f"<ul class=notes>{notes}</ul>" if notes else "",
        "<h2 id=appendix>Appendix: counted on a CPU</h2>",
        "".join(_counted(page, name, claim) for name, claim in CLAIMS.items()),
        "<h2 id=runs>Appendix: runs</h2>",
        _table(report.RUN_COLUMNS, report.run_rows(page)),
        *(
            f"<h3>Written by {escape(name)}</h3><pre>{escape(text)}</pre>"
            for name, text in report.texts(page)
        ),
    ]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>tilegpt: the papers' claims</title>"
        f"<meta name=viewport content='width=device-width, initial-scale=1'><style>{style}</style>"
        f"<main>{''.join(parts)}</main><script>{SCRIPT}</script>\n"
    )


def _filter(page: report.Page) -> str:
    states = [page.state(name) for name in CLAIMS]
    buttons = "".join(
        f'<button class={MARKS[state]} data-state="{state}" aria-pressed=false>{states.count(state)} {state}</button>'
        for state in report.STATES
        if state in states
    )
    return f"<div class=filter>{buttons}</div>"


def _claim(page: report.Page, name: str, claim: Claim) -> str:
    """A line, which opens to the claim's figures on a GPU and their pictures."""
    state, tally = page.state(name), page.tally(name)
    chip = _chip(state, f", {tally}" if tally else "")
    line = f"<b>{name}</b><span>{escape(claim.statement)} <small>{escape(claim.source)}</small></span>{chip}"
    inside = _figures(page.on_gpu(name))
    if claim.estimate:
        inside += f"<p class=dim>Estimate, not a run: {escape(claim.estimate)}.</p>"
    if page.on_cpu(name):
        inside += f'<p class=dim><a href="#cpu-{name}">Counted on a CPU</a></p>'
    inside += "".join(map(_picture, page.pictures_below(name, True)))
    content = f"<summary>{line}</summary><div class=inside>{inside}</div>"
    return f'<details id={name} data-state="{state}">{content}</details>'


def _counted(page: report.Page, name: str, claim: Claim) -> str:
    figures = page.on_cpu(name)
    line = f"<b>{name}</b><span>{escape(claim.statement)}</span>"
    pictures = "".join(map(_picture, page.pictures_below(name, False)))
    inside = f"<div class=inside>{_figures(figures)}{pictures}</div>"
    return (
        f"<details id=cpu-{name}><summary>{line}</summary>{inside}</details>" if figures or pictures else ""
    )


def _figures(figures: list[report.Figure]) -> str:
    return _table(report.COLUMNS, report.figure_rows(figures)) if figures else ""


def _table(header: tuple[str, ...], rows: list[list[str]], style: str = "") -> str:
    return html_table(header, [[_cell(each) for each in row] for row in rows], style)


def _cell(markdown: str) -> str:
    """A verdict's chip; else the text, with its code and links."""
    if markdown in MARKS:
        return _chip(markdown)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(markdown))
    return re.sub(r"\[([^\]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', text)


def _chip(status: str, more: str = "") -> str:
    return f'<span class="chip {MARKS[status]}">{status}{more}</span>'


def _picture(path: Path) -> str:
    """The file's <svg> element, without the XML prologue and the metadata."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return f"<figure>{text}</figure>"
