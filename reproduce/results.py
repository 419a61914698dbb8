"""Results on disk: one JSON "document" per experiment and device. A run adds samples to one, and never joins two.

    results/<device>/<name>.json            complete: every sample asked for exists, though some may have failed
    results/<device>/<name>.partial.json    not every sample that the experiment lists exists; the next run resumes it
    results/<device>/<name>.svg             its picture

Only `.ci/gpu/merge.py` joins documents: of several processes or slices, and with --over newer points and older ones.

    version, experiment, state, tiny, device    of this format; <name>; complete or partial; --tiny; the GPU's name
    command, environment, date    of a run: of joined ones, the last, but --over keeps the older command, environment
    commit        of the code that ran; "A to B": joined, A the first and B the last
    depends       name -> hash of what the figures depend on; survives moves, renames and comments (`depends.py`)
    again         commit -> its `depends`, for the points that --over laid over older ones
    settings      the experiment's Settings, of the last run; --over adds those in its SELECTION up
    seconds, took       of all its runs; kind -> [samples, seconds to measure them], without those that --over added
    samples       a line each: `kind` and what else says which point it is, then what was measured there. In any:
      process           which of settings.processes measured it; without it, once is enough
      ms                contender -> phase -> milliseconds of each round
      late              contender -> rounds whose times may include waiting for the host (`timing.py`)
      clocks            least, median, most of clock, power, temperature; host_load before and after
      alone             contender -> its clocks, for those timed after the others, beside which they did not fit
      again, beside     the commit, if it is in the document's `again`; what else ran then (entered by hand)
      refused, out_of_memory, failed, broke_device    why there is no figure; whether later samples could not run
      partial           the step at which a training run was cut; it is measured again

Numbers have eight digits. A run resumes a partial document, or is skipped in favour of a complete one, only if
device, settings, torch and triton versions are the same and nothing it depends on has changed. Processes of one
experiment may write to its partial document at the same time.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.files import replace_file

from . import depends
from .common import ReproduceError, as_lines, rounded, writing
from .experiment import Experiment, OutOfTime, Results, Sample
from .older_code import FASTER_SINCE, Outrun

if TYPE_CHECKING:
    import torch

# Packages whose versions a document records, where they are installed.
PEERS = ("flash-attn-4", "liger-kernel", "transformers")
VERSION = 3  # of the document's format; a file of another version is skipped
# Fields that every document must have; see Store.
FIELDS = ("experiment", "state", "tiny", "device", "command", "commit", "depends", "settings", "environment")
FIELDS += ("date", "seconds", "samples")


def _installed(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def slug(device_name: str) -> str:
    """The name of a device's folder: "NVIDIA H200" -> nvidia-h200; "cpu" for every CPU, as its figures are counts."""
    return (
        "cpu" if device_name.startswith("CPU") else re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    )


def changed_since(document: Results) -> list[str]:
    """The names that a document's figures depend on and whose code has changed since; see `depends.py`."""
    recorded = (document["depends"], *document.get("again", {}).values())
    changed = (name for each in recorded for name in depends.changed(each))
    return list(dict.fromkeys(changed))


def faster_since(document: Results) -> list[str]:
    """In words, what the code has become faster at since the document was measured; see `older_code.py`."""
    return list(dict.fromkeys(each.words for _, found in _outrun(document) for each in found))


def without_outrun(document: Results) -> Results:
    """The document without samples whose code has become faster since: they are not to be joined with new ones."""
    return {**document, "samples": [sample for sample, found in _outrun(document) if not found]}


def _outrun(document: Results) -> Iterator[tuple[Sample, list[Outrun]]]:
    """Each sample, with what of FASTER_SINCE holds of it, by the hashes of the commit it names or the document's."""

    def known(recorded: dict[str, str]) -> list[Outrun]:
        found = (each for hash_, its in FASTER_SINCE.items() if hash_ in recorded.values() for each in its)
        return list(dict.fromkeys(found))

    of_document = known(document.get("depends", {}))
    of_commit = {commit: known(recorded) for commit, recorded in document.get("again", {}).items()}
    for sample in document["samples"]:
        known_here = of_commit.get(sample.get("again"), of_document)
        yield sample, [each for each in known_here if each.holds(sample)]


