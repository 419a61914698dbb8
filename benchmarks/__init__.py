"""Benchmarks that are in no paper, against this project's own aims; `python -m benchmarks` lists them.

They use the experiments' machinery (`reproduce/experiment.py`): settings, budgets, resuming, results/. Where an
experiment judges a paper's claims, a benchmark has `aims(results) -> list[Aim]`.
"""
