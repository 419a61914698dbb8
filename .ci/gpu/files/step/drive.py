"""Variants of the training step in turns on one GPU, a process each: drive.py TREES

Every folder of TREES is a variant, "main" the one they are compared with. What fails is noted, with the end of what
it printed, and left out. The table so far is printed, and step.json written, after every round.
"""

import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

TRY, OUT = "TRY" in os.environ, Path(os.environ["JOB_OUT"])
BEGAN = time.monotonic()
END = BEGAN + float(os.environ["JOB_LIMIT"]) - 20
document: dict = {}


def say(what: str) -> None:
    print(f"[{time.monotonic() - BEGAN:.0f} s] {what}", flush=True)


class Worker:
    def __init__(self, tree: Path, *how: object) -> None:
        command = [sys.executable, str(Path(__file__).with_name("worker.py").resolve()), *map(str, how)]
        paths = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
        self.errors = OUT / f"{tree.name}.{how[0]}_{how[1]}.err"
        self.process = subprocess.Popen(
            command,
            cwd=tree,
            # Few threads each: torch.compile would start up to 32 processes for every variant.
            env=os.environ | {"PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "4"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
        )
        self.answers: queue.Queue = queue.Queue()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put({})

    def hear(self, key: str, until: float = END):
        return self.answers.get(timeout=max(until - time.monotonic(), 0.01))[key]

    def ask(self, order: str, argument: object, key: str, within: float = 40):
        self.process.stdin.write(f"{order} {argument}\n")
        self.process.stdin.flush()
        return self.hear(key, min(END, time.monotonic() + within))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def table(group: dict) -> str:
    lines = [
        f"{'variant':16}{'ms':>9}  {'less than main, by turn':26}{'GiB':>6}{'loss':>10}  repeats  gradients' errors"
    ]
    base = group["checked"].get("main")
    for name, ms in group["ms"].items():
        saved = [main - each for main, each in zip(group["ms"].get("main", []), ms, strict=False)]
        less = f"{statistics.median(saved):.2f} ({min(saved):.2f} to {max(saved):.2f})" if saved else ""
        checked = group["checked"][name]
        errors = checked["errors"]
        worst = max(errors, key=errors.get)
        worse = [each for each in errors if base and errors[each] > 1.1 * base["errors"][each] + 1e-6]
        lines.append(
            f"{name:16}{statistics.median(ms):9.2f}  {less:26}{checked['gib']:6.1f}{checked['loss']:10.5f}  "
            f"{checked['repeats']!s:7}  {errors[worst]:.1e} {worst}; {len(worse)} above 1.1 of main's: {worse[:4]}"
        )
        if checked["skipped"]:
            lines.append(f"    {checked['skipped']} of its graphs did not become CUDA graphs")
    return "\n".join(lines)


def measure(key: str, trees: list[Path], how: tuple, steps: int, rounds: int, build: float) -> dict:
    """build: seconds within which a variant has to have been compiled and checked."""
    group = document[key] = {"ms": {}, "checked": {}, "failed": {}}
    workers = {tree.name: Worker(tree, *how) for tree in trees}
    built = min(END - 10, time.monotonic() + build)

    def report() -> None:
        new = OUT / "step.json.new"
        new.write_text(json.dumps(document, indent=1))
        new.rename(OUT / "step.json")
        say(f"{key}\n{table(group)}")

    def attempt(name: str, what) -> None:
        try:
            what(workers[name])
        except (KeyError, OSError, queue.Empty) as error:
            group["failed"][name] = repr(error)
            worker = workers.pop(name)
            worker.end()
            said = "".join(worker.errors.read_text(errors="replace").splitlines(keepends=True)[-25:])
            say(f"{key}: {name} FAILED, {error!r}; the end of {worker.errors.name}:\n{said}")

    def turn(name: str, worker: Worker) -> None:
        group["ms"].setdefault(name, []).append(worker.ask("steps", steps, "ms"))

    def hear(name: str, worker: Worker) -> None:
        group["checked"][name] = worker.hear("checked", built)
        say(f"{key}: {name} is built")

    for name in list(workers):
        attempt(name, lambda worker, name=name: hear(name, worker))
    for number in range(rounds):
        if time.monotonic() < END - 15:
            for name in list(workers)[:: 1 if number % 2 == 0 else -1]:
                attempt(name, lambda worker, name=name: turn(name, worker))
            report()
    for name in [name for name in workers if name in ("main", trees[-1].name)]:
        if time.monotonic() < END - 10:
            file = OUT / f"profile_{key}_{name}.txt"
            attempt(name, lambda worker, file=file: worker.ask("profile", file, "profiled", 20))
    for worker in workers.values():
        worker.end()
    report()
    return group


trees = sorted(Path(sys.argv[1]).resolve().iterdir(), key=lambda tree: (tree.name != "main", tree.name))
say(f"{[tree.name for tree in trees]}")
if TRY:
    measure("tiny", [trees[0], trees[-1]], ("tiny", 1, 2), 1, 2, 300)
else:
    # About 10 GiB each. 48 steps of a variant in 6 turns, then two whose memory a device has.
    ms = measure("small_16", trees, ("small", 16, 4), 8, 6, 170)["ms"]
    others = [tree for tree in trees[1:] if tree.name in ms]
    if "main" in ms and others:
        fastest = min(others, key=lambda tree: statistics.median(ms[tree.name]))
        measure("small_64", [trees[0], fastest], ("small", 64, 1), 10, 5, 120)
        measure("medium_16", [trees[0], fastest], ("medium", 16, 4), 5, 4, 150)
