"""training/ can be read file by file: what a file imports, for types too, does not import it back."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "training"


def imported(file: Path) -> set[str]:
    """The modules of training that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names |= {node.module} if node.module else {alias.name for alias in node.names}
    return names


def test_the_modules_of_training_import_each_other_without_a_circle():
    order = TopologicalSorter({file.stem: imported(file) for file in PACKAGE.glob("*.py")}).static_order()
    assert list(order)[-1] == "trainer"
