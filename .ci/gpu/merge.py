"""What jobs brought back, into results/: python .ci/gpu/merge.py OUT --commit SHA [--into results]

OUT is a runner's folder out/. Slices of an experiment are joined into one document, complete if nothing is missing;
perplexity's runs join those that are there, a whole one in place of a cut one; scaling's launches become a file for
each number of GPUs, and those of jobs quiet_* count before others; a long run, whole or cut, and killed ranks too.
With --over, the points of a document of older code, the partial one if there is one, that every process timed again
take their places.
Run it in a checkout of the commit that ran, or of a later one that changed nothing that the figures depend on: what
is stale is refused.
"""

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, os.getcwd())
os.environ.setdefault("TRITON_INTERPRET", "1")  # experiments are asked what they measure, on a CPU

import torch

from benchmarks import scaling
from benchmarks.__main__ import BENCHMARKS
from reproduce import long_run
from reproduce.common import as_lines
from reproduce.comparison.runs import find_runs
from reproduce.experiment import EXPERIMENTS, Options
from reproduce.perplexity_runs import PARTS
from reproduce.plan import ASSUMED, processes_of
from reproduce.results import changed_since, slug, without_outrun

torch.cuda.device_count = lambda: 8  # some experiments refuse fewer GPUs than they are asked for
Document = dict
ALL = {**EXPERIMENTS, **BENCHMARKS}
VERSIONS = ("torch", "triton", "cuda", "cudnn", "driver", "python", "device_name")
NO_PLACE = (
    "ms",
    "late",
    "clocks",
    "process",
    "again",
    "alone",
    "beside",
    "failed",
    "broke_device",
)  # what does not say which point a sample is of
# What says which run of `perplexity` a sample is; the rest is what was measured.
PLACE = ("kind", "of", "part", "name", "attention", "init_seed", "context", "micro_batch")
PLACE += ("steps", "code", "lr", "when")


class RefusedError(Exception):
    """Documents that do not belong together."""


def alike(documents: list[Document]) -> None:
    """Refuse documents of other code, settings or versions than the first one's."""
    first = documents[0]
    ignored = ("processes", *getattr(ALL[first["experiment"]].module, "SELECTION", ()))

    def about(document: Document) -> dict:
        settings = {key: value for key, value in document["settings"].items() if key not in ignored}
        versions = {key: document["environment"].get(key) for key in VERSIONS}
        return {"tiny": document["tiny"], **settings, **versions}

    for each in documents:
        if changed := changed_since(each):
            raise RefusedError(f"this checkout has changed {', '.join(changed)}")
        if differ := [key for key, value in about(first).items() if about(each)[key] != value]:
            raise RefusedError(f"{', '.join(differ)} differ")


def newest(documents: list[Document]) -> Document:
    return max(reversed(documents), key=lambda each: each["date"])  # of one day the last


def whole(sample: dict) -> bool:
    return not sample.get("failed") and "partial" not in sample


def apart(documents: list[Document]) -> list[Document]:
    """Without those that a later one went on from: their samples and seconds are in it."""
    samples = [{json.dumps(each, sort_keys=True) for each in one["samples"]} for one in documents]
    return [one for n, one in enumerate(documents) if not any(samples[n] <= of for of in samples[n + 1 :])]


def slices(documents: list[Document]) -> Document:
    """All that the experiment asks for, in its order. Where slices measured the same, the one with the most
    contenders counts, the first of such. A complete one that is alone is as it came."""
    documents = apart(documents)
    document = newest(documents)
    if len(documents) == 1 and document["state"] == "complete":
        return document
    document["seconds"] = round(sum(each["seconds"] for each in documents), 1)
    took: dict[str, list] = defaultdict(lambda: [0, 0.0])
    for each in documents:
        for kind, (count, seconds) in each["took"].items():
            took[kind] = [took[kind][0] + count, took[kind][1] + seconds]
    document["took"] = took
    module = ALL[document["experiment"]].module
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in document["settings"].items()}
    settings = module.Settings(**settings)
    device = torch.device("cpu" if document["device"].startswith("CPU") else "cuda")
    every = [each for one in documents for each in one["samples"]]
    found: dict[str, dict | None] = {}

    def find(**where: object) -> dict | None:
        where = json.loads(json.dumps(where))
        known = [each for each in every if where.items() <= each.items()]
        others = known[0] if known else None
        return max(filter(whole, known), key=lambda each: len(each.get("ms", ())), default=others)

    def sample(measure, **where: object) -> dict:
        known = find(**where)
        if where.get("process", number) == number:
            found.setdefault(json.dumps(where), known)
        return known or {**where, **ASSUMED}

    for number in range(processes_of(settings, device, document["tiny"])):
        module.run(Options(device, document["tiny"], settings, sample, number, find, say=lambda line: None))
    samples: list[dict] = []
    for each in found.values():
        if each and each not in samples:
            samples.append(each)
    missing = [where for where, each in found.items() if each is None]
    failed = [json.dumps(each)[:200] for each in samples if not whole(each)]
    print(f"  {len(samples)} samples; {len(missing)} are missing, {len(failed)} failed")
    print(*missing[:5], *failed, sep="\n")
    return {**document, "samples": samples, "state": "partial" if missing else "complete"}


