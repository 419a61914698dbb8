"""Start the jobs in a folder as GPUs become free: python runner.py ROOT GPUS. Jobs may be added at any time.

ROOT/queue/NN_NAME.sh   waits, the lowest NN first; README.md says what a job is
ROOT/have/NAME          an environment (a shell script that sets it) or a prepared input (an empty file) is there
ROOT/kill/NAME          (an empty file) ends a job, as its limit does
ROOT/stop               (an empty file) ends the runner once nothing runs, and nothing that waits can start
ROOT/state, log/, out/  where all jobs stand, what they printed, what they left in $JOB_OUT
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

GRACE = 20  # seconds from SIGTERM to SIGKILL: a run saves itself within them
START = """
set -e
source {environment}
tar xzf {root}/repo.tar.gz
exec bash {script}
"""


@dataclass
class Job:
    process: subprocess.Popen
    gpus: list[int]
    limit: float
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None  # when it got SIGTERM

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def signal(self, which: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, which)


def header(script: Path, name: str, default: str) -> str:
    found = re.search(rf"^# {name}:(.*)$", script.read_text(), re.MULTILINE)
    return found[1].strip() if found else default


def name_of(script: Path) -> str:
    return script.stem.split("_", 1)[1]


class Runner:
    def __init__(self, root: Path, gpus: int) -> None:
        self.root, self.gpus, self.began = root, gpus, time.monotonic()
        self.free = list(range(gpus))
        self.running: dict[str, Job] = {}
        self.history: list[str] = []
        for each in ("queue", "have", "kill", "log", "out", "work"):
            (root / each).mkdir(parents=True, exist_ok=True)

    def waiting(self) -> list[Path]:
        return sorted((self.root / "queue").glob("*.sh"))

    def start_what_fits(self) -> None:
        for script in self.waiting():
            needs = [header(script, "env", ""), *header(script, "needs", "").split()]
            gpus = int(header(script, "gpus", "1"))
            if gpus > self.gpus or not all((self.root / "have" / each).is_file() for each in needs):
                continue
            if name_of(script) in self.running:  # the first run's GPUs would never be free again
                continue
            if gpus > len(self.free):
                return  # what comes later must not take a GPU that this one waits for
            taken, self.free = self.free[:gpus], self.free[gpus:]
            self.running[name_of(script)] = self.start(script, taken)

    def start(self, script: Path, gpus: list[int]) -> Job:
        name = name_of(script)
        work, out = self.root / "work" / name, self.root / "out" / name
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        out.mkdir(exist_ok=True)
        script = script.rename(self.root / "work" / script.name)
        environment = self.root / "have" / header(script, "env", "")
        paths = {"root": self.root, "environment": environment, "script": script}
        command = START.format(**{key: shlex.quote(str(path)) for key, path in paths.items()})
        limit = header(script, "limit", "600")
        variables = {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
            "JOB_OUT": str(out),
            "JOB_LIMIT": limit,
        }
        with (self.root / "log" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=work,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Job(process, gpus, float(limit))

    def look_after(self, name: str, job: Job) -> None:
        code, kill = job.process.poll(), self.root / "kill" / name
        if code is None:
            if job.ended is None and (job.seconds > job.limit or kill.exists()):
                job.ended = time.monotonic()
                job.signal(signal.SIGTERM)
            elif job.ended is not None and time.monotonic() - job.ended > GRACE:
                job.signal(signal.SIGKILL)
            return
        job.signal(signal.SIGKILL)  # what it left behind
        kill.unlink(missing_ok=True)
        self.free = sorted(self.free + job.gpus)
        del self.running[name]
        self.history.append(f"{name}: status {code} after {job.seconds:.0f} s on {job.gpus}")

    def write_state(self) -> None:
        lines = [f"{time.monotonic() - self.began:.0f} s; free: {self.free}", *self.history]
        lines += [f"{name}: runs on {job.gpus} for {job.seconds:.0f} s" for name, job in self.running.items()]
        lines += [f"{script.stem}: waits" for script in self.waiting()]
        new = self.root / "state.new"
        new.write_text("\n".join(lines) + "\n")
        new.rename(self.root / "state")  # never half a file

    def run(self) -> None:
        while True:
            for name, job in list(self.running.items()):
                self.look_after(name, job)
            self.start_what_fits()
            self.write_state()
            if (self.root / "stop").exists() and not self.running:  # with every GPU free, what can start has
                return
            time.sleep(0.5)


if __name__ == "__main__":
    # A shell starts its background jobs deaf to SIGINT, and so would be every pytest that a job interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runner = Runner(Path(sys.argv[1]).resolve(), int(sys.argv[2]))
    try:
        runner.run()
    finally:
        for job in runner.running.values():
            job.signal(signal.SIGTERM)
