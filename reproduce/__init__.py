"""The papers' figures and tables as runs: `python -m reproduce` lists them, and reads and writes results/."""
