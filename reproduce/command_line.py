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
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from training.config import is_users_mistake, one_line_errors

from . import tables
from .common import ReproduceError
from .experiment import Experiment, OutOfTime, parse_settings
from .plan import Step, missing, shown, steps
from .plots import can_draw
from .results import Store

if TYPE_CHECKING:
    import torch

    from .parallel_runs import Call

RESULTS, TINY_RESULTS = "results", "runs/tiny"
OUT_OF_TIME = 75  # exit status when the budget ran out first: EX_TEMPFAIL, a temporary failure, in sysexits.h
WORTH = "; the figures of --tiny, and verdicts on them, mean nothing"
RESERVED = 0.95  # the share of a budget in which samples are started


@dataclass(frozen=True)
class Program:
    """A package that is run as `python -m NAME`.

    Attributes:
        tools: subcommands that are not experiments: name -> (module with main(argv), what it does).
    """

    name: str
    experiments: dict[str, Experiment]
    tools: dict[str, tuple[str, str]]


def run(program: Program, argv: list[str]) -> int:
    """Run the command line and return the exit status."""
    try:
        if not argv:
            print(listing(program))
            return 0
        if argv[0] in program.tools:
            return importlib.import_module(program.tools[argv[0]][0]).main(argv[1:])
        return _measure(program, _parser(program).parse_intermixed_args(argv))
    except ValueError as error:
        if not is_users_mistake(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if "." in error.name:  # a part of what is there
            raise
        print(f"error: not installed: {error.name} (pip install -r requirements.txt)", file=sys.stderr)
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
        f"{start} all --budget 10m      on all GPUs, first what README shows; continues where it stopped",
        f"{start} NAME NAME ... --plan  what is left to measure, and how long it takes",
        *(f"{start} {name:22}{what}" for name, (_, what) in program.tools.items()),
        "",
        "takes: on one H100, about."
        + " needs cpu: without a GPU, a CPU counts what it can."
        * any(each.needs == "cpu" for each in experiments),
        "--tiny runs any of them on any machine as a smoke test, in seconds, or minutes if it trains; "
        "its figures mean nothing.",
    ]
    return "\n".join(lines)


def _parser(program: Program) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {program.name}",
        description=listing(program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="+", metavar="NAME or key=value", help="experiments, or all; settings")
    parser.add_argument("--tiny", action="store_true", help="a smoke test; the figures mean nothing")
    parser.add_argument("--device", default="auto", help="cuda: all GPUs; cuda:1; cpu; default: cuda, or cpu")
    parser.add_argument(
        "--budget", type=_seconds, metavar="10m", help="stop after this time; run again to continue"
    )
    parser.add_argument("--again", action="store_true", help="measure again, even if results/ has it already")
    parser.add_argument("--results", type=Path, help=f"default: {RESULTS}; with --tiny {TINY_RESULTS}")
    parser.add_argument("--plan", action="store_true", help="say what is left to measure, and stop")
    return parser


def _seconds(text: str) -> float:
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(f"(?:{number}h)?(?:{number}m)?(?:{number}s?)?", text)
    hours, minutes, seconds = (float(part or 0) for part in match.groups()) if match else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if not total:
        raise argparse.ArgumentTypeError(f"{text} is not a duration above 0; write 90s, 9m30s or 1h")
    return total


