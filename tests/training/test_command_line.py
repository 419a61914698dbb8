"""How a command line is composed, refused or interrupted. Runs in this process, with tasks that train nothing."""

import math
import subprocess
import sys
from pathlib import Path
from typing import ClassVar
from warnings import catch_warnings

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback

import reproduce.__main__
import sample
from kernels import AttentionError
from training.command_line import composed
from training.config import Config, ConfigError
from training.console import for_shell, quoted_for_shell
from training.distributed import World
from training.plan import resolve


def never(_config: Config, _run_dir: Path) -> None:
    raise AssertionError("it was to be refused")


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "experiment=gpt2_medium",
            "is not an option; did you mean paper/gpt2_medium? experiment has: compare/gpt2_small, ",
        ),
        ("attention=flsh", "attention=flsh is not an option; did you mean flash? attention has: auto, "),
        ("model=gpt2", "did you mean gpt2_large or gpt2_medium or gpt2_small or gpt2_xl? model has: "),
        ("data=openwebtxt", "did you mean openwebtext? data has: "),
        ("model=", "model= is not an option; model has: gpt2_large, "),
        ("data=foo", "data=foo is not an option; data has: hub, mix, "),
        ("experimnt=compare/gpt2_small", "experimnt is not a setting; did you mean experiment?"),
        ("modle=nano", "did you mean model?"),
        ("trainer.lr=3", "did you mean optimizer.lr?"),
        ("trainer.lrr=1", "did you mean optimizer.lr?"),
        ("+trainer.lrr=1", "trainer.lrr is not a setting"),
        ("trainer.precision=fp8", "expected one of [auto, fp32, bf16, fp16]"),
        ("logger.mode=disabled", "expected one of [auto, online, offline]; logger=none turns wandb off"),
        ("trainer.batch_tokens=4000", "3968 or 4032"),
        ("trainer.seed=3", "did you mean seed?"),
        ("trainr.step=3", "did you mean trainer.steps?"),
        ("model.layer=3", "did you mean model.n_layer?"),
        ("model.depth=3", "model.depth is not a setting; model has: vocab_size, seq_len, "),
        ("bias=False", "bias is not a setting; use GPT-2's biases, of linear layers and norms"),
        ("foo=1", "foo is not a setting; `python train.py --cfg job` prints all settings"),
        ("optimizer.learning_rate=1", "did you mean optimizer.lr?"),
        ("warmup_iters=2000", "use schedule.warmup_fraction, which is warmup_iters / max_iters"),
        ("optimizer.min_lr=6e-5", "use schedule.final_fraction, which is min_lr / learning_rate"),
        ("--gradient_accumulation_steps=40", "use trainer.batch_tokens: the tokens of all micro-batches"),
        ("lr_decay_iters=600000", "use trainer.steps: the decay ends with the run"),
        ("wandb_project=owt", "did you mean logger.project?"),
        ("--block_size=32", "did you mean model.seq_len=32?"),
        ("trainer.steps=1e3", "trainer.steps=1e3: the value must be a whole number: trainer.steps=1000"),
        ("model=nano trainer.batch_tokens=100 --cfg job", "nearest: 64 or 128"),
        ("model=nano +unknown=1 --cfg job", "unknown is not a setting"),
        ("schedule.warmup_fraction=2 --cfg job", "it must be in [0, 1)"),
        (
            "schedule=constant schedule.final_fraction=0.5",
            "with schedule=constant nothing decays: leave it out",
        ),
        ("trainer.steps 5", "trainer.steps 5: did you mean trainer.steps=5?"),
        ("seed=1 --steps 5 attention=naive", "--steps 5: did you mean trainer.steps=5?"),
        ("--lr=1", "--lr=1: did you mean optimizer.lr=1?"),
        ("trainer.steps", "did you mean trainer.steps=VALUE?"),
        ("--foo", "settings are written key=value"),
        ("hydra/launcher=local", "hydra/launcher=local: this needs -m"),
        ("hydra.sweeper.n_trials=3", "hydra.sweeper.n_trials=3: this needs -m"),
        ("-m seed=1 -z=3", "-z=3: settings are written key=value"),
        ("=3", "=3: settings are written key=value"),
        ("model=null", "model=null: model must be one of gpt2_large, "),
        ("logger=False", "logger=False: logger must be one of none, tensorboard, wandb, or left out"),
        ("--resolve", "The --resolve flag can only be used in conjunction with --cfg or --help"),
        ("attention=[naive,sdpa]", "attention=[naive,sdpa]: attention must be one of auto, "),
        (
            "attention=naive,sdpa",
            "attention=naive,sdpa: several values need -m, which starts one run for each",
        ),
        ("data.files=a,b", "for a list type data.files=[a,b], for a text with commas \"data.files='a,b'\""),
        ("logger.tags=a", "logger.tags=a: the value must be a list: logger.tags=[a]"),
        ("optimizer.betas=0.9", "optimizer.betas=0.9: the value must be a list: optimizer.betas=[0.9]"),
        (
            "trainer.steps=0 trainer.profile_step=1",
            "trainer.profile_step is 1; with trainer.steps=0 there is no step",
        ),
        ("optimizer.lr=inf", "optimizer.lr is inf; it must be a finite number above 0"),
        ("trainer.sample_prompt=f(x", "trainer.sample_prompt=f(x: Hydra cannot parse this; "),
        ("attention=[naive", "attention=[naive: Hydra cannot parse this; "),
        ("trainer.init_from=", "trainer.init_from is empty: name a run directory, or leave it out"),
        ("trainer.resume=", "trainer.resume is empty"),
        ("trainer.resume=true", "trainer.resume=true: it must be a run directory, or auto"),
        ("hydra.run.dir=", "hydra.run.dir=: an empty value means the current directory"),
        ("seed=1,2 hydra.run.dir=x -m", "name the parent of them all with hydra.sweep.dir=x"),
        ("hydra.sweep.dir=x", "without -m, name the run directory with hydra.run.dir=..."),
        ("data.cache_dir=", "data.cache_dir is empty: name a folder, or leave it out"),
        ("model.n_embd=${model.width}", "model.n_embd: Interpolation key 'model.width' not found"),
        ("trainer.sample_prompt=${oc.env:NOPE}", "trainer.sample_prompt: KeyError raised while resolving"),
        (
            "trainer.sample_prompt=it's(x",
            r"for Hydra and for the shell: " + r'''"trainer.sample_prompt='it\'s(x'"''',
        ),
        ("-m hydra/launcher=joblib", "hydra/launcher/joblib"),
        ("model.n_embd=32 model.n_head=3", "set model.n_embd=30 or 33, or model.n_head=2 or 4"),
        ("model.vocab_size=0", "model.vocab_size=0: it must be at least 1"),
        (
            "trainer.init_positions=repeat",
            "trainer.init_positions is read with trainer.init_from only: add that",
        ),
        ("optimizer.momentum=0.9 --cfg job", "optimizer.momentum is read with optimizer=muon only: add that"),
        (
            "trainer.sample_every=9 trainer.sample_tokens=0",
            "trainer.sample_every is read with trainer.sample_tokens above 0 only: add that, or leave it out",
        ),
        ("model.dropout=1.5", "model.dropout=1.5: it must be at least 0.0"),
    ],
)
def test_a_mistaken_argument_gives_a_one_line_error_with_the_remedy(
    started, tmp_path, capsys, arguments, said
):
    error = started(never, *arguments.split())
    assert not capsys.readouterr().err  # Hydra prints an exception that a task raises
    assert error.startswith("error: ")
    assert said in error
    assert "\n" not in error
    assert not any(tmp_path.glob("runs/*"))