class Store:
    """The document of a run in progress, written to disk after every sample."""

    def __init__(
        self,
        directory: Path,
        experiment: Experiment,
        *,
        device: torch.device,
        settings: Any,
        tiny: bool,
        command: list[str],
        deadline: float | None = None,
        retry: Iterable[int] | None = None,
    ) -> None:
        """Start a run's document with the samples of an earlier run, if that one still applies (see the module).

        Args:
            command: the arguments after `python -m reproduce` or `python -m benchmarks`.
            deadline: on the clock of `time.monotonic`; no sample is started after it.
            retry: the processes whose failed samples of the earlier run are measured again; None: all.
        """
        from training.environment import device_name, environment

        self.experiment, self.settings, self.device = experiment, settings, device
        self.folder = directory / slug(device_name(device))
        self.complete = self.folder / f"{experiment.name}.json"
        self.partial = self.folder / f"{experiment.name}.partial.json"
        self.picture = self.folder / f"{experiment.name}.svg"
        self.deadline, self.began = deadline, time.monotonic()
        record = environment(device)
        del record["command"], record["platform"]  # paths and names specific to this machine
        record |= _installed(PEERS)
        self.document: Results = {
            "version": VERSION,
            "experiment": experiment.name,
            "state": "partial",
            "tiny": tiny,
            "device": record["device_name"],
            "command": ["python", "-m", experiment.package, *command],
            "commit": record["commit"],
            "depends": depends.tree().record(experiment.path, experiment.measures, gpu=device.type == "cuda"),
            "settings": json.loads(json.dumps(asdict(settings))),
            "environment": record,
            "date": time.strftime("%Y-%m-%d"),
            "seconds": 0.0,
            "took": {},  # kind -> number of samples, and the seconds that measuring them took
            "samples": [],
        }
        earlier = self._reusable(read(self.partial)) or self._reusable(read(self.complete))
        self.earlier_seconds = 0.0
        if earlier:
            self._go_on_from(earlier)
            self.document["seconds"] = self.earlier_seconds = earlier["seconds"]
        self.retried = [
            s
            for s in self.document["samples"]
            if ("partial" in s or (s.get("failed") and not s.get("broke_device")))
            and (retry is None or s.get("process", 0) in retry)
        ]
        same = earlier and self._settings_of(earlier) == self.document["settings"]
        whole = bool(same) and earlier["state"] == "complete" and not faster_since(earlier)
        self.finished = whole and not self.retried

    def forget(self) -> None:
        """Begin again, without the samples of earlier runs."""
        self.document |= {"samples": [], "took": {}}
        self.retried, self.finished, self.earlier_seconds = [], False, 0.0

    def _go_on_from(self, other: Results) -> None:
        samples = without_outrun(other)["samples"]
        self.document |= {"samples": list(samples), "took": other.get("took", {})}

    def _reusable(self, other: Results | None) -> Results | None:
        """The other document if its samples can count as this run's: same code, settings, device and versions."""
        if other is None or changed_since(other):
            return None

        selection = ("processes", *getattr(self.experiment.module, "SELECTION", ()))

        def applies_to(document: Results) -> list[Any]:
            versions = [document["environment"][name] for name in ("torch", "triton")]
            return [self._settings_of(document, selection), document["device"], document["tiny"], *versions]

        return other if applies_to(other) == applies_to(self.document) else None

    def _settings_of(self, other: Results, selection: Sequence[str] = ()) -> Sample:
        """The other document's values of the settings that exist today, without those in `selection`."""
        return {key: other["settings"].get(key) for key in self.document["settings"] if key not in selection}

    def sample(self, measure: Callable[[], Sample], **where: Any) -> Sample:
        """See `Options.sample`."""
        import torch

        from kernels import AttentionError

        if known := self.find(**where):
            return known
        where = json.loads(json.dumps(where))
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise OutOfTime
        broken, began = False, time.monotonic()
        try:
            measured = measure()
        except AttentionError as error:
            measured = {"refused": str(error)}
        except torch.OutOfMemoryError:
            measured = {"out_of_memory": True}
        # One failing kernel (say, one that does not compile for this GPU) must not lose the samples after it. The
        # failure is printed and stored, makes the exit status 1, and is tried again by the next run.
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            if "No available kernel" in first_line:  # how torch's SDPA refuses
                measured = {"refused": first_line}
            else:
                broken = "CUDA error" in first_line and not self.experiment.apart
                measured = {"failed": f"{type(error).__name__}: {first_line}", "broke_device": broken}
                print(f"  failed: {where}: {measured['failed']}")
        known = {**where, **rounded(measured)}
        self._add(known, where, time.monotonic() - began)
        if broken:
            raise ReproduceError("that sample broke the device; the same command continues with the next one")
        return known

    def _add(self, sample: Sample, where: Sample, seconds: float) -> None:
        """Write a sample to the partial document, in place of the one that had failed there.

        Another process may have written to it since.
        """
        from filelock import FileLock  # the experiments can be listed without it

        with writing(self.partial, "--results FOLDER"), FileLock(self.partial.with_suffix(".lock")):
            if written := self._reusable(read(self.partial)):
                self._go_on_from(written)
            if before := [each for each in self.retried if where.items() <= each.items()]:
                self.retried = [each for each in self.retried if each not in before]
                gone = before if "failed" in sample else [*before, *self._turns_without(where)]
                self.document["samples"] = [each for each in self.document["samples"] if each not in gone]
            self.document["samples"].append(sample)
            count, so_far = self.document["took"].get(sample.get("kind", ""), (0, 0.0))
            self.document["took"][sample.get("kind", "")] = [count + 1, so_far + seconds]
            self.write(self.partial)

    def find(self, **where: Any) -> Sample | None:
        """See `Options.find`."""
        where = json.loads(json.dumps(where))
        for known in self.document["samples"]:
            if where.items() <= known.items() and known not in self.retried:
                return known
        return None

    def _turns_without(self, where: Sample) -> list[Sample]:
        """Joint timings that lack the contender at `where`, which had failed: to be made again, all together."""

        def stale(sample: Sample) -> bool:
            joint = isinstance(sample.get("ms"), dict) and not {"backend", "contender"} & sample.keys()
            return joint and all(
                sample.get(key, value) == value for key, value in where.items() if key != "kind"
            )

        named = {"backend", "contender"} & where.keys()
        return [each for each in self.document["samples"] if named and stale(each)]

    def finish(self) -> None:
        """Mark the document complete, and save it under its final name."""
        self.document["state"] = "complete"
        self.write(self.complete)
        self.partial.unlink(missing_ok=True)
        self.partial.with_suffix(".lock").unlink(missing_ok=True)

    def write(self, path: Path) -> None:
        self.document["seconds"] = round(self.earlier_seconds + time.monotonic() - self.began, 1)
        with writing(path, "--results FOLDER"):
            replace_file(path, as_lines(self.document))


