"""Bytes that DRAM and L2 actually moved, from Nsight Compute's counters, if the GPU's driver permits reading them.

`python -m reproduce.hardware_counters BACKEND JSON` is the profiled program: one forward and one backward of an
attention workload between cudaProfilerStart and cudaProfilerStop. GPU clocks are not changed (--clock-control none).
"""

from __future__ import annotations

import csv
import io
import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from .experiment import Sample

if TYPE_CHECKING:
    from .attention import Workload

METRICS = {
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_written",
    "lts__t_bytes.sum": "l2_bytes",
    "gpu__time_duration.sum": "nanoseconds",
}


def read_counters(backend: str, workload: Workload) -> Sample:
    """{"dram_read", "dram_written", "l2_bytes", "nanoseconds", "kernels"} or {"refused": why}, and "command"."""
    ncu = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
    ncu += ["--csv", "--print-units", "base", "--metrics", ",".join(METRICS)]
    program = ["-m", __spec__.name, backend, json.dumps(asdict(workload))]
    command = {"command": shlex.join([*ncu, "python", *program])}
    if shutil.which("ncu") is None:
        return {"refused": "ncu is not installed", **command}
    line = [*ncu, sys.executable, *program]
    done = subprocess.run(line, capture_output=True, text=True, timeout=180, check=False)
    counters = parse(done.stdout)
    if not counters["kernels"]:
        said = (done.stdout + done.stderr).splitlines()
        errors = [each for each in said if "==ERROR==" in each or "Error" in each]
        why = errors[0].replace("==ERROR==", "").strip() if errors else "it profiled no kernel"
        return {"refused": f"ncu: {why}", **command}
    return {**counters, **command}


def parse(output: str) -> Sample:
    """Sum ncu's --csv output over all kernels; lines of the program itself and of ncu's log are skipped."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    totals: Sample = {"kernels": 0, **dict.fromkeys(METRICS.values(), 0.0)}
    kernels = set()
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        if row.get("Metric Name") in METRICS:
            kernels.add(row["ID"])
            totals[METRICS[row["Metric Name"]]] += float(row["Metric Value"].replace(",", ""))
    totals["kernels"] = len(kernels)
    return totals


def main(backend: str, workload_json: str) -> None:
    """Run the profiled program."""
    import torch

    from .attention import Inputs, Workload, attend_with, gradients

    device = torch.device("cuda")
    inputs = Inputs(Workload(**json.loads(workload_json)), torch.float16, device)
    attend = attend_with(backend)
    gradients(attend, inputs)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    gradients(attend, inputs)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main(*sys.argv[1:])