def _measure(program: Program, arguments: argparse.Namespace) -> int:
    """Measure what is missing of the experiments named, and print what is known of them."""
    from training.distributed import resolve_device

    from .parallel_runs import Call  # these import torch

    began, tiny = time.monotonic(), arguments.tiny
    overrides = _chosen(program, arguments.words, tiny)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler logs to stderr whenever it starts
    device = resolve_device(arguments.device, "--device ")
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported: our kernels on a CPU
    devices = _devices(arguments.device, device)
    chosen = _able([program.experiments[name] for name in overrides], device, len(devices), tiny)
    call = Call(arguments.results or Path(TINY_RESULTS if tiny else RESULTS), tiny, overrides)
    plan: list[Step] = []
    unfinished: dict[str, Store] = {}
    for each in chosen:
        module = each.module
        defaults, needed = module.TINY if tiny else module.Settings(), getattr(module, "NEEDED", ())
        settings = parse_settings(defaults, overrides[each.name], needed)
        store = call.store(each, settings, device)
        if arguments.again:
            store.forget()
        if store.finished:
            if len(chosen) == 1 and not arguments.plan:
                _show_verdicts(store)
            done = f"{each.name}: already done with the same code: {store.complete} (--again repeats it)"
            print(done + WORTH * tiny)
            continue
        unfinished[each.name] = store
        plan += steps(store)
    plan.sort(key=lambda each: (each.experiment.alone, each.selected == each.settings))  # README's first
    if len(plan) > 1 or (plan and arguments.plan):
        print(shown(plan, devices), flush=True)
    if arguments.plan:
        return 0
    for store in unfinished.values() if arguments.again else ():
        store.write(store.partial)
    end = began + arguments.budget if arguments.budget else None
    cut, statuses = _run(plan, devices, call, end, arguments)
    late = end is not None and time.monotonic() >= began + RESERVED * arguments.budget
    late |= len(plan) == 1 and bool(cut)  # which says so itself
    for name in [each for each in unfinished if each not in statuses]:
        store = call.store(program.experiments[name], unfinished[name].settings, device, retry=[])
        whole = not missing(store, store.settings) if store.experiment.seconds else name not in cut
        statuses[name] = _conclude(store, whole, late)
        if store.document["samples"] and (whole or len(chosen) == 1):
            _show(store)
    return max(statuses.values(), default=0)


def _run(
    plan: list[Step],
    devices: list[torch.device],
    call: Call,
    end: float | None,
    arguments: argparse.Namespace,
) -> tuple[set[str], dict[str, int]]:
    """The experiments that did not come to their end, and the exit statuses of those that ran on their own."""
    import torch

    from .parallel_runs import compile_all, measure, measure_all

    if len(plan) == 1:
        try:
            measure(devices, plan[0], replace(call, deadline=end))
        except OutOfTime:
            return {plan[0].experiment.name}, {}
        return set(), {}
    if end is not None:  # a running sample is not cut before the end
        call = replace(call, deadline=end - (1 - RESERVED) * arguments.budget)
    alone = {step.experiment.name: step.experiment for step in plan if step.experiment.alone}
    if len({step.experiment.name for step in plan}) == 1 and alone:
        sees_all = devices[0].type == "cuda" and plan[0].experiment.gpus > 1
        return measure_all(plan, [torch.device("cuda")] if sees_all else devices[:1], call, end), {}
    shared = [step for step in plan if not step.experiment.alone]
    compile_all(shared, devices, call, end)
    cut = measure_all(shared, devices, call, end)
    return cut, {name: _start(each, arguments, end) for name, each in alone.items()}


def _conclude(store: Store, whole: bool, late: bool) -> int:
    """Finish a document that is whole, and return the exit status."""
    if whole:
        store.finish()
        return int(any(sample.get("failed") for sample in store.document["samples"]))
    done = f"what is done is in {store.partial}, and " if store.document["samples"] else ""
    why = "out of time" if late else "not finished"
    print(f"{store.experiment.name}: {why}; {done}the same command continues")
    return OUT_OF_TIME if late else 1


def _show(store: Store) -> None:
    """Print and draw the document."""
    module, document = store.experiment.module, store.document
    print(getattr(module, "table", tables.table)(document))
    _show_verdicts(store)
    if can_draw():
        module.draw(document, store.picture)
    else:
        print("no picture: matplotlib is not installed (the report draws it on a machine that has it)")
    name, seconds = store.experiment.name, document["seconds"]
    print(f"{name}: {document['state']} in {seconds:.0f} s, {store.folder}" + WORTH * document["tiny"])


def _show_verdicts(store: Store) -> None:
    """Print what the document's figures say of the claims, if it tests any."""
    judge = getattr(store.experiment.module, "judge", None)
    if judge and (found := tables.verdicts(judge(store.document))):
        print(found)


