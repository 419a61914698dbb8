"""One long run in the report, beside the perplexity's: results/<gpu>x<number>/long_run.json.

It is no experiment: `.ci/gpu/jobs/long_run.sh` trains on all GPUs of a machine, and `.ci/gpu/merge.py` keeps of its
run directory what `kept` returns. A run that was cut is kept up to its last row.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from . import plots
from .comparison.runs import Run
from .experiment import Results
from .results import slug

FILE = "long_run.json"
SERIES = {"losses": "train/loss", "validation": "val/loss", "bits_per_byte": "val/bits_per_byte"}


def kept(run: Run, commit: str) -> Results:
    """Curves by step, and what they are of; no paths of the machine that it ran on, no text: it may name people."""
    mixed = "data.corpora."
    corpora = {name.removeprefix(mixed): each for name, each in run.config.items() if name.startswith(mixed)}
    settings = {name: each for name, each in run.config.items() if each not in (None, [], {})}
    environment = {n: each for n, each in run.environment.items() if n not in ("command", "platform")}
    return {
        "device": environment["device_name"],
        "gpus": run.facts["world_size"],
        "commit": commit,
        "date": time.strftime("%Y-%m-%d", time.localtime((run.path / "metrics.csv").stat().st_mtime)),
        "settings": {n: each for n, each in settings.items() if not n.startswith(("data.", "logger."))},
        "corpora": corpora,  # and their tokens
        "facts": run.facts,
        "environment": environment | {"commit": commit},
        "state": "complete" if run.finished else "partial",
        "seconds": run.rows[-1]["seconds"],
        "tokens_per_second": run.speed("perf/tokens_per_second"),
        "peak_gib": (run.peak_memory or (None, None))[1],
        **{
            name: [[int(row["step"]), round(row[column], 5)] for row in run.rows if column in row]
            for name, column in SERIES.items()
        },
    }


def place(document: Results) -> Path:
    """Where it belongs in results/."""
    return Path(f"{slug(document['device'])}x{document['gpus']}", FILE)


def title(document: Results) -> str:
    """The run in a few words: "flash, 124 M parameters, 2,415 M tokens, on 8 NVIDIA H200"."""
    facts, tokens = document["facts"], _against_tokens(document, "losses")[-1][0]
    size = f"{facts['parameters'] / 1e6:.0f} M parameters, {tokens:,.0f} M tokens"
    return f"{facts['attention']}, {size}, on {document['gpus']} {document['device']}"


def line(document: Results) -> str:
    """What came of it, in Markdown."""
    _, loss = document["validation"][-1]
    _, bits = document["bits_per_byte"][-1]
    cut = f" (cut after step {document['losses'][-1][0]:,})" * (document["state"] == "partial")
    came = f"perplexity {math.exp(loss):.2f}, {bits:.3f} bits per byte"
    seconds, per_second = document["seconds"], document["tokens_per_second"] / 1e3
    speed = f"{seconds:,.0f} s in all, {per_second:,.0f} k tokens/s while it trains"
    where = f"[{document['date']}, {document['commit'][:9]}]({place(document).as_posix()})"
    return f"One long run, of {' and '.join(document['corpora'])}: {title(document)}{cut}: {came}; {speed}; {where}."


def draw(document: Results, path: Path) -> None:
    """Loss and bits per byte against tokens."""
    with plots.picture(path, 2, title=f"One long run: {title(document)}") as (losses, bits):
        losses.plot(*zip(*_against_tokens(document, "losses"), strict=True), alpha=0.5, label="training")
        losses.plot(*zip(*_against_tokens(document, "validation"), strict=True), label="validation")
        losses.set(title="Loss", xlabel="M tokens", ylabel="nats")
        plots.legend(losses)
        bits.plot(*zip(*_against_tokens(document, "bits_per_byte"), strict=True), color=plots.COLOURS[1])
        bits.set(title="Validation", xlabel="M tokens", ylabel="bits per byte")


def _against_tokens(document: Results, series: str) -> list[tuple[float, Any]]:
    batch = document["settings"]["trainer.batch_tokens"]
    return [(step * batch / 1e6, value) for step, value in document[series]]
