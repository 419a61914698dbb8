"""The experiment on the head and its loss: the contenders, which are left out and why, and the aims. 15 s."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import loss
from benchmarks.__main__ import main
from benchmarks.aims import MET, MISSED, NO_AIM
from reproduce.experiment import pick
from tests.conftest import INTERPRETED
from tests.processes import in_three

# Bytes for 65,536 x 768 times 768 x 50,304: hidden and float32 weight with gradients, and targets; 16-bit logits.
INPUTS_AND_GRADIENTS, LOGITS = 2 * (65536 * 768 * 2 + 50304 * 768 * 4) + 65536 * 8, 65536 * 50304 * 2

PEER = """
import torch

class LigerFusedLinearCrossEntropyFunction:
    @staticmethod
    def apply(
        hidden, weight, targets, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction,
        softcap, return_z_loss, accum_dtype,
    ):
        assert (bias, ce_weight, softcap) == (None, None, None)
        assert (lse_square_scale, label_smoothing, return_z_loss) == (0.0, 0.0, False)
        assert (ignore_index, accum_dtype) == (-1, torch.float32)
        logits = hidden @ weight.T
        return FACTOR * torch.nn.functional.cross_entropy(logits.float(), targets, reduction=reduction), None
"""

# On a machine with a GPU, the tests have Triton compile, not interpret.


def run(folder: Path, *arguments: str) -> dict:
    command = ["loss", "--tiny", "--device", "cpu", "--results", str(folder), "rows=16", "check_rows=16"]
    assert main([*command, *arguments]) == 0
    return json.loads((folder / "cpu" / "loss.json").read_text())


def install_peer(folder: Path, monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Install a stand-in for the Liger-Kernel package, whose loss is off by `factor`."""
    files = {
        "liger_kernel/__init__.py": "",
        "liger_kernel/ops/__init__.py": "",
        "liger_kernel/ops/fused_linear_cross_entropy.py": PEER.replace("FACTOR", str(factor)),
        "liger_kernel-0.8.dist-info/METADATA": "Metadata-Version: 2.1\nName: liger-kernel\nVersion: 0.8\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()


@pytest.fixture(autouse=True)
def forget_peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test imports liger_kernel anew, and leaves no stand-in to the tests of other files."""

    def imported() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]

    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in imported():
        del sys.modules[name]


@pytest.mark.slow
@INTERPRETED
def test_without_liger_kernel_the_others_are_timed_and_one_line_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    results = run(tmp_path)
    (timed,) = pick(results, kind="time")
    assert set(timed["ms"]) == {"fused", "eager", "compiled"}
    hidden, weight, targets = 16 * 32 * 2, 128 * 32 * 4, 16 * 8
    for sample in pick(results, kind="memory"):
        assert sample["inputs_and_gradients_bytes"] == 2 * (hidden + weight) + targets
        assert sample["logits_bytes"] == 16 * 128 * 2
        assert sample["peak_bytes"] >= sample["inputs_and_gradients_bytes"]
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("left out")]
    assert line.startswith("left out: check, liger: not installed")
    assert line.endswith("pip install liger-kernel, then --again")


@pytest.mark.slow
@INTERPRETED
def test_liger_kernel_is_timed_if_it_is_installed(tmp_path, capsys, monkeypatch):
    install_peer(tmp_path / "peer", monkeypatch, 1.0)
    results = run(tmp_path)
    assert set(pick(results, kind="time")[0]["ms"]) == {"fused", "eager", "compiled", "liger"}
    assert pick(results, contender="liger", kind="check")[0]["version"] == "0.8"
    assert re.search(r"\nliger +\d.*0\.8", capsys.readouterr().out)  # its errors and version


@pytest.mark.slow
@INTERPRETED
def test_a_contender_with_wrong_results_is_not_timed(tmp_path, capsys, monkeypatch):
    install_peer(tmp_path / "peer", monkeypatch, 1.002)
    assert set(pick(run(tmp_path), kind="time")[0]["ms"]) == {"fused", "eager", "compiled"}
    assert re.search(
        "left out: check, liger, 0.8: wrong, so not timed: errors {'loss': 0.0", capsys.readouterr().out
    )


@pytest.mark.slow
@INTERPRETED
def test_a_contender_out_of_memory_is_left_out_and_the_rest_timed(tmp_path, capsys, monkeypatch):
    def hungry(hidden, weight, targets, vocab_size):
        if len(hidden) > 16:
            raise torch.OutOfMemoryError("37 GiB")
        return loss.cross_entropy(hidden, weight, targets, vocab_size)

    losses = {"fused": loss.linear_cross_entropy, "eager": hungry}
    monkeypatch.setattr(loss, "contenders", lambda options: losses)
    timed = pick(run(tmp_path, "rows=24,16"), kind="time")
    assert [set(sample["ms"]) for sample in timed] == [{"fused"}, {"fused", "eager"}]
    assert "left out: memory, eager, 24: out of memory" in capsys.readouterr().out


@INTERPRETED
def test_a_loss_that_predicts_the_padding_fails_the_check():
    """A loss that also predicts the padding fails the check that every contender but Liger-Kernel gets."""

    def padding_too(hidden, weight, targets, vocab_size):
        return loss.cross_entropy(hidden, weight, targets, weight.shape[0])

    options = loss.Options(torch.device("cpu"), True, loss.TINY, sample=None)
    assert loss.check(loss.LIGER + " in name only", padding_too, options)["passed"] is False


@INTERPRETED
def test_wrong_gradients_alone_fail_the_check():
    def steeper(*arguments):
        value = loss.cross_entropy(*arguments)
        return value + 0.003 * (value - value.detach())

    found = loss.check("steeper", steeper, loss.Options(torch.device("cpu"), True, loss.TINY, sample=None))
    within = {part: error <= found["limits"][part] for part, error in found["errors"].items()}
    assert within == {"loss": True, "d_hidden": False, "d_weight": False}
    assert not found["passed"]


def on_a_gpu(peak_bytes: float, **ms: float) -> dict:
    """A GPU run's document in which forward and backward take half of the time each."""
    sizes = {"inputs_and_gradients_bytes": INPUTS_AND_GRADIENTS, "logits_bytes": LOGITS}
    samples = [
        {"kind": "memory", "contender": name, "rows": 65536, "peak_bytes": peak_bytes, **sizes} for name in ms
    ]
    halves = {name: {"forward": [t / 2] * 3, "backward": [t / 2] * 3} for name, t in ms.items()}
    samples.append({"kind": "time", "rows": 65536, "ms": halves})
    settings = {"width": 768, "padded_vocab": 50304, "check_rows": 8192}
    return {"device": "NVIDIA Test 3000", "settings": settings, "samples": in_three(*samples)}


def test_faster_and_without_full_logits_meets_the_aims():
    results = on_a_gpu(1.03 * 2**30, fused=26.4, compiled=28.0, liger=30.0)
    time, peer, memory = loss.aims(results)
    assert (time.status, time.ours) == (MET, "1.06x")
    assert (peer.status, peer.ours) == (NO_AIM, "1.14x")
    assert (memory.status, memory.ours) == (MET, "2.2x")
    assert "12.9x" in memory.why  # the logits alone


def test_slower_and_with_full_logits_misses_the_aims():
    time, memory = loss.aims(on_a_gpu(1.03 * 2**30 + LOGITS, fused=28.1, compiled=28.0))
    assert {time.status, memory.status} == {MISSED}


def test_nothing_is_judged_without_timings_of_the_fused_loss(tmp_path):
    results = on_a_gpu(1.0, eager=60.0)
    assert loss.aims(results) == []
    results["samples"] = []
    assert loss.aims(results) == []
    loss.draw(results, tmp_path / "loss.svg")  # the report shows the picture even so
    assert (tmp_path / "loss.svg").exists()
