"""`python -m reproduce report`: results/ as one page, as REPORT.md and as report.html, which needs no other file.

The first screen has a picture, three figures, and the claims counted; then a line a claim, which opens to its
figures. A GPU's figures come first, what a CPU counted in an appendix. A figure that is in no results file is "not
measured". A file that cannot be used loses only its own rows, and the page says so.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from . import headline, long_run, pairs
from .attention_figures import peaks
from .common import results_folder, writing
from .experiment import EXPERIMENTS, NOT_MEASURED, Results, Verdict
from .perplexity_figures import runs
from .perplexity_verdicts import judge_between_devices, judge_extended
from .plots import can_draw
from .report_html import as_html
from .report_markdown import as_markdown
from .report_notes import EARLIER, name_of, notes
from .report_page import Figure, Judged, Page, summary
from .results import read_all, slug
from .sparse import judge_against_others

# Claim without a picture of its own -> the claim whose picture shows its figures.
PICTURED_AT = {"C9": "C7", "C17": "C24", "C20": "C24", "C26": "C2", "C28": "C27", "C30": "C7", "C32": "C8"}


def main(argv: list[str]) -> int:
    """Write the two files and print their paths."""
    directory = results_folder("reproduce report", __doc__, argv)
    page = build(directory)
    with writing(directory / "REPORT.md", "--results FOLDER"):
        (directory / "REPORT.md").write_text(as_markdown(page, directory), encoding="utf-8")
        (directory / "report.html").write_text(as_html(page), encoding="utf-8")
    print(summary(page))
    if page.notes:
        print(f"{len(page.notes)} notes on the runs: under Runs, in the appendix")
    print(f"{directory / 'REPORT.md'}  {directory / 'report.html'}")
    return 0


def build(directory: Path) -> Page:
    """Judge every document below `directory`, draw its picture, and add rows for what is not measured."""
    page = Page()

    def wrong(words: str) -> None:
        """Note what is lost, here and on the page."""
        page.notes.append(words)
        print(f"note: {words}")

    documents = read_all(directory, EXPERIMENTS, wrong)
    names: set[str] = set()
    for document in sorted(documents, key=lambda each: not ran_on_gpu(each)):
        if (name := name_of(document)) in names:
            document = {**document, "state": EARLIER}
            page.notes.append(f"{name}: what it lacks is an earlier, complete run's")
        elif document["state"] != "complete":
            page.notes.append(f"{name} is partial: not all of it was run")
        names.add(name)
        # One bad document must not lose the others' rows.
        try:
            _add(page, document, directory)
        except Exception as error:
            wrong(f"{name_of(document)} cannot be judged: {type(error).__name__}: {error}")
    curves = [each for each in page.documents if each["experiment"] == "perplexity"]
    _add_between_devices(page, curves)
    trained = []
    if files := sorted(directory.glob(f"*/{pairs.FILE}")):
        trained += [run for each in curves for run in pairs.of_perplexity(each)]
        trained += [run for file in files for run in pairs.of_recipes(json.loads(file.read_text()))]
        _add_pairs(page, trained, files, directory)
    for verdict in judge_against_others(page.documents):
        device = verdict.basis.partition(",")[0]
        own, others = (page.sources[name, device] for name in ("sparse", "attention"))
        page.claims["C10"].figures.append(Figure(verdict, own, others=others))
    page.notes += notes(page.documents)
    for file in sorted(directory.glob(f"*/{long_run.FILE}")):
        try:
            _add_long_run(page, json.loads(file.read_text()), file.with_suffix(".svg"))
        except Exception as error:
            wrong(f"{file} cannot be shown: {type(error).__name__}: {error}")
    page.headlines = list(_headlines(page.documents, trained, directory)) if can_draw() else []
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
    """Add the verdicts of C12 and C14 that compare runs of several devices, by the newest document of each."""
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


def _add_pairs(page: Page, trained: list[pairs.Trained], files: list[Path], directory: Path) -> None:
    """Add C12's verdicts over all pairs of runs that differ in attention alone. files: of the runs made for this."""
    claim = page.claims["C12"]
    links = ", ".join(f"[{file.parent.name}]({file.relative_to(directory).as_posix()})" for file in files)
    claim.figures += (Figure(replace(each, basis=f"{each.basis}: {links}")) for each in pairs.judge(trained))
    if can_draw() and pairs.matched(trained):
        pairs.draw(trained, files[-1].with_name(pairs.PICTURE))
        claim.gpu_pictures.append(files[-1].with_name(pairs.PICTURE))


def _add_long_run(page: Page, document: Results, picture: Path) -> None:
    """Show the long training run at C12: it corresponds to no figure of the paper, so it gets no verdict."""
    claim = page.claims["C12"]
    claim.also.append(long_run.line(document))
    if can_draw():
        long_run.draw(document, picture)
        claim.gpu_pictures.append(picture)


def _headlines(documents: list[Results], trained: list[pairs.Trained], directory: Path) -> Iterator[Path]:
    """Draw README's picture for each GPU on which attention and training were both measured, and yield its path.

    The loss curves in it are of that GPU, or else of the one with the most of them.
    """
    newest = [each for each in documents if ran_on_gpu(each) and each["state"] != EARLIER]
    measured = {(each["device"], each["experiment"]): each for each in newest}
    curves = {gpu: each for (gpu, name), each in measured.items() if name == "perplexity"}
    curves = {gpu: each for gpu, each in curves.items() if {"naive", "flash"} <= runs(each, "gpt2").keys()}
    most = max(curves.values(), key=lambda each: len(runs(each, "gpt2")), default=None)
    for device in sorted({device for device, _ in measured}):
        needed = [measured.get((device, name)) for name in ("attention", "training")]
        if all(needed) and peaks(needed[0]):  # else too little of attention for a picture
            path = directory / slug(device) / "headline.svg"
            headline.draw(*needed, path, curves.get(device, most), trained)
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
