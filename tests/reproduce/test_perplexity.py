"""The perplexity experiment: the trainer's own runs, cut and continued; its verdicts fit the curves."""

import json
import math
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
import torch

from reproduce import fleet, perplexity
from reproduce.__main__ import main
from reproduce.command_line import OUT_OF_TIME
from reproduce.experiment import NOT_COMPARABLE, NOT_MEASURED, NOT_REPRODUCED, REPRODUCED, Options
from reproduce.perplexity_runs import training_runs
from reproduce.perplexity_verdicts import judge_between_devices, judge_extended


def command(folder: Path, *arguments: str) -> list[str]:
    own = (f"runs={folder / 'runs'}", f"cache_dir={folder / 'cache'}")
    return ["perplexity", "--tiny", "--device", "cpu", "--results", str(folder), *own, *arguments]


def samples(folder: Path, kind: str) -> dict[str, dict]:
    """The samples of a kind by name."""
    file = folder / "cpu" / "perplexity.json"
    if not file.exists():
        file = file.with_suffix(".partial.json")
    found = json.loads(file.read_text())["samples"]
    return {sample.get("name", sample["kind"]): sample for sample in found if sample["kind"] == kind}


FEW = ("naive", "numerics_end", "context_8", "context_32", "numerics_context")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each kind but those that the configs of the next test tell apart."""
    folder = tmp_path_factory.mktemp("results")
    with mock.patch.dict(os.environ):  # of a fixture for many tests nobody else restores it
        assert main(command(folder, f"only={','.join(FEW)}")) == 0
    return folder


def differences(ours: object, theirs: object) -> set[str]:
    """The settings in which two configs differ."""
    ours, theirs = asdict(ours), asdict(theirs)
    return {
        f"{group}.{name}" if isinstance(value, dict) else group
        for group, value in ours.items()
        for name in (value if isinstance(value, dict) else [group])
        if (value[name] != theirs[group][name] if isinstance(value, dict) else value != theirs[group])
    }


def test_runs_differ_in_attention_micro_batch_or_weights_alone():
    options = Options(torch.device("cpu"), True, perplexity.TINY, sample=None)
    runs = {each.name: each.config for each in training_runs(perplexity.TINY, options)}
    for name, base, settings in (
        ("naive_half", "naive", {"trainer.micro_batch"}),
        ("sdpa", "naive", {"attention.name"}),
        ("flash", "naive", {"attention.name"}),
        ("naive_seed", "naive", {"init_seed"}),
        ("stability_sdpa", "context_32", {"attention.name"}),
        ("context_8", "context_32", {"model.seq_len", "trainer.micro_batch"}),  # the same tokens
    ):
        assert differences(runs[name], runs[base]) == settings, name
    assert 2 * runs["naive_half"].trainer.micro_batch == runs["naive"].trainer.micro_batch


@pytest.mark.slow
def test_a_run_learns_and_is_evaluated_as_often_as_asked(tiny: Path):
    naive = samples(tiny, "run")["naive"]
    assert [step for step, _ in naive["validation"]] == [3, 6, 9, 12]
    assert naive["losses"][-1][1] < naive["losses"][0][1]


@pytest.mark.slow
def test_one_checkpoint_is_evaluated_with_every_backend(tiny: Path):
    rows = {row["backend"]: row for row in samples(tiny, "numerics")["numerics"]["rows"]}
    assert rows.keys() >= {"naive", "flash", "sdpa"}
    for row in rows.values():
        assert row["loss"] == pytest.approx(rows["naive"]["loss"], abs=1e-6)
        assert 0 < max(row["gradient_errors"].values()) < 1e-5


@pytest.mark.slow
def test_contexts_see_the_same_tokens_and_are_evaluated_three_ways(tiny: Path):
    runs = samples(tiny, "run")
    short, long = runs["context_8"], runs["context_32"]
    assert len(short["losses"]) == len(long["losses"]) == 12
    # windows of one length, whatever the model was trained with, ask for the same targets
    assert [context for context, _ in long["cut"]] == [8, 32]
    assert short["cut"][-1][1] == pytest.approx(short["validation"][-1][1], abs=1e-4)
    assert long["cut"][-1][1] == pytest.approx(long["validation"][-1][1], abs=1e-4)
    assert [(first, last) for first, last, _ in long["positions"]] == [(0, 16), (16, 32)]
    assert [step for step, _ in long["gradient_norms"]] == [1, 6, 11]


@pytest.mark.slow
def test_the_longest_context_has_numerics_of_its_own(tiny: Path):
    document = json.loads((tiny / "cpu" / "perplexity.json").read_text())
    (numerics,) = (each for each in document["samples"] if each.get("when") == "context")
    assert numerics["of"] == "context_32"
    assert {"naive", "flash", "sdpa"} <= {row["backend"] for row in numerics["rows"]}


@pytest.mark.slow
def test_a_finished_experiment_is_not_run_again(tiny: Path, capsys):
    assert main(command(tiny, f"only={','.join(FEW)}")) == 0
    assert "already done" in capsys.readouterr().out


@pytest.mark.slow
def test_another_selection_adds_to_what_was_measured(tiny: Path, tmp_path: Path, capsys):
    """Here of runs that are there; then one that extends a checkpoint that is gone, as on another machine."""
    shutil.copytree(tiny / "cpu", tmp_path / "cpu")
    shutil.copytree(tiny / "cache", tmp_path / "cache")
    assert main(command(tmp_path, "only=naive,context_8")) == 0
    assert not (tmp_path / "runs").exists()  # nothing was trained again
    assert samples(tmp_path, "run").keys() == samples(tiny, "run").keys()

    capsys.readouterr()
    assert main(command(tmp_path, "parts=extend", "only=extend_32")) == 0
    said = capsys.readouterr().out
    assert "\nextend_32: 4 steps, validation loss" in said
    assert "\nnaive: 12 steps" not in said  # those of the earlier machine, which stay in the results
    assert samples(tmp_path, "run")["extend_32"]["context"] == 32
    assert samples(tmp_path, "run").keys() == {*samples(tiny, "run"), "extend_32"}
    assert (
        len(list((tmp_path / "runs").glob("*/summary.json"))) == 2
    )  # the source's, trained again, and its own


@pytest.mark.slow
def test_a_run_that_is_cut_is_kept_and_goes_on(tmp_path: Path, monkeypatch):
    def after_an_evaluation(deadline: float | None) -> bool:
        kept = (tmp_path / "runs").glob("*/metrics.csv")
        return len([line for file in kept for line in file.read_text().splitlines()]) > 25

    whole = command(tmp_path, "only=naive", "steps=2000", "eval_every=500")
    with monkeypatch.context() as patch:
        patch.setattr(fleet, "_is_late", after_an_evaluation)  # as if the budget were over then
        assert main(whole) == OUT_OF_TIME
    first = samples(tmp_path, "run")["naive"]
    assert 0 < first["partial"] < 2000
    assert main(whole) == 0
    second = samples(tmp_path, "run")["naive"]
    assert "partial" not in second
    assert second["losses"][: first["partial"]] == first["losses"]
    assert [step for step, _ in second["losses"]] == list(range(1, 2001))


@pytest.mark.slow
def test_a_run_that_fails_says_where_to_look(tmp_path: Path, capsys):
    assert main(command(tmp_path, "only=naive", "lr=1e30")) == 1
    out = capsys.readouterr().out
    assert "the loss is nan" in out
    assert ".log)" in out


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("text=nowhere/*.txt tokenizer=bytes", "nowhere"),
        ("only=flsh", "only=flsh is no run of"),
        ("parts=all", "parts=all is unknown"),
        ("contexts=24", "batch_tokens=128 is not a multiple of context 24"),
        ("steps=100000", "python_source is too small"),
    ],
)
def test_a_mistaken_setting_is_a_one_line_error(tmp_path, capsys, override, said):
    assert main(command(tmp_path, *override.split())) == 1
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_what_is_extended_may_be_the_run_of_the_longest_context():
    settings = perplexity.replace(perplexity.TINY, only=(), extend_from="context_32")
    options = perplexity.Options(perplexity.torch.device("cpu"), True, settings, sample=None)
    tasks = perplexity._numerics(perplexity.training_runs(settings, options), settings)
    assert [(task.where["when"], task.where["of"]) for task in tasks] == [
        (when, "context_32") for when in ("start", "end", "context")
    ]


# ---- conclusions, from curves made up for the purpose ---------------------------------------------------


def curve(name: str, *losses: float, context: int = 64, part: str = "gpt2", **changes: object) -> dict:
    """A run whose validation losses are `losses`, after steps 1, 2, ..."""
    run = {"kind": "run", "part": part, "name": name, "context": context, "steps": len(losses)}
    run |= {
        "batch_tokens": 64,
        "parameters": 10**8,
        "tokens_per_second": 1e3,
        "peak_gib": 1.0,
        "seconds": 1.0,
    }
    return run | {"validation": [[step, loss] for step, loss in enumerate(losses, 1)]} | changes


def judged(*found: dict) -> list[tuple[str, str]]:
    results = {"device": "GPU", "settings": {}, "samples": list(found)}
    return [(verdict.claim, verdict.status) for verdict in perplexity.judge(results)]


NAIVE, HALF = curve("naive", 5, 4, 3, 2), curve("naive_half", 5, 4, 3.01, 2.01)
FLASH_SEED = curve("flash_seed", 5.1, 4.1, 3.1, 2.1)


@pytest.mark.parametrize(
    ("losses", "status"),
    [
        ((5, 4, 3.015, 2.015), REPRODUCED),  # within twice the control
        ((5, 4, 3.045, 2.0), NOT_REPRODUCED),  # on average over the second half it is not
        ((5, 4, 3.0, 2.03), NOT_REPRODUCED),  # at the end it is not
        ((7, 6, 3.0, 2.0), REPRODUCED),  # the first half is not asked
    ],
)
def test_curves_coincide_if_they_are_as_close_as_another_order_of_rounding(losses, status):
    assert judged(NAIVE, HALF, curve("flash", *losses), FLASH_SEED)[0] == ("C12", status)


def test_curves_further_apart_than_two_seeds_do_not_coincide():
    """Even where the control is as far."""
    far, seed = curve("naive_half", 5, 4, 3.2, 2.2), curve("flash_seed", 5, 4, 3.31, 2.31)
    assert judged(NAIVE, far, curve("flash", 5, 4, 3.3, 2.3), seed)[0] == ("C12", NOT_REPRODUCED)


@pytest.mark.parametrize("left_out", ["naive", "naive_half", "flash_seed"])
def test_without_its_controls_nothing_is_claimed(left_out: str):
    found = [run for run in (NAIVE, HALF, curve("flash", 5, 4, 3, 2), FLASH_SEED) if run["name"] != left_out]
    assert {status for claim, status in judged(*found) if claim == "C12"} == {NOT_MEASURED}


def test_what_two_cards_differ_by_in_the_same_run_is_told():
    cut = curve("sdpa", 5, 4, 3) | {"partial": 3}
    one = {"device": "H1", "samples": [curve("flash", 5, 3.0), curve("naive", 5, 3.5), cut]}
    other = {"device": "H2", "samples": [curve("flash", 5, 3.25), curve("sdpa", 5, 2)]}
    (told,) = judge_between_devices(one, other)
    assert (told.what, told.ours) == (
        "one run on H1 and on H2: |difference| in nats at the end",
        "flash 0.2500",
    )
    assert told.status == NOT_COMPARABLE
    longer = {"device": "H2", "samples": [curve("flash", 5, 3.25, steps=9)]}
    assert not judge_between_devices(one, longer)


@pytest.mark.parametrize(
    ("losses", "status"),
    [
        ((3.0, 2.7, 2.4), REPRODUCED),
        ((3.0, 2.7, 2.45), NOT_REPRODUCED),  # by no more than another card changes, 0.25
        ((3.0, 2.7, 2.8), NOT_REPRODUCED),
    ],
)
def test_every_step_to_a_longer_context_must_gain_more_than_a_run_is_known_to(losses: tuple, status: str):
    steps = [
        curve(f"extend_{length}", loss, part="extend", context=length)
        for length, loss in zip((64, 128, 256), losses, strict=True)
    ]
    seeds = [curve("flash", 5, 3.0), curve("flash_seed", 5, 3.2)]
    one = {"device": "H1", "samples": [*seeds, *steps]}
    other = {"device": "H2", "samples": [curve("flash", 5, 3.25)]}
    (found,) = judge_extended(one, [one, other])
    assert found.status == status
    assert found.why.startswith("too few runs to tell 128 to 256; ") == (status == NOT_REPRODUCED)
    assert "0.2500 at most: 64 to 128 by 0.3000 nats" in found.why
    (alone,) = judge_extended({**one, "samples": steps}, [{**one, "samples": steps}])
    assert (alone.status, "which is not known" in alone.why) == (NOT_REPRODUCED, True)
    (missing,) = judge_extended(other, [one, other])
    assert missing.why.endswith("the GPU's time went to other parts; it was on " + one["device"])
    assert missing.status == NOT_MEASURED


def test_the_papers_recipe_is_not_held_to_another_runs_bound():
    recipe = [curve(f"recipe_{name}", 5, 4, 3, 2, part="recipe") for name in ("naive", "flash")]
    cut = {"device": "GPU", "settings": {}, "samples": [recipe[0] | {"partial": 3}, recipe[1]]}
    (found,) = (each for each in perplexity.judge(cut) if "recipe" in each.what)
    assert (found.status, found.ours) == (NOT_MEASURED, "")
    assert found.why.endswith("its time was over at step 3 of 4 of recipe_naive")
    results = {"device": "GPU", "settings": {}, "samples": [NAIVE, HALF, FLASH_SEED, *recipe]}
    (found,) = (each for each in perplexity.judge(results) if "recipe" in each.what)
    assert (found.status, found.ours[:6]) == (NOT_COMPARABLE, "0.0000")


def test_a_cut_run_is_not_judged():
    cut = curve("flash", 5, 4, partial=2)
    assert judged(NAIVE, HALF, cut, FLASH_SEED)[0] == ("C12", NOT_MEASURED)


@pytest.mark.parametrize(
    ("error", "apart", "status"),
    [(1.9e-3, 0.0, REPRODUCED), (2.1e-3, 0.0, NOT_REPRODUCED), (1e-3, 0.002, NOT_REPRODUCED)],
)
def test_numerics_are_judged_by_every_tensor(error: float, apart: float, status: str):
    def row(backend: str, loss: float, worst: float) -> dict:
        return {
            "backend": backend,
            "dtype": "bfloat16",
            "loss": loss,
            "gradient_errors": {"a": 1e-3, "b": worst},
        }

    sample = {
        "kind": "numerics",
        "when": "end",
        "rows": [row("naive", 3.0, 1e-3), row("flash", 3.0 + apart, error)],
    }
    assert ("C12", status) in judged(sample)


@pytest.mark.parametrize(
    ("gain", "seed", "status"),
    [(0.1, 0.05, REPRODUCED), (0.1, 0.3, NOT_REPRODUCED), (-0.1, 0.05, NOT_REPRODUCED)],
)
def test_longer_context_must_win_by_more_than_the_seeds_differ(gain: float, seed: float, status: str):
    def context(length: int, loss: float, name: str = "") -> dict:
        views = {"cut": [[64, loss + 0.1], [length, loss]], "positions": [[0, 32, 3.0], [32, 64, loss]]}
        return curve(name or f"context_{length}", 3.0, loss, context=length, part="context", **views)

    found = [context(64, 2.0), context(256, 2.0 - gain), context(256, 2.0 - gain + seed, "context_256_seed")]
    assert ("C14", status) in judged(*found)


def test_a_context_that_diverged_is_named_and_left_out(tmp_path: Path):
    def context(length: int, *losses: float) -> dict:
        views = {"cut": [[64, losses[-1] + 0.1], [length, losses[-1]]]}
        views |= {"positions": [[0, 32, 3.0], [32, 64, losses[-1]]], "gradient_norms": [[1, 1.0], [3, 1e4]]}
        return curve(f"context_{length}", *losses, context=length, part="context", **views)

    found = [context(64, 3.0, 2.5, 2.0), context(256, 3.0, 2.0, 1.5), context(1024, 3.0, 1.6, 5.0)]
    results = {"device": "GPU", "settings": {}, "samples": found}
    verdicts = [each for each in perplexity.judge(results) if each.claim == "C14"]
    shown = [(each.what, each.ours, each.status) for each in verdicts]
    assert ("validation loss, context 256 minus context 64", "-0.500 nats", REPRODUCED) in shown
    assert ("validation loss at context 1024", "diverged from step 2 on", NOT_REPRODUCED) in shown
    assert next(each.why for each in verdicts if "diverged" in each.ours).startswith("without precise_delta")
    assert "3 (diverged from 2 on)" in perplexity.table(results)
    perplexity.draw(results, tmp_path / "perplexity.svg")
    drawn = (tmp_path / "perplexity.svg").read_text()
    assert "context (x: diverged)" in drawn
    assert "The 256 model, windows cut" in drawn


def test_a_panel_that_was_not_measured_is_not_drawn(tmp_path: Path):
    results = {"device": "GPU", "settings": {}, "samples": [NAIVE, curve("flash", 5, 4, 3, 2.1)]}
    perplexity.draw(results, tmp_path / "perplexity.svg")
    drawn = (tmp_path / "perplexity.svg").read_text()
    assert "Loss: ends within 0.1 nats of naive" in drawn
    assert "Loss minus naive's" in drawn
    assert "Longer context" not in drawn


def test_a_context_of_other_weights_has_its_name_in_the_legend(tmp_path: Path):
    found = [curve(f"context_64{seed}", 3, 2, context=64, part="context") for seed in ("", "_seed")]
    perplexity.draw({"device": "GPU", "settings": {}, "samples": found}, tmp_path / "perplexity.svg")
    assert "64, other weights" in (tmp_path / "perplexity.svg").read_text()


def test_the_table_has_perplexity_and_distance():
    text = perplexity.table({"device": "GPU", "settings": {}, "samples": [NAIVE, HALF]})
    assert f"{math.exp(2.01):.2f}" in text
    assert "1.0e-02" in text