def _chosen(program: Program, words: list[str], tiny: bool) -> dict[str, list[str]]:
    """The experiments named, `all` for every one, with their settings: of several, written NAME.key=value."""
    names = [word for word in words if "=" not in word]
    if not names:
        raise ReproduceError(f"{words[0]}: name an experiment first")
    everything = names[0] == "all"
    if everything:
        names = list(program.experiments)
    if names[0] not in program.experiments:
        known = [*program.experiments, "all", *program.tools]
        near = "".join(f"; did you mean {each}?" for each in get_close_matches(names[0], known, n=1))
        raise ReproduceError(f"there is no experiment {names[0]}; choose one of {', '.join(known)}{near}")
    for name in names[1:]:
        if name not in program.experiments:
            raise ReproduceError(f"{name} is not key=value, nor an experiment")
    chosen: dict[str, list[str]] = {name: [] for name in names}
    for word in (word for word in words if "=" in word):
        name, dot, setting = word.partition(".")
        if len(chosen) == 1:
            chosen[names[0]].append(word)
        elif dot and name in chosen:
            chosen[name].append(setting)
        else:
            raise ReproduceError(f"{word}: settings apply to one experiment: write NAME.{word}")
    for name in names if everything and not tiny else ():
        wants = program.experiments[name].wants
        if wants and not any(word.startswith(f"{wants}=") for word in chosen[name]):
            print(f"left out, as it takes {wants} of your own: {name} (name it with {name}.{wants}=...)")
            del chosen[name]
    return chosen


def _able(chosen: list[Experiment], device: torch.device, gpus: int, tiny: bool) -> list[Experiment]:
    """Those that can run here; what is left out is said, or, where nothing is left, refused."""
    from kernels.versions import kernels_lack, no_cuda  # the experiments can be listed without torch

    ours = [each.name for each in chosen if any(name.startswith("kernels") for name in each.measures)]
    if ours and (lacking := kernels_lack()):
        raise ReproduceError(f"{ours[0]} measures our kernels, which need {lacking}")
    if tiny:
        return chosen
    if device.type == "cpu":
        able = [each for each in chosen if each.needs == "cpu"]
        if not able:
            because = f": {lacking}" if (lacking := no_cuda()) else ""
            small = "--tiny runs its small form here, as a smoke test"
            raise ReproduceError(f"{chosen[0].name} needs a CUDA device{because}; {small}")
        if len(able) < len(chosen):
            print(f"no CUDA device here, so these alone: {', '.join(each.name for each in able)}")
        return able
    able = [each for each in chosen if each.gpus <= gpus or len(chosen) == 1]
    if more := [each.name for each in chosen if each not in able]:
        print(f"left out, as they take more GPUs than there are: {', '.join(more)}")
    return able


def _devices(name: str, device: torch.device) -> list[torch.device]:
    """All GPUs, unless one was named."""
    import torch

    if device.type != "cuda" or ":" in name:
        return [device]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _start(experiment: Experiment, arguments: argparse.Namespace, end: float | None) -> int:
    """Run an experiment as its own command, with nothing else at the same time; its exit status."""
    left = end - time.monotonic() if end else None
    if left is not None and left < 5:
        print(f"{experiment.name}: out of time; the same command continues")
        return OUT_OF_TIME
    own = [word.partition(".")[2] for word in arguments.words if word.startswith(f"{experiment.name}.")]
    command = [sys.executable, "-m", experiment.package, experiment.name, *own, "--device", arguments.device]
    command += ["--tiny"] * arguments.tiny + ["--again"] * arguments.again
    command += ["--budget", f"{left:.0f}s"] if left else []
    command += ["--results", str(arguments.results)] if arguments.results else []
    print(f"\n== {experiment.name}", flush=True)
    return subprocess.run(command, check=False).returncode


def start(program: Program) -> None:
    """What `__main__` does: run the command line of this process, and exit with its status."""
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, as it ends cat
    with one_line_errors():
        sys.exit(run(program, sys.argv[1:]))
