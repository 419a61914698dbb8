"""Experiments that reproduce the papers' figures and tables; `python -m reproduce` lists them. Results: results/."""
