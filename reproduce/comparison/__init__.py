"""Training runs compared: with each other (compare), with a published curve (milestones), in wandb (workspace).

It reads run directories and wandb folders (`runs.py`) and imports none of the experiments.
"""
