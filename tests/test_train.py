"""The real command line, as a user types it."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sample
import train
from tests.conftest import ROOT, losses, measured, rows
from tests.training.ranks import done_on, ended_on, logged, wait_until
from training.checkpoint import find, load_training
from training.config import ConfigError
from training.trainer import Trainer


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def test_a_run_learns_and_leaves_a_complete_directory(command_line, tiny, tmp_path):
    done = command_line("train.py", *tiny, "trainer.steps=40", "optimizer.lr=1e-2", "logger=wandb")
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    first, *_, last = losses(run)
    assert last < first - 1.0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["attention"] == "sdpa"
    assert summary["val/loss"] < first
    for figures in (summary, {name: float(cell) for name, cell in rows(run)[-2].items() if cell}):
        phases = [figures[f"perf/{phase}_ms"] for phase in ("data", "forward_backward", "optimizer")]
        assert min(phases) > 0
        assert sum(phases) <= figures["perf/step_ms"]
    assert {path.name for path in run.iterdir()} >= {
        *(
            "config.yaml",
            "environment.json",
            "metrics.csv",
            "summary.json",
            "sample.txt",
            "checkpoints",
            "wandb",
        ),
    }
    for said in (
        "attention",
        "(requested: auto)",
        "parameters",
        "tokens a step",
        "step 40/40",
        "tokens/s",
        "left",
    ):
        assert said in done.stdout + done.stderr
    for said in (
        "perplexity",
        "bits per byte",
        "sample",
        "wandb leet",
        "wandb sync",
        "1 layer, 2 heads",
        str(run.relative_to(tmp_path)),
    ):
        assert said in done.stdout
    assert "? left" not in done.stderr

    (offline,) = (run / "wandb").glob("offline-run-*")
    read = subprocess.run(
        [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", offline],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert read.returncode == 0, read.stderr
    for metric in ("train/loss", "val/perplexity", "perf/tokens_per_second"):
        assert metric in read.stdout


def test_runs_of_an_attention_sweep_have_equal_losses_and_one_group(command_line, tiny, tmp_path):
    done = command_line("train.py", "-m", "attention=naive,sdpa", *tiny)
    assert done.returncode == 0, done.stderr
    runs = sorted(path for path in only_run(tmp_path).iterdir() if path.is_dir())
    assert [json.loads((run / "summary.json").read_text())["attention"] for run in runs] == ["naive", "sdpa"]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-5)
    groups = {
        line for run in runs for line in (run / "config.yaml").read_text().splitlines() if "group:" in line
    }
    assert len(groups) == 1
    assert "null" not in groups.pop()


def test_sample_repeats_with_its_seed_and_masks_terminal_control_codes(
    command_line, started, monkeypatch, capsys, tiny, tmp_path
):
    assert started(train.main, *tiny) == 0
    arguments = ["sample.py", str(only_run(tmp_path)), "the quick", "--tokens", "20"]
    first = command_line(*arguments)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("the quick")

    def sampled(*more: str) -> str:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [*arguments, *more])
        sample.main()
        return capsys.readouterr().out

    assert sampled() == first.stdout
    assert sampled("--seed", "1") != first.stdout
    assert sampled("--seed", str(2**64)) == first.stdout  # a seed of any length, as train.py takes
    arguments = ["sample.py", str(only_run(tmp_path)), "--tokens", "20"]
    assert sampled("the quick") == first.stdout  # the prompt after the options
    rows = sampled("the quick", "a", "-t", "0").split(f"\n{'-' * 80}\n")  # as a batch
    assert [*map(str.rstrip, rows)] == [sampled(prompt, "-t", "0").rstrip() for prompt in ("the quick", "a")]
    assert sampled("\x1b[2J").startswith("\x1b[2J")  # a file gets the text as it is
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert sampled("\x1b[2J\r\x9b\ta").startswith("\ufffd[2J\ufffd\ufffd\ta")  # a terminal would obey
    assert sampled("a\r\nb").startswith("a\r\nb")  # Windows line ends are kept


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.steps=many", "could not be converted to Integer"),  # Hydra's own message
        ("+unknown=1", "unknown is not a setting"),  # this project's message
    ],
)
def test_a_mistaken_setting_gives_a_one_line_error_in_a_shell(command_line, tmp_path, override, said):
    """In a process of its own, as from a shell; test_command_line.py has the other mistakes."""
    done = command_line("train.py", override)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert not any(path.is_dir() for path in tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["attention=flash"], "TRITON_INTERPRET=1"),
        (["model.loss=fused"], "use model.loss=torch"),
        (["model.block=fused"], "use model.block=torch"),
        (["data.files=nowhere/*.txt"], "nowhere/*.txt"),
        (["model.seq_len=65536", "trainer.batch_tokens=65536"], "a model.seq_len of at most"),
        (["model.vocab_size=50257"], "the tokenizer bytes has 257 tokens; leave model.vocab_size out"),
        (["trainer.resume=nowhere"], "nowhere does not exist"),
        (["trainer.device=cuda:7"], "cuda:7"),
        (["optimizer.betas=[0.9]"], "two numbers"),
        (["model.document_end=5"], "data.document_mask=true"),
        (["data.files=[]", "data.tokenizer=nowhere.tiktoken"], "text_files needs files"),  # not the tokenizer
    ],
)
def test_settings_that_cannot_run_are_refused_before_the_first_step(
    started, monkeypatch, tiny, tmp_path, overrides, said
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    error = started(train.main, *tiny, *overrides)
    assert error.startswith("error: ")
    assert "\n" not in error
    assert said in error
    assert not any((tmp_path / "runs").iterdir())


def test_a_refused_run_prints_no_traceback_and_leaves_no_directory(command_line, tiny, tmp_path):
    done = command_line("train.py", *tiny, "model.block=fused")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert not any((tmp_path / "runs").iterdir())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [],
            "trainer.micro_batch=8: use trainer.micro_batch=4; gradients accumulate, so the global batch stays ",
        ),
        (["trainer.batch_tokens=480"], "trainer.micro_batch=15: use trainer.micro_batch=5; "),
        (
            ["trainer.micro_batch=1"],
            "one sequence at a time is too much; use parallel.recompute=block, lower ",
        ),
        (["trainer.micro_batch=1", "parallel.recompute=block"], "at a time is too much; lower model.seq_len"),
    ],
)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_out_of_memory_gives_a_one_line_error_with_the_remedy(
    started, monkeypatch, tiny, overrides, said, on_gpu
):
    causes = []

    def exhausted(*_args):
        if on_gpu:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        torch.empty(1 << 50)  # 4 PiB

    def task(config, run_dir):
        try:
            train.main(config, run_dir)
        except ConfigError as error:
            causes.append(error.__cause__)
            raise

    monkeypatch.setattr(Trainer, "train_step", exhausted)
    error = started(task, *tiny, *overrides)
    assert error.startswith("error: cpu is out of memory with trainer.micro_batch=")
    assert said in error
    assert "\n" not in error
    assert isinstance(causes[0], torch.OutOfMemoryError) == on_gpu


def test_flash_runs_in_the_triton_interpreter(command_line, tiny, tmp_path):
    short = ["trainer.steps=3", "model.seq_len=16", "trainer.batch_tokens=32", "data.val_fraction=0.01"]
    done = command_line("train.py", *tiny, *short, "attention=flash", env={"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    assert "Triton kernels interpreted\n" in done.stdout + done.stderr
    assert json.loads((only_run(tmp_path) / "summary.json").read_text())["attention"] == "flash"


@pytest.mark.slow
def test_a_run_directory_refuses_another_run_but_allows_resuming(started, tiny, tmp_path, capsys):
    """Resuming keeps the rows up to its checkpoint and removes newer checkpoints."""
    here = [*tiny, "hydra.run.dir=here", "trainer.save_every=6"]
    assert started(train.main, *here) == 0
    assert "already holds a run: choose another hydra.run.dir" in started(train.main, *here)
    (tmp_path / "multirun.yaml").touch()  # as a sweep leaves it, which takes no hydra.run.dir
    assert "already holds a run: choose another hydra.sweep.dir" in started(train.main, *here)
    again = ["trainer.steps=15", "trainer.resume=here/checkpoints/step-00000006"]
    capsys.readouterr()
    assert started(train.main, *here, *again) == 0
    gone = "removed step-00000012: newer than the step this run resumes from"
    assert gone in capsys.readouterr().out.splitlines()
    assert sorted(measured(tmp_path / "here", "train/loss")) == list(range(1, 16))


def test_the_task_returns_the_validation_loss(started, tiny, tmp_path):
    """For hydra/sweeper=optuna, which minimises it."""
    returned = []
    task = lambda config, run_dir: returned.append(train.main(config, run_dir))  # noqa: E731
    assert started(task, *tiny, "hydra.run.dir=run") == 0
    assert returned == [json.loads((tmp_path / "run/summary.json").read_text())["val/loss"]]


@pytest.mark.slow
def test_muon_and_wsd_train_from_the_command_line_and_differ_from_adamw(started, tiny, tmp_path):
    settings = [*tiny, "trainer.steps=40", "optimizer.lr=1e-2"]
    assert started(train.main, *settings, "hydra.run.dir=adamw") == 0
    assert started(train.main, *settings, "hydra.run.dir=muon", "optimizer=muon", "schedule=wsd") == 0
    adamw, muon = (losses(tmp_path / name) for name in ("adamw", "muon"))
    assert adamw[0] == muon[0]  # before any step
    assert adamw[1] != muon[1]
    assert muon[-1] < muon[0] - 1.0
    rates = measured(tmp_path / "muon", "train/learning_rate")
    assert rates[32] == 1e-2 > rates[33] > rates[40] == 0.0


@pytest.mark.slow
def test_resuming_takes_optimizer_settings_from_the_command_line(started, tiny, tmp_path):
    assert started(train.main, *tiny, "hydra.run.dir=a") == 0
    changed = [*tiny, "trainer.steps=20", "optimizer.weight_decay=0.5", "optimizer.betas=[0.5,0.6]"]
    assert started(train.main, *changed, "hydra.run.dir=b", "trainer.resume=a") == 0
    group = load_training(find(tmp_path / "b"))["optimizer"]["param_groups"][0]
    assert (group["weight_decay"], tuple(group["betas"])) == (0.5, (0.5, 0.6))


@pytest.mark.parametrize(
    "command",
    [
        *("train.py", "sample.py", "prepare.py"),
        *("-m training.export", "-m training.attention_maps", "-m training.reference"),
    ],
)
def test_without_its_requirements_a_command_names_them_in_one_line(command):
    bare = [sys.executable, "-S", *command.split()]  # Python without its site-packages
    done = subprocess.run(bare, cwd=ROOT, env={}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: not installed: torch, numpy, hydra-core, ")
    assert done.stderr.endswith("(pip install -r requirements.txt)\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "lacks"),
    [
        ("-m reproduce attention --tiny", "torch"),
        ("-m reproduce compare runs", "jinja2"),
        ("-m benchmarks scaling", "torch"),
        ("-m data.inspect corpus", "numpy, tiktoken, filelock, tqdm"),
        ("-m kernels.compile_report", "torch"),
        ("-m kernels.tune", "torch"),
        ("-m kernels.hub folder", "torch"),
    ],
)
def test_a_command_names_what_it_lacks_when_it_gets_there(command, lacks):
    bare = [sys.executable, "-S", *command.split()]
    done = subprocess.run(bare, cwd=ROOT, env={}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: not installed: {lacks} (pip install -r requirements.txt")
    assert done.stderr.count("\n") == 1


def test_the_experiments_are_listed_without_any_requirement():
    for package in ("reproduce", "benchmarks"):
        bare = [sys.executable, "-S", "-m", package]
        assert "--tiny" in subprocess.run(bare, cwd=ROOT, env={}, capture_output=True, text=True).stdout


def test_a_refused_prepare_does_not_delete_the_current_directory(command_line, tmp_path):
    done = command_line("prepare.py", "data=text_files", "data.files=nothing.txt")
    assert done.returncode == 1
    assert "nothing.txt" in done.stderr
    assert tmp_path.is_dir()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "words",
    [
        ["data=text_files", "--cfg", "job"],
        ["--cfg", "job", "data=text_files"],
        ["data=text_files", "-c", "job"],
        ["data=text_files", "hydra.run.dir=made", "--cfg", "job"],
    ],
)
@pytest.mark.parametrize("script", ["prepare.py", "train.py"])
def test_hydra_options_work_before_and_after_the_settings(command_line, tmp_path, script, words):
    """Also where the program adds settings of its own: in prepare.py, and on all ranks but the first."""
    done = command_line(script, *words, env={"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert done.returncode == 0, done.stderr
    assert "source: text_files" in done.stdout
    assert not any(tmp_path.iterdir())


def test_a_run_directory_that_cannot_be_created_is_refused_with_the_remedy(command_line, tiny):
    done = command_line("train.py", *tiny, "hydra.run.dir=/proc/run")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: cannot create the run directory (")
    assert "name a writable directory: hydra.run.dir=" in done.stderr


@pytest.mark.slow
def test_a_full_disk_ends_training_with_an_error_naming_the_file(command_line, tiny, tmp_path):
    assert command_line("prepare.py", *tiny).returncode == 0  # its files are larger than the limit
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # no file of the run may be larger
    try:
        done = command_line("train.py", *tiny, "trainer.steps=100", "hydra.run.dir=here")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "error: here/metrics.csv cannot be written (File too large): free"
    )
    assert "Traceback" not in done.stderr
    assert len(losses(tmp_path / "here")) > 20


def test_a_numbered_gpu_under_torchrun_is_refused(started, monkeypatch, tiny):
    """Each rank takes the GPU of its local rank, whatever was asked for."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    error = started(train.main, *tiny, "trainer.device=cuda:1")
    assert error.startswith("error: trainer.device=cuda:1: under torchrun each rank takes its own GPU; use ")


