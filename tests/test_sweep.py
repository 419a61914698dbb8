"""Sweeps that need more than Hydra: a search with Optuna, and runs as jobs of their own by submitit."""

import json
import os
import re
import shlex
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import train
from tests.conftest import ROOT, measured


def only_sweep(folder: Path) -> Path:
    (sweep,) = (folder / "runs").iterdir()
    return sweep


@pytest.mark.slow
def test_a_search_finds_the_best_run_among_refused_ones(started, tiny, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    grid = ["hydra/sweeper/sampler=grid", "hydra.sweeper.params=null", "trainer.micro_batch=choice(3,8)"]
    said = started(train.main, "-m", "hydra/sweeper=search", *tiny, *grid)
    assert re.fullmatch(r"error: \d_nano_auto: trainer\.micro_batch=3 does not divide .*", said)
    sweep = only_sweep(tmp_path)
    found = yaml.safe_load((sweep / "optimization_results.yaml").read_text())
    (summary,) = sweep.glob("*/summary.json")
    assert found["best_params"] == {"trainer.micro_batch": 8}
    assert found["best_value"] == json.loads(summary.read_text())["val/loss"]
    fixed = started(train.main, "-m", "hydra/sweeper=search", *tiny, "optimizer.lr=1e-3")
    assert fixed.startswith("error: all settings are fixed; a search varies one: ")
    assert only_sweep(tmp_path) == sweep


@pytest.mark.slow
def test_a_search_of_the_learning_rate_goes_on_from_its_storage(started, tiny, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    kept = ["hydra.sweeper.storage=sqlite:///search.db", "hydra.sweeper.study_name=mine"]
    for _ in range(2):
        assert (
            started(train.main, "-m", "hydra/sweeper=search", "hydra.sweeper.n_trials=2", *kept, *tiny) == 0
        )
    with sqlite3.connect("search.db") as trials:
        rates = [rate for (rate,) in trials.execute("select param_value from trial_params")]
    assert len(set(rates)) == 4
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    configs = (tmp_path / "runs").glob("*/*/config.yaml")
    assert sorted(yaml.safe_load(path.read_text())["optimizer"]["lr"] for path in configs) == sorted(rates)


def test_a_plugin_that_is_not_installed_is_named_with_its_extra(command_line, tmp_path):
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins/__init__.py").touch()  # a package of this name hides the plugins
    for choice, extra in (("hydra/sweeper=search", "search"), ("hydra/launcher=local", "slurm")):
        done = command_line("train.py", "-m", choice, env={"PYTHONPATH": str(tmp_path)})
        assert done.returncode == 1
        assert re.fullmatch(
            rf"error: hydra/\S+ is not installed: pip install '\.\[{extra}\]' in the checkout\n", done.stderr
        )


def test_slurm_without_slurm_is_refused(started, monkeypatch):
    monkeypatch.setenv("PATH", "")
    said = started(train.main, "-m", "hydra/launcher=slurm")
    assert said.startswith("error: hydra/launcher=slurm: there is no srun here; ")


@pytest.mark.slow
def test_jobs_make_a_sweep_and_say_what_they_refuse(command_line, started, tiny, tmp_path):
    pytest.importorskip("submitit")
    heads = ["hydra.sweep.dir=sweep", "model.n_head=2,5"]
    done = command_line("train.py", "-m", "hydra/launcher=local", *tiny, *heads)
    assert done.returncode == 1
    assert re.fullmatch(r"error: 1_nano_auto: model\.n_embd=32 .*", done.stderr.splitlines()[-1])
    assert [path.name for path in (tmp_path / "sweep").glob("*_nano_auto")] == ["0_nano_auto"]
    assert started(train.main, *tiny, "model.n_head=2", "hydra.run.dir=here") == 0
    run = tmp_path / "sweep/0_nano_auto"
    assert measured(run, "train/loss") == measured(tmp_path / "here", "train/loss")
    assert json.loads((run / "environment.json").read_text())["command"][1:4] == [
        *(str(ROOT / "train.py"), "-m", "hydra/launcher=local")
    ]
    assert yaml.safe_load((run / "config.yaml").read_text())["logger"]["group"] == "sweep"


@pytest.mark.slow
def test_a_job_that_is_told_of_its_end_saves_is_queued_again_and_continues(user_environment, tiny, tmp_path):
    """As submitit tells it under SLURM: by SIGUSR2, 120 s before. The tasks of a job are ranks, and agree."""
    pytest.importorskip("submitit")
    long = [*tiny, "trainer.steps=600", "trainer.resume=auto", "hydra.launcher.tasks_per_node=2"]
    process = subprocess.Popen(
        [sys.executable, ROOT / "train.py", "-m", "hydra/launcher=local", *long, "hydra.sweep.dir=sweep"],
        cwd=tmp_path,
        env=user_environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "sweep/0_nano_auto/metrics.csv"
    while not (metrics.exists() and metrics.read_text().count("\n") > 5):
        assert process.poll() is None
        time.sleep(0.02)
    job, _ = (number for number, words in processes() if f"submitit.core._submit {tmp_path}" in words)
    os.kill(job, signal.SIGUSR2)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads((tmp_path / "sweep/0_nano_auto/facts.json").read_text())["world_size"] == 2
    (said,) = (tmp_path / "sweep/.submitit").glob("*/*_0_log.out")
    assert re.search(r"stopped at step (\d+) and saved", said.read_text())
    assert sorted(measured(tmp_path / "sweep/0_nano_auto", "train/loss")) == list(range(1, 601))


def processes() -> list[tuple[int, str]]:
    """Every process, with its command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append((int(path.parent.name), path.read_bytes().replace(b"\0", b" ").decode()))
        except OSError:  # ended by now
            continue
    return found


# Stand-ins for SLURM's programs: sbatch starts two jobs of an array in the background, srun runs its command.
SBATCH = """#!/bin/bash
cp "$1" "$SLURM_FOLDER/submitted.sh"
for task in 0 1; do
  SLURM_ARRAY_JOB_ID=17 SLURM_ARRAY_TASK_ID=$task SLURM_JOB_ID=$((17 + task)) SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 \\
    SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 bash "$1" >/dev/null 2>&1 &
done
echo "Submitted batch job 17"
"""
OPTIONS = """#!/bin/bash
while [[ $1 == -* ]]; do
  case $1 in --output | --error) shift 2 ;; *) shift ;; esac
done
"""
SRUN = OPTIONS + 'exec "$@"'
# Of one job: its two nodes are this one, and srun starts a task on each.
SBATCH_OF_TWO_NODES = """#!/bin/bash
cp "$1" "$SLURM_FOLDER/submitted.sh"
SLURM_JOB_ID=17 SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST=localhost,localhost \\
  bash "$1" >/dev/null 2>&1 &
echo "Submitted batch job 17"
"""
SRUN_ON_TWO_NODES = (
    OPTIONS
    + """for node in 0 1; do
  SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 "$@" &
done
wait -n && wait -n
"""
)


@pytest.fixture
def slurm(command_line, tiny, tmp_path):
    """Submits a sweep to these stand-ins; returns what it printed, and what sbatch was asked for."""
    pytest.importorskip("submitit")

    def submit(sbatch: str, srun: str, *words: str) -> tuple[str, dict[str, str]]:
        programs = {"sbatch": sbatch, "srun": srun, "sacct": "#!/bin/bash\necho 'JobID|State|NodeList'\n"}
        for name, script in programs.items():
            (tmp_path / name).write_text(script)
            (tmp_path / name).chmod(stat.S_IRWXU)
        found = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_FOLDER": str(tmp_path)}
        sweep = ["hydra/launcher=slurm", "hydra.launcher.partition=gpu", "hydra.sweep.dir=sweep", *words]
        done = command_line("train.py", "-m", *tiny, *sweep, env=found)
        assert done.returncode == 0, done.stderr
        return done.stdout, dict(
            re.findall(r"#SBATCH --([\w-]+)=(.*)", (tmp_path / "submitted.sh").read_text())
        )

    return submit


@pytest.mark.slow
def test_the_slurm_config_submits_an_array_of_jobs(slurm, tmp_path):
    """submitit takes every setting of the config, and the jobs train."""
    said, asked = slurm(SBATCH, SRUN, "seed=1,2")
    assert asked["signal"] == "USR2@120"
    assert (asked["time"], asked["gpus-per-node"], asked["partition"]) == ("240", "1", "gpu")
    assert asked["array"].startswith("0-1")
    assert len(list((tmp_path / "sweep").glob("*/summary.json"))) == 2
    assert "output       sweep/.submitit/*/*_log.out\n" in said


@pytest.mark.slow
def test_the_nodes_of_a_slurm_job_are_ranks_of_one_run(slurm, tmp_path):
    _, asked = slurm(SBATCH_OF_TWO_NODES, SRUN_ON_TWO_NODES, "seed=1", "hydra.launcher.nodes=2")
    assert (asked["nodes"], asked["ntasks-per-node"]) == ("2", "1")
    (facts,) = (tmp_path / "sweep").glob("*/facts.json")
    assert json.loads(facts.read_text())["world_size"] == 2
    assert (facts.parent / "summary.json").exists()
    assert len(list((tmp_path / "sweep" / ".submitit").glob("*/*_result.pkl"))) == 2


# Of one job, which scontrol starts again; sbatch takes a script that names its interpreter, and no other.
OF_A_SCRIPT = {
    "sbatch": """#!/bin/bash
[[ $(head -c 2 "$1") == "#!" ]] || exit 1
cp "$1" "$SLURM_FOLDER/submitted.sh"
job 17 &
""",
    "job": """#!/bin/bash
SLURM_JOB_ID=$1 bash "$SLURM_FOLDER/submitted.sh" >>"$SLURM_FOLDER/said" 2>&1
echo $? >>"$SLURM_FOLDER/statuses"
""",
    "srun": '#!/bin/bash\necho $$ >"$SLURM_FOLDER/step"\nexec "$@"\n',
    "scontrol": "#!/bin/bash\n[[ $1 == requeue ]] && job $2 &\n",
    "python": f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "$@"\n',
}


@pytest.mark.slow
def test_the_script_of_the_recipe_saves_is_queued_again_and_continues(user_environment, tiny, tmp_path):
    """It ends as the run did, so that SLURM does not call a finished job failed."""
    (script,) = re.findall(
        r"^    (#!.*?)\n\n", (ROOT / "docs/recipes.md").read_text(), re.MULTILINE | re.DOTALL
    )
    words = [str(ROOT / "train.py"), *tiny, "trainer.steps=600"]
    script = script.replace("\n    ", "\n").replace("train.py experiment=paper/gpt2_small", shlex.join(words))
    assert str(ROOT) in script
    (tmp_path / "job.sh").write_text(script)
    for name, program in OF_A_SCRIPT.items():
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(stat.S_IRWXU)
    found = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_FOLDER": str(tmp_path)}
    subprocess.run(["sbatch", "job.sh"], cwd=tmp_path, env=user_environment | found, check=True)
    run, statuses = tmp_path / "runs/17", tmp_path / "statuses"
    until = time.monotonic() + 120
    while not (run / "metrics.csv").exists() or (run / "metrics.csv").read_text().count("\n") <= 5:
        assert time.monotonic() < until
        assert not statuses.exists(), (tmp_path / "said").read_text()
        time.sleep(0.02)
    os.kill(int((tmp_path / "step").read_text()), signal.SIGUSR1)
    while not statuses.exists() or statuses.read_text().count("\n") < 2:
        assert time.monotonic() < until, (tmp_path / "said").read_text()
        time.sleep(0.05)
    assert statuses.read_text().split() == ["138", "0"]
    said = (tmp_path / "said").read_text()
    (step,) = re.findall(r"stopped at step (\d+) and saved", said)
    assert re.search(rf"resumed +runs/17\S*, at step {step}$", said, re.MULTILINE)
    assert sorted(measured(run, "train/loss")) == list(range(1, 601))