class Returned(Callback):
    """What Hydra was given by each run of a sweep, as a sweeper that searches is."""

    values: ClassVar[list[float]] = []

    def on_job_end(self, config, job_return, **_):
        self.values.append(job_return.return_value)


def test_a_sweeper_gets_what_a_task_returns_and_infinity_for_a_refused_run(started, monkeypatch):
    monkeypatch.setattr(Returned, "values", [])

    def task(config: Config, _run_dir: Path) -> float:
        if config.seed == 2:
            raise ConfigError("the loss is nan")
        return config.seed / 2

    callback = f"+hydra.callbacks.returned._target_={__name__}.Returned"
    assert "the loss is nan" in started(task, "-m", "seed=1,2,3", callback)
    assert Returned.values == [0.5, math.inf, 1.5]


@pytest.mark.slow
def test_a_sweep_over_optimizers_may_set_what_one_of_them_reads(started):
    seen = []
    words = ["-m", "optimizer=adamw,muon", "optimizer.momentum=0.9"]
    assert started(lambda config, _: seen.append(config.optimizer), *words) == 0
    assert [each.name.value for each in seen] == ["adamw", "muon"]
    assert seen[1].momentum == 0.9
    for given in ([], ["optimizer=adamw"]):  # one optimizer for all runs: nothing is left to them
        refused = started(never, "-m", *given, "optimizer.momentum=0.9,0.8").splitlines()
        assert len(refused) == 2
        assert all("momentum is read with optimizer=muon only" in each for each in refused)


