import time

import pytest
import torch

from training.distributed import World
from training.metrics import Throughput, memory, peak_flops, performance

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


def test_mfu_only_for_a_known_device(monkeypatch):
    gpu = World(torch.device("cuda", 0), size=2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 PCIe")
    assert peak_flops(gpu.device) == 756e12
    mfu = performance(1.0, tokens_per_step=1000, flops_per_token=10**9, world=gpu)["perf/mfu"]
    assert mfu == pytest.approx(1e12 / (2 * 756e12))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some Other GPU")
    assert "perf/mfu" not in performance(1.0, 1000, 10**9, gpu)


def test_resident_memory_grows_with_what_is_allocated():
    before = memory(CPU.device)["perf/peak_resident_gib"]
    block = torch.ones(2**27)  # 0.5 GiB
    assert memory(CPU.device)["perf/peak_resident_gib"] >= max(before, 0.5)
    del block
