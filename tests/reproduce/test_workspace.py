"""`python -m reproduce workspace`: built offline where wandb-workspaces is installed; without it, it is asked for."""

import importlib.util
import sys

import pytest

from reproduce.__main__ import main
from reproduce.workspace import build
from training.loggers import COLUMNS

installed = pytest.mark.skipif(
    importlib.util.find_spec("wandb_workspaces") is None, reason="needs the extra wandb-workspaces"
)


@pytest.mark.parametrize("project", ["nobody", "/project", "a/b/c"])
def test_a_project_is_named_with_its_entity(project, capsys):
    assert main(["workspace", project]) == 1
    assert f"{project} is not ENTITY/PROJECT" in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_remedy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert main(["workspace", "someone/tilegpt"]) == 1
    error = capsys.readouterr().err
    assert "pip install wandb-workspaces" in error
    assert len(error.splitlines()) == 1


@installed
def test_the_view_shows_what_runs_log():
    workspace = build("someone", "tilegpt", group="sweep")
    shown = set()
    for section in workspace.sections:
        for panel in section.panels:
            shown |= {str(name) for name in getattr(panel, "y", []) or getattr(panel, "metrics", [])}
    assert shown <= set(COLUMNS)
    assert shown >= {"train/loss", "val/loss", "perf/tokens_per_second", "perf/peak_allocated_gib"}


@installed
def test_a_server_that_refuses_is_one_line(monkeypatch, capsys):
    from wandb_workspaces.workspaces import Workspace

    def save(self):
        raise ValueError("No API key configured.")

    monkeypatch.setattr(Workspace, "save", save)
    assert main(["workspace", "someone/tilegpt"]) == 1
    assert "wandb login" in capsys.readouterr().err