@pytest.mark.parametrize("wrong", ["trainer.step=5", "trainer.micro_batch=7"])
def test_of_all_ranks_that_refuse_a_run_one_says_so(user_environment, tiny, tmp_path, wrong):
    done = ended_on(2, [str(ROOT / "train.py"), *tiny, wrong], tmp_path, user_environment)
    assert done.returncode == 1
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: trainer.")]) == 1


def test_what_only_another_rank_refuses_is_said(started, monkeypatch, tiny):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("training.torchrun.PATIENCE", 0.1)
    assert started(train.main, *tiny, "trainer.device=cuda:1").startswith("error: trainer.device=cuda:1: ")


@pytest.mark.parametrize("options", [["-n", "-5"], ["-n", "many"], ["-t", "nan"], ["--samples", "0"]])
def test_sample_refuses_impossible_numbers(command_line, options):
    done = command_line("sample.py", "nowhere", *options)
    assert done.returncode == 2
    assert "it must be" in done.stderr


@pytest.mark.parametrize(
    ("override", "env"),
    [
        ("logger.mode=online", {}),
        pytest.param("logger.mode=auto", {"WANDB_MODE": "online"}, marks=pytest.mark.slow),
    ],
)
def test_wandb_online_without_a_key_is_refused_not_prompted(command_line, tiny, tmp_path, override, env):
    done = command_line("train.py", *tiny, "logger=wandb", override, env=env)
    assert done.returncode == 1
    assert "wandb login" in done.stderr.splitlines()[-1]
    assert not any((tmp_path / "runs").iterdir())  # nothing that would block a second try