def read(path: Path, say: Callable[[str], None] = print) -> Results | None:
    """The document at `path`; None if there is none, or, with a line to `say`, if it is unreadable or outdated."""
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, json.JSONDecodeError) as error:
        say(f"{path} cannot be read and is left out: {error}")
        return None
    found = document.get("version") if isinstance(document, dict) else None
    if found != VERSION:
        say(f"{path} has version {found}, not {VERSION}, and is left out; run the experiment again")
        return None
    if missing := [name for name in FIELDS if name not in document]:
        say(f"{path} has no {', '.join(missing)} and is left out; run the experiment again")
        return None
    return document


def read_all(
    directory: Path, experiments: Iterable[str], say: Callable[[str], None] = print
) -> Iterator[Results]:
    """The experiments' documents below `directory`, by device; of two of an experiment the newer, partial one first.

    Documents of --tiny runs are left out, and, with a line to `say`, those in another's place.
    """
    for folder in sorted(path for path in directory.glob("*") if path.is_dir()):
        for name, state in itertools.product(experiments, (".partial", "")):
            document = read(folder / f"{name}{state}.json", say)
            if document is None or document["tiny"]:
                continue
            place = directory / slug(document["device"]) / f"{document['experiment']}.json"
            if place != folder / f"{name}.json":
                what = f"{document['experiment']} on {document['device']}"
                say(f"{folder / name}{state}.json holds {what} and is left out; its place is {place}")
                continue
            yield document
