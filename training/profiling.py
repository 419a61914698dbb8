"""Where time and memory of one optimizer step go: a trace, a memory snapshot, a list of the costliest operations."""

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
def profiled(step: int, folder: Path, device: torch.device, say: Callable[[str], None]) -> Iterator[None]:
    """Profile the block on `device`: its files go to `folder`, its costliest operations to `say`.

    On CUDA every allocation is recorded too, with the lines of Python that made it.
    """
    on_gpu = device.type == "cuda"
    path = folder / f"trace-step-{step:08}.json.gz"
    # The profiler's backend writes lines of its own to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with (
        profile(activities=activities) as profiler,
        _memory(folder / f"memory-step-{step:08}.pickle", on_gpu, say),
    ):
        yield
        if on_gpu:
            torch.cuda.synchronize(device)
    where = f"trace in {path}; open it at https://ui.perfetto.dev"
    try:
        profiler.export_chrome_trace(str(path))
    except OSError as error:  # the run is worth more than its trace
        path.unlink(missing_ok=True)
        where = f"no trace: {path} cannot be written ({error.strerror})"
    say(f"step {step:,}: {where}\n{_costliest(profiler, on_gpu)}")


@contextmanager
def _memory(path: Path, on_gpu: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Record what CUDA's allocator does in the block, for PyTorch's viewer."""
    if not on_gpu:
        yield
        return
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))
        say(f"memory in {path}; open it at https://pytorch.org/memory_viz")
    except OSError as error:  # the run is worth more than its snapshot
        path.unlink(missing_ok=True)
        say(f"no memory snapshot: {path} cannot be written ({error.strerror})")
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _costliest(profiler: profile, on_gpu: bool) -> str:
    """The operations with most time of their own: kernels on a GPU, PyTorch's operators on a CPU."""
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
