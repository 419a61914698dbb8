"""`python -m benchmarks aims`: what results/ holds of the benchmarks, against this project's own aims.

No paper states these figures; an aim is what we hold them to. Each benchmark's rows come from its `aims(results)`.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from reproduce.common import markdown_table, results_folder, writing
from reproduce.experiment import Sample
from reproduce.plots import can_draw
from reproduce.results import beside, changed_since, faster_since, host_load, read_all, slug, timed_again
from reproduce.timing import FASTER, Times, fastest, took, versus, waited

MET, MISSED, NO_AIM = "met", "missed", "no aim"
# The files in results/ that have aims; `attention`, `training` and `ring` are experiments of reproduce.
SOURCES = ("attention", "loss", "documents", "features", "host", "neighbour", "huggingface", "decode")
SOURCES += ("training", "ring")
TIMED = ("time", "speed")  # kinds of samples
HEADER = ("what", "ours", "aim", "status", "why")
RULE = (
    "Of several processes the worst decides. A time over the fastest library's, or another's, is missed only where "
    "that is faster: its range and ours do not overlap. One process has no range: its figure decides, and says so."
)


@dataclass(frozen=True)
class Aim:
    """A figure of ours, the aim it is held to (none: it is only shown), and what explains it.

    level: met only because ranges overlap; its median is on the aim's other side.
    among: the row in which it is counted if it is met; "": it has one of its own.
    """

    what: str
    ours: str
    aim: str = ""
    met: bool | None = None
    why: str = ""
    level: bool = False
    among: str = ""

    @property
    def status(self) -> str:
        return {True: MET, False: MISSED, None: NO_AIM}[self.met]


def shown(times: Times, limit: float, form: str = "{:.2f}x") -> str:
    """`Times.shown`, with more digits, up to four, where at those of the form something would round to the limit."""
    figures = [each for each in (times.low, times.median, times.high) if each != limit]
    start, digits, end = form.partition(re.search(r"\d", form)[0])
    for more in range(int(digits), 5):
        finer = f"{start}{more}{end}"
        if finer.format(limit) not in map(finer.format, figures):
            break
    return times.shown(finer)


def held(ours: Times, theirs: Times) -> tuple[bool, bool]:
    """Whether theirs is not faster, as `timing.versus` has it, and then whether the two are level: our median is
    behind, but the ranges overlap. Of one process, which has no range, the figure decides."""
    behind = (ours / theirs).median > 1
    lost = versus(theirs, ours) == FASTER or bool(behind and (ours / theirs).alone)
    return not lost, behind and not lost


def over_fastest(
    where: str, sample: Sample, ours: str, others: Iterable[str], which: str = "other", phase: str = "both",
    among: str = "",
) -> list[Aim]:  # fmt: skip
    """Our time over that of the fastest of the others for which the device did not wait, if there is one.

    Missed where one of them is faster, as `timing.versus` has it, then over the fastest of those; see `held`.
    """
    others = [name for name in others if name in sample["ms"]]
    late = [name for name in others if waited(sample, name)]
    times, found = took(sample, ours, phase), [name for name in others if name not in late]
    faster = [name for name in found if versus(took(sample, name, phase), times) == FASTER]
    best = fastest(sample, tuple(faster or found), phase)
    if best is None:
        return []
    gain, why = times / best[1], f"the fastest {which} is {best[0]}"
    why += f", without {', '.join(late)}, which waited for the host" if late else ""
    met, level = held(times, best[1])
    what = f"{where}: time over the fastest {which}'s"
    return [Aim(what, shown(gain, 1), "1x at most", met, why, level, among)]


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
        sections += [line for words in faster_since(document) for line in (f"Of before, {words}.", "")]
        sections += [f"Newer than the rest: {again}.", ""] if (again := timed_again(document)) else []
        processes = {sample.get("process") for sample in document["samples"] if sample["kind"] in TIMED}
        sections += ["One process: no range.", ""] if len(processes) == 1 else []
        sections += [f"Load of the host: {load}.", ""] if (load := host_load(document)) else []
        sections += [f"Some points were timed beside {other}.", ""] if (other := beside(document)) else []
        if hasattr(module, "unmeasured"):
            alike = [each for each in documents if (each["experiment"], each["device"]) == (name, device)]
            missing = module.unmeasured(sample for each in alike for sample in each["samples"])
            sections += [f"Not measured: {', '.join(missing)}.", ""] if missing else []
        sections += markdown_table(HEADER, rows(aims))
        picture = Path(slug(device), f"{name}.svg")
        if hasattr(module, "draw") and (directory / picture).exists():
            sections += [f"![{name}]({picture.as_posix()})", ""]
    summary = f"{counts[MET]} aims met, {counts[MISSED]} missed; {counts[NO_AIM]} figures without an aim."
    head = ["# Held to this project's own aims", "", summary, "", RULE, ""]
    return "\n".join([*head, *sections]).rstrip() + "\n", summary


def rows(aims: list[Aim]) -> Iterator[list[str]]:
    """The table's rows: one for each aim, but what is met of those counted together shares one, the last."""
    for a in aims:
        if not (a.met and a.among):
            why = [a.why] * bool(a.why) + ["level: above 1x, but the ranges overlap"] * a.level
            yield [a.what, a.ours, a.aim, a.status, "; ".join(why)]
    for name in dict.fromkeys(a.among for a in aims if a.met and a.among):
        together = [a for a in aims if a.among == name]
        met = [a for a in together if a.met]
        level = sum(a.level for a in met)
        why = f"{level} of them level: above 1x, but the ranges overlap" if level else ""
        missed = len(together) - len(met)
        status = f"{len(met)} {MET}" + f", {missed} {MISSED} above" * bool(missed)
        yield [name, f"{len(met)} of {len(together)} passes", met[0].aim, status, why]
