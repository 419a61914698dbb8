"""wandb online: the real client and the real command line, against a local server (wandb_stub.py)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, measured
from tests.training.conftest import contents
from tests.training.ranks import logged, processes, started_on, wait_until
from tests.wandb_stub import WandbStub

# train.py whose first two arguments say how many seconds it waits for a wandb server at its start and at its end
IMPATIENT = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
from training import wandb_logger
wandb_logger.BEGIN_SECONDS, wandb_logger.END_SECONDS = int(sys.argv.pop(1)), int(sys.argv.pop(1))
sys.argv[0] = {str(ROOT / "train.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
Start = Callable[..., subprocess.Popen]


@pytest.fixture
def server() -> Iterator[WandbStub]:
    with WandbStub() as server:
        yield server


@pytest.fixture
def start(tmp_path, tmp_path_factory, user_environment, tiny, server) -> Iterator[Start]:
    """Start train.py in an empty directory; `patience`: see IMPATIENT."""
    processes = []
    script = tmp_path_factory.mktemp("impatient") / "train.py"
    script.write_text(IMPATIENT)

    def start(*args: str, run: str = "run", patience: tuple[int, int] = (20, 20)) -> subprocess.Popen:
        seconds, where = map(str, patience), f"hydra.run.dir={run}"
        process = subprocess.Popen(
            [sys.executable, script, *seconds, *tiny, "logger=wandb", where, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=user_environment | server.variables,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen) -> str:
    """What a run that ended well printed."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return out


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_resuming_continues_the_wandb_run_only_in_the_same_directory(start, server, tmp_path):
    texts = ["trainer.sample_every=5", "trainer.sample_prompt=quick"]
    said = ended(start("logger.group=both", "logger.tags=[mine]", "attention=naive", *texts))
    ((name, run),) = server.runs.items()
    assert f"{server.url}/someone/tilegpt/runs/{name}" in said
    assert "wandb:" not in said
    assert run.facts["groupName"] == "both"
    assert run.facts["tags"] == ["naive", "mine"]
    resolved = run.config["resolved"]
    assert (resolved["attention"], resolved["attention_tier"], resolved["world_size"]) == ("naive", None, 1)
    assert run.config["trainer"]["steps"] == 12
    losses = {row["step"]: row["train/loss"] for row in run.history if "train/loss" in row}
    assert losses == pytest.approx(measured(tmp_path / "run", "train/loss"))
    assert [row["tokens"] for row in run.history] == [256 * row["step"] for row in run.history]
    assert run.summary["val/perplexity"] > 1
    assert run.exit_code == 0
    table = json.loads(server.files["samples.table.json"])
    assert table["columns"] == ["step", "prompt", "text"]
    assert [row[:2] for row in table["data"]] == [[5, "quick"], [10, "quick"], [12, "quick"]]
    assert all(row[2].startswith("quick") for row in table["data"])

    ended(start("trainer.steps=15", "trainer.resume=run"))
    assert list(server.runs.values()) == [run]
    assert [row["step"] for row in run.history] == list(range(1, 16))
    assert run.summary["steps"] == 15

    ended(start("trainer.steps=18", "trainer.resume=run", run="other"))
    _, other = server.runs.values()
    assert [row["step"] for row in other.history] == [16, 17, 18]


@pytest.mark.slow
def test_a_resume_that_wandb_refuses_changes_nothing_in_the_run_directory(start, server, tmp_path):
    """Resumed from an older checkpoint, it would remove the newer one; the server knows no key, then it is silent
    until a signal comes."""
    ended(start("trainer.save_every=6"))
    before = contents(tmp_path / "run")
    resumes = ["logger.mode=online", "trainer.resume=run/checkpoints/step-00000006", "optimizer.lr=1e-4"]
    server.stranger = True
    process = start(*resumes)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert contents(tmp_path / "run") == before
    server.stranger, server.silent = False, True
    for stop in (signal.SIGINT, signal.SIGTERM):
        asked = server.waiting
        process = start(*resumes, patience=(10, 20))  # with 5 s, a busy machine sent the signal too late
        until(lambda: server.waiting > asked)  # noqa: B023
        process.send_signal(stop)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (128 + stop, 1), err  # 1: wandb gave up before it let the signal through
        assert contents(tmp_path / "run") == before


