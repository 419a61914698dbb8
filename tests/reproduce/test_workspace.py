"""`python -m reproduce workspace`: saved by the real client on a local server (wandb_stub.py)."""

import subprocess
import sys

import pytest

from reproduce.__main__ import main
from tests.conftest import ROOT
from tests.wandb_stub import WandbStub
from training.loggers import COLUMNS


def workspace(server: WandbStub, environment: dict[str, str], *args: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "reproduce", "workspace", "someone/tilegpt", *args],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=environment | server.variables,
    )


def shown(spec: dict) -> dict[str, dict]:
    """The panels of a saved view, by title."""
    sections = spec["section"]["panelBankConfig"]["sections"]
    return {
        panel["config"].get("chartTitle"): panel["config"] for each in sections for panel in each["panels"]
    }


@pytest.mark.slow
def test_the_saved_view_shows_metrics_that_runs_log(user_environment):
    with WandbStub() as server:
        done = workspace(server, user_environment, "--group", "a_sweep")
    assert done.returncode == 0, done.stderr
    (view,) = server.views
    address = view["name"].removesuffix("-v").replace("nw-", "nw=")
    assert done.stdout.splitlines()[-1] == f"{server.url}/someone/tilegpt?{address}"
    assert (view["projectName"], view["displayName"]) == ("tilegpt", "Attention backends: a_sweep")

    section, panels = view["spec"]["section"], shown(view["spec"])
    metrics = {metric for each in panels.values() for metric in each.get("metrics", [])}
    assert metrics <= set(COLUMNS)
    assert metrics >= {"train/loss", "val/perplexity", "perf/tokens_per_second", "perf/peak_allocated_gib"}
    assert section["settings"]["xAxis"] == panels["Training loss"]["xAxis"] == "tokens"
    assert len(panels["Where it goes (ms)"]["metrics"]) == 3
    assert panels[None] == {"diffOnly": "split"}  # the run comparer
    (runs,) = section["runSets"]
    assert runs["grouping"] == [{"section": "config", "name": "resolved.value.attention"}]
    (only,) = runs["filters"]["filters"]
    assert (only["key"]["name"], only["op"], only["value"]) == ("group", "=", "a_sweep")


@pytest.mark.slow
def test_a_server_that_denies_access_is_an_error_with_the_remedy(user_environment):
    with WandbStub() as server:
        server.stranger = True
        done = workspace(server, user_environment)
    assert done.returncode == 1
    assert "error: the workspace was not saved: " in done.stderr.splitlines()[-1]
    assert "`wandb login` first, and someone/tilegpt must be yours to write to" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("project", ["nobody", "/project", "a/b/c"])
def test_a_project_not_given_as_entity_and_project_is_refused(project, capsys):
    assert main(["workspace", project]) == 1
    assert f"{project} is not ENTITY/PROJECT" in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_remedy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert main(["workspace", "someone/tilegpt"]) == 1
    error = capsys.readouterr().err
    assert "pip install wandb-workspaces" in error
    assert len(error.splitlines()) == 1
