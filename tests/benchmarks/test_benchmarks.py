"""`python -m benchmarks`: the tiny forms run to the end, and results are held to our own aims. 10 s."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.aims import page
from reproduce.experiment import pick

SLOW = ("huggingface", "loss")  # 5 s of processor time each


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in BENCHMARKS]
)
def test_the_tiny_form_runs_to_the_end(name, tmp_path):
    assert main([name, "--tiny", "--device", "cpu", "--results", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "cpu" / f"{name}.json").read_text())
    assert results["state"] == "complete"
    assert pick(results, kind="time")
    assert not [sample for sample in results["samples"] if "failed" in sample]
    assert results["command"][:4] == ["python", "-m", "benchmarks", name]
    assert (tmp_path / "cpu" / f"{name}.svg").is_file()


def test_the_list_names_benchmarks_and_tools(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    for name in (*BENCHMARKS, "aims", "step", "preparation"):
        assert name in said
    assert "claims" not in said


def test_the_committed_results_are_held_to_the_aims():
    text, summary = page(Path("results"))
    assert summary == "53 aims met, 4 missed; 2 figures without an aim."
    assert "| host, forward, no_grad of flash | 112 us | 60 us | missed |" in text
    assert "Liger-Kernel's time over ours | 1.38x |  | no aim |" in text
