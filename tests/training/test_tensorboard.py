"""TensorBoard: what its own reader finds in a run's folder."""

import sys
from pathlib import Path

import pytest

import train
from tests.conftest import rows

reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def scalars(run: Path) -> dict[str, dict[int, float]]:
    events = reader.EventAccumulator(str(run / "tensorboard")).Reload()
    return {tag: {each.step: each.value for each in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def cells(run: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in rows(run):
        for name, cell in row.items():
            if cell and name != "step":
                found.setdefault(name, {})[int(row["step"])] = float(cell)
    return found


@pytest.mark.slow
def test_scalars_are_those_of_metrics_csv_also_of_a_resumed_run(started, tiny, tmp_path):
    """Resumed from an older checkpoint, the rows behind it are written again, and count once."""
    run = [*tiny, "logger=tensorboard", "hydra.run.dir=run", "trainer.save_every=6", "trainer.sample_every=5"]
    assert started(train.main, *run) == 0
    again = ["trainer.resume=run/checkpoints/step-00000006", "optimizer.lr=1e-4"]
    assert started(train.main, *run, *again) == 0
    found, expected = scalars(tmp_path / "run"), cells(tmp_path / "run")
    assert found.keys() == expected.keys()
    for name in ("train/loss", "val/loss", "tokens", "perf/peak_resident_gib"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6)
    texts = reader.EventAccumulator(str(tmp_path / "run/tensorboard")).Reload().Tags()["tensors"]
    assert texts == ["config/text_summary", "sample/text_summary"]


def test_without_its_package_the_run_is_refused(started, monkeypatch, tiny, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not there
    said = started(train.main, *tiny, "logger=tensorboard")
    assert (
        said
        == "error: tensorboard is not installed: pip install tensorboard, or use logger.tensorboard=false."
    )
    assert not any((tmp_path / "runs").iterdir())
