"""The report's notes on the runs behind it: older code, waiting for the host, fewer processes, failures."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from .experiment import Results
from .results import changed_since, faster_since

# State of a complete document next to a newer partial one: its figures count where the partial one has none.
EARLIER = "earlier run"
# Experiments that time whole steps, where waiting for the host counts: with more kernels than CUDA queues, all late.
OF_STEPS = ("training", "encoders")


def notes(documents: list[Results]) -> Iterator[str]:
    """The notes, a sentence each."""
    stale = filter(changed_since, documents)
    yield from _listed("code has changed since these were run (Runs tells what)", stale)
    faster: dict[str, list[str]] = defaultdict(list)
    for document in documents:
        for words in faster_since(document):
            faster[words].append(name_of(document))
    yield from (f"{', '.join(names)}, {words}" for words, names in faster.items())
    for document in documents:
        yield from (f"of {name_of(document)}, {words}" for words in of_points(document))
        if document["experiment"] in OF_STEPS:
            continue
        rounds: Counter[str] = Counter()  # late ones, whose times may include waiting; see `timing.Timed`
        for sample in document["samples"]:
            rounds.update(sample.get("late", {}))
        if rounds:
            late = ", ".join(f"{name} in {count}" for name, count in rounds.most_common())
            yield (
                f"in some rounds of {name_of(document)} the device waited for the host, so their times may include "
                f"it: {late}"
            )
    once = filter(_timed_once, documents)
    yield from _listed("timed in one process, so their figures have no range yet", once)
    for document in documents:
        if _timed_once(document):
            continue
        if kinds := {each["kind"] for each in document["samples"] if "ms" in each and "process" not in each}:
            yield f"of {name_of(document)}, 1 process timed {', '.join(sorted(kinds))}"
        for processes, points in sorted(_timed_by_fewer(document).items()):
            yield f"of {name_of(document)}, {processes} process{'es' * (processes > 1)} timed {points}"
    failed = [each for each in documents if any("failed" in sample for sample in each["samples"])]
    yield from _listed("some samples failed, whose files say why", failed)


def of_points(document: Results) -> Iterator[str]:
    """Notes on some of a document's points: newer than the rest (merge.py --over), or not timed alone (by hand)."""
    if again := timed_again(document):
        yield f"some points are newer than the rest: {again}"
    if other := "; ".join(dict.fromkeys(each["beside"] for each in document["samples"] if "beside" in each)):
        yield f"some points were timed beside {other}"


def timed_again(document: Results) -> str:
    """Features or lengths of points newer than their document: "sinks at 820bf2d"; or ""."""
    newer: dict[str, set[str]] = defaultdict(set)
    lengths: dict[str, set[int]] = defaultdict(set)
    for sample in document["samples"]:
        if "feature" in sample and "again" in sample:
            newer[sample["again"]].add(sample["feature"])
        elif "again" in sample:
            lengths[sample["again"]].add(sample.get("length") or sample["context"])
    said = [f"{', '.join(sorted(its))} at {commit}" for commit, its in newer.items()]
    said += [f"lengths {', '.join(map(str, sorted(its)))} at {commit}" for commit, its in lengths.items()]
    return "; ".join(said)


def host_load(document: Results) -> str:
    """The host's load averages while samples were timed: "4 to 78 of 64 cores"; "" where none was recorded."""
    clocks = [sample.get("clocks") for sample in document["samples"]]
    found = [load for each in clocks if isinstance(each, dict) for load in each.get("host_load", ())]
    if not found:
        return ""
    ends = dict.fromkeys(f"{load:.0f}" for load in (min(found), max(found)))
    return f"{' to '.join(ends)} of {document['environment']['cpu_count']} cores"


def _listed(words: str, documents: Iterable[Results]) -> Iterator[str]:
    """The documents, if any, by device: "WORDS: attention, history on NVIDIA H200; ..."."""
    names: dict[str, list[str]] = {}
    for document in documents:
        names.setdefault(document["device"], []).append(document["experiment"] + _earlier(document))
    if names:
        by_device = [f"{', '.join(experiments)} on {device}" for device, experiments in names.items()]
        yield f"{words}: {'; '.join(by_device)}"


def _timed_once(document: Results) -> bool:
    timings = [sample for sample in document["samples"] if "ms" in sample]
    return bool(timings) and not any(sample.get("process") for sample in timings)


def _timed_by_fewer(document: Results) -> dict[int, str]:
    """How many processes -> what so few have timed, where the settings ask for more: parts by name, or how many."""
    processes: dict[str, set[int]] = defaultdict(set)
    in_parts = False
    for sample in document["samples"]:
        if "ms" in sample and "process" in sample:
            in_parts = "part" in sample
            where = {k: v for k, v in sample.items() if isinstance(v, str | int) and k != "process"}
            part = " ".join(str(where[key]) for key in ("part", "mode", "model", "context") if key in where)
            processes[part if in_parts else json.dumps(where)].add(sample["process"])
    fewer: dict[int, list[str]] = defaultdict(list)
    for place, its in processes.items():
        if len(its) < document["settings"].get("processes", 1):
            fewer[len(its)].append(place)
    return {
        count: ", ".join(places) if in_parts else f"{len(places)} of {len(processes)} points"
        for count, places in fewer.items()
    }


def name_of(document: Results) -> str:
    return f"{document['experiment']} on {document['device']}" + _earlier(document)


def _earlier(document: Results) -> str:
    return f" ({EARLIER})" * (document["state"] == EARLIER)
