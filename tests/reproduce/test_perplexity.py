"""The perplexity experiment: it trains as the trainer does, on any prepared corpus; its verdicts fit the curves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reproduce import perplexity
from reproduce.__main__ import main
from reproduce.experiment import NOT_MEASURED, NOT_REPRODUCED, REPRODUCED
from tests.conftest import measured
from training.config import (
    AttentionConfig,
    Config,
    DataConfig,
    LoggerConfig,
    ModelConfig,
    TrainerConfig,
)
from training.corpus import prepare_corpus
from training.trainer import train


def run(folder: Path, *arguments: str) -> dict:
    cache = f"cache_dir={folder / 'cache'}"
    assert main(["perplexity", "--tiny", "--device", "cpu", "--results", str(folder), cache, *arguments]) == 0
    return json.loads((folder / "cpu" / "perplexity.json").read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run(tmp_path_factory.mktemp("results"))


def runs(results: dict, part: str) -> list[dict]:
    return [sample for sample in results["samples"] if sample["kind"] == "run" and sample["part"] == part]


def test_backends_see_the_same_weights_and_batches(tiny):
    naive, sdpa, other_seed = runs(tiny, "backends")
    assert (naive["backend"], sdpa["backend"], other_seed["seed"]) == ("naive", "sdpa", 1)
    assert sdpa["losses"] == pytest.approx(naive["losses"], rel=1e-5)
    assert other_seed["losses"][0] != pytest.approx(naive["losses"][0], rel=1e-4)
    assert [step for step, _, _ in naive["validation"]] == [3, 6, 9, 12]
    assert naive["losses"][-1] < naive["losses"][0]


def test_contexts_are_trained_on_equal_tokens(tiny):
    contexts = runs(tiny, "context")
    assert [sample["model"]["seq_len"] for sample in contexts] == [8, 32]
    assert {len(sample["losses"]) for sample in contexts} == {12}


def test_losses_equal_those_of_the_trainer(text_file, tmp_path):
    """The experiment's losses, on a corpus folder prepared elsewhere, are those in the trainer's metrics.csv."""
    data = DataConfig(
        "text_files", files=str(text_file), separator="\n\n", cache_dir=str(tmp_path / "c"), workers=1
    )
    config = Config(
        model=ModelConfig(seq_len=16, n_layer=1, n_head=2, n_embd=32),
        attention=AttentionConfig("naive"),
        data=data,
        trainer=TrainerConfig(steps=12, batch_tokens=128, log_every=1, sample_tokens=0, device="cpu"),
        logger=LoggerConfig(wandb=False),
    )
    summary = train(config, tmp_path / "run")
    corpus = prepare_corpus(data, quiet=True).directory
    results = run(tmp_path, "parts=backends", "backends=naive", f"corpus={corpus}")
    ours = runs(results, "backends")[0]
    theirs = list(map(float, measured(tmp_path / "run", "train/loss").values()))
    assert ours["losses"] == pytest.approx(theirs, rel=1e-6)
    assert ours["validation"][-1][1] == pytest.approx(summary["val/loss"], rel=1e-6)


def test_it_needs_neither_datasets_nor_hydra_nor_wandb(tmp_path):
    """As on a bare GPU machine."""
    code = (
        "import sys\n"
        "for name in ('datasets', 'hydra', 'omegaconf', 'wandb'): sys.modules[name] = None\n"
        "from reproduce.__main__ import main\n"
        "import reproduce.training\n"
        f"sys.exit(main(['perplexity', '--tiny', '--device', 'cpu', '--results', {str(tmp_path)!r},"
        f" 'parts=backends', 'backends=naive', 'cache_dir={tmp_path}/cache']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=perplexity.__file__.rsplit("/", 2)[0],
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("corpus=nowhere", "nowhere"),
        ("backends=flsh", "backends=flsh is unknown"),
        ("parts=all", "parts=all is unknown"),
        ("contexts=24", "batch_tokens=128 is not a multiple of context 24"),
    ],
)
def test_a_mistaken_setting_is_a_one_line_error(tmp_path, capsys, override, said):
    assert main(["perplexity", "--tiny", "--device", "cpu", "--results", str(tmp_path), override]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


# ---- conclusions, from curves made up for the purpose ---------------------------------------------------


def curve(backend: str, offset: float, seed: int = 1, context: int = 64, part: str = "backends") -> dict:
    where = {"kind": "run", "part": part, "backend": backend, "seed": seed, "context": context, "steps": 2}
    return where | {"losses": [5 + offset, 4 + offset], "validation": [[2, 4 + offset, 1.0]]}


def judged(*samples: dict, backends: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    results = {"device": "GPU", "settings": {"seeds": [1, 2], "backends": backends}, "samples": list(samples)}
    return [(verdict.claim, verdict.status) for verdict in perplexity.judge(results)]


def test_curves_coincide_if_they_are_closer_than_two_seeds():
    seeds = [curve("naive", 0.0), curve("naive", 0.03, seed=2)]
    close, far = curve("flash", 0.001), curve("sdpa", -0.05)
    statuses = [status for claim, status in judged(*seeds, close, far) if claim == "C12"]
    assert statuses == [REPRODUCED, NOT_REPRODUCED, NOT_MEASURED]  # last: the paper's 18.2 takes a long run


def test_seeds_that_differ_at_first_alone_do_not_make_a_curve_close():
    """The mean difference is 0.3 against the seeds' 0.5 over all steps; from a quarter of them on, 0.3 against 0."""
    base, seed, far = curve("naive", 0.0), curve("naive", 0.0, seed=2), curve("flash", 0.3)
    for run, losses in ((base, [5, 4, 3, 2]), (seed, [7, 4, 3, 2]), (far, [5.3, 4.3, 3.3, 2.3])):
        run |= {"losses": losses, "validation": [[4, 2.0, 1.0]], "steps": 4}
    settings = {"seeds": [1, 2], "backends": []}
    results = {"device": "GPU", "settings": settings, "samples": [base, seed, far]}
    verdict, *_ = perplexity.judge(results)
    assert verdict.status == NOT_REPRODUCED
    assert (
        "from step 1 on, when the initial weights no longer dominate, 3.0e-01 against 0.0e+00" in verdict.why
    )


def test_backends_that_were_left_out_are_said_to_be_not_measured():
    curves = [curve("naive", 0.0), curve("naive", 0.03, seed=2), curve("flash", 0.001)]
    statuses = [status for claim, status in judged(*curves, backends=("flash",)) if claim == "C12"]
    assert statuses == [REPRODUCED, NOT_MEASURED, NOT_MEASURED]


def test_without_a_second_seed_nothing_is_claimed():
    assert {status for _, status in judged(curve("naive", 0.0), curve("flash", 0.0))} == {NOT_MEASURED}


@pytest.mark.parametrize(("gain", "status"), [(-0.1, REPRODUCED), (0.1, NOT_REPRODUCED)])
def test_longer_context_is_judged_by_its_direction(gain, status):
    contexts = [curve("flash", gain * i, context=64 * 2**i, part="context") for i in range(3)]
    assert ("C14", status) in judged(*contexts)


def test_a_loss_that_was_not_measured_has_no_panel(tmp_path):
    results = {
        "device": "GPU",
        "settings": {"seeds": [1]},
        "samples": [curve("naive", 0.0), curve("flash", 0.1)],
    }
    perplexity.draw(results, tmp_path / "perplexity.svg")
    drawn = (tmp_path / "perplexity.svg").read_text()
    assert "Training loss" in drawn
    assert "step by step" in drawn
    assert "Validation loss" not in drawn
