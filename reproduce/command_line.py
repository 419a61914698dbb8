"""The command line of a list of experiments: list them, run one or all, or start a tool that is none."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config import is_users_mistake

from . import tables
from .experiment import Experiment, Options, OutOfTime, ReproduceError, find_experiment, parse_settings
from .plots import can_draw
from .results import Store

if TYPE_CHECKING:
    import torch

RESULTS, TINY_RESULTS = "results", "runs/tiny"
OUT_OF_TIME = 75  # exit status when the budget ran out first: EX_TEMPFAIL, a temporary failure, in sysexits.h
SOME_FAILED = (
    65  # exit status of one of several processes whose samples are whole but for failures: EX_DATAERR
)


@dataclass(frozen=True)
class Program:
    """A package that is run as `python -m NAME`.

    Attributes:
        tools: subcommands that are not experiments: name -> (module with main(argv), what it does).
    """

    name: str
    experiments: dict[str, Experiment]
    tools: dict[str, tuple[str, str]]

    @property
    def others(self) -> list[str]:
        return ["all", *self.tools]


def run(program: Program, argv: list[str]) -> int:
    """Run the command line and return the exit status."""
    try:
        if not argv:
            print(listing(program))
            return 0
        if argv[0] in program.tools:
            return importlib.import_module(program.tools[argv[0]][0]).main(argv[1:])
        arguments = _parser(program).parse_intermixed_args(argv)
        if arguments.name == "all":
            return _run_all(program, arguments)
        return _run_one(program, arguments, argv)
    except ValueError as error:
        if not is_users_mistake(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130


def listing(program: Program) -> str:
    """The text that lists the experiments and the other subcommands."""
    experiments, start = program.experiments.values(), f"python -m {program.name}"
    width = max(len(" ".join(each.claims)) for each in experiments) + 2
    lines = [f"{'experiment':12}{'claims' if width > 2 else '':{width}}{'needs':7}{'takes':>7}  what"]
    for each in experiments:
        claims = " ".join(each.claims)
        lines.append(f"{each.name:12}{claims:{width}}{each.needs:7}{each.minutes:>4.3g}min  {each.title}")
    lines += [
        "",
        f"{start} NAME [key=value ...] [--tiny] [--device cpu] [--again] [--budget 5m]",
        f"{start} all --budget 10m      as many as fit, in this order; continues where it stopped",
        *(f"{start} {name:22}{what}" for name, (_, what) in program.tools.items()),
        "",
        "takes: on an H200, about. needs cpu: without a GPU, a CPU counts what it can.",
        "--tiny runs any of them on any machine in seconds, as a smoke test; its figures mean nothing.",
    ]
    return "\n".join(lines)


def _parser(program: Program) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {program.name}",
        description=listing(program),
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
    # Which one of the settings' `processes` this is.
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    return parser


def _seconds(text: str) -> float:
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(f"(?:{number}h)?(?:{number}m)?(?:{number}s?)?", text)
    hours, minutes, seconds = (float(part or 0) for part in match.groups()) if match else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if not total:
        raise argparse.ArgumentTypeError(f"{text} is not a duration above 0; write 90s, 9m30s or 1h")
    return total


def _run_one(program: Program, arguments: argparse.Namespace, command: list[str]) -> int:
    experiment = find_experiment(arguments.name, program.experiments, program.others)
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
    # Counts are the same in every process.
    processes = getattr(settings, "processes", 1) if device.type == "cuda" or arguments.tiny else 1
    process = arguments.process or 0
    store = Store(
        directory,
        experiment,
        device=device,
        settings=settings,
        tiny=arguments.tiny,
        command=[word for word in command if not word.startswith("--process=")],
        deadline=deadline,
        again=arguments.again,
        retry=process == 0,
    )
    if store.finished:
        print(f"{experiment.name}: already done with the same code: {store.complete} (--again repeats it)")
        return 0
    if processes > 1 and arguments.process is None:
        return _run_processes(experiment, arguments, processes, deadline)
    return _measure(store, settings, device, deadline, process, last=process == processes - 1)


def _run_processes(
    experiment: Experiment, arguments: argparse.Namespace, processes: int, deadline: float | None
) -> int:
    """Run the experiment in several processes, one after another; each adds its times to the same document."""
    failed = 0
    for process in range(processes):
        seconds = max(1.0, deadline - time.monotonic()) if deadline else None
        again = arguments.again and process == 0
        status = _start(experiment, arguments, seconds, again, [*arguments.overrides, f"--process={process}"])
        if status not in (0, SOME_FAILED):
            return status
        failed = failed or status
    return int(failed != 0)


def _measure(
    store: Store, settings: Any, device: torch.device, deadline: float | None, process: int, last: bool
) -> int:
    """Run the experiment in this process; the last one prints and draws what they found."""
    experiment, module, status = store.experiment, store.experiment.module, 0
    try:
        module.run(
            Options(device, store.document["tiny"], settings, store.sample, process, store.find, deadline)
        )
        if not last:
            return SOME_FAILED if store.failures else 0
        store.finish()
    except OutOfTime:
        status = OUT_OF_TIME
        print(
            f"{experiment.name}: out of time; what is done is in {store.partial}, and the same command continues"
        )
    print(getattr(module, "table", tables.table)(store.document))
    print(tables.verdicts(getattr(module, "judge", lambda results: [])(store.document)))
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


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _run_all(program: Program, arguments: argparse.Namespace) -> int:
    """Run each experiment in its own process, so that one that breaks the device does not stop the others."""
    if arguments.overrides:
        raise ReproduceError(
            f"{arguments.overrides[0]}: settings apply to one experiment: name it instead of all"
        )
    # A running sample is never interrupted, so a twentieth of the budget is reserved for one to finish.
    end = time.monotonic() + 0.95 * arguments.budget if arguments.budget else None
    chosen = list(program.experiments.values())
    device = _device(arguments.device)
    if device.type == "cpu" and not arguments.tiny:
        chosen = [each for each in chosen if each.needs == "cpu"]
        print(f"no CUDA device here, so these alone: {', '.join(each.name for each in chosen)}")
    elif not arguments.tiny and (more := [each.name for each in chosen if each.gpus > _count_gpus()]):
        chosen = [each for each in chosen if each.name not in more]
        print(f"left out, as they take more GPUs than there are: {', '.join(more)}")
    # First round: each gets its own share of the time. Second: what is left goes to those unfinished, in this order.
    statuses = {each.name: OUT_OF_TIME for each in chosen}
    for shares in (True, False):
        for each in chosen:
            left = end - time.monotonic() if end else None
            if statuses[each.name] != OUT_OF_TIME:
                continue
            if left is not None and left < 5:
                continue
            share = each.minutes / sum(other.minutes for other in chosen)
            seconds = min(left, share * arguments.budget) if left and shares else left
            statuses[each.name] = _start(each, arguments, seconds, arguments.again and shares)
    if unfinished := ", ".join(name for name, status in statuses.items() if status == OUT_OF_TIME):
        print(f"the budget is spent; the same command continues with {unfinished}")
    return int(any(status not in (0, OUT_OF_TIME) for status in statuses.values()))


def _start(
    experiment: Experiment,
    arguments: argparse.Namespace,
    seconds: float | None,
    again: bool,
    more: Sequence[str] = (),
) -> int:
    command = [sys.executable, "-m", experiment.package, experiment.name, *more, "--device", arguments.device]
    command += ["--tiny"] * arguments.tiny + ["--again"] * again
    command += ["--budget", f"{seconds:.0f}s"] if seconds else []
    command += ["--results", str(arguments.results)] if arguments.results else []
    if not more:
        print(f"\n== {experiment.name}", flush=True)
    return subprocess.run(command, check=False).returncode


def start(program: Program) -> None:
    """What `__main__` does: run the command line of this process, and exit with its status."""
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, as it ends cat
    sys.exit(run(program, sys.argv[1:]))
