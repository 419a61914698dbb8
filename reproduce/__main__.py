"""`python -m reproduce`: list, run and report the experiments, or compare runs."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from training.config import is_users_mistake

from .experiment import (
    EXPERIMENTS,
    Experiment,
    Options,
    OutOfTime,
    ReproduceError,
    find_experiment,
    parse_settings,
)
from .plots import can_draw
from .results import Store, read

if TYPE_CHECKING:
    import torch

# Subcommands that are not experiments; each is a module with main(argv).
TOOLS = {
    "report": (".report", "one page, Markdown and HTML, from results/: the papers' figures beside ours"),
    "compare": (".comparison.compare", "RUNS...: training runs side by side, a table and a page with plots"),
    "milestones": (
        ".comparison.milestones",
        "RUN: a run's curve against the paper's, milestone by milestone",
    ),
    "workspace": (".comparison.workspace", "ENTITY/PROJECT: the same view as a wandb workspace"),
}
RESULTS, TINY_RESULTS = "results", "runs/tiny"
OUT_OF_TIME = 75  # exit status when the budget ran out first: EX_TEMPFAIL, a temporary failure, in sysexits.h


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv:
            print(listing())
            return 0
        if argv[0] in TOOLS:
            return importlib.import_module(TOOLS[argv[0]][0], __package__).main(argv[1:])
        arguments = _parser().parse_intermixed_args(argv)
        if arguments.name == "all":
            return _run_all(arguments)
        return _run_one(arguments, argv)
    except ValueError as error:
        if not is_users_mistake(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130


def listing() -> str:
    """The text that lists the experiments and the other subcommands."""
    experiments = EXPERIMENTS.values()
    width = max(len(" ".join(each.claims)) for each in experiments) + 2
    lines = [f"{'experiment':12}{'claims':{width}}{'needs':7}{'takes':>7}  what"]
    for each in experiments:
        claims = " ".join(each.claims)
        lines.append(f"{each.name:12}{claims:{width}}{each.needs:7}{_takes(each):>7}  {each.title}")
    lines += [
        "",
        "python -m reproduce NAME [key=value ...] [--tiny] [--device cpu] [--again] [--budget 5m]",
        "python -m reproduce all --budget 10m      as many as fit, in this order; continues where it stopped",
        *(f"python -m reproduce {name:22}{what}" for name, (_, what) in TOOLS.items()),
        "",
        "takes: on one GPU; with ~, an estimate for an H200. needs cpu: without a GPU, a CPU counts what it can.",
        "--tiny runs any of them on any machine in seconds, as a smoke test; its figures mean nothing.",
    ]
    return "\n".join(lines)


def _takes(experiment: Experiment) -> str:
    """How long a GPU took with the default settings, according to results/; otherwise an estimate."""
    estimate = experiment.minutes
    for path in sorted(Path(RESULTS).glob(f"*/{experiment.name}.json")):
        document = None if path.parent.name == "cpu" else read(path)
        if not document:
            continue
        minutes = document["seconds"] / 60
        if not any("=" in word and word[0] != "-" for word in document["command"]):
            return f"{minutes:.1f}min"
        estimate = max(estimate, minutes)  # other settings may have skipped most of the work
    return f"~{estimate:.2g}min"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reproduce",
        description=listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="an experiment, or all")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--tiny", action="store_true", help="seconds on a CPU; the figures mean nothing")
    parser.add_argument(
        "--device", default="auto", help="cuda, cpu, cuda:1; default: cuda where there is one"
    )
    parser.add_argument(
        "--budget", type=_seconds, metavar="10m", help="stop after this time; run again to continue"
    )
    parser.add_argument("--again", action="store_true", help="measure again, even if results/ has it already")
    parser.add_argument("--results", type=Path, help=f"default: {RESULTS}; with --tiny {TINY_RESULTS}")
    return parser


def _seconds(text: str) -> float:
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(f"(?:{number}h)?(?:{number}m)?(?:{number}s?)?", text)
    hours, minutes, seconds = (float(part or 0) for part in match.groups()) if match else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if not total:
        raise argparse.ArgumentTypeError(f"{text} is not a duration above 0; write 90s, 9m30s or 1h")
    return total


def _run_one(arguments: argparse.Namespace, command: list[str]) -> int:
    experiment = find_experiment(arguments.name, ["all", *TOOLS])
    deadline = time.monotonic() + arguments.budget if arguments.budget else None

    device = _device(arguments.device)
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported: our kernels on a CPU
        if experiment.needs == "cuda" and not arguments.tiny:
            raise ReproduceError(
                f"{experiment.name} needs a CUDA device; --tiny runs its small form here, as a smoke test"
            )

    module = experiment.module
    defaults = module.TINY if arguments.tiny else module.Settings()
    settings = parse_settings(defaults, arguments.overrides)
    directory = arguments.results or Path(TINY_RESULTS if arguments.tiny else RESULTS)
    store = Store(
        directory,
        experiment,
        device=device,
        settings=settings,
        tiny=arguments.tiny,
        command=command,
        deadline=deadline,
        again=arguments.again,
    )
    if store.finished:
        print(f"{experiment.name}: already done with the same code: {store.complete} (--again repeats it)")
        return 0
    status = 0
    try:
        module.run(Options(device, arguments.tiny, settings, store.sample, store.find, deadline))
        store.finish()
    except OutOfTime:
        status = OUT_OF_TIME
        print(
            f"{experiment.name}: out of time; what is done is in {store.partial}, and the same command continues"
        )
    print(module.table(store.document))
    if can_draw():
        module.draw(store.document, store.picture)
    else:
        print("no picture: matplotlib is not installed (the report draws it on a machine that has it)")
    print(
        f"{experiment.name}: {store.document['state']} in {store.document['seconds']:.0f} s, {store.folder}"
    )
    return status or (1 if store.failures else 0)


def _device(name: str) -> torch.device:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler logs to stderr whenever it starts
    from training.distributed import resolve_device

    return resolve_device(name, "--device ")


def _run_all(arguments: argparse.Namespace) -> int:
    """Run each experiment in its own process, so that one that breaks the device does not stop the others."""
    if arguments.overrides:
        raise ReproduceError(
            f"{arguments.overrides[0]}: settings apply to one experiment: name it instead of all"
        )
    # A running sample is never interrupted, so a twentieth of the budget is reserved for one to finish.
    end = time.monotonic() + 0.95 * arguments.budget if arguments.budget else None
    chosen = list(EXPERIMENTS.values())
    if _device(arguments.device).type == "cpu" and not arguments.tiny:
        chosen = [each for each in chosen if each.needs == "cpu"]
        print(f"no CUDA device here, so these alone: {', '.join(each.name for each in chosen)}")
    # First round: each gets its own share of the time. Second: what is left goes to those unfinished, in this order.
    statuses = {each.name: OUT_OF_TIME for each in chosen}
    for shares in (True, False):
        for each in chosen:
            left = end - time.monotonic() if end else None
            if statuses[each.name] != OUT_OF_TIME:
                continue
            if left is not None and left < 5:
                continue
            seconds = min(left, 60 * each.minutes) if left and shares else left
            statuses[each.name] = _start(each.name, arguments, seconds, again=arguments.again and shares)
    if unfinished := ", ".join(name for name, status in statuses.items() if status == OUT_OF_TIME):
        print(f"the budget is spent; the same command continues with {unfinished}")
    return int(any(status not in (0, OUT_OF_TIME) for status in statuses.values()))


def _start(name: str, arguments: argparse.Namespace, seconds: float | None, again: bool) -> int:
    command = [sys.executable, "-m", "reproduce", name, "--device", arguments.device]
    command += ["--tiny"] * arguments.tiny + ["--again"] * again
    command += ["--budget", f"{seconds:.0f}s"] if seconds else []
    command += ["--results", str(arguments.results)] if arguments.results else []
    print(f"\n== {name}", flush=True)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, as it ends cat
    sys.exit(main())