@pytest.mark.slow
def test_going_back_to_an_older_checkpoint_with_other_settings_begins_another_wandb_run(
    start, server, tmp_path
):
    """wandb would drop the new rows, as it has those steps. With the same settings the rows are the same."""
    ended(start("trainer.save_every=6"))
    ((name, first),) = server.runs.items()
    back = "trainer.resume=run/checkpoints/step-00000006"
    assert "it has rows up to step 12 already, and keeps those" in ended(start(back))
    assert list(server.runs) == [name]
    assert f"a new run: {name} went on to step 12 with other settings" in ended(
        start(back, "trainer.steps=9")
    )
    assert [row["step"] for row in first.history if "step" in row] == list(range(1, 13))
    _, other = server.runs.values()
    losses = {row["step"]: row["train/loss"] for row in other.history if "train/loss" in row}
    assert losses == pytest.approx(measured(tmp_path / "run", "train/loss"))
    assert sorted(losses) == list(range(1, 10))


@pytest.mark.slow
def test_variables_of_wandb_are_followed_or_named_as_not_used(start, server, monkeypatch):
    monkeypatch.setitem(server.variables, "WANDB_PROJECT", "mine")
    monkeypatch.setitem(server.variables, "WANDB_TAGS", "night,shift")
    monkeypatch.setitem(server.variables, "WANDB_NAME", "by hand")
    monkeypatch.setitem(server.variables, "WANDB_RUN_ID", "chosen")
    said = ended(start("logger.tags=[own]"))
    ((name, run),) = server.runs.items()
    assert f"{server.url}/someone/mine/runs/{name}" in said
    assert run.facts["tags"] == ["sdpa", "own", "night", "shift"]
    assert run.facts["displayName"] == "by hand"
    assert name != "chosen"
    assert "WANDB_RUN_ID: not used, since a run's id and files belong to its directory" in said


@pytest.mark.slow
def test_an_unusable_server_ends_a_run_only_with_logger_mode_online(start, server, tmp_path):
    server.stranger = True
    process = start("logger.mode=online")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    refused = "error: logger.mode=online: the server returned error 401; use logger.mode=offline, or auto."
    assert err.splitlines()[-1] == refused
    assert "Traceback" not in err
    server.leave()
    # In the same directory, where nothing is left that would block a second try.
    said = ended(start(patience=(2, 20)))
    assert "offline, since the server did not answer; view: wandb leet run/wandb/offline-run-" in said
    assert (tmp_path / "run/summary.json").exists()


@pytest.mark.slow
def test_a_lost_server_delays_the_end_of_a_run_only_by_the_timeout(start, server, tmp_path):
    server.leaves = True
    process = start(patience=(20, 4))
    until((tmp_path / "run/summary.json").exists)
    assert process.poll() is None  # it waits for wandb last, when the run's own files are whole
    said = ended(process)
    assert (
        "the wandb server did not accept everything within 4 s; to upload the rest later: wandb sync run/wandb/run-"
        in said
    )


@pytest.mark.slow
def test_training_continues_when_the_wandb_process_is_killed(start, tmp_path):
    process = start("trainer.steps=400")
    metrics = tmp_path / "run/metrics.csv"
    until(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 2)
    assert kill_service(tmp_path)
    said = ended(process)
    assert re.search(r"wandb stopped \(.*\); metrics\.csv has the whole run", said)
    assert len(measured(tmp_path / "run", "train/loss")) == 400


@pytest.mark.slow
def test_a_run_begins_offline_if_the_wandb_process_is_killed_at_its_start(start, server, tmp_path):
    server.silent = True
    process = start()
    until(lambda: server.waiting > 0)
    assert kill_service(tmp_path)
    assert "offline, since wandb stopped (HandleAbandonedError); view: wandb leet" in ended(process)


