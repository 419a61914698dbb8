"""`python -m reproduce`: list, run and report the experiments, or compare runs."""

from .command_line import Program, run, start
from .experiment import EXPERIMENTS

TOOLS = {
    "report": ("reproduce.report", "one page, Markdown and HTML: the papers' figures and ours"),
    "compare": ("reproduce.comparison.compare", "RUNS...: training runs side by side, a table and a page"),
    "milestones": ("reproduce.comparison.milestones", "RUN: its curve against the paper's, point by point"),
    "workspace": ("reproduce.comparison.workspace", "ENTITY/PROJECT: the same view as a wandb workspace"),
}
PROGRAM = Program("reproduce", EXPERIMENTS, TOOLS)


def main(argv: list[str]) -> int:
    return run(PROGRAM, argv)


if __name__ == "__main__":
    start(PROGRAM)
