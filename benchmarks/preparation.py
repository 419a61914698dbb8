"""How fast preparation is, against bare tiktoken and against nanoGPT's prepare.py on the same parquet files.

    python -m benchmarks preparation --tokenizer gpt2 --nanogpt CHECKOUT [--parquet FOLDER] --output FILE.json

Each of these runs in a process of its own, in turn, `--repeats` times; ratios are taken within a turn, so that other
load on the machine touches both sides, and are given for seconds and for CPU seconds (workers included, start-up and
imports not), which other load hardly touches:

    bare       tiktoken's encode_ordinary over documents already in memory, one process; nothing read or written
    one        prepare() with one process: parquet in, shards and manifest out
    all        prepare() with one process per core
    nanogpt    data/openwebtext/prepare.py of the checkout, except that load_dataset() reads the same parquet files,
               because the name it asks for can no longer be loaded, and for the part held out
    tuned      the same with `num_proc` = cores instead of 8, and 16 batches instead of 1,024 when the tokens are
               written, which cost little in nanoGPT's 40 GB and much in so little text

Everywhere 20 % of the documents are held out: nanoGPT stops when it has fewer of them than batches.
Without --parquet the text is this Python's installed source code, --megabytes of it. The tokens of `nanogpt` and of
`all` are compared: the validation split token for token, the training split document for document.
"""

import argparse
import json
import os
import platform
import re
import resource
import runpy
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.corpora import PythonSource, make_corpus
from data.loader import Corpus
from data.prepare import prepare
from data.tokenizer import load_tokenizer
from data.workers import cpu_count
from reproduce.common import as_lines
from training.environment import device_name

