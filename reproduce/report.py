"""`python -m reproduce report`: results/ as one page, both as REPORT.md and as a self-contained report.html.

Each claim has rows with the paper's figure, ours, their ratio, a status and the reason for it. A figure that is in no
results file is "not measured". A file that cannot be used loses only its own rows, and the page says so.
"""

from __future__ import annotations

import argparse
import html
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import headline
from .claims import CLAIMS, PAPERS, Claim
from .common import ReproduceError, writing
from .experiment import (
    AIM_MET,
    AIM_MISSED,
    EXPERIMENTS,
    NOT_COMPARABLE,
    NOT_MEASURED,
    NOT_REPRODUCED,
    REPRODUCED,
    STATUSES,
    Results,
    Verdict,
)
from .plots import can_draw
from .results import changed_since, read_all, slug

COLUMNS = ("what", "paper", "ours", "ours/paper", "status", "why", "from")
# Status -> CSS class, in order of precedence: a claim is shown with the first status that any of its figures has.
# Our own aims come after the papers' figures, so they decide only where no figure was compared with a paper's.
MARKS = {NOT_REPRODUCED: "bad", REPRODUCED: "good", NOT_COMPARABLE: "grey"}
MARKS |= {AIM_MISSED: "missed", AIM_MET: "met", NOT_MEASURED: "none"}
OWN_AIMS = (AIM_MET, AIM_MISSED)


