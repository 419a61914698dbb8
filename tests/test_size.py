"""Lines of code in each folder, and words of a page: growth is a decision.

A folder's budget is what was reached, up to the next hundred lines. Lower a number when you can.
"""

import pytest

from tests.conftest import ROOT

BUDGET = {
    "model": 1500,
    "kernels": 16200,
    "data": 3600,
    "training": 7100,
    "reproduce": 11600,
    "benchmarks": 3400,
}
WORDS = 2600  # of docs/measurements.md, with the bars of its tables


@pytest.mark.parametrize("folder", BUDGET)
def test_a_folder_keeps_to_its_budget_of_lines(folder: str) -> None:
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))
    assert lines <= BUDGET[folder]


def test_the_page_of_measurements_keeps_to_its_budget_of_words() -> None:
    """What the report and the benchmarks have does not return to it."""
    assert len((ROOT / "docs" / "measurements.md").read_text().split()) <= WORDS
