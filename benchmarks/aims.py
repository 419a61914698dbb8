"""`python -m benchmarks aims`: what results/ holds of the benchmarks, against this project's own aims.

No paper states these figures; an aim is what we hold them to. Each benchmark's rows come from its `aims(results)`.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from reproduce.common import markdown_table, results_folder, writing
from reproduce.experiment import Sample
from reproduce.plots import can_draw
from reproduce.results import changed_since, read_all, slug
from reproduce.timing import fastest, took, waited

MET, MISSED, NO_AIM = "met", "missed", "no aim"
# The files in results/ that have aims; `training` and `ring` are experiments of reproduce.
SOURCES = ("loss", "documents", "features", "host", "neighbour", "huggingface", "decode", "training", "ring")
HEADER = ("what", "ours", "aim", "status", "why")


@dataclass(frozen=True)
class Aim:
    """A figure of ours, the aim it is held to (none: it is only shown), and what explains it."""

    what: str
    ours: str
    aim: str = ""
    met: bool | None = None
    why: str = ""

    @property
    def status(self) -> str:
        return {True: MET, False: MISSED, None: NO_AIM}[self.met]


def over_fastest(
    where: str, sample: Sample, ours: str, others: Iterable[str], which: str = "other"
) -> list[Aim]:
    """Our time over that of the fastest of the others for which the device did not wait, if there is one."""
    others = [name for name in others if name in sample["ms"]]
    late = [name for name in others if waited(sample, name)]
    best = fastest(sample, tuple(name for name in others if name not in late))
    if best is None:
        return []
    gain, why = took(sample, ours) / best[1], f"the fastest {which} is {best[0]}"
    why += f", without {', '.join(late)}, which waited for the host" if late else ""
    what = f"{where}: time over the fastest {which}'s"
    return [Aim(what, gain.shown(), "1x at most", gain.high <= 1, why)]


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
    """The benchmarks' pictures, the newest document's last; those of `reproduce` are its report's."""
    for document in reversed(list(read_all(directory, SOURCES))):
        module = importlib.import_module(f"benchmarks.{document['experiment']}")
        if hasattr(module, "draw"):
            module.draw(document, directory / slug(document["device"]) / f"{document['experiment']}.svg")


def page(directory: Path) -> tuple[str, str]:
    """The page as Markdown, with the pictures that there are, and its summary in a line."""
    counts: Counter[str] = Counter()
    sections = []
    shown: set[tuple[str, str, str]] = set()  # of an earlier run, what the newer one lacks is added
    for document in read_all(directory, SOURCES):
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
        sections += markdown_table(HEADER, [[a.what, a.ours, a.aim, a.status, a.why] for a in aims])
        picture = Path(slug(device), f"{name}.svg")
        if hasattr(module, "draw") and (directory / picture).exists():
            sections += [f"![{name}]({picture.as_posix()})", ""]
    summary = f"{counts[MET]} aims met, {counts[MISSED]} missed; {counts[NO_AIM]} figures without an aim."
    head = ["# Benchmarks that are in no paper", "", "Held to this project's own aims. " + summary, ""]
    return "\n".join([*head, *sections]).rstrip() + "\n", summary