@dataclass
class Page:
    """The report's content, independent of its format."""

    verdicts: dict[str, list[Verdict]] = field(default_factory=lambda: {name: [] for name in CLAIMS})
    documents: list[Results] = field(default_factory=list)
    pictures: list[tuple[str, Path]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # (experiment, claim) pairs with a row measured on a GPU
    on_gpu: set[tuple[str, str]] = field(default_factory=set)


def main(argv: list[str]) -> int:
    """Write the two files and print their paths."""
    parser = argparse.ArgumentParser(prog="python -m reproduce report", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: results")
    directory = parser.parse_args(argv).results
    if not directory.is_dir():
        raise ReproduceError(
            f"{directory} does not exist: name the folder that holds results, --results FOLDER"
        )
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
    for document in read_all(directory, page.notes.append):
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
        for verdict in verdicts:
            page.verdicts[verdict.claim].append(verdict)
        if _ran_on_gpu(document):
            page.on_gpu |= {(experiment.name, verdict.claim) for verdict in verdicts}
        page.documents.append(document)
        page.pictures += [(f"{experiment.title} ({document['device']})", picture)] if picture else []
    page.notes += [*_older(page.documents), *_late(page.documents)]
    page.pictures[:0] = _headlines(page, directory)
    for name, claim in CLAIMS.items():
        page.verdicts[name] += _missing(claim, page)
    return page


def _headlines(page: Page, directory: Path) -> Iterator[tuple[str, Path]]:
    """The picture that README shows, for each GPU on which attention and training were both measured."""
    by_name = {(each["device"], each["experiment"]): each for each in page.documents if _ran_on_gpu(each)}
    for device in sorted({device for device, _ in by_name}):
        needed = [by_name.get((device, name)) for name in ("attention", "training")]
        if all(needed) and can_draw():
            path = directory / slug(device) / "headline.svg"
            headline.draw(*needed, path)
            yield f"At a glance ({device})", path


def _older(documents: list[Results]) -> Iterator[str]:
    """One note that lists the results made by code that has changed since."""
    names: dict[str, list[str]] = {}
    for document in documents:
        if changed_since(document):
            names.setdefault(document["device"], []).append(document["experiment"])
    if names:
        listed = "; ".join(f"{', '.join(experiments)} on {device}" for device, experiments in names.items())
        yield f"code has changed since these were run (Runs lists the files): {listed}"


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
    if (claim.experiment, claim.name) in page.on_gpu or (page.verdicts[claim.name] and not claim.on_gpu):
        return
    why = f"needs a CUDA device: python -m reproduce {claim.experiment}"
    if any(each["experiment"] == claim.experiment and _ran_on_gpu(each) for each in page.documents):
        why = f"no run of {claim.experiment} on a GPU has measured it yet"
    yield Verdict(claim.name, claim.on_gpu or "the claim", claim.paper, why=why)


def _ran_on_gpu(document: Results) -> bool:
    return document["environment"]["device"].startswith("cuda")


def summary(page: Page) -> str:
    """One line: how many claims have a figure, the papers' figures by status and, separately, our own aims."""
    counts = Counter(verdict.status for verdicts in page.verdicts.values() for verdict in verdicts)
    aims = sum(counts[status] for status in OWN_AIMS)
    without = (NOT_MEASURED, *OWN_AIMS)
    measured = sum(any(v.status not in without for v in verdicts) for verdicts in page.verdicts.values())
    figures = ", ".join(
        f"{counts[each]} {each}" for each in STATUSES if counts[each] and each not in OWN_AIMS
    )
    line = f"{measured} of {len(CLAIMS)} claims have a measured figure. "
    line += f"Of {counts.total() - aims} figures of the papers: {figures}."
    own = ", ".join(f"{counts[status]} {status}" for status in OWN_AIMS if counts[status])
    return line + (f" Of {aims} figures that no paper states: {own}." if aims else "")


def _cells(verdict: Verdict) -> list[str]:
    ratio = "" if verdict.ratio is None else f"{verdict.ratio:.2f}"
    ours = verdict.ours or NOT_MEASURED
    return [verdict.what, verdict.paper, ours, ratio, verdict.status, verdict.why, verdict.basis]


def _runs(page: Page) -> list[list[str]]:
    """A row for each document that says what produced it."""
    rows = []
    for document in page.documents:
        environment = document["environment"]
        versions = f"torch {environment['torch']}, triton {environment['triton']}"
        commit, changes, _ = (document["commit"] or "unknown").partition("+")
        commit = commit[:9] + ("+changes" if changes else "")
        command = shlex.join(document["command"])
        took = f"{document['seconds']:.0f} s"
        row = [document["experiment"], document["state"], document["device"], command, took, document["date"]]
        rows.append([*row, versions, commit, ", ".join(changed_since(document))])
    return rows


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
INTRODUCTION = (
    "The papers' figures beside ours. A figure is ours only if a file in results/ holds it; everything else is not "
    "measured. Ratios are ours over the paper's; the column why says what a figure had to reach. Where no paper "
    "states a figure, ours is held to this project's own aim, with statuses of its own. Milliseconds, days and "
    "out-of-memory points of another GPU are not compared; a count made on a CPU says so in the last column. "
)
INTRODUCTION += "; ".join(f"{short}: {paper}" for short, paper in PAPERS.items()) + "."


def as_markdown(page: Page, directory: Path) -> str:
    """The report as Markdown; pictures are linked."""
    lines = ["# The papers' claims, reproduced", "", INTRODUCTION, "", f"**{summary(page)}**", ""]
    lines += [f"- {note}" for note in page.notes] + [""] * bool(page.notes)
    for name, claim in CLAIMS.items():
        lines += [f"## {name}. {claim.statement}", "", f"{claim.source}.", ""]
        lines += _markdown_table(COLUMNS, [_cells(verdict) for verdict in page.verdicts[name]])
        lines += [f"Estimate, not a run: {claim.estimate}.", ""] if claim.estimate else []
    lines += ["## Pictures", ""]
    for title, path in page.pictures:
        lines += [f"![{title}]({path.relative_to(directory).as_posix()})", ""]
    lines += ["## Runs", "", *_markdown_table(RUN_COLUMNS, _runs(page))]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(header: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for row in rows:
        cells = " | ".join(cell.replace("|", r"\|") for cell in row)
        lines.append(f"| {cells} |")
    return [*lines, ""]


STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; }
body { max-width: 1180px; margin: 2.5rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.7rem; margin-bottom: .3rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
nav a, .map a { text-decoration: none; } nav a { color: #0072b2; margin-right: 1rem; }
p.key, small, tr.claim p { color: #777; font-size: .85rem; } p.summary { font-weight: 600; }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .86rem; }
th { text-align: left; color: #777; font-weight: 500; border-bottom: 1px solid #ccc; }
th, td { padding: .3rem .8rem .3rem 0; vertical-align: top; } td { border-bottom: 1px solid #eee; }
th.what { width: 23%; } th.paper { width: 15%; } th.why { width: 25%; } th.from { width: 11%; }
td.took, td.date, td.device { white-space: nowrap; } td.command { overflow-wrap: anywhere; }
th.command { width: 32%; } th.changed { width: 20%; }
tr.claim td { padding: 1.5rem 0 .35rem; font-size: 1rem; border-bottom: 1px solid #ccc; }
tr.claim b { color: #888; margin-right: .3rem; } tr.claim small { margin-left: .6rem; }
tr.claim p { margin: .1rem 0 0; } span.none { white-space: nowrap; }
.chip { display: inline-block; border-radius: 4px; padding: 0 .45em; white-space: nowrap; font-size: .8rem; }
.good { background: #d9f2e3; color: #0b5c34; } .bad { background: #fbdfd8; color: #8c2210; }
.met { box-shadow: inset 0 0 0 1px #7fbf9b; color: #0b5c34; }
.missed { box-shadow: inset 0 0 0 1px #dc9a8b; color: #8c2210; }
.grey { background: #e6e8ee; color: #3d4663; } .chip.none { background: #f3f3f3; } .none { color: #888; }
.map { display: flex; flex-wrap: wrap; gap: .3rem; margin: 1rem 0 .6rem; }
ul.notes { color: #8c5a10; } figure { margin: 1.2rem 0 2rem; } figure svg { max-width: 100%; height: auto; }
figcaption { color: #777; font-size: .88rem; } svg text { font-family: system-ui, sans-serif; }
"""


def as_html(page: Page) -> str:
    """The report as one self-contained HTML page, with the pictures inlined as SVG."""
    e = html.escape
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    ]
    parts += [f"<title>tilegpt: the papers' claims</title><style>{STYLE}</style>"]
    parts += ["<h1>The papers' claims, reproduced</h1>", f"<p>{e(INTRODUCTION)}</p>"]
    parts += ["<nav><a href=#claims>claims</a><a href=#pictures>pictures</a><a href=#runs>runs</a></nav>"]
    parts += [f"<p class=summary>{e(summary(page))}</p>", _html_map(page)]
    parts += (
        ["<ul class=notes>", *(f"<li>{e(note)}</li>" for note in page.notes), "</ul>"] if page.notes else []
    )
    parts += ["<h2 id=claims>Claims</h2>", _html_claims(page)]
    parts += ["<h2 id=pictures>Pictures</h2>"] if page.pictures else []
    for title, path in page.pictures:
        parts += [f"<figure>{_svg(path)}<figcaption>{e(title)}</figcaption></figure>"]
    parts += [
        "<h2 id=runs>Runs</h2>",
        _html_table(RUN_COLUMNS, [_html_row(RUN_COLUMNS, row) for row in _runs(page)]),
    ]
    return "\n".join(parts) + "\n"


def _html_map(page: Page) -> str:
    """All claims at a glance: one chip per claim, coloured by the first of MARKS that it has."""
    chips = []
    for name, verdicts in page.verdicts.items():
        status = next(each for each in MARKS if any(v.status == each for v in verdicts))
        open_rows = any(v.status == NOT_MEASURED for v in verdicts) and status != NOT_MEASURED
        label = f"{name}{'*' if open_rows else ''}"
        chips.append(f'<a href="#{name}" class="chip {MARKS[status]}" title="{status}">{label}</a>')
    key = " ".join(f'<span class="chip {style}">{status}</span>' for status, style in MARKS.items())
    return (
        f"<div class=map>{''.join(chips)}</div><p class=key>{key} &nbsp; * with figures not measured yet</p>"
    )


def _html_claims(page: Page) -> str:
    """One table for all claims, so that their columns are aligned, with a heading row for each claim."""
    rows = []
    for name, claim in CLAIMS.items():
        text = f"<b>{name}</b> {html.escape(claim.statement)} <small>{html.escape(claim.source)}</small>"
        if claim.estimate:
            text += f"<p>Estimate, not a run: {html.escape(claim.estimate)}.</p>"
        rows.append(f"<tr class=claim id={name}><td colspan={len(COLUMNS)}>{text}</td></tr>")
        rows += [_html_row(COLUMNS, _cells(verdict)) for verdict in page.verdicts[name]]
    return _html_table(COLUMNS, rows)


def _html_table(header: tuple[str, ...], rows: list[str]) -> str:
    heading = "".join(f'<th class="{cell}">{html.escape(cell)}</th>' for cell in header)
    return f"<div class=table><table><tr>{heading}</tr>{''.join(rows)}</table></div>"


def _html_row(header: tuple[str, ...], values: list[str]) -> str:
    cells = []
    for column, value in zip(header, values, strict=True):
        text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(value))
        if column == "status":
            text = f'<span class="chip {MARKS[value]}">{text}</span>'
        elif value == NOT_MEASURED:
            text = f"<span class=none>{text}</span>"
        cells.append(f'<td class="{column}">{text}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _svg(path: Path) -> str:
    """The file's <svg> element, without the XML prologue and the metadata."""
    text = path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
