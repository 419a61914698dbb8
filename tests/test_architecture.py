"""docs/architecture.md: code imports only from layers below its own, never in a circle, and what it names exists."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.conftest import ROOT

# From the top; those of one layer do not import each other.
LAYERS = [
    {"train", "prepare", "sample"},
    {"benchmarks"},
    {"reproduce"},
    {"training"},
    {"model", "kernels", "data"},
]
PACKAGES = set().union(*LAYERS)


def modules() -> dict[str, Path]:
    """Dotted name -> file, of all packages."""
    files = [path for name in PACKAGES for path in [ROOT / f"{name}.py", *(ROOT / name).rglob("*.py")]]
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files
        if path.is_file()
    }


def imports(module: str, path: Path, known: dict[str, Path], nodes: list[ast.AST]) -> set[str]:
    """The modules of ours that these statements import."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if node.level else []
            base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
            # `from package import module` imports the module; `from module import name` the module itself
            found |= {name if (name := f"{base}.{alias.name}") in known else base for alias in node.names}
    return (found & set(known)) - {module}


def at_import(tree: ast.Module) -> list[ast.AST]:
    """The statements that run when the module is imported: not those in functions, or for a type checker alone."""
    waiting, found = list(tree.body), []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        found.append(node)
        waiting += ast.iter_child_nodes(node)
    return found


def test_code_imports_only_from_layers_below_its_own() -> None:
    """Imports within functions count too."""
    known = modules()
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    upwards = [
        f"{module} imports {other}"
        for module, path in known.items()
        for other in imports(module, path, known, list(ast.walk(ast.parse(path.read_text()))))
        if (mine := module.split(".")[0]) != (theirs := other.split(".")[0]) and level[mine] >= level[theirs]
    ]
    assert upwards == []


def test_no_files_import_each_other_in_a_circle() -> None:
    known = modules()
    graph = {
        module: imports(module, path, known, at_import(ast.parse(path.read_text())))
        for module, path in known.items()
    }
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_a_number_that_attention_takes_is_named_in_seven_files() -> None:
    """As CONTRIBUTING says; beside them are the backends and kernels that take it of their own, as Hopper's do."""
    own = {"library.py", "under_transformers.py", "decode.py", "layers"}
    own |= {"hopper", "dispatch.py", "faster.py", "compile_report.py"}

    def names(path: Path) -> set[str]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        return {
            str(getattr(node, key, "")).lower() for node in nodes for key in ("id", "arg", "attr", "value")
        }

    files = [path for path in (ROOT / "kernels").rglob("*.py") if not own & set(path.parts)]
    found = {path.relative_to(ROOT / "kernels").as_posix() for path in files if "softcap" in names(path)}
    assert found == {
        *("arguments.py", "features.py", "naive.py", "flash/api.py", "flash/call.py"),
        *("flash/portable/spec.py", "flash/portable/score_mods.py"),
    }


def defined(tree: ast.Module | ast.ClassDef) -> set[str]:
    """The functions, classes and assigned names in a file; of a class also Class.name."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{own}" for own in defined(node)}
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def test_the_page_names_what_exists() -> None:
    """Each `path.py:name` of the two listings that follow a step and a figure."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"([\w./]+\.py):(\w+(?:\.\w+)*)", page)
    assert len(named) > 30
    missing = [
        f"{path}:{name}" for path, name in named if name not in defined(ast.parse((ROOT / path).read_text()))
    ]
    assert missing == []