def over(whole: Document, documents: list[Document], commit: str) -> Document:
    """A document with the points that every process timed again, or the one that is to, in place of its own,
    which may have failed, and with those that it lacks, also of some processes. They name their commit, by which
    `again` has what that one's figures depend on: the document stays one of the older code."""

    def point(sample: dict) -> str:
        return json.dumps({k: v for k, v in sample.items() if k not in NO_PLACE}, sort_keys=True)

    def check(sample: dict) -> str:  # without what it measured
        where = {k: v for k, v in sample.items() if isinstance(v, str | int) and not k.endswith("_bytes")}
        return json.dumps(where, sort_keys=True)

    found: dict[str, dict[int, dict]] = defaultdict(dict)
    for each in documents:
        for sample in each["samples"]:
            if "ms" in sample:
                found[point(sample)][sample.get("process")] = {**sample, "again": commit}
    every = set(range(whole["settings"]["processes"]))
    had: dict[str, set[int]] = defaultdict(set)
    for each in whole["samples"]:
        had[point(each)].add(each.get("process"))
    anew = {at for at, its in found.items() if its.keys() in (every, {None})}
    again = {at: its for at, its in found.items() if at in anew or its.keys().isdisjoint(had[at])}
    samples = [each for each in whole["samples"] if point(each) not in anew]
    known = {check(each) for each in samples}
    checks = {check(sample): sample for each in documents for sample in each["samples"] if "ms" not in sample}
    samples += [each for at, each in checks.items() if at not in known]
    settings = {**whole["settings"]}
    for name in getattr(ALL[whole["experiment"]].module, "SELECTION", ()):
        asked = [value for each in (whole, *documents) for value in each["settings"].get(name, ())]
        settings[name] = list(dict.fromkeys(asked))
    print(
        f"  {len([at for at in anew if had[at]])} points again, {len([at for at in again if not had[at]])} more"
    )
    last = newest(documents)
    samples += [its[number] for its in again.values() for number in sorted(its)]
    named = {each.get("again") for each in samples}
    commits = {**whole.get("again", {}), commit: last["depends"]}
    return {
        **whole,
        "settings": settings,
        "date": last["date"],
        "again": {each: depends for each, depends in commits.items() if each in named},
        "seconds": round(whole["seconds"] + sum(each["seconds"] for each in documents), 1),
        "samples": samples,
    }


def perplexity(documents: list[Document]) -> Document:
    """Every run; the best sample of each: whole, else the longest. All went on from the first document."""

    def worth(sample: dict) -> tuple:
        return not sample.get("failed"), whole(sample), sample.get("partial", 0)

    merged: dict[str, dict] = {}
    for each in documents:
        for sample in each["samples"]:
            place = json.dumps({key: sample[key] for key in PLACE if key in sample}, sort_keys=True)
            known = merged.get(place)
            if known and sample["kind"] == "corpus" and sample["tokens"] != known["tokens"]:
                raise RefusedError(f"another text: {sample['tokens']} tokens, not {known['tokens']}")
            if known is None or worth(sample) > worth(known):
                print(f"  {sample.get('name', sample['kind'])}: {'new' if known is None else 'better'}")
                merged[place] = sample
    document = {**newest(documents), "samples": [*merged.values()], "state": "partial"}
    before = documents[0]["seconds"]
    document["seconds"] = round(before + sum(max(0.0, each["seconds"] - before) for each in documents), 1)
    of = {each.get("part", each["kind"]) for each in merged.values()}
    document["settings"] = {
        **document["settings"],
        "parts": [part for part in PARTS if part in of],
        "only": [],
    }
    document["command"] = [word for word in document["command"] if not word.startswith(("parts=", "only="))]
    return document


def write(document: Document, commits: list[str | None], folder: Path) -> None:
    """commits: of the earlier document, if one was joined, and of the code that ran now."""
    name, folder = document["experiment"], folder / slug(document["device"])
    known = (commits[0] or "unknown").split(" to ")
    same = any(each.startswith(commits[-1]) for each in known)
    commit = " to ".join(known if same else [known[0], commits[-1]])
    document["commit"] = document["environment"]["commit"] = commit
    partial = folder / f"{name}.partial.json"
    path = partial if document["state"] == "partial" else folder / f"{name}.json"
    save(path, document)
    if path != partial:
        partial.unlink(missing_ok=True)


def save(path: Path, document: Document) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_lines(document))
    print(f"  {path}")


def greatest(errors: list[dict]) -> dict:
    """{contender: {result: the greatest}} of those of several processes."""
    return {
        name: {result: max(each[name][result] for each in errors if name in each) for result in its}
        for one in errors
        for name, its in one.items()
    }


