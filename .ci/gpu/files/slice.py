"""A part of an experiment, everything else as the experiment has it; merge.py joins parts.

    python slice.py reproduce|benchmarks EXPERIMENT [--select key=a,b ...] [--only key=a,b ...] [setting=value ...]

--select: the part of the settings that is run. The document records the whole settings, as a cut run's would.
--only: samples with another value at this coordinate are left to another part.
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, os.getcwd())
if not os.environ.get("CUDA_VISIBLE_DEVICES"):
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from benchmarks.__main__ import BENCHMARKS
from reproduce import fleet, parallel_runs
from reproduce.experiment import EXPERIMENTS, parse_settings
from reproduce.plan import Step

Only = dict[str, tuple[str, ...]]


def listed(words: list[str]) -> Only:
    return {key: tuple(values.split(",")) for key, values in (word.split("=", 1) for word in words)}


@dataclass(frozen=True)
class Slice(parallel_runs.Call):
    """A call to which what another part has is as if it had been refused."""

    only: Only = field(default_factory=dict)

    def store(self, *arguments, **how):
        store = super().store(*arguments, **how)
        found = store.find

        def find(**where):
            elsewhere = any(
                key in where and str(where[key]) not in values for key, values in self.only.items()
            )
            return {**where, "refused": "in another part"} if elsewhere else found(**where)

        store.find = find
        return store


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", choices=("reproduce", "benchmarks"))
    parser.add_argument("name")
    parser.add_argument("settings", nargs="*", metavar="setting=value")
    parser.add_argument("--select", nargs="+", default=[])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--processes", nargs="+", type=int, help="which; default: all that the settings name")
    parser.add_argument("--seconds", type=float, default=float(os.environ["JOB_LIMIT"]) - 40)
    parser.add_argument("--compilers", type=int, default=4, help="processes that compile first")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--results", type=Path, default=Path("results"))
    given = parser.parse_intermixed_args()
    end = time.monotonic() + given.seconds
    experiment = (EXPERIMENTS if given.package == "reproduce" else BENCHMARKS)[given.name]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    default = experiment.module.TINY if given.tiny else experiment.module.Settings()
    settings = parse_settings(default, given.settings)
    chosen = {}
    for key, values in listed(given.select).items():
        known = {str(each): each for each in getattr(settings, key)}
        chosen[key] = tuple(known[each] for each in values if each in known)
        if not given.tiny and len(chosen[key]) < len(values):
            sys.exit(f"{key}={','.join(values)} is not among {', '.join(known)}")
    selected = replace(settings, **{key: values for key, values in chosen.items() if values})
    only = {} if given.tiny else listed(given.only)
    count = getattr(settings, "processes", 1)
    processes = [each for each in given.processes or range(count) if each < count]
    call = Slice(given.results, given.tiny, {given.name: given.settings}, deadline=end, only=only)
    plan = [Step(experiment, settings, selected, each, count, None, 0.0) for each in processes]
    lost = []
    with tempfile.TemporaryDirectory() as folder:
        if experiment.compiles and device.type == "cuda" and given.compilers:
            jobs = [
                fleet.Job(
                    f"compiling {n}",
                    parallel_runs.compile_share,
                    (plan[:1], call, n, given.compilers),
                    Path(folder, f"c{n}"),
                )
                for n in range(given.compilers)
            ]
            print(
                "compiled:", *(state for _, state in fleet.run(jobs, [device] * len(jobs), end)), flush=True
            )
        for step in plan:  # one after the other, each in a process of its own
            log = Path(folder, str(step.process))
            follow = fleet.Follow(given.name, log)
            job = fleet.Job(step.name, parallel_runs._measure, (step, call), log, None, follow)
            lost += [each.name for each, state in fleet.run([job], [device], end + 10) if state != fleet.DONE]
    print("not whole:", *lost or ["nothing"], flush=True)
    return len(lost)


if __name__ == "__main__":
    sys.exit(main())