def test_an_invalid_wandb_mode_is_refused(started, monkeypatch, tiny, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "of")
    said = "error: WANDB_MODE=of: it must be online, offline, dryrun, disabled, or unset."
    assert started(train.main, *tiny, "logger=wandb") == said
    assert not any((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("overrides", [[], ["logger.mode=offline"]])
def test_missing_wandb_gives_a_one_line_error_with_the_remedy(
    started, monkeypatch, tiny, tmp_path, overrides
):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not there
    error = started(train.main, *tiny, "logger=wandb", *overrides)
    assert error == "error: wandb is not installed: pip install wandb, or use logger=none."
    assert not any((tmp_path / "runs").iterdir())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("train.py", ["--help"], "python train.py attention=naive"),
        ("train.py", ["--cfg", "job"], "attention"),
        ("prepare.py", ["--help"], "python prepare.py data=text_files data.files='*.txt'"),
    ],
)
def test_help_is_printed_without_importing_torch(command_line, script, flags, said):
    """PyTorch takes 2 s to import. The time itself is not tested: on a busy machine it has been 4 s."""
    done = command_line(script, *flags, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0
    assert said in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "training.command_line" in imported
    assert "torch" not in imported


@pytest.mark.slow
def test_a_run_ended_by_sigterm_saves_and_resumes_with_the_same_losses(
    command_line, started, user_environment, tiny, tmp_path
):
    """It prints the command to resume with; the losses before and after are those of an uninterrupted run."""
    steady = [
        *tiny,
        "model.dropout=0.1",
        "trainer.log_every=7",
        "schedule=constant",
        "schedule.warmup_fraction=0",
    ]
    long = [*steady, "trainer.steps=100000"]
    process = subprocess.Popen(
        [sys.executable, ROOT / "train.py", *long, "hydra.run.dir=cut short"],
        cwd=tmp_path,
        env=user_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: logged(tmp_path / "cut short") > 3, process)
    (tmp_path / "multirun.yaml").touch()  # as a sweep leaves it
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "same command without -m " in out
    assert "'hydra.run.dir=cut short' 'trainer.resume=cut short'" in out  # quoted for a shell
    stopped = int(find(tmp_path / "cut short").name.removeprefix("step-"))
    short = [*steady, f"trainer.steps={stopped + 20}"]
    resumed = command_line("train.py", *short, "hydra.run.dir=resumed", "trainer.resume=cut short")
    assert resumed.returncode == 0, resumed.stderr
    assert started(train.main, *short, "hydra.run.dir=whole") == 0
    before, after, whole = (
        measured(tmp_path / name, "train/loss") for name in ("cut short", "resumed", "whole")
    )
    assert max(before) <= stopped < min(after)
    assert {step: loss for step, loss in (before | after).items() if step in whole} == whole


@pytest.mark.slow
def test_unencodable_characters_are_printed_as_question_marks(command_line, tiny):
    """As with output to a file on Windows, where a traceback would otherwise end the run."""
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    prompt = ["trainer.sample_prompt='日'", "trainer.sample_tokens=9", "data.tokenizer=bytes"]
    for command in (
        ("train.py", *tiny, *prompt, "optimizer.lr=1e-9", "hydra.run.dir=run"),
        ("sample.py", "run", "日"),
    ):
        done = command_line(*command, env=ascii_only)
        assert done.returncode == 0, done.stderr
        assert "?" in done.stdout


@pytest.mark.slow
def test_a_run_saves_a_checkpoint_when_its_terminal_closes(user_environment, tiny, tmp_path):
    """As when ssh loses its connection; writing to such a terminal raises."""
    ours, theirs = os.openpty()
    take = "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    # nohup around the tests would have it ignored
    take += "signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    take += "os.execv(sys.argv[1], sys.argv[1:])"
    train = [sys.executable, ROOT / "train.py", *tiny, "trainer.steps=100000", "hydra.run.dir=run"]
    process = subprocess.Popen(
        [sys.executable, "-c", take, *train],
        cwd=tmp_path,
        env=user_environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    wait_until(lambda: logged(tmp_path / "run") > 3, process)
    os.close(ours)
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    assert [path.name[:5] for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-"]


@pytest.mark.slow
def test_a_run_whose_output_pipe_closes_ends_without_a_traceback(user_environment, tiny, tmp_path):
    """As `train.py ... | head` does."""
    process = subprocess.Popen(
        # eval_every=1: it prints after every step
        [sys.executable, ROOT / "train.py", *tiny, "trainer.steps=100000", "trainer.eval_every=1"],
        cwd=tmp_path,
        env=user_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().startswith("tilegpt")
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    assert "this output is piped to has exited" in said
    assert "Traceback" not in said


def test_a_killed_run_leaves_a_checkpoint_that_can_be_sampled_from(
    command_line, user_environment, tiny, tmp_path
):
    process = subprocess.Popen(
        [
            sys.executable,
            ROOT / "train.py",
            *tiny,
            "trainer.steps=100000",
            "trainer.save_every=1",
            "hydra.run.dir=cut",
        ],
        cwd=tmp_path,
        env=user_environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: len(list((tmp_path / "cut").glob("checkpoints/step-*"))) >= 3, process)
    process.kill()
    process.wait()
    done = command_line("sample.py", "cut", "the", "--tokens", "5")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_two_ranks_give_the_same_losses_as_one_rank(
    started, user_environment, tiny, tmp_path, tmp_path_factory
):
    """Real gloo ranks: same losses, same evaluation, one run directory."""
    question = {
        "activity_label": "Fox",
        "ctx_a": "It jumps",
        "ctx_b": "",
        "endings": ["over", "a", "dog", "box"],
    }
    questions = tmp_path_factory.mktemp("hellaswag") / "five.jsonl"
    questions.write_text("".join(json.dumps(question | {"label": label}) + "\n" for label in (0, 1, 2, 2, 3)))
    tiny = [*tiny, "trainer.hellaswag=true", f"trainer.hellaswag_file={questions}", "trainer.sample_every=5"]
    assert started(train.main, *tiny, "hydra.run.dir=one") == 0
    done_on(2, [str(ROOT / "train.py"), *tiny, "hydra.run.dir=two"], tmp_path, user_environment)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    evaluated = [json.loads((tmp_path / run / "summary.json").read_text()) for run in ("one", "two")]
    assert evaluated[1]["val/loss"] == pytest.approx(evaluated[0]["val/loss"], rel=1e-5)
    assert evaluated[1]["val/tokens"] == evaluated[0]["val/tokens"]
    assert evaluated[1]["val/hellaswag"] == evaluated[0]["val/hellaswag"] in (0.2, 0.4)
    assert evaluated[1]["world_size"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
