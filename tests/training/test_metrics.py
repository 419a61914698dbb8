import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from training import metrics
from training.banner import result
from training.config import TrainerConfig
from training.distributed import World
from training.metrics import Throughput, peak_flops, performance

CPU = World(torch.device("cpu"))


class Clock:
    """Moves only when someone sleeps, so that a busy machine fails no test."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def arriving(seconds: list[float], sleep: Callable[[float], None] = time.sleep) -> Iterator[float]:
    """Batches, each after the given seconds of waiting."""
    for each in seconds:
        sleep(each)
        yield each


def test_throughput_excludes_warmup_steps_and_pauses(clock):
    meter = Throughput(CPU, warmup_steps=2)
    for number, _ in enumerate(meter.waiting(arriving([5] * 2 + [1] * 10, clock.sleep)), 1):
        clock.sleep(5 if number <= 2 else 2)  # compiling, say
        meter.begins("optimizer")
        meter.step()
        if number == 2:
            assert meter.mark() is None
        if number == 7:
            assert meter.mark()["step"] == 3
            clock.sleep(100)  # an evaluation
            meter.resume()
    meter.mark()
    assert meter.mean == {"step": 3, "data": 1, "forward_backward": 2, "optimizer": 0}
    assert meter.total_steps == 10
    assert meter.windows == [3, 3]


def test_a_step_is_split_into_its_phases(clock):
    meter = Throughput(CPU, warmup_steps=1)
    for number, _ in enumerate(meter.waiting(arriving([1] * 7, clock.sleep)), 1):
        clock.sleep(4)
        meter.begins("optimizer")
        clock.sleep(2)
        meter.step()
        clock.sleep(1)  # logging, say: it is part of the step but of no phase
        if number == 4:
            meter.mark()
    times = meter.mark()
    assert list(times) == ["step", "data", "forward_backward", "optimizer"]
    phases = {"data": 1, "forward_backward": 4, "optimizer": 2}
    assert times == {"step": 8, **phases}
    # The clock starts when the warm-up step ends, before its logging.
    assert meter.mean == pytest.approx({"step": (6 * 8 + 1) / 6, **phases})


def test_the_attention_of_ranks_that_share_sequences_is_apart_from_their_computing(clock):
    meter = Throughput(CPU, warmup_steps=1)
    for number, _ in enumerate(meter.waiting(arriving([1] * 3, clock.sleep))):
        for _ in range(2):
            clock.sleep(2)
            with meter.attends():
                clock.sleep(4)
        clock.sleep(1)
        meter.step()
        if number:  # an evaluation
            with meter.attends():
                clock.sleep(100)
            meter.resume() if number == 1 else None
    times = meter.mark()
    assert times == {"step": 114, "data": 1, "forward_backward": 5, "attention": 8}
    assert performance(times, 1, 1, CPU)["perf/forward_backward_ms"] == 13e3


def test_the_final_report_warns_of_large_variations_in_speed(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    summary = dict.fromkeys(("val/loss", "val/perplexity", "val/bits_per_byte", "seconds"), 1.0)
    summary |= {"steps": 1, "val/tokens": 1, "perf/peak_resident_gib": 1.0}
    idle, busy = (
        str(result(summary, Path("run"), [100.0, speed, 130.0], TrainerConfig())) for speed in (199.0, 201.0)
    )
    assert "varied" not in idle
    assert (
        "varied from 100 to 201 tokens/s: other programs used the machine; with OMP_WAIT_POLICY=passive"
        in busy
    )
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert "OMP_WAIT_POLICY" not in str(result(summary, Path("run"), [100.0, 201.0, 130.0], TrainerConfig()))


@pytest.mark.gpu
def test_on_a_gpu_phase_times_are_measured_on_the_cuda_stream():
    """The host queues steps of some 20 ms without waiting for them.

    Data that arrives late adds to the data time; data that arrives while the device is busy does not.
    """
    meter = Throughput(World(torch.device("cuda", torch.cuda.current_device())), warmup_steps=1)
    cycles = _cycles(0.01)

    def queue_steps(count: int, late: float) -> None:
        for _ in meter.waiting(arriving([late] * count)):
            torch.cuda._sleep(cycles)
            meter.begins("optimizer")
            torch.cuda._sleep(cycles)
            meter.step()

    queue_steps(1, late=0.0)  # warm-up, which ends with the device idle
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began = time.perf_counter()
    start.record()
    queue_steps(5, late=0.0)
    stop.record()
    assert time.perf_counter() - began < 0.05  # the device will take twice as long
    measured = meter.mark()
    # Some 20 ms: the clock rate may have changed since the cycles were counted (16 ms beside 12 other processes).
    step = start.elapsed_time(stop) / 5e3
    split = {"forward_backward": step / 2, "optimizer": step / 2}
    assert measured == pytest.approx({"step": step, "data": 0.0, **split}, abs=0.004)
    queue_steps(5, late=0.05)
    # The first step waits in full, the others only for the time in which the device was not busy.
    data = 0.05 - 4 / 5 * step
    assert meter.mark() == pytest.approx({"step": data + step, "data": data, **split}, abs=0.006)


def _cycles(seconds: float) -> int:
    """How many clock cycles the device sleeps in so many seconds."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    start.record()
    torch.cuda._sleep(10**7)
    stop.record()
    torch.cuda.synchronize()
    return int(10**7 * seconds / (start.elapsed_time(stop) / 1e3))


def test_performance_computes_milliseconds_and_tokens_per_second():
    times = {"step": 0.5, "data": 0.1}
    assert performance(times, tokens_per_step=1000, flops_per_token=10, world=CPU) == {
        "perf/step_ms": 500.0,
        "perf/data_ms": 100.0,
        "perf/tokens_per_second": 2000.0,
    }
    assert performance(None, 1000, 10, CPU) == {}


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H800 PCIe", None),
        ("Some Other GPU", None),
    ],
)
def test_mfu_is_reported_only_for_known_gpus(monkeypatch, name, tflops):
    gpu = World(torch.device("cuda", 0), size=2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(gpu.device) == (tflops and tflops * 1e12)
    measured = performance({"step": 1.0}, tokens_per_step=1000, flops_per_token=10**9, world=gpu)
    if tflops:
        assert measured["perf/mfu"] == pytest.approx(1e12 / (2 * tflops * 1e12))
    else:
        assert "perf/mfu" not in measured


PEAKS = """
import torch
from training.metrics import memory, reset_peak_memory
cpu = torch.device("cpu")
peak = lambda: memory(cpu)["perf/peak_resident_gib"]
reset_peak_memory(cpu)
before = peak()
block = torch.ones(2**27)  # 0.5 GiB
full = peak()
del block
reset_peak_memory(cpu)
print(before, full, peak())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak cannot be reset")
def test_peak_resident_memory_counts_only_the_run_itself():
    """It rises with allocations and falls when a new run begins; a large parent process is not counted."""
    ballast = torch.ones(2**28)  # 1 GiB in this process, the parent
    done = subprocess.run(
        [sys.executable, "-c", PEAKS],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    before, full, after = map(float, done.stdout.split())
    assert before < 0.6 < ballast.nbytes / 2**30
    assert full - before == pytest.approx(0.5, abs=0.1)
    assert after < full - 0.4
