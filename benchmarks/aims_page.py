"""`python -m benchmarks aims`: results/BENCHMARKS.md, the benchmarks' results held to this project's own aims."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from reproduce.common import markdown_table, results_folder, writing
from reproduce.plots import can_draw
from reproduce.report_notes import host_load, of_points
from reproduce.results import changed_since, faster_since, read_all, slug

from . import standing
from .aims import MET, MISSED, NO_AIM, Aim

# The files in results/ that have aims; `attention`, `training` and `ring` are experiments of reproduce.
SOURCES = ("attention", "loss", "documents", "features", "host", "neighbour", "huggingface", "decode")
SOURCES += ("training", "ring")
MAP = "standing.svg"
TIMED = ("time", "speed")  # kinds of samples
HEADER = ("what", "ours", "aim", "status", "why")
RULE = (
    "Of several processes the worst decides, but for a time over another library's: that is missed only where ours "
    "takes longer in every process. Where its median is behind, but not every process, the two are level. Of one "
    "process the figure decides, and says so."
)


def main(argv: list[str]) -> int:
    """Write BENCHMARKS.md and print its summary."""
    directory = results_folder("benchmarks aims", __doc__, argv)
    if can_draw():
        draw(directory)
    text, summary = page(directory)
    with writing(directory / "BENCHMARKS.md", "--results FOLDER"):
        (directory / "BENCHMARKS.md").write_text(text, encoding="utf-8")
    print(f"{summary}\n{directory / 'BENCHMARKS.md'}")
    return 0


def draw(directory: Path) -> None:
    """Each GPU's map; the benchmarks' pictures, the newest document's last. Those of `reproduce` are its report's."""
    documents = list(read_all(directory, SOURCES))
    for device in {each["device"] for each in documents if not each["device"].startswith("CPU")}:
        measured = [each for each in documents if each["device"] == device]
        standing.draw(measured, device, directory / slug(device) / MAP)
    for document in reversed(documents):
        module = importlib.import_module(f"benchmarks.{document['experiment']}")
        if hasattr(module, "draw"):
            module.draw(document, directory / slug(document["device"]) / f"{document['experiment']}.svg")


def page(directory: Path) -> tuple[str, str]:
    """The page as Markdown, with the pictures that there are, and its summary in a line."""
    counts: Counter[str] = Counter()
    sections = []
    shown: set[tuple[str, str, str]] = set()  # of an earlier run, what the newer one lacks is added
    documents = list(read_all(directory, SOURCES))
    for document in documents:
        name, device = document["experiment"], document["device"]
        module = importlib.import_module(f"benchmarks.{name}")
        aims = module.aims(document)
        aims = [each for each in aims if (name, device, each.what) not in shown]
        if not aims:
            continue
        shown |= {(name, device, each.what) for each in aims}
        counts.update(aim.status for aim in aims)
        stale = changed_since(document)
        partial = "" if document["state"] == "complete" else ".partial"
        command, file = " ".join(document["command"]), f"{slug(device)}/{name}{partial}.json"
        sections += [f"## {name}, {device}", "", f"`{command}`, {document['date']}: [samples]({file}).", ""]
        sections += [f"Changed since it was run: {', '.join(stale)}.", ""] if stale else []
        sections += [line for words in faster_since(document) for line in (f"With older code, {words}.", "")]
        sections += [line for words in of_points(document) for line in (f"Here {words}.", "")]
        processes = {sample.get("process") for sample in document["samples"] if sample["kind"] in TIMED}
        sections += ["One process: no range.", ""] if len(processes) == 1 else []
        sections += [f"Load of the host: {load}.", ""] if (load := host_load(document)) else []
        if hasattr(module, "unmeasured"):
            alike = [each for each in documents if (each["experiment"], each["device"]) == (name, device)]
            missing = module.unmeasured(sample for each in alike for sample in each["samples"])
            sections += [f"Not measured: {', '.join(missing)}.", ""] if missing else []
        sections += markdown_table(HEADER, rows(aims))
        picture = Path(slug(device), f"{name}.svg")
        if hasattr(module, "draw") and (directory / picture).exists():
            sections += [f"![{name}]({picture.as_posix()})", ""]
    summary = f"{counts[MET]} aims met, {counts[MISSED]} missed; {counts[NO_AIM]} figures without an aim."
    maps = dict.fromkeys(f"{slug(each['device'])}/{MAP}" for each in documents)
    head = ["# Held to this project's own aims", "", summary, "", RULE, ""]
    head += [f"![{standing.TITLE}]({path})\n" for path in maps if (directory / path).exists()]
    return "\n".join([*head, *sections]).rstrip() + "\n", summary


def rows(aims: list[Aim]) -> Iterator[list[str]]:
    """The table's rows: one for each aim, but what is met of those counted together shares one, the last."""
    for a in aims:
        if not (a.met and a.among):
            why = [a.why] * bool(a.why) + ["level: ours takes longer, but not in every process"] * a.level
            yield [a.what, a.ours, a.aim, a.status, "; ".join(why)]
    for name in dict.fromkeys(a.among for a in aims if a.met and a.among):
        together = [a for a in aims if a.among == name]
        met = [a for a in together if a.met]
        level = sum(a.level for a in met)
        why = f"{level} of them level: ours takes longer, but not in every process" if level else ""
        missed = len(together) - len(met)
        status = f"{len(met)} {MET}" + f", {missed} {MISSED} above" * bool(missed)
        yield [name, f"{len(met)} of {len(together)} passes", met[0].aim, status, why]