def merge_ring(documents: list[Document]) -> Document:
    """Every number of ranks and length that was measured in any of them; what several measured, as processes, with
    the greatest of their errors, which PyTorch's dQ has others of each time."""
    document = documents[-1]
    samples = defaultdict(list)
    for each in (each for one in documents for each in one["samples"] if whole(each)):
        samples[each["ranks"], each["length"]].append(each)
    document["samples"] = []
    for place in sorted(samples):
        errors = greatest([each["errors"] for each in samples[place]])
        document["samples"] += [
            {**each, "errors": errors, "process": number} for number, each in enumerate(samples[place])
        ]
    document["seconds"] = round(sum(each["seconds"] for each in documents), 1)
    took = [each["took"]["time"] for each in documents]
    document["took"] = {"time": [len(document["samples"]), sum(seconds for _, seconds in took)]}
    for position, setting in enumerate(("ranks", "lengths")):
        document["settings"][setting] = sorted({place[position] for place in samples})
    return document


def merge_scaling(files: list[Path], commit: str, into: Path) -> None:
    """A document for each number of GPUs, with one GPU beside it; of one GPU if there is nothing else. What several
    files measured is the first one's."""
    read = [json.loads(file.read_text()) for file in files]
    for ranks in sorted({each["ranks"] for one in read for each in one["samples"]} - {1}) or [1]:
        samples, commands = {}, []
        for one in read:
            own = defaultdict(list)
            for each in one["samples"]:
                if each["ranks"] in (1, ranks):
                    own[each["ranks"], each["model"], each["name"]].append(each)
            if new := {place: each for place, each in own.items() if place not in samples}:
                samples |= new
                commands.append(re.sub(r" --out \S+", "", one["command"]))
        environment = {k: v for k, v in read[0]["environment"].items() if k != "command"}  # it names paths
        environment["commit"] = commit
        document = {**read[0], "command": commands, "environment": environment}
        document["samples"] = [
            each for place in sorted(samples, key=lambda p: p[0]) for each in samples[place]
        ]
        print(scaling.table(document["samples"]))
        several = f"x{ranks}" if ranks > 1 else ""
        save(into / f"{slug(environment['device_name'])}{several}" / "scaling.json", document)


def merge_long_runs(folders: list[Path], commit: str, into: Path) -> None:
    """A document for each number of GPUs."""
    for run in find_runs([str(folder) for folder in folders]):
        document = long_run.kept(run, commit)
        if not document["validation"]:
            print(f"left out, cut before its first evaluation: {run.path}")
            continue
        print(long_run.line(document))
        save(into / long_run.place(document), document)


def merge_killed(files: list[Path], commit: str, into: Path) -> None:
    """A document for each number of ranks: what happened when one was killed, and after half of them went on."""
    of: dict[int, list[dict]] = defaultdict(list)
    for file in files:
        each = json.loads(file.read_text())
        of[each["ranks"]].append(each)
    for ranks, samples in of.items():
        environment = [each.pop("environment") for each in samples][-1] | {"commit": commit}
        print(*(f"killed, {each['name']}: resumed {each.get('resumed')}" for each in samples), sep="\n")
        document = {"environment": environment, "samples": samples}
        save(into / f"{slug(environment['device_name'])}x{ranks}" / "killed.json", document)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", required=True, help="of the code that ran")
    parser.add_argument("--into", type=Path, default=Path("results"))
    parser.add_argument(
        "--over", action="store_true", help="in place of the same points of the documents that are there"
    )
    given = parser.parse_args()
    groups: dict[tuple[str, str], list[Document]] = defaultdict(list)
    for file in sorted(given.out.glob("*/results/*/*.json")):
        if ".partial." in file.name and file.with_name(file.name.replace(".partial", "")).exists():
            continue  # copied before it was complete
        document = json.loads(file.read_text())
        groups[document["experiment"], slug(document["device"])].append(document)
    for (name, device), documents in groups.items():
        print(f"{name} on {device}: {len(documents)} documents came back")
        known, commits = given.into / device / f"{name}.partial.json", [given.commit]
        older = known if known.exists() else known.with_name(f"{name}.json")
        try:
            if given.over and older.exists():
                old = json.loads(older.read_text())
                alike([old, *documents])
                write(over(old, documents, given.commit), [old["commit"], given.commit], given.into)
                continue
            if known.exists():
                before = json.loads(known.read_text())
                if name == "ring" and changed_since(before):  # then `reproduce ring` would begin again too
                    print(f"  replaced, for its code has changed: {known}")
                else:
                    documents.insert(0, without_outrun(before))
                    commits.insert(0, before["commit"])
            alike(documents)
            merge = {"perplexity": perplexity, "ring": merge_ring}.get(name, slices)
            write(merge(documents), commits, given.into)
        except RefusedError as error:
            print(f"  refused: {error}")
    jobs = ("quiet_*", "scaling_*", "long_[0-9]")
    if files := [each for job in jobs for each in sorted(given.out.glob(f"{job}/*.json"))]:
        merge_scaling(files, given.commit, given.into)
    if runs := [file.parent for file in sorted(given.out.glob("long_run_*/runs/long/metrics.csv"))]:
        merge_long_runs(runs, given.commit, given.into)
    merge_killed(sorted(given.out.glob("killed_*/killed_*.json")), given.commit, given.into)


if __name__ == "__main__":
    main()
