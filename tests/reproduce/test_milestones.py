"""`python -m reproduce milestones`: pass and fail against published curves, on run directories of known losses."""

import math
import os
from pathlib import Path

import pytest

from reproduce.__main__ import main
from reproduce.comparison.milestones import read_reference, references
from training.command_line import CONFIGS, composed
from training.config import to_yaml

OTHER_TEXT = ("data=python_source", "data.tokenizer=some/folder/gpt2.tiktoken")


def write_run(path: Path, losses: dict[int, float], *overrides: str) -> Path:
    """A run directory of the paper's recipe whose validation loss at each step is as given."""
    config = composed("experiment=paper/gpt2_small", *overrides)
    path.mkdir()
    (path / "config.yaml").write_text(to_yaml(config))
    rows = [f"{step},{step * config.trainer.batch_tokens},{loss}" for step, loss in losses.items()]
    (path / "metrics.csv").write_text("\n".join(["step,tokens,val/loss", *rows]) + "\n")
    return path


def test_a_run_on_the_papers_curve_passes_every_milestone_it_reached(tmp_path, capsys):
    run = write_run(
        tmp_path / "run", {5000: 3.45, 8000: math.log(28.4), 10000: 3.28, 15000: 3.2, 20000: 3.16}
    )
    assert main(["milestones", str(run)]) == 0
    said = capsys.readouterr().out
    assert "against experiment=paper/gpt2_small" in said
    assert "!" not in said
    assert "0 failed" in said
    assert "the next is at step 30,000" in said
    assert "28.40" in said
    svg = (run / "milestones.svg").read_text()
    assert "<svg" in svg


def test_a_run_above_the_curve_fails_there_only(tmp_path, capsys):
    run = write_run(tmp_path / "run", {5000: 3.45, 10000: 3.2, 20000: math.log(23.73 + 0.2)})
    assert main(["milestones", str(run)]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1
    assert "20,000" in failed[0]
    assert "23.93" in failed[0]


def test_a_perplexity_above_the_curve_by_the_reading_error_passes(tmp_path):
    inside = write_run(tmp_path / "in", {8000: math.log(28.4 + 0.09)})
    outside = write_run(tmp_path / "out", {8000: math.log(28.4 + 0.11)})
    assert [main(["milestones", str(run)]) for run in (inside, outside)] == [0, 1]


def test_settings_that_differ_from_the_reference_are_listed(tmp_path, capsys):
    run = write_run(tmp_path / "run", {1000: 5.0}, "trainer.batch_tokens=262144", *OTHER_TEXT)
    assert main(["milestones", str(run)]) == 0
    said = capsys.readouterr().out
    assert "the run's settings differ from the reference's" in said
    assert "    trainer.batch_tokens is 262144, not 524288\n" in said
    assert "    data.source is python_source, not openwebtext\n" in said
    assert "data.tokenizer" not in said


def test_a_setting_that_is_newer_than_the_run_is_no_difference(tmp_path, capsys):
    run = write_run(tmp_path / "run", {1000: 5.0})
    config = run / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if "softcap" not in line))
    assert main(["milestones", str(run)]) == 0
    assert "!" not in capsys.readouterr().out


def test_another_model_is_refused_unless_a_reference_is_named(tmp_path, capsys):
    run = write_run(tmp_path / "run", {1000: 5.0}, "model=nano", "data=python_source")
    assert main(["milestones", str(run)]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    for said in (
        "model.n_layer is 4, not 12",
        "data.tokenizer is bytes, not gpt2",
        "the closest, paper/gpt2_small, differs",
        "--reference paper/gpt2_small compares",
    ):
        assert said in error
    assert not (run / "milestones.svg").exists()
    assert main(["milestones", str(run), "--reference", "paper/gpt2_medium"]) == 0
    said = capsys.readouterr().out
    assert "    model.n_layer is 4, not 24\n" in said
    assert f"plot: {os.path.relpath(run)}/milestones.svg" in said


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name",
    [
        *("attention=naive", "attention.precise_delta=false", "trainer.micro_batch=8", "seed=7"),
        "trainer.hellaswag=true",
    ],
)
def test_settings_that_a_recipe_leaves_free_are_not_reported(tmp_path, capsys, name):
    assert main(["milestones", str(write_run(tmp_path / "run", {1000: 5.0}, name))]) == 0
    assert "!" not in capsys.readouterr().out


def test_the_nearest_reference_is_taken(tmp_path, capsys):
    run = write_run(tmp_path / "run", {1000: 5.0}, "model.seq_len=2048")
    main(["milestones", str(run)])
    assert "against experiment=paper/gpt2_small_2k" in capsys.readouterr().out


def test_a_resumed_run_has_the_curve_of_all_its_parts(tmp_path, capsys):
    first = write_run(tmp_path / "first", {5000: 3.45, 10000: 3.2, 11000: 9.0})
    second = write_run(tmp_path / "second", {11000: 3.19, 20000: 3.1}, f"trainer.resume={first}")
    assert main(["milestones", str(second)]) == 0
    assert "7 passed, 0 failed" in capsys.readouterr().out  # up to step 20,000
    assert main(["milestones", str(first)]) == 0
    assert "4 passed, 0 failed" in capsys.readouterr().out  # up to step 10,000


def test_a_sweep_asks_to_name_one_of_its_runs(tmp_path, capsys):
    (tmp_path / "sweep").mkdir()
    first, _ = (write_run(tmp_path / "sweep" / name, {1000: 5.0}) for name in ("0_naive", "1_sdpa"))
    assert main(["milestones", str(tmp_path / "sweep")]) == 1
    assert f"holds 2 runs; name one of them, such as {os.path.relpath(first)}\n" in capsys.readouterr().err


def test_a_run_without_validation_says_so(tmp_path, capsys):
    assert main(["milestones", str(write_run(tmp_path / "run", {}))]) == 1
    assert "no validation loss yet" in capsys.readouterr().err


def test_every_reference_has_its_recipe_and_its_sources():
    for name in references():
        assert (CONFIGS / "experiment" / f"{name}.yaml").is_file()
        points = read_reference(name)
        assert points == sorted(points, key=lambda point: point.step)
        assert all(point.source and point.error > 0 for point in points)


def test_the_papers_two_curves_agree():
    """Figure 4 and the released code's curve: no run could pass one by failing the other by much."""
    points = read_reference("paper/gpt2_small")
    for one in points:
        for other in points:
            if one.step == other.step:
                assert math.log(one.perplexity) == pytest.approx(math.log(other.perplexity), abs=0.035)
