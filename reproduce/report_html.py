"""The report as one HTML page: pictures are in it, results files are linked."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from .claims import CLAIMS, PAPERS, Claim
from .common import html_table
from .experiment import NOT_COMPARABLE, NOT_MEASURED, NOT_REPRODUCED, REPRODUCED
from .report import HOW_TO_READ, IN_PART, STATES, Figure, Page, ratio_of, summary, texts, unrepeated
from .report_markdown import RUN_COLUMNS, runs

# State of a claim or status of a figure -> CSS class.
MARKS = {
    REPRODUCED: "good",
    IN_PART: "part",
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


def as_html(page: Page) -> str:
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    claims = "".join(_claim(page, name, claim) for name, claim in CLAIMS.items())
    notes = "".join(f"<li>{escape(note)}</li>" for note in page.notes)
    papers = "; ".join(f"{short}: {paper}" for short, paper in PAPERS.items())
    parts = [
        "<h1>The papers' claims, reproduced</h1>",
        *map(_picture, page.headlines),
        _first(page),
        f"<p class=summary>{escape(summary(page))}</p>",
        f"<p class=dim>{escape(HOW_TO_READ)} {escape(WHERE)}</p>",
        _filter(page),
        f"<section id=claims>{claims}</section>",
        f"<p class=dim>{escape(papers)}.</p>",
        f"<ul class=notes>{notes}</ul>" if notes else "",
        "<h2 id=appendix>Appendix: counted on a CPU</h2>",
        "".join(_counted(page, name, claim) for name, claim in CLAIMS.items()),
        "<h2 id=runs>Appendix: runs</h2>",
        html_table(RUN_COLUMNS, [[escape(cell) for cell in row] for row in runs(page)]),
        *(f"<h3>Written by {escape(name)}</h3><pre>{escape(text)}</pre>" for name, text in texts(page)),
    ]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>tilegpt: the papers' claims</title>"
        f"<meta name=viewport content='width=device-width, initial-scale=1'><style>{style}</style>"
        f"<main>{''.join(parts)}</main><script>{SCRIPT}</script>\n"
    )


def _first(page: Page) -> str:
    rows = [
        [
            subject,
            escape(figure.verdict.what),
            escape(figure.verdict.paper),
            escape(figure.verdict.ours or NOT_MEASURED),
            _chip(figure.verdict.status),
            escape(figure.verdict.basis),
        ]
        for subject, figure in page.first()
    ]
    return html_table(("", "figure", "the paper", "ours", "verdict", "on"), rows, "first") if rows else ""


def _filter(page: Page) -> str:
    states = [page.state(name) for name in CLAIMS]
    buttons = "".join(
        f'<button class={MARKS[state]} data-state="{state}" aria-pressed=false>{states.count(state)} {state}</button>'
        for state in STATES
        if state in states
    )
    return f"<div class=filter>{buttons}</div>"


def _claim(page: Page, name: str, claim: Claim) -> str:
    """A line, which opens to the claim's figures on a GPU and their pictures."""
    state, tally = page.state(name), page.tally(name)
    chip = _chip(state) if not tally else f'<span class="chip {MARKS[state]}">{state}, {tally}</span>'
    line = f"<b>{name}</b><span>{escape(claim.statement)} <small>{escape(claim.source)}</small></span>{chip}"
    inside = _figures(page.on_gpu(name))
    if claim.estimate:
        inside += f"<p class=dim>Estimate, not a run: {escape(claim.estimate)}.</p>"
    if page.on_cpu(name):
        inside += f'<p class=dim><a href="#cpu-{name}">Counted on a CPU</a></p>'
    inside += "".join(map(_picture, page.pictures_below(name, True)))
    content = f"<summary>{line}</summary><div class=inside>{inside}</div>"
    return f'<details id={name} data-state="{state}">{content}</details>'


def _counted(page: Page, name: str, claim: Claim) -> str:
    figures = page.on_cpu(name)
    line = f"<b>{name}</b><span>{escape(claim.statement)}</span>"
    pictures = "".join(map(_picture, page.pictures_below(name, False)))
    inside = f"<div class=inside>{_figures(figures)}{pictures}</div>"
    return (
        f"<details id=cpu-{name}><summary>{line}</summary>{inside}</details>" if figures or pictures else ""
    )


def _figures(figures: list[Figure]) -> str:
    rows = []
    for figure, why in zip(figures, unrepeated(figures), strict=True):
        v = figure.verdict
        ratio = f" <small>{ratio_of(v)} of the paper's</small>" if v.ratio is not None else ""
        ours = escape(v.ours or NOT_MEASURED) + ratio
        source = f'<a href="{escape(figure.source)}">{escape(v.basis)}</a>' if figure.source else ""
        code = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(why))
        rows.append([escape(v.what), escape(v.paper), ours, _chip(v.status), code, source])
    return html_table(("figure", "paper", "ours", "verdict", "why", "from"), rows) if rows else ""


def _chip(status: str) -> str:
    return f'<span class="chip {MARKS[status]}">{status}</span>'


def _picture(path: Path) -> str:
    """The file's <svg> element, without the XML prologue and the metadata."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return f"<figure>{text}</figure>"
