"""The offline compile gate: lets a shipped tile through, stops a bad one. About 10 s."""

import os
import subprocess
import sys

import pytest


def report(*arguments: str, kernel: str = "forward") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.compile_report", "--kernel", kernel, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_shipped_tile_passes() -> None:
    done = report("--arch", "90", "--head-dim", "64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wgmma" in done.stdout
    assert "\n0 of " in done.stdout


@pytest.mark.parametrize("kernel", ["hopper_forward", "hopper_backward"])
def test_the_hopper_kernels_keep_to_their_budgets(kernel: str) -> None:
    done = report("--arch", "90", "--head-dim", "64", "128", kernel=kernel)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TMA" in done.stdout
    assert "\n0 of " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        # Too many accumulators for four warps.
        (["--arch", "80", "--head-dim", "128", "--tile", "128", "64", "4", "3"], "bytes spilled"),
        # Sixteen queries are too few for a warpgroup's instruction, one stage too few to load ahead.
        (
            ["--arch", "90", "--head-dim", "64", "--tile", "16", "64", "4", "1"],
            "tensor cores: mma.sync, not wgmma",
        ),
        (["--arch", "80", "--head-dim", "64", "--tile", "64", "64", "4", "1"], "no asynchronous loads"),
    ],
)
def test_a_bad_tile_is_stopped(arguments: list[str], problem: str) -> None:
    done = report(*arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert problem in done.stdout


def test_the_interpreter_is_refused() -> None:
    command = [sys.executable, "-m", "kernels.compile_report"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "unset it" in done.stderr
