"""C12 over several initial weights: which pairs count, what judges them, and that they are perplexity's runs."""

import itertools
import json
import re
import runpy
import shlex
from dataclasses import replace

import pytest
import torch

from reproduce import pairs
from reproduce.__main__ import main
from reproduce.experiment import EXPERIMENTS, NOT_REPRODUCED, REPRODUCED, Options
from reproduce.pairs import Pair, Trained
from reproduce.perplexity_runs import Settings, training_runs
from reproduce.results import read_all
from tests.conftest import ROOT
from training.command_line import composed
from training.config import to_yaml

RUN = Trained("a file", "GPU", 3, 64, 1, "naive", {1: 4.0, 2: 3.0, 3: 2.0})


def pair(weights: int, naive: float, flash: float) -> list[Trained]:
    base = RUN._replace(weights=weights, losses={1: 4.0, 2: 3.0, 3: naive})
    return [base, base._replace(attention="flash", losses={1: 4.0, 2: 3.0, 3: flash})]


@pytest.mark.parametrize(
    ("apart", "status"),
    [
        ((0.002, -0.003, 0.001), REPRODUCED),
        ((0.011, 0.010, 0.009), NOT_REPRODUCED),  # small, but the same in every pair
        ((0.08, -0.07, 0.01), NOT_REPRODUCED),  # holds 0, but leaves open more than other weights change
    ],
)
def test_the_interval_of_the_mean_must_hold_zero_and_be_narrower_than_other_weights(apart, status):
    runs = [pair(n, 2.0 + 0.05 * n, 2.0 + 0.05 * n + each) for n, each in enumerate(apart)]
    (verdict,) = pairs.judge([*itertools.chain(*runs)])
    assert (verdict.claim, verdict.status) == ("C12", status)
    assert all(f"{each:+.4f}" in verdict.why for each in apart)


def test_a_run_without_its_pair_tells_what_weights_change():
    runs = [*pair(1, 2.0, 2.001), *pair(2, 2.0, 1.999), *pair(3, 2.0, 2.0)]
    assert [each.status for each in pairs.judge(runs)] == [NOT_REPRODUCED]  # weights change next to nothing
    assert [each.status for each in pairs.judge([*runs, pair(4, 2.1, 0)[0]])] == [REPRODUCED]


def of_two_cards(others: tuple[float, ...]) -> str:
    """Why, of three pairs on card A, and of card B's, whose weights are 1, 2, ... too."""
    runs = []
    for card, apart in (("A", (0.002, -0.003, 0.001)), ("B", others)):
        for n, each in enumerate(apart, 1):
            its = pair(n, 2.0 + 0.05 * n, 2.0 + 0.05 * n + each)
            runs += [run._replace(device=card, document=card) for run in its]
    (verdict,) = pairs.judge(runs)
    return verdict.why


def test_what_one_weight_counted_once_and_each_card_alone_give_is_computed():
    why = of_two_cards((0.004, -0.001, 0.003))
    assert "the same weights on two GPUs are two pairs; counted once, 3 pairs: +0.0010 nats, " in why
    assert (
        "A alone, 3 pairs: +0.0000 nats, 95 % interval -0.0066 to +0.0066, keeps the rule by 0.0598, " in why
    )
    assert "B alone, 3 pairs: +0.0020 nats, 95 % interval -0.0046 to +0.0086, keeps the rule by 0.0" in why
    assert (
        "B alone, 3 pairs: +0.0500 nats, 95 % interval +0.0500 to +0.0500, misses the rule, "
        in of_two_cards((0.05, 0.05, 0.05))
    )
    assert "B alone, 2 pairs: too few to tell" in of_two_cards((0.004, -0.001))


def test_a_card_that_keeps_the_rule_by_its_own_gap_alone_says_so():
    wide = [
        run._replace(device="B", document="B")
        for n in range(3)
        for run in pair(n, 2.0 + n, 2.0 + n + 0.2 * (n - 1))
    ]
    narrow = [run for n in range(3, 9) for run in pair(n, 2.0 + 0.01 * n, 2.0 + 0.01 * n)]
    (verdict,) = pairs.judge([*narrow, *wide])
    assert re.search(
        r"; B alone, 3 pairs: .*, keeps the rule by \S+, with its weights' gap \S+, misses it with",
        verdict.why,
    )
    assert verdict.why.count("misses it with ") == 1


def test_of_one_card_and_other_weights_in_each_pair_there_is_nothing_else_to_tell():
    runs = itertools.chain(*(pair(n, 2.0 + 0.05 * n, 2.0 + 0.05 * n + 0.001 * (-1) ** n) for n in range(3)))
    (verdict,) = pairs.judge([*runs])
    assert "alone" not in verdict.why
    assert "counted once" not in verdict.why


