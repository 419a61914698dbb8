import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from training.distributed import World
from training.metrics import Throughput, peak_flops, performance

CPU = World(torch.device("cpu"))


def test_warmup_and_pauses_are_not_counted():
    meter = Throughput(CPU, warmup_steps=2)
    for _ in range(2):
        time.sleep(0.2)  # compiling, say
        meter.step()
    assert meter.mark() is None
    for _ in range(5):
        time.sleep(0.02)
        meter.step()
    assert meter.mark() == pytest.approx(0.02, rel=0.5)
    time.sleep(0.3)  # an evaluation
    meter.resume()
    for _ in range(5):
        time.sleep(0.02)
        meter.step()
    meter.mark()
    assert meter.seconds_per_step == pytest.approx(0.02, rel=0.5)
    assert meter.total_steps == 10


def test_performance_of_a_step_time():
    metrics = performance(0.5, tokens_per_step=1000, flops_per_token=10, world=CPU)
    assert metrics == {"perf/step_ms": 500.0, "perf/tokens_per_second": 2000.0}
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
def test_mfu_only_for_a_known_device(monkeypatch, name, tflops):
    gpu = World(torch.device("cuda", 0), size=2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(gpu.device) == (tflops and tflops * 1e12)
    metrics = performance(1.0, tokens_per_step=1000, flops_per_token=10**9, world=gpu)
    if tflops:
        assert metrics["perf/mfu"] == pytest.approx(1e12 / (2 * tflops * 1e12))
    else:
        assert "perf/mfu" not in metrics


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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak cannot be reset")
def test_resident_memory_is_the_runs_own(tmp_path):
    """It rises with what is allocated, falls when a new run begins, and a large parent is not counted."""
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
