"""Where the time of one optimizer step goes: a trace file, and a printed list of the costliest operations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ROWS, NAME = 8, 70  # operations that are named, and how much of a kernel's name, which can be a page of C++


@contextmanager
def profiled(what: str, path: Path, device: torch.device, say: Callable[[str], None]) -> Iterator[None]:
    """Profile the block on `device`: its trace goes to `path` (.json.gz), its costliest operations to `say`."""
    on_gpu = device.type == "cuda"
    # The profiler's backend writes lines of its own to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        yield
        if on_gpu:
            torch.cuda.synchronize(device)
    where = f"trace in {path}; open it at https://ui.perfetto.dev"
    try:
        profiler.export_chrome_trace(str(path))
    except OSError as error:  # the run is worth more than its trace
        path.unlink(missing_ok=True)
        where = f"no trace: {path} cannot be written ({error.strerror})"
    say(f"{what}: {where}\n{_costliest(profiler, on_gpu)}")


def _costliest(profiler: profile, on_gpu: bool) -> str:
    """The operations that took most time themselves: kernels on a GPU, PyTorch's operators on a CPU."""
    device_type = DeviceType.CUDA if on_gpu else DeviceType.CPU
    times = {
        event.key: (event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count)
        for event in profiler.key_averages()
        if event.device_type == device_type  # not `is`: each event makes a new one
    }
    total = sum(microseconds for microseconds, _ in times.values())
    shown = sorted(times.items(), key=lambda item: -item[1][0])[:ROWS]
    lines = [
        f"  {microseconds / total:4.0%} {microseconds / 1e3:8.2f} ms {count:5} x  {name[:NAME]}"
        for name, (microseconds, count) in shown
    ]
    calls = sum(count for _, count in times.values())
    return "\n".join([*lines, f"  total: {total / 1e3:.2f} ms in {calls} calls"])