def test_two_pairs_are_not_judged():
    assert not pairs.judge([*pair(1, 2.0, 2.001), *pair(2, 2.05, 2.05)])


def test_naive_is_paired_with_flash_of_equal_weights_file_and_length():
    flash = RUN._replace(attention="flash")
    shorter, others = (
        (RUN._replace(weights=2, steps=2), flash._replace(weights=2, steps=2)),
        (RUN._replace(weights=3),),
    )
    elsewhere = (RUN._replace(weights=4), flash._replace(weights=4, document="another file"))
    assert pairs.matched([RUN, flash, *shorter, *others, *elsewhere]) == [Pair(RUN, flash)]


def test_a_job_trains_as_perplexity_does_but_for_its_weights():
    text = [
        "data=text_files",
        "data.files=[a.jsonl]",
        "data.tokenizer=gpt2",
        "logger=none",
        "trainer.device=cuda",
    ]
    settings = Settings(text=("a.jsonl",))
    options = Options(torch.device("cuda"), False, settings, lambda *_: {}, 0, lambda **_: None)
    theirs = {run.name: run.config for run in training_runs(settings, options)}
    jobs = runpy.run_path(str(ROOT / ".ci" / "gpu" / "jobs.py"))["JOBS"]
    found = {
        name: job.body.partition("train.sh ")[2] for name, job in jobs.items() if name.startswith("pair_")
    }
    assert len(found) == 8
    for name, words in found.items():
        _, attention, weights = name.split("_")
        ours = composed(*text, *shlex.split(words))
        assert to_yaml(ours) == to_yaml(replace(theirs[attention], init_seed=int(weights)))


def test_the_report_shows_the_pairs_of_both_files(tmp_path):
    folder = tmp_path / "nvidia-test-3000"
    folder.mkdir()
    kept = {
        f"{attention} {weights}": {
            "device": "NVIDIA Test 3000",
            "settings": {"init_seed": weights, "seed": 1337, "trainer.steps": 3, "trainer.batch_tokens": 64},
            "facts": {"attention": attention},
            "state": "partial" if weights == 5 else "complete",
            "validation": [
                [1, 4.0],
                [2, 3.0],
                [3, 2 + 0.05 * weights + 0.001 * weights * (attention == "flash")],
            ],
        }
        for attention in ("naive", "flash")
        for weights in (-1, 0, 1, 5)
    }
    (folder / "pairs.json").write_text(json.dumps(kept))
    assert main(["report", "--results", str(tmp_path)]) == 0
    report = (tmp_path / "REPORT.md").read_text()
    assert re.search(r"flash minus naive, mean over 3 pairs .* \+0\.0000 nats.* \| reproduced \|", report)
    assert "](nvidia-test-3000/pairs.json)" in report
    assert "](nvidia-test-3000/pairs.C12.svg)" in report
    assert "weights 1" in (folder / "pairs.C12.svg").read_text()


def test_readme_and_measurements_say_what_the_committed_pairs_give():
    documents = read_all(ROOT / "results", EXPERIMENTS, lambda note: None)
    trained = [
        run for each in documents if each["experiment"] == "perplexity" for run in pairs.of_perplexity(each)
    ]
    for file in sorted((ROOT / "results").glob(f"*/{pairs.FILE}")):
        trained += pairs.of_recipes(json.loads(file.read_text()))
    found, mean = pairs.matched(trained), pairs.of_pairs(trained)
    once = pairs.Mean.of(pairs.counted_once(found), mean.gap)
    h100, h200 = (pairs.of_pairs(its) for its in pairs.by_card(trained).values())
    assert (len(found), once.holds, h100.holds, h200.holds) == (7, True, False, True)

    readme, page = (
        " ".join((ROOT / name).read_text().split()).replace("*", "")
        for name in ("README.md", "docs/measurements.md")
    )
    for text in (readme, page):
        assert str(mean).partition("nats, ")[2] in text
    assert f"other weights alone differ by {mean.gap:.4f} " in readme
    assert f"to each other ({mean.gap:.4f}), a bound" in page
    assert f"each weight counted once ({len(pairs.counted_once(found))} pairs), by {once.spare:.4f}." in page
    assert not h200._replace(gap=mean.gap).holds
    assert f"the H100's three pairs miss it (gap {h100.gap:.4f})" in page
    kept = f"the H200's four keep it by {h200.spare:.4f} (gap {h200.gap:.4f}; with {mean.gap:.4f} they would miss it)"
    assert kept in page
