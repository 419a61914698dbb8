"""The report as one HTML page: pictures are in it, results files are linked."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from . import report
from .claims import PAPERS
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
const open = () => {
  const claim = document.getElementById(location.hash.slice(1))?.closest("details");
  if (!claim) return;
  claim.open = true;
  claim.hidden = false;
  claim.scrollIntoView();
};
addEventListener("hashchange", open);
open();
"""


def as_html(page: report.Page) -> str:
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    claims = page.claims.values()
    notes = "".join(f"<li>{escape(note)}</li>" for note in page.notes)
    papers = "; ".join(f"{short}: {paper}" for short, paper in PAPERS.items())
    parts = [
        "<h1>The papers' claims, reproduced</h1>",
        *map(_picture, page.headlines),
        _table(report.FIRST_COLUMNS, report.first_rows(page), "first"),
        f"<p class=summary>{escape(report.summary(page))}</p>",
        f"<p class=dim>{escape(report.HOW_TO_READ)} {escape(WHERE)}</p>",
        _filter([judged.state for judged in claims]),
        f"<section id=claims>{''.join(map(_claim, claims))}</section>",
        f"<p class=dim>{escape(papers)}.</p>",
        f"<ul class=notes>{notes}</ul>" if notes else "",
        "<h2 id=appendix>Appendix: counted on a CPU</h2>",
        *map(_counted, claims),
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


def _filter(states: list[str]) -> str:
    buttons = "".join(
        f'<button class={MARKS[state]} data-state="{state}" aria-pressed=false>{states.count(state)} {state}</button>'
        for state in report.STATES
        if state in states
    )
    return f"<div class=filter>{buttons}</div>"


def _claim(judged: report.Judged) -> str:
    """A line, which opens to the claim's figures on a GPU and their pictures."""
    claim, state = judged.claim, judged.state
    chip = _chip(state, judged.tally and f", {judged.tally}")
    line = f"<b>{claim.name}</b><span>{escape(claim.statement)} <small>{escape(claim.source)}</small></span>{chip}"
    inside = _figures(judged.on_gpu)
    if judged.on_cpu:
        inside += f'<p class=dim><a href="#cpu-{claim.name}">Counted on a CPU</a></p>'
    if there := judged.pictured_at:
        inside += f'<p class=dim><a href="#{there}">Picture at {there}</a></p>'
    inside += "".join(map(_picture, judged.gpu_pictures))
    content = f"<summary>{line}</summary><div class=inside>{inside}</div>"
    return f'<details id={claim.name} data-state="{state}">{content}</details>'


def _counted(judged: report.Judged) -> str:
    claim, inside = judged.claim, _figures(judged.on_cpu) + "".join(map(_picture, judged.cpu_pictures))
    line = f"<summary><b>{claim.name}</b><span>{escape(claim.statement)}</span></summary>"
    return f"<details id=cpu-{claim.name}>{line}<div class=inside>{inside}</div></details>" if inside else ""


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
