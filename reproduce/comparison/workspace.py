"""`python -m reproduce workspace ENTITY/PROJECT`: the comparison as a wandb workspace, which needs a wandb account.

It also needs the package wandb-workspaces. Runs are grouped by the attention that ran; the x axis is tokens.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..common import ReproduceError

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

NAME = "Attention backends"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m reproduce workspace", description=__doc__)
    parser.add_argument("project", metavar="ENTITY/PROJECT")
    parser.add_argument(
        "--group", help="only the runs of this wandb group (of a sweep: the name of its folder)"
    )
    arguments = parser.parse_args(argv)
    entity, _, project = arguments.project.partition("/")
    if not (entity and project) or "/" in project:
        raise ReproduceError(
            f"{arguments.project} is not ENTITY/PROJECT, as in the address of a wandb project"
        )
    print(_save(build(entity, project, arguments.group)))
    return 0


def build(entity: str, project: str, group: str | None = None) -> Workspace:
    """Build the workspace without saving it; needs no network."""
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise ReproduceError(
            "this needs the package wandb-workspaces: pip install wandb-workspaces"
        ) from None

    def line(title: str, metric: str, x: str = "tokens") -> panels.LinePlot:
        return panels.LinePlot(title=title, x=x, y=[metric], title_x=x)

    def bar(title: str, *metrics: str) -> panels.BarPlot:
        return panels.BarPlot(title=title, metrics=list(metrics))

    phases = [f"perf/{phase}_ms" for phase in ("data", "forward_backward", "optimizer")]

    sections = {
        "Loss": [
            line("Training loss", "train/loss"),
            line("Validation loss", "val/loss"),
            line("Validation perplexity", "val/perplexity"),
            line("HellaSwag", "val/hellaswag"),
            line("Training loss against time (s)", "train/loss", x="seconds"),
        ],
        "Speed": [
            line("Tokens/s", "perf/tokens_per_second"),
            bar("Tokens/s, the run's mean", "perf/tokens_per_second"),
            bar("Step time (ms)", "perf/step_ms"),
            bar("Where it goes (ms)", *phases),
            bar("MFU (6 N + 12 L H Q T)", "perf/mfu"),
        ],
        "Memory": [
            bar("Peak allocated (GiB)", "perf/peak_allocated_gib"),
            bar("Peak reserved (GiB)", "perf/peak_reserved_gib"),
        ],
        "What differs": [panels.RunComparer(diff_only="split")],
    }
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=NAME if group is None else f"{NAME}: {group}",
        sections=[
            workspaces.Section(name=name, panels=each, is_open=True) for name, each in sections.items()
        ],
        settings=workspaces.WorkspaceSettings(x_axis="tokens"),
        runset_settings=workspaces.RunsetSettings(
            groupby=[workspaces.Config("resolved.attention")],
            filters=[] if group is None else [workspaces.Metric("Group") == group],
        ),
    )


def _save(workspace: Workspace) -> str:
    """Save the workspace on the server; returns the view's URL."""
    import wandb

    try:
        return workspace.save().url
    except (wandb.errors.Error, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ReproduceError(
            f"the workspace was not saved: {reason}; `wandb login` first, and {workspace.entity}/{workspace.project} "
            "must be yours to write to"
        ) from error