def test_a_sweep_over_attentions_may_set_the_tier_of_one_of_them(started):
    seen = {}
    words = ["-m", "attention=naive,flash,auto", "attention.tier=triton"]
    assert started(lambda config, _: seen.update({config.attention.name: config.attention.tier}), *words) == 0
    assert seen == {"naive": "auto", "flash": "triton", "auto": "triton"}
    with pytest.raises(AttentionError, match=r"no kernel tiers \(leave out attention.tier=triton\)"):
        resolve(composed("attention=naive", "attention.tier=triton"), Path(), World(torch.device("cpu")))


@pytest.mark.slow
def test_a_sweep_tells_at_once_which_of_its_runs_will_be_refused(started, capsys, tmp_path):
    def task(config: Config, _run_dir: Path) -> None:
        print(f"seed {config.seed} begins")

    refused = started(task, "-m", "seed=1,2", "model.dropout=0,2")
    first, second, *begun = [each for each in capsys.readouterr().out.splitlines() if "HYDRA" not in each]
    assert first.startswith("run 1 will be refused: model.dropout=2.0: it must be at least 0.0")
    assert second.startswith("run 3 will be refused: ")
    assert begun == ["seed 1 begins", "seed 2 begins"]
    assert len(refused.splitlines()) == 2
    assert "did you mean trainer.steps?" in started(never, "-m", "seed=1,2", "trainer.step=1")
    assert "did you mean flash?" in started(never, "-m", "attention=naive,flsh")
    assert "refused" not in capsys.readouterr().out
    assert "model.dropout=3.0" in started(never, "-m", "model.dropout=2,3")
    assert "run 0 will be refused" in capsys.readouterr().out
    assert not any((tmp_path / "runs").iterdir())  # a run that wrote something would be left
    (tmp_path / "made").mkdir()
    started(never, "-m", "attention=naive,flsh", f"hydra.sweep.dir={tmp_path / 'made'}")
    assert (tmp_path / "made").exists()
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\nmodel: {dropout: 2}\n")
    started(never, "--config-dir", str(tmp_path), "--config-name=mine", "-m", "seed=1,2")
    assert "run 1 will be refused: model.dropout=2.0" in capsys.readouterr().out
    with catch_warnings(action="error"):  # Hydra makes a warning of a callback's error
        assert started(task, "-m", "model.dropout=0,0.1", "seed=${hydra:job.num}") == 0


