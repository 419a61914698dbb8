"""Experiments from the command to the document and its figure. About 30 s on a CPU."""

import json

import pytest

from reproduce import timing
from reproduce.experiment import EXPERIMENTS, STATUSES, pick
from reproduce.tables import table
from tests.conftest import ROOT
from tests.reproduce import tiny
from tests.reproduce.tiny import FOLDER, document, run

DEVICE = tiny.DEVICE  # on a GPU, `-m gpu` takes these tests


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("attention", marks=pytest.mark.slow),  # others below run parts of it
        pytest.param("encoders", marks=pytest.mark.slow),  # takes longer than the four others together
        *("traffic", "numerics", "sparse", "history"),
    ],
)
def test_the_tiny_form_runs_to_the_end(name, tmp_path, capsys):
    assert run(tmp_path, name) == 0
    assert capsys.readouterr().out.count("where they can be read:") <= 1
    results = document(tmp_path, name)
    assert results["state"] == "complete"
    assert results["samples"]
    assert not [sample for sample in results["samples"] if "failed" in sample]
    if name == "attention":  # bfloat16 would be refused on a CPU, which is not a failure
        assert all("flash" in sample["ms"] for sample in pick(results, kind="time"))
    assert {"torch", "triton", "commit"} <= results["environment"].keys()
    assert results["command"][:4] == ["python", "-m", "reproduce", name]
    assert str(ROOT) not in json.dumps(results)  # a result can be shared
    assert (tmp_path / FOLDER / f"{name}.svg").read_text().startswith("<?xml")
    module = EXPERIMENTS[name].module
    kinds = {sample["kind"] for sample in results["samples"] if "refused" not in sample}
    assert not {kind for kind in kinds - {"ncu"} if f"\n{kind}" not in table(results)}
    for verdict in module.judge(results):
        assert verdict.claim in EXPERIMENTS[name].claims
        assert verdict.status in STATUSES


@pytest.mark.slow
def test_several_processes_time_everything_and_check_it_once(tmp_path):
    chosen = ["backends=naive,sdpa", "figures=gpt2", "rounds=2"]
    assert run(tmp_path, "attention", *chosen) == 0
    before = document(tmp_path, "attention")["samples"]
    assert run(tmp_path, "attention", *chosen, "processes=2") == 0  # the first finds its own
    results = document(tmp_path, "attention")
    assert results["state"] == "complete"
    assert results["samples"][: len(before)] == before
    assert [sample["process"] for sample in pick(results, kind="time")] == [0, 1]
    assert len(pick(results, kind="check")) == 2
    (sample,) = timing.timed(results, kind="time")
    assert len(timing.took(sample, "sdpa")) == 2
    assert not [word for word in results["command"] if "process=" in word]
