"""The list of experiments, the interface each one implements, and the helpers they share.

An experiment is an entry in `EXPERIMENTS` and a module `reproduce/<name>.py` that defines

    Settings    a frozen dataclass: what `key=value` on the command line may change, with the defaults
    TINY        the Settings for `--tiny`: takes seconds on a CPU and executes every line of the experiment
    SELECTION   optional: names of Settings that choose samples and change none: runs with other values add samples
    NEEDED      optional: names of Settings that are lists and must not be empty
    run(options)                 measures; every figure goes through `options.sample` or, if it is a time,
                                 `options.timed`, so a killed run can resume
    table(results) -> str        optional: what is printed at the end instead of all samples (`tables.py`)
    draw(results, path)          one picture of the results; path ends in .svg or .png
    judge(results) -> list[Verdict]

`results` is the document in results/<device>/<name>.json (see `results.py`). This module does not import torch, so
that `python -m reproduce` lists the experiments at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from .claims import CLAIMS
from .common import ReproduceError

if TYPE_CHECKING:
    import torch

    from .timing import Times

Results = dict[str, Any]
Sample = dict[str, Any]

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
NOT_COMPARABLE, NOT_MEASURED = "not comparable", "not measured"
STATUSES = (REPRODUCED, NOT_REPRODUCED, NOT_COMPARABLE, NOT_MEASURED)
NOT_STATED = "not stated"


class OutOfTime(Exception):
    """The time budget of the command is spent; the samples measured so far are kept."""


@dataclass(frozen=True)
class Timing:
    """Settings of every experiment that times; its Settings inherit them."""

    # Processes that each time everything, on one GPU or several of a host. Stated: their median and range.
    processes: int = 3
    # The least number of rounds of each contender in a process.
    rounds: int = 20
    # Measuring time per contender and workload in a process, after warm-up, if the rounds take less and vary.
    seconds: float = 0.15


@dataclass(frozen=True)
class Verdict:
    """One of our figures compared with a paper's claim.

    Attributes:
        claim: "C1" to "C33".
        what: the quantity, in a few words.
        paper: the paper's figure, with its unit; NOT_STATED where it has none: then it cannot be compared.
        ours: our figure, with its unit; empty when there is none.
        ratio: ours over the paper's, where both are numbers.
        status: one of STATUSES.
        why: the reason for the status, or what is missing.
        basis: where our figure comes from: "NVIDIA H200", "counted on one head", "extrapolated".
    """

    claim: str
    what: str
    paper: str
    ours: str = ""
    ratio: float | None = None
    status: str = NOT_MEASURED
    why: str = ""
    basis: str = ""


@dataclass(frozen=True)
class Experiment:
    """An entry in the list of experiments; the module of the same name does the work.

    Attributes:
        name: its name on the command line.
        title: one line for the list and the report.
        needs: "cpu" if a CPU gives meaningful figures, "cuda" if only its --tiny form runs without a GPU.
        minutes: about what it takes on one GPU in all its processes.
        measures: names of the code that its figures depend on besides its own `run`, as `depends.py` takes them.
        package: the package that its module is in.
        gpus: the least number of GPUs.
        alone: nothing else may run at the same time: it times the host, or takes all GPUs itself.
        apart: it measures in processes of its own, so a CUDA error there breaks no device for later samples.
        seconds: kind of sample -> about the seconds that one takes on an H100 once its kernels are compiled, averaged
            also over those that are refused. With it `plan.py` finds what is left to measure, and for how long;
            without it, the experiment is planned as a whole, by `minutes`.
        compiles: coordinates of samples that several processes measure first, only to fill the compilers' caches.
        first: setting -> its values that README and its picture show, which are measured before all others.
        wants: a setting that has to be given; without it `all` leaves the experiment out.
    """

    name: str
    title: str
    minutes: float
    measures: tuple[str, ...]
    needs: str = "cuda"
    package: str = "reproduce"
    gpus: int = 1
    alone: bool = False
    apart: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    compiles: tuple[Sample, ...] = ()
    first: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    wants: str = ""

    @property
    def claims(self) -> list[str]:
        """The claims that `claims.py` says it measures."""
        return [name for name, claim in CLAIMS.items() if claim.experiment == self.name]

    @property
    def path(self) -> str:
        return f"{self.package}.{self.name}"

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(self.path)


# Values of `measures`: the code that figures depend on; see `depends.py`.
ATTENTIONS = (
    *("kernels.flash", "kernels/flash/portable/measured/sm_90.json"),  # the measured times decide its tiles
    *("kernels.flash.hopper.spec.specify", "kernels.flash.hopper.backward_schedule.BLOCK_M"),  # Hopper's
    "kernels.flash.hopper.launch._prepare_backward",  # its grid
    "kernels.flash.hopper.launch.BESIDE",  # warps
    *("kernels.flash.hopper.groups.of_forward", "kernels.flash.hopper.groups.of_backward"),
    *("kernels.flash.hopper.groups.of_dkdv", "kernels.flash.hopper.groups.of_dq"),
    "kernels.flash.faster.FASTER",  # where `auto` takes them
    *("kernels.history", "kernels.history.flash1.FORWARD", "kernels.history.flash1.BACKWARD"),
    *("kernels.history.chunked.chunked_attention", "kernels.naive.naive_attention"),
    *("kernels.library.sdpa", "kernels.library.flex"),
)
_STEP = (
    *("kernels", *ATTENTIONS, "model.gpt.GPT", "training.optimizer.build_optimizer"),
    *("training.optimizer.update", "training.precision.compiled", "training.cuda_graphs.compiled_to_graphs"),
)
_RUN = (
    *(*_STEP, "training.evaluation.evaluate", "training.schedule.learning_rate"),
    *("training.seeds.stream_seed", "data.loader.Batches", "data.permutation.Permutation"),
)
_RING = (
    *(*ATTENTIONS, "kernels.ring.passes.forward", "kernels.ring.passes.backward"),
    *("kernels.ring.blocks.Layout", "kernels.ring.group.RingGroup"),
)
# The most useful first: `all` runs them in this order, those that need all GPUs at the end.
EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        Experiment(
            name="attention",
            title="time and peak memory of attention against length, every backend",
            needs="cpu",
            minutes=20.0,
            measures=(*ATTENTIONS, "kernels.history.stored_p.FORWARD", "kernels.history.stored_p.BACKWARD"),
            seconds={"check": 0.5, "memory": 0.15, "time": 5.0},
            compiles=({"kind": "check"}, {"kind": "memory"}),
            first={"figures": ("gpt2", "fa2")},
        ),
        Experiment(
            name="traffic",
            title="FLOPs and memory traffic, standard against flash, and the tile size",
            needs="cpu",
            minutes=2.0,
            measures=ATTENTIONS,
            seconds={"check": 0.5, "time": 6.0, "passes": 2.0, "tiles": 1.0, "ncu": 6.0},
            compiles=({"kind": "check"},),
        ),
        Experiment(
            name="numerics",
            title="errors against float64, with outliers",
            needs="cpu",
            minutes=2.0,
            measures=ATTENTIONS,
            seconds={"errors": 0.12, "outliers": 0.1, "fp8": 1.0},
            compiles=({"kind": "errors"}, {"kind": "outliers"}),
        ),
        Experiment(
            name="sparse",
            title="block-sparse attention against the share of blocks",
            needs="cpu",
            minutes=3.0,
            measures=ATTENTIONS,
            seconds={"exact": 0.5, "shares": 0.3, "butterfly": 0.5},
            compiles=({"kind": "exact"},),
        ),
        Experiment(
            name="history",
            title="the algorithms that led to flash: softmax passes, loop order, tiles, backward",
            needs="cpu",
            minutes=9.0,
            measures=ATTENTIONS,
            seconds={
                **{"check": 0.3, "order": 5.5, "ablation": 1.0, "tiles": 1.6, "programs": 2.0},
                **{"softmax": 0.4, "flash1 tiles": 6.0, "passes": 2.0, "changes": 3.0, "warps": 1.5},
            },
            compiles=({"kind": "check"},),
        ),
        Experiment(
            name="training",
            title="tokens/s and memory of GPT-2 training, attention swapped alone and the whole stack",
            minutes=55.0,
            measures=_STEP,
            seconds={"memory": 4.2, "speed": 49.0},
            compiles=({"kind": "memory", "mode": "compiled"},),
            first={"parts": ("compiled", "whole")},
        ),
        Experiment(
            name="encoders",
            title="BERT-large's step, and long-range tasks: ListOps at equal accuracy, Path-X's length",
            minutes=23.0,
            measures=_STEP,
            seconds={"bert": 35.0, "listops": 22.0, "path": 20.0, "accuracy": 110.0},
        ),
        Experiment(
            name="ring",
            title="attention of one sequence on several GPUs: time and bytes against length",
            minutes=5.0,
            measures=_RING,
            gpus=2,
            alone=True,
            apart=True,
        ),
        Experiment(
            name="perplexity",
            title="loss curves of every backend, and of longer contexts at equal tokens",
            minutes=130.0,
            measures=_RUN,
            alone=True,
            apart=True,
            wants="text",
        ),
    )
}


@dataclass
class Options:
    """What an experiment's `run` receives.

    Attributes:
        device: where to run.
        devices: for an experiment that runs on several at once: all that it may take, that one first.
        tiny: whether this is the smoke test, whose figures mean nothing.
        settings: the module's Settings with the command line's changes applied.
        sample: `sample(measure, **where)` returns the sample at the coordinates `where`. It reuses the one from an
            earlier run of the same code and settings if there is one; otherwise it calls `measure() -> dict` and
            saves the sample before returning it. The sample is {**where, **measured}. If a backend refuses, it is
            {**where, "refused": reason}; if memory runs out, {**where, "out_of_memory": True}; after any other error
            {**where, "failed": reason, "broke_device": bool}. The run then continues, unless the error broke the
            device. Raises OutOfTime when the time budget is spent; `run` must not catch it. A sample with an entry
            "partial" is measured again by the next run.
        process: which of the settings' `processes` this is, from 0 on.
        find: `find(**where)` returns the sample there if it is measured already, and None if it has to be measured.
        deadline: when the time budget is spent, on the clock of `time.monotonic`; None: never.
        say: prints a line of progress.
    """

    device: torch.device
    tiny: bool
    settings: Any
    sample: Callable[..., Sample]
    process: int = 0
    find: Callable[..., Sample | None] = lambda **where: None
    deadline: float | None = None
    say: Callable[[str], None] = print
    devices: list[torch.device] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.settings.dtype)

    def autocast(self) -> torch.autocast:
        import torch

        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32)

    def timed(self, measure: Callable[[], Sample], **where: Any) -> Sample:
        """`sample` for times: each process measures its own, so `process` is one of the coordinates."""
        return self.sample(measure, **where, process=self.process)

    def right(
        self, names: Iterable[str], check: Callable[[str], Sample], of: str = "backend", **where: Any
    ) -> list[str]:
        """The names whose `check(name)` has "passed": samples of kind "check", whose coordinate `of` is the name."""
        checks = {
            name: self.sample(partial(check, name), kind="check", **{of: name}, **where) for name in names
        }
        return [name for name, sample in checks.items() if sample.get("passed")]


def parse_settings(defaults: Any, overrides: list[str], needed: tuple[str, ...] = ()) -> Any:
    """`defaults` (a Settings) with `key=value` overrides applied, each parsed by its field's type.

    A tuple is written a,b,c; a bool, true or false. Raises ReproduceError that names the known keys or the type, or a
    tuple that is `needed` and empty.
    """
    types = get_type_hints(type(defaults))
    changes = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ReproduceError(f"{override} is not key=value")
        if key not in types:
            known = ", ".join(each.name for each in fields(defaults))
            raise ReproduceError(f"{key} is not a setting of this experiment; it has {known}")
        changes[key] = _parse(key, text, types[key])
        if key in needed and not changes[key]:
            default = ",".join(map(str, getattr(defaults, key)))
            raise ReproduceError(f"{override} names nothing to run: write one or more, like {key}={default}")
    return replace(defaults, **changes)


def _parse(key: str, text: str, kind: Any) -> Any:
    if get_origin(kind) is tuple:
        return tuple(_parse(key, each, get_args(kind)[0]) for each in text.split(",") if each)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ReproduceError(f"{key}={text}: it must be true or false")
        return text.lower() == "true"
    if "dtype" in key and text not in ("float16", "bfloat16", "float32"):
        raise ReproduceError(f"{key}={text}: it must be float16, bfloat16 or float32")
    try:
        return kind(text)
    except ValueError:
        raise ReproduceError(f"{key}={text}: it must be of type {kind.__name__}") from None


class Verdicts(list[Verdict]):
    """Verdicts as they are found; `basis` is where their figures come from, unless one names another."""

    def __init__(self, basis: str) -> None:
        super().__init__()
        self.basis = basis

    def add(
        self, claim: str, what: str, paper: str, ours: str, passed: bool | None, why: str = "",
        *, ratio: float | None = None, basis: str = "",
    ) -> None:  # fmt: skip
        """Add a figure that a paper states too. passed: whether it is reproduced; None: it cannot be compared."""
        status = {True: REPRODUCED, False: NOT_REPRODUCED, None: NOT_COMPARABLE}[passed]
        self.append(Verdict(claim, what, paper, ours, ratio, status, why, basis or self.basis))

    def times(
        self, claim: str, what: str, expected: float, ours: float | Times, passed: bool | None, why: str = "",
        *, form: str = "{:.2f}x", theirs: str = "", basis: str = "",
    ) -> None:  # fmt: skip
        """`add` for two numbers, shown in the format `form`; ours may be Times of several processes.

        theirs: shows the paper's figure, if not in that form.
        """
        several = isinstance(ours, tuple)
        median, shown = (ours.median, ours.shown(form)) if several else (ours, form.format(ours))
        paper, ratio = theirs or form.format(expected), median / expected
        self.add(claim, what, paper, shown, passed, why, ratio=ratio, basis=basis)


def pick(results: Results, **where: Any) -> list[Sample]:
    """The samples at the coordinates `where` that hold a measurement (not refused, failed or out of memory)."""
    missing = ("refused", "failed", "out_of_memory")
    return [
        sample
        for sample in results["samples"]
        if all(sample.get(key) == value for key, value in where.items())
        and not any(sample.get(key) for key in missing)
    ]