KINDS = ("bare", "one", "all", "nanogpt", "tuned")
VAL_FRACTION = 0.2
_FILES = 8
_ROWS_PER_GROUP = 1000  # as in OpenWebText's files


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks preparation", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--nanogpt", type=Path, help="checkout of nanoGPT; without it, it is not measured")
    parser.add_argument("--parquet", type=Path, help="folder of parquet files with a column `text`")
    parser.add_argument(
        "--megabytes", type=int, default=100, help="text to make where --parquet is not given"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.run:
        print(json.dumps(run_one(options.run, options)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        options.parquet = options.parquet or make_parquet(Path(scratch, "parquet"), options.megabytes * 10**6)
        result = compare(options, Path(scratch))
    text = as_lines(result, "turns")
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)
    return 0


def compare(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run every kind in turn and return the figures."""
    kinds = KINDS if options.nanogpt else KINDS[:3]
    turns: list[dict[str, Any]] = []
    loads = [os.getloadavg()[0]]
    for turn in range(options.repeats):
        # the order is turned around every time, so that no kind always comes first
        order = kinds[:: -1 if turn % 2 else 1]
        turns.append({kind: measure(kind, options, scratch / f"{turn}-{kind}") for kind in order})
        loads.append(os.getloadavg()[0])
    documents, size = (turns[0]["bare"][each] for each in ("documents", "text_bytes"))
    cpu = device_name(torch.device("cpu"))

    def ratio(slow: str, fast: str) -> dict[str, Any]:
        seconds, cpu = (
            [round(turn[slow][key] / turn[fast][key], 3) for turn in turns]
            for key in ("seconds", "cpu_seconds")
        )
        medians = {"median": statistics.median(seconds), "cpu_median": statistics.median(cpu)}
        return {**medians, "each": seconds, "cpu_each": cpu}

    def speed(kind: str) -> float:
        return round(statistics.median(size / turn[kind]["seconds"] / 1e6 for turn in turns), 2)

    pairs = [("one", "all"), ("bare", "one"), ("nanogpt", "all"), ("tuned", "all")]
    ratios = {f"{slow} / {fast}": ratio(slow, fast) for slow, fast in pairs if slow in kinds}
    command = f"python -m benchmarks preparation --megabytes {options.megabytes} --repeats {options.repeats}"
    last = [scratch / f"{options.repeats - 1}-{kind}" for kind in ("all", "nanogpt")]
    return {
        "command": command + (" --nanogpt CHECKOUT" if options.nanogpt else ""),
        "load": f"the machine's load average was {min(loads):.1f} to {max(loads):.1f} on {cpu_count()} cores "
        "meanwhile; above that number, seconds say little and CPU seconds are what to compare",
        "machine": {"cpu": cpu, "cores": cpu_count(), "python": platform.python_version()},
        "text": {"documents": documents, "bytes": size, "tokenizer": Path(options.tokenizer).stem},
        "megabytes_per_second": {kind: speed(kind) for kind in kinds},
        "ratios": ratios,
        "same_tokens_as_nanogpt": same_tokens(*last) if options.nanogpt else "not measured",
        "turns": turns,
    }


def measure(kind: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one kind in a process of its own; return what it printed."""
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks", "preparation", "--run", kind, "--folder", str(folder)]
    command += ["--tokenizer", options.tokenizer, "--parquet", str(options.parquet.absolute())]
    command += ["--nanogpt", str(options.nanogpt.absolute())] if options.nanogpt else []
    # its own Hub home: a cache of an earlier turn would be used again and measure nothing
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{kind} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Clock:
    """Measures from its making: seconds, CPU seconds of this process and its finished children, largest memory."""

    def __init__(self):
        self._start = time.perf_counter(), sum(os.times()[:4])

    def read(self) -> dict[str, float]:
        seconds, cpu = time.perf_counter() - self._start[0], sum(os.times()[:4]) - self._start[1]
        both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        peak = max(resource.getrusage(who).ru_maxrss for who in both) >> 10
        return {"seconds": round(seconds, 3), "cpu_seconds": round(cpu, 2), "peak_rss_mb": peak}


def run_one(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Do the work of one kind in this process; imports and reading into memory are not in `seconds`."""
    import datasets  # noqa: F401, imported by all so that it is in the time of none

    load_tokenizer(options.tokenizer)
    runs = {"bare": _run_bare, "nanogpt": _run_nanogpt, "tuned": _run_nanogpt}
    return runs.get(kind, _run_prepare)(kind, options)


def _run_bare(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    import pyarrow.parquet

    documents = pyarrow.parquet.read_table(options.parquet, columns=["text"])["text"].to_pylist()
    encoding = load_tokenizer(options.tokenizer)
    clock = Clock()
    tokens = sum(len(encoding.encode_ordinary(text)) for text in documents)
    measured = clock.read()
    text_bytes = sum(len(text.encode()) for text in documents)
    return {**measured, "documents": len(documents), "text_bytes": text_bytes, "tokens": tokens}


def _run_prepare(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    source = make_corpus("text_files", files=str(options.parquet))
    clock = Clock()
    workers = 1 if kind == "one" else cpu_count()
    corpus = prepare(source, options.tokenizer, options.folder, val_fraction=VAL_FRACTION, workers=workers)
    measured = clock.read()
    return {**measured, "workers": workers, "tokens": sum(corpus.manifest.tokens.values())}


def _run_nanogpt(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    import datasets
    import tiktoken

    script = (options.nanogpt / "data" / "openwebtext" / "prepare.py").read_text()
    changes = {r"test_size=[\d.]+": f"test_size={VAL_FRACTION}"}
    if kind == "tuned":
        changes[r"(?m)^num_proc = \d+"] = f"num_proc = {cpu_count()}"
        changes[r"total_batches = \d+"] = "total_batches = 16"
    for pattern, value in changes.items():
        script, replaced = re.subn(pattern, value, script)
        if replaced != 1:
            raise SystemExit(f"this checkout's prepare.py has not one line with {pattern}")
    copy = options.folder / "prepare.py"  # it writes beside itself
    copy.write_text(script)
    files = sorted(str(path) for path in options.parquet.glob("*.parquet"))
    load = datasets.load_dataset
    datasets.load_dataset = lambda name, **settings: load("parquet", data_files={"train": files}, **settings)
    tiktoken.get_encoding = lambda name: load_tokenizer(options.tokenizer)
    clock = Clock()
    runpy.run_path(str(copy), run_name="__main__")
    measured = clock.read()
    tokens = sum((options.folder / f"{split}.bin").stat().st_size // 2 for split in ("train", "val"))
    workers = cpu_count() if kind == "tuned" else 8
    return {**measured, "workers": workers, "tokens": tokens}


def same_tokens(ours: Path, theirs: Path) -> dict[str, bool]:
    """Compare the tokens: validation in order, training as a set of documents, which nanoGPT shuffles."""
    (directory,) = (path.parent for path in ours.glob("*/manifest.json"))
    corpus = Corpus(directory)
    splits = {name: np.fromfile(theirs / f"{name}.bin", np.uint16) for name in ("train", "val")}

    def documents(tokens: np.ndarray) -> list[bytes]:
        ends = np.flatnonzero(tokens == corpus.eot_token)
        return sorted(part.astype(np.uint16).tobytes() for part in np.split(tokens, ends + 1))

    train = corpus.train.read(0, corpus.train.tokens)
    return {
        "val, token for token": bool(np.array_equal(corpus.val.read(0, corpus.val.tokens), splits["val"])),
        "train, document for document": documents(train) == documents(splits["train"]),
    }


def make_parquet(folder: Path, text_bytes: int) -> Path:
    """Write installed Python source as parquet files shaped like OpenWebText's."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True)
    texts, size = [], 0
    paths = sysconfig.get_paths()
    # the folders in site-packages one by one: the folder itself is left out of Python source
    packages = (sorted(Path(folder).iterdir()) for folder in {paths["purelib"], paths["platlib"]})
    for root in (paths["stdlib"], *(str(path) for each in packages for path in each if path.is_dir())):
        if size >= text_bytes:
            break
        if any(Path(root).rglob("*.py")):
            for path in PythonSource((root,)).paths():
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
                size += path.stat().st_size
    each = -(-len(texts) // _FILES)
    for index in range(_FILES):
        table = pyarrow.table({"text": texts[index * each : (index + 1) * each]})
        pyarrow.parquet.write_table(table, folder / f"{index:05d}.parquet", row_group_size=_ROWS_PER_GROUP)
    return folder
