"""The report as one HTML page: pictures are in it, results files are linked. report.html is its template."""

import re
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from . import report_page
from .claims import PAPERS
from .experiment import NOT_COMPARABLE, NOT_MEASURED, NOT_REPRODUCED, REPRODUCED

# State of a claim or status of a figure -> CSS class.
MARKS = {
    REPRODUCED: "good",
    report_page.IN_PART: "part",
    report_page.BY_COUNT: "grey",
    NOT_REPRODUCED: "bad",
    NOT_COMPARABLE: "grey",
    NOT_MEASURED: "none",
}


def as_html(page: report_page.Page) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"markdown": _markdown, "svg": _svg, "states": _states}
    return environment.get_template("report.html").render(
        page=page, report=report_page, marks=MARKS, papers=PAPERS
    )


def _states(cell: str) -> list[tuple[str, str]]:
    """(GPU, or "", and state) of a cell of states, "reproduced" or "A: reproduced; B: not reproduced"; else none."""
    parts = [each.rpartition(": ") for each in cell.split("; ")]
    return [(card, state) for card, _, state in parts] if all(part[2] in MARKS for part in parts) else []


def _markdown(text: str) -> Markup:
    """The text, with its code and links."""
    coded = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\[([^\]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', coded))


def _svg(path: Path) -> Markup:
    """The file's <svg> element, without the XML prologue and the metadata."""
    text = path.read_text(encoding="utf-8")
    return Markup(re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL))
