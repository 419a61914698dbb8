"""Experiments that reproduce the papers' figures and tables, into results/; `python -m reproduce` lists them."""
