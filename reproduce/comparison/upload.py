"""`python -m reproduce compare RUNS... --wandb`: the page in wandb, to be seen in a run and kept as an artifact."""

import os
import re
from pathlib import Path

from training.config import ConfigError, LoggerConfig
from training.wandb_logger import check_wandb, wandb_mode

from ..common import ReproduceError
from .runs import Run


def upload(page: Path, runs: list[Run]) -> str:
    """Send the page as version of the artifact `compare-NAME`, of the runs' sweep or first run.

    It goes to the project that the first run names, with WANDB_PROJECT and WANDB_ENTITY as for runs. Returns where it
    is: an address, or offline what to type to upload it.
    """
    project = runs[0].config.get("logger.project") or os.environ.get("WANDB_PROJECT") or "tilegpt"
    try:
        check_wandb(LoggerConfig(project=project))
        mode = wandb_mode(LoggerConfig().mode)
    except ConfigError as error:
        remedy = str(error).replace("logger.mode=offline", "WANDB_MODE=offline")
        raise ReproduceError(remedy.replace("use logger=none", "leave out --wandb")) from None
    import wandb

    name = page.resolve().parent.name
    folder = page.parent / ".compare"  # hidden: it is no run to compare
    folder.mkdir(exist_ok=True)
    try:
        with wandb.init(
            mode=mode,
            dir=folder,
            project=project,
            job_type="compare",
            name=f"compare {name}",
            group=runs[0].config.get("logger.group"),
            config={"runs": [run.path.name for run in runs]},
            settings=wandb.Settings(init_timeout=20, silent=True),
        ) as run:
            artifact = wandb.Artifact(re.sub(r"[^\w.-]", "_", f"compare-{name}"), type="comparison")
            artifact.add_file(str(page))
            run.log_artifact(artifact)
            run.log({"compare": wandb.Html(page.read_text(encoding="utf-8"), inject=False)})
            where = run.url if mode == "online" else f"wandb sync {os.path.relpath(Path(run.dir).parent)}"
    except (wandb.errors.Error, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ReproduceError(f"the page was not sent to wandb: {reason}; it is in {page}") from error
    return where
