"""The samples of any experiment as text: what is printed when it ends."""

from typing import Any

from training.config import flatten

from .common import text_table
from .experiment import Results, Sample, Verdict

OUT_OF_MEMORY = "out of memory"
MOST_ROWS = 60  # of a kind; all are in the file


def verdicts(found: list[Verdict]) -> str:
    """What was claimed, and what came out: a line each."""
    rows = [[f"{v.claim} {v.what}", v.paper, v.ours, v.status] for v in found if v.ours]
    return text_table(["claim", "paper", "ours", "verdict"], rows) if rows else ""


def table(results: Results) -> str:
    """A table for each kind of sample: its coordinates and what was measured, then what was left out and why.

    Of a timing a row for each contender: the median of forward, backward and so on, in ms, and of their sum.
    """
    from .timing import timed

    parts = []
    for kind in dict.fromkeys(sample["kind"] for sample in results["samples"]):
        found = [s for s in results["samples"] if s["kind"] == kind and not _why_missing(s)]
        if found and "ms" in found[0]:
            found = [row for sample in timed(results, kind=kind) for row in _contenders(sample)]
        parts.append(_of_kind(kind, [flat(sample) for sample in found]))
    left_out: dict[str, Sample] = {}
    for sample in results["samples"]:
        if why := _why_missing(sample):
            left_out.setdefault(why if why != OUT_OF_MEMORY else f"{why} {sample}", sample)
    parts += [f"left out: {_named(sample)}: {_why_missing(sample)}" for sample in left_out.values()]
    return "\n".join(part for part in parts if part)


def _named(sample: Sample) -> str:
    where = (value for key, value in sample.items() if key not in ("refused", "failed"))
    return ", ".join(str(v) for v in where if isinstance(v, str | int) and v and v is not True)


def _why_missing(sample: Sample) -> str | None:
    """Why the sample has no measurement, or its contender is not timed; None if neither."""
    if sample.get("out_of_memory"):
        return OUT_OF_MEMORY
    if sample.get("passed") is False:
        return f"wrong, so not timed: errors {sample['errors']}, limits {sample['limits']}"
    if sample.get("agrees") is False:
        return f"its logits are off by {sample['logit_error']:.1%}: not timed"
    return sample.get("refused") or sample.get("failed")


def _contenders(sample: Sample) -> list[Sample]:
    from .timing import took

    where = {key: value for key, value in sample.items() if key not in ("ms", "late")}
    rows = []
    for name, phases in sample["ms"].items():
        split = phases if len(phases) > 1 else ()
        medians = {f"{phase} ms": took(sample, name, phase).ranging("{:.4g}") for phase in split}
        rows.append({**where, "contender": name, **medians, "ms": took(sample, name).ranging("{:.4g}")})
    return rows


def flat(sample: Sample) -> dict[str, Any]:
    """The numbers and words of a sample, those of entries inside named "entry.inner"; without lists."""
    return {k: v for k, v in flatten(sample).items() if v is not None and not isinstance(v, list)}


def _of_kind(kind: str, rows: list[dict[str, Any]]) -> str:
    """The columns that differ between the rows; those that do not are in the title."""
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "kind"]
    alike = [key for key in columns if len(rows) > 1 and len({str(row.get(key)) for row in rows}) == 1]
    shown = [key for key in columns if key not in alike]
    title = ", ".join([kind, *(f"{key} {_cell(rows[0][key])}" for key in alike)])
    if not shown:
        return f"\n{title}" * bool(rows)
    cells = [[_cell(row.get(key, "-")) for key in shown] for row in rows[:MOST_ROWS]]
    more = f"\n({len(rows) - len(cells)} more in the file)" * (len(rows) > len(cells))
    return f"\n{title}\n{text_table(shown, cells)}{more}"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
