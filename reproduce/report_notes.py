"""What a reader of the report has to know of the runs behind it: late, alone, failed, or of older code."""

from collections import Counter
from collections.abc import Callable, Iterator

from .experiment import EXPERIMENTS, Results
from .results import changed_since, faster_since
from .standard import NAME as STANDARD

# The state of a complete run beside a newer partial one: it counts where that has no figure.
EARLIER = "earlier run"
# These time whole steps, of which waiting for the host is a part: of more kernels than CUDA queues, all are late.
OF_STEPS = ("training", "encoders")


def notes(documents: list[Results]) -> Iterator[str]:
    """What a reader has to know of the runs."""
    yield from _listed("code has changed since these were run (Runs tells what)", documents, changed_since)
    for document in documents:
        yield from (f"{name_of(document)}, {words}" for words in faster_since(document))
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
    yield from _listed("timed in one process, so their figures have no range yet", documents, _timed_once)
    for document in documents:
        if parts := _parts_timed_once(document):
            yield f"of {name_of(document)} one process timed {', '.join(sorted(parts))}"
    yield from _listed("some samples failed, whose files say why", documents, _failed)
    words = "of older code, whose standard attention is slower than today's: its mask by masked_fill, its scale apart"
    yield from _listed(words, documents, _older_standard)


def _listed(words: str, documents: list[Results], holds: Callable[[Results], object]) -> Iterator[str]:
    """The documents of which it holds, if any, by device: "WORDS: attention, history on NVIDIA H200; ..."."""
    names: dict[str, list[str]] = {}
    for document in filter(holds, documents):
        names.setdefault(document["device"], []).append(document["experiment"] + _earlier(document))
    if names:
        by_device = [f"{', '.join(experiments)} on {device}" for device, experiments in names.items()]
        yield f"{words}: {'; '.join(by_device)}"


def _timed_once(document: Results) -> bool:
    timings = [sample for sample in document["samples"] if "ms" in sample]
    return bool(timings) and not any(sample.get("process") for sample in timings)


def _parts_timed_once(document: Results) -> set[str]:
    """Parts of an experiment that one process timed, where others have timed other parts."""
    processes: dict[str, set[int]] = {}
    for sample in document["samples"]:
        if "ms" in sample and "part" in sample:
            place = " ".join(
                str(sample[key]) for key in ("part", "mode", "model", "context") if key in sample
            )
            processes.setdefault(place, set()).add(sample.get("process", 0))
    return set() if _timed_once(document) else {part for part, its in processes.items() if len(its) == 1}


def _failed(document: Results) -> bool:
    return any("failed" in sample for sample in document["samples"])


def _older_standard(document: Results) -> bool:
    """Whether it timed standard attention before aae4db6, with which three processes came too."""
    run = f"{EXPERIMENTS[document['experiment']].path}.run"
    beside = any(STANDARD in sample.get("ms", ()) for sample in document["samples"])
    return beside and _timed_once(document) and run in changed_since(document)


def name_of(document: Results) -> str:
    return f"{document['experiment']} on {document['device']}" + _earlier(document)


def _earlier(document: Results) -> str:
    return f" ({EARLIER})" * (document["state"] == EARLIER)
