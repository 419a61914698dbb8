"""A run by torchrun, one rank of it killed in the middle, resumed on half the ranks: killed.py NAME RANKS SETTINGS...

$JOB_OUT/killed_NAME.json says what happened when, without paths of this machine; beside it is all that was printed.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, os.getcwd())
from tests.conftest import measured
from tests.training.ranks import logged, processes, torchrun

ROWS, MORE = 12, 6  # logged rows before the kill, and after the resume
name, ranks, settings = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
out, began = Path(os.environ["JOB_OUT"]), time.monotonic()
first_run, second_run = Path("runs", name), Path("runs", f"{name}-resumed")
kept = [each for each in settings if not each.startswith("data.")]
record = {"name": name, "ranks": ranks, "settings": kept, "at": {}}


def note(what: str, value: object) -> None:
    record["at"][what] = round(time.monotonic() - began, 1)
    record[what] = value
    (out / f"killed_{name}.json").write_text(json.dumps(record, indent=1))
    print(f"[{time.monotonic() - began:6.1f} s] {what}: {value}", flush=True)


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


class Started:
    def __init__(self, label: str, count: int, run: Path, *extra: str) -> None:
        command = torchrun(count, "train.py", *settings, f"hydra.run.dir={run}", *extra)
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process, self.run = subprocess.Popen(command, **how), run
        self.log, self.said = (out / f"{name}_{label}.txt").open("w", buffering=1), []
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in self.process.stdout:
            self.log.write(f"{time.monotonic() - began:7.1f} {line}")
            self.said.append(line.strip())

    def logs(self, rows: int, seconds: float) -> bool:
        """Wait until so many rows are logged, but no longer than it runs."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None and logged(self.run) < rows:
            time.sleep(0.2)
        return logged(self.run) >= rows

    def ended(self, seconds: float) -> int | None:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


first = Started("before", ranks, first_run)
if not first.logs(ROWS, 100):
    sys.exit(f"only {logged(first_run)} rows logged")
victim = min(3, ranks - 1)
environment = json.loads((first_run / "environment.json").read_text())
record["environment"] = {k: v for k, v in environment.items() if k not in ("command", "platform")}
note("saved before", checkpoints(first_run))
note("last logged before", max(measured(first_run, "train/loss")))
os.kill(processes(first.process)[victim], signal.SIGKILL)
note("killed", victim)
note("torchrun's status", first.ended(100))
note("told", [line for line in first.said if "does not answer" in line])
note("saved", checkpoints(first_run))
if record["saved"]:
    second = Started("after", max(1, ranks // 2), second_run, f"trainer.resume={first_run}")
    note("resumed", second.logs(MORE, 100))
    second.process.send_signal(signal.SIGTERM)
    note("status after SIGTERM", second.ended(60))
    note("losses before", list(measured(first_run, "train/loss").items())[-8:])
    if logged(second_run):
        note("losses after", list(measured(second_run, "train/loss").items())[:8])
