"""The jobs of .ci/gpu, and their runner, without a GPU."""

import re
import subprocess
import sys
import tarfile

from tests.conftest import ROOT

FOLDER = ROOT / ".ci" / "gpu"


def test_the_runner_starts_jobs_by_priority_and_ends_those_at_their_limit(tmp_path):
    (tmp_path / "queue").mkdir()
    (tmp_path / "have").mkdir()
    (tmp_path / "have" / "torch").write_text("export GREETING=hello\n")
    tarfile.open(tmp_path / "repo.tar.gz", "w:gz").close()
    (tmp_path / "stop").touch()
    header = "# gpus: 0\n# limit: {}\n# env: torch\n"
    jobs = {"10_says": (60, 'echo $GREETING > "$JOB_OUT/said"'), "20_sleeps": (1, "exec sleep 60")}
    for name, (limit, body) in jobs.items():
        (tmp_path / "queue" / f"{name}.sh").write_text(header.format(limit) + body)
    subprocess.run([sys.executable, FOLDER / "runner.py", tmp_path, "0"], check=True, timeout=60)
    assert (tmp_path / "out" / "says" / "said").read_text() == "hello\n"
    ended = dict(re.findall(r"^(\w+): status (-?\d+)", (tmp_path / "state").read_text(), re.MULTILINE))
    assert ended == {"says": "0", "sleeps": "-15"}


def test_every_job_finds_its_script(tmp_path):
    listed = subprocess.run([sys.executable, FOLDER / "jobs.py"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    (tmp_path / "queue").mkdir()
    subprocess.run([sys.executable, FOLDER / "jobs.py", tmp_path, "10", *names], check=True)
    for name in names:
        script = (tmp_path / "queue" / f"10_{name}.sh").read_text()
        assert all((ROOT / path).is_file() for path in re.findall(r"\.ci/gpu/\S+", script)), name
