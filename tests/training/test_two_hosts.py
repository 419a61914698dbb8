"""Two "hosts": two torchrun agents on one machine that meet by c10d's rendezvous, as in docs/many-gpus.md."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

import train
from tests.conftest import losses, measured
from tests.training.ranks import ROOT, logged, processes, started_on, wait_until
from training.checkpoint import saved

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def hosts(
    settings: list[str], folder, environment: dict[str, str], *others, rates=("", "")
) -> list[subprocess.Popen]:
    """An agent each, with one rank. others: the folder of the second, where that is another. rates: RATE, of each."""
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=job"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command = [*launcher, *meeting, "--local-addr=127.0.0.1", str(ROOT / "train.py"), *settings]
    return [
        subprocess.Popen(
            command,
            cwd=each,
            env=environment | {"RATE": rate},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for each, rate in zip((folder, *(others or [folder])), rates, strict=True)
    ]


@pytest.mark.parametrize("shard", ["none", "full"])
def test_two_hosts_train_as_one_rank_does(started, user_environment, tiny, tmp_path, shard):
    assert started(train.main, *tiny, "hydra.run.dir=one") == 0
    agents = hosts([*tiny, "hydra.run.dir=two", f"parallel.shard={shard}"], tmp_path, user_environment)
    said = [agent.communicate(timeout=240)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["world_size"] == 2


def test_parts_on_a_disk_of_each_host_are_refused_before_the_first_step(user_environment, tiny, tmp_path):
    """Of a name that is another directory on each, no host could read the checkpoint."""
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    settings = [*tiny, "hydra.run.dir=run", "parallel.shard=full"]
    agents = hosts(settings, folders[0], user_environment, folders[1])
    said = [agent.communicate(timeout=120)[0] for agent in agents]
    assert 0 not in [agent.returncode for agent in agents]
    why = (
        r"^error: run is not one directory for all ranks: rank 1 does not see what .* parallel\.shard=none\.$"
    )
    assert re.search(why, "".join(said), re.MULTILINE), said
    assert not list(tmp_path.glob("*/run"))


def test_a_model_in_parts_is_evaluated_where_hosts_share_no_disk(started, user_environment, tiny, tmp_path):
    """Nothing is saved with trainer.steps=0, so the directory need not be one for all."""
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    settings = [*tiny, "trainer.steps=0"]
    assert started(train.main, *settings, "hydra.run.dir=one") == 0
    parts = [*settings, "hydra.run.dir=run", "parallel.shard=full"]
    agents = hosts(parts, folders[0], user_environment, folders[1])
    said = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    (run,) = tmp_path.glob("*/run/summary.json")  # of whichever host had rank 0
    one, two = (json.loads(each.read_text())["val/loss"] for each in (tmp_path / "one/summary.json", run))
    assert two == pytest.approx(one, rel=1e-5)
    assert not list(run.parent.glob("checkpoints"))
    assert "warning: with trainer.save_every" not in "".join(said)


@pytest.mark.parametrize("what", ["settings", "text", "no text"])
def test_hosts_that_would_train_unlike_are_refused_in_one_line(user_environment, tiny, tmp_path, what):
    """With another rate each the ranks' weights parted in silence; with another layout they waited for ever."""
    folders = [tmp_path / name for name in ("here", "there")]
    settings = [
        *tiny,
        "optimizer.lr=${oc.env:RATE}",
        "hydra.run.dir=run",
        "data.cache_dir=cache",
        "data.files=text.txt",
    ]
    for number, folder in enumerate(folders):
        folder.mkdir()
        text = f"{number if what == 'text' else ''} A quick fox.\n\n" * 200
        if number == 0 or what != "no text":
            (folder / "text.txt").write_text(text)
    rates = ("1e-3", "1e-2") if what == "settings" else ("1e-3", "1e-3")
    agents = hosts(settings, folders[0], user_environment, folders[1], rates=rates)
    said = "".join(agent.communicate(timeout=120)[0] for agent in agents)
    assert 0 not in [agent.returncode for agent in agents]
    why = {
        "settings": r"rank 1 was started with optimizer\.lr=0\.\d+, rank 0 with optimizer\.lr=0\.\d+: give one",
        "text": "rank 1 has another corpus than rank 0: give all hosts the same text",
        "no text": r"no \.txt, .* matches data\.files=.*text\.txt",
    }
    assert re.search(f"^error: {why[what]}", said, re.MULTILINE), said
    assert "RuntimeError" not in said
    if what == "no text":  # of the other host
        assert re.search(
            "^error: another rank has ended before the first step: its own line says why", said, re.M
        )


@pytest.mark.parametrize("host", [1, 0])
def test_a_host_that_is_lost_is_named_and_the_run_is_saved_by_the_other(
    user_environment, tiny, tmp_path, host
):
    agents = hosts([*tiny, "trainer.steps=100000", "hydra.run.dir=run"], tmp_path, user_environment)
    wait_until(lambda: logged(tmp_path / "run") > 3, agents[0])
    ranks = {rank: (agent, process) for agent in agents for rank, process in processes(agent).items()}
    lost, process = ranks[host]
    lost.kill()
    os.kill(process, signal.SIGKILL)
    began = time.monotonic()
    said = ranks[1 - host][0].communicate(timeout=120)[0]
    assert time.monotonic() - began < 100
    named = (  # rank 0's has the store
        r"the store of the ranks cannot be reached, on the host of rank 0 \(.+\): rank 1 was .* step \d",
        rf"rank 1 \(.*process {process}\) does not answer, for \d+ s: ",
    )
    assert re.search(f"^error: {named[host]}", said, re.MULTILINE), said
    (step,) = (int(each.replace(",", "")) for each in re.findall(r"stopped at step ([\d,]+) and saved", said))
    assert [path.name for path in saved(tmp_path / "run")] == [f"step-{step:08d}"]


def test_torchruns_restart_goes_on_where_the_run_was_saved(user_environment, tiny, tmp_path):
    """--max-restarts with trainer.resume=auto: a killed rank costs half a minute, and no step."""
    long = [*tiny, "trainer.steps=400", "hydra.run.dir=run", "trainer.resume=auto"]
    launcher = started_on(2, long, tmp_path, user_environment, "--max-restarts=1")
    wait_until(lambda: logged(tmp_path / "run") > 20, launcher)
    os.kill(processes(launcher)[1], signal.SIGKILL)
    said = launcher.communicate(timeout=200)[0]
    assert launcher.returncode == 0, said
    assert re.search(r"error: rank 1 .* does not answer", said)
    (step,) = (int(step) for step in re.findall(r"resumed +run, at step (\d+)", said))
    # The row of the step that was under way may be missing: it was saved, and not yet logged.
    assert set(range(1, 401)) - measured(tmp_path / "run", "train/loss").keys() <= {step}