def test_a_sweep_tells_at_once_what_this_machine_cannot_run(started, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    begun = []
    words = ["-m", "attention=naive,flash", "trainer.device=cpu"]
    started(lambda config, _: begun.append(capsys.readouterr().out), *words)
    assert "run 1 will be refused: attention=flash cannot be used here: " in begun[0]
    assert "refused" not in begun[1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "words", ["-m seed=1 init_seed=2,3", "seed=1 -m init_seed=2,3", "seed=1 init_seed=2,3 -m"]
)
def test_an_option_may_stand_anywhere_among_the_settings(started, words):
    seen = []
    assert started(lambda config, _: seen.append((config.seed, config.init_seed)), *words.split()) == 0
    assert seen == [(1, 2), (1, 3)]


def test_a_single_string_is_accepted_for_a_list_setting(started):
    seen = []
    assert started(lambda config, _: seen.append(config.data), "data.roots=/nope", "data.files=[a,b]") == 0
    assert (seen[0].roots, seen[0].files) == (["/nope"], ["a", "b"])


def test_a_tilde_in_a_path_setting_expands_to_the_home_directory(started, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    seen = []
    files, run = "data.files=[a.txt,~/b.txt]", "hydra.run.dir=~/run"
    words = [files, run, "trainer.init_from='~/b'", "trainer.sample_prompt='~/'"]
    assert started(lambda config, run_dir: seen.append((config, run_dir.resolve())), *words) == 0
    config, run_dir = seen[0]
    assert config.data.files == ["a.txt", f"{tmp_path}/b.txt"]
    assert config.trainer.init_from == f"{tmp_path}/b"
    assert config.trainer.sample_prompt == "~/"
    assert run_dir == tmp_path / "run"


def test_an_early_interrupt_prints_one_line_and_leaves_no_run_directory(started, tmp_path, capsys):
    def interrupted(_config: Config, run_dir: Path) -> None:
        assert run_dir.is_dir()
        raise KeyboardInterrupt

    assert started(interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not any((tmp_path / "runs").iterdir())


def test_a_sweep_continues_after_a_refused_run(started, tmp_path):
    ran = []

    def task(config: Config, run_dir: Path) -> None:
        if config.attention.name.startswith("flash"):
            raise ConfigError(f"{config.attention.name} needs a GPU")
        ran.append(config.attention.name)
        (run_dir / "metrics.csv").touch()

    error = started(task, "-m", "attention=naive,flash,flash1,sdpa")
    assert ran == ["naive", "sdpa"]
    assert error.splitlines() == [
        "error: 1_nano_flash: flash needs a GPU",
        "error: 2_nano_flash1: flash1 needs a GPU",
    ]
    (sweep,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in sweep.glob("*_nano_*")) == ["0_nano_naive", "3_nano_sdpa"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("stop", "code", "said"), [(SystemExit(143), 143, []), (KeyboardInterrupt(), 130, ["interrupted"])]
)
def test_a_stopped_sweep_reports_the_runs_refused_before_the_stop(started, capsys, stop, code, said):
    def task(config: Config, _run_dir: Path) -> None:
        if config.seed == 1:
            raise ConfigError("no")
        raise stop

    assert started(task, "-m", "seed=1,2") == code
    assert capsys.readouterr().err.splitlines() == ["error: 0_nano_auto: no", *said]


@pytest.mark.parametrize("words", [["attention=naive"], ["attention.name=naive"]])
def test_the_name_of_a_run_directory_contains_the_attention(started, words):
    names = []
    assert started(lambda _config, run_dir: names.append(run_dir.name), *words) == 0
    assert started(lambda _config, run_dir: names.append(run_dir.name), "-m", "seed=1,2", *words) == 0
    assert ["_nano_naive" in name for name in names] == [True] * 3


def test_an_exception_from_a_bug_in_the_task_is_not_caught(started):
    def broken(_config: Config, _run_dir: Path) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        started(broken)


def bug(*_args):
    raise ValueError("a bug")


def test_sample_and_reproduce_do_not_catch_exceptions_from_bugs(monkeypatch):
    monkeypatch.setattr("training.load_run.load_run", bug)
    monkeypatch.setattr(sys, "argv", ["sample.py", "run"])
    with pytest.raises(ValueError, match="a bug"):
        sample.main()
    monkeypatch.setattr("reproduce.command_line._chosen", bug)
    with pytest.raises(ValueError, match="a bug"):
        reproduce.__main__.main(["attention"])


@pytest.mark.parametrize(
    "value",
    ["runs/a", "a b", "lr=3", "p (1),x", "it's", 'a "b"', "$HOME/`x`", "a\\\\b\\' \\", "ü~", "{a}", "[1,2]"],
)
def test_a_suggested_override_keeps_its_value_through_bash_and_hydra(value):
    for write in (for_shell, quoted_for_shell):
        words = subprocess.run(
            ["bash", "-c", f"printf %s {write(f'trainer.resume={value}')}"], capture_output=True, text=True
        ).stdout
        assert OverridesParser.create().parse_override(words).value() == value


def test_an_unreadable_config_or_tokenizer_of_a_run_gives_a_one_line_error(tmp_path, monkeypatch):
    for name in ("checkpoints/step-00000001/weights.safetensors", "tokenizer.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "argv", ["sample.py", str(tmp_path)])
    for text in ("model: [", "model: {n_layer: many}", "unheard_of: 1", "optimizer: {lr: -1}"):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(SystemExit, match=r"error: .*config\.yaml cannot be read: ") as refused:
            sample.main()
        assert "\n" not in str(refused.value)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(SystemExit, match=r"error: .*config\.yaml is empty\."):
        sample.main()
    (tmp_path / "config.yaml").write_text("seed: 1")
    with pytest.raises(SystemExit, match=r"error: .*tokenizer\.json cannot be read: "):
        sample.main()
