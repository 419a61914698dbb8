"""Variants of the training step in turns on one GPU, a process each: drive.py TREES

Every folder of TREES is a variant, "main" the one they are compared with. What fails is noted and left out.
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
END = time.monotonic() + float(os.environ["JOB_LIMIT"]) - 40
document: dict = {}


class Worker:
    def __init__(self, tree: Path, *how: object) -> None:
        command = [sys.executable, str(Path(__file__).with_name("worker.py").resolve()), *map(str, how)]
        paths = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            command,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(OUT / f"{tree.name}.{how[0]}.err").open("w"),
            text=True,
        )
        self.answers: queue.Queue = queue.Queue()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put({})

    def hear(self, key: str):
        return self.answers.get(timeout=max(END - time.monotonic(), 0.01))[key]

    def ask(self, order: str, argument: object, key: str):
        self.process.stdin.write(f"{order} {argument}\n")
        self.process.stdin.flush()
        return self.hear(key)


def table(group: dict) -> str:
    lines = [f"{'variant':16}{'ms':>9}  {'less than main, by turn':26}{'loss':>10}  worst gradient"]
    for name, ms in group["ms"].items():
        saved = [base - each for base, each in zip(group["ms"]["main"], ms, strict=False)]
        errors, main = group["checked"][name]["errors"], group["checked"]["main"]["errors"]
        worst = max(errors, key=errors.get)
        less = f"{statistics.median(saved):.2f} ({min(saved):.2f} to {max(saved):.2f})"
        line = f"{name:16}{statistics.median(ms):9.2f}  {less:26}{group['checked'][name]['loss']:10.5f}"
        worse = [each for each in errors if errors[each] > 1.1 * main[each] + 1e-6]
        lines.append(
            f"{line}  {errors[worst]:.1e} {worst}; {len(worse)} worse than 1.1 of main's: {worse[:4]}"
        )
    return "\n".join(lines)


def measure(key: str, trees: list[Path], how: tuple, steps: int, rounds: int) -> dict:
    group = document[key] = {"ms": {}, "checked": {}, "failed": {}}
    workers = {tree.name: Worker(tree, *how) for tree in trees}

    def attempt(name: str, what) -> None:
        try:
            what(workers[name])
        except (KeyError, OSError, queue.Empty) as error:
            group["failed"][name] = repr(error)
            workers.pop(name).process.kill()

    def turn(name: str, worker: Worker) -> None:
        group["ms"].setdefault(name, []).append(worker.ask("steps", steps, "ms"))

    def hear(name: str, worker: Worker) -> None:
        group["checked"][name] = worker.hear("checked")

    for name in list(workers):
        attempt(name, lambda worker, name=name: hear(name, worker))
    for number in range(rounds):
        if time.monotonic() < END - 20:
            for name in list(workers)[:: 1 if number % 2 == 0 else -1]:
                attempt(name, lambda worker, name=name: turn(name, worker))
    for name in list(workers):
        attempt(
            name,
            lambda worker, name=name: worker.ask("profile", OUT / f"profile_{key}_{name}.txt", "profiled"),
        )
    for worker in workers.values():
        worker.process.kill()
        worker.process.wait()
    (OUT / "step.json").write_text(json.dumps(document, indent=1))
    print(f"{key}, failed: {group['failed']}\n{table(group)}", flush=True)
    return group


trees = sorted(Path(sys.argv[1]).resolve().iterdir(), key=lambda tree: (tree.name != "main", tree.name))
if TRY:
    measure("tiny", [trees[0], trees[-1]], ("tiny", 1, 2), 1, 2)
else:
    ms = measure("small_16", trees, ("small", 16, 4), 12, 6)["ms"]
    fastest = min(
        (tree for tree in trees[1:] if tree.name in ms), key=lambda tree: statistics.median(ms[tree.name])
    )
    # Of larger ones two fit on a device.
    measure("small_64", [trees[0], fastest], ("small", 64, 1), 16, 6)
    measure("medium_16", [trees[0], fastest], ("medium", 16, 4), 8, 5)