def kill_service(folder: Path) -> int:
    """SIGKILL the process that wandb started in a folder; how many were there."""
    killed = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (
                process.joinpath("comm").read_text() == "wandb-core\n"
                and process.joinpath("cwd").readlink() == folder
            ):
                os.kill(int(process.name), signal.SIGKILL)
                killed += 1
        except OSError:  # gone by now, or another user's
            continue
    return killed


@pytest.mark.slow
def test_a_run_that_gives_up_sends_an_alert(start, server):
    process = start("optimizer.lr=1e30", "trainer.sample_every=1")  # a broken model is not to be sampled
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    told = err.splitlines()[-1].removeprefix("error: ")
    assert " at step " in told
    (alert,) = server.alerts
    assert (alert["title"], alert["text"], alert["severity"]) == ("run gave up", told, "ERROR")
    (run,) = server.runs.values()
    assert run.exit_code == 1


@pytest.mark.slow
def test_several_ranks_are_one_run_that_sends_an_alert_when_it_loses_one(
    server, user_environment, tiny, tmp_path
):
    endless = [*tiny, "trainer.steps=100000", "hydra.run.dir=run", "logger=wandb"]
    launcher = started_on(2, endless, tmp_path, user_environment | server.variables)
    wait_until(lambda: logged(tmp_path / "run") > 5, launcher)
    os.kill(processes(launcher)[1], signal.SIGKILL)
    said = launcher.communicate(timeout=120)[0]
    (alert,) = server.alerts
    assert "does not answer" in alert["text"]
    assert f"error: {alert['text']}\n" in said
    (run,) = server.runs.values()  # rank 0's
    ours = {"tokens_per_second_per_device", "exchange_ms", "slowest_rank", "slowest_rank_ratio"}
    assert {f"perf/{name}" for name in ours} <= run.history[-1].keys()


@pytest.mark.slow
def test_names_of_runs_tell_sweeps_apart(server, user_environment, tiny, tmp_path):
    for sweep in (["hydra.sweep.dir=mine"], []):
        command = [
            sys.executable,
            ROOT / "train.py",
            "-m",
            *tiny,
            "logger=wandb",
            "attention=naive,sdpa",
            *sweep,
        ]
        subprocess.run(
            command,
            env=user_environment | server.variables,
            cwd=tmp_path,
            timeout=120,
            capture_output=True,
            check=True,
        )
    (unnamed,) = (tmp_path / "runs").iterdir()
    number = unnamed.name[-4:]
    assert sorted(run.facts["displayName"] for run in server.runs.values()) == [
        *(f"0_nano_naive {number}", "0_nano_naive mine", f"1_nano_sdpa {number}", "1_nano_sdpa mine")
    ]


@pytest.mark.slow
def test_a_sweep_that_the_server_leads(server, user_environment, tiny, tmp_path):
    """`wandb sweep` takes the example, `wandb agent` starts its command, and the run is the one asked for."""
    lines = (ROOT / "examples/wandb_sweep.yaml").read_text()
    command = [str(ROOT / "train.py"), *tiny, "logger=wandb"]
    ours = re.sub(r'"\$\{program\}".*(?=, "\$\{args)', lambda _: ", ".join(map(json.dumps, command)), lines)
    assert ours != lines
    (tmp_path / "sweep.yaml").write_text(ours)
    server.trials.append({"optimizer.lr": 3e-3, "optimizer.weight_decay": 0.1})

    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def wandb(*args: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "wandb", *args],
            capture_output=True,
            text=True,
            timeout=400,
            cwd=tmp_path,
            env=user_environment | server.variables | path | {"WANDB_SILENT": "false"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    (agent,) = re.findall(r"wandb (agent someone/\S+)", wandb("sweep", "sweep.yaml", "-p", "tilegpt"))
    wandb(*agent.split())
    ((name, run),) = server.runs.items()
    assert name == "trial0"
    assert (run.config["optimizer"]["lr"], run.config["optimizer"]["weight_decay"]) == (3e-3, 0.1)
    assert run.summary["val/loss"] > 0
    assert run.exit_code == 0
