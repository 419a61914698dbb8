"""How many random cases the differential tests draw: a few by default, or TILEGPT_RANDOM_CASES of each kind.

    TILEGPT_RANDOM_CASES=500 python -m pytest -m "" -k random

A case is drawn from its number, which its test's name shows, so a failure can be repeated alone.
"""

import os


def random_cases(usual: int) -> range:
    """The numbers of the cases of one kind; `usual` of them unless the environment says otherwise."""
    return range(int(os.environ.get("TILEGPT_RANDOM_CASES", usual)))
