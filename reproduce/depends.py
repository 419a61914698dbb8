"""What a figure depends on, by name, each with a hash that survives moves, renames and comments.

An experiment depends on its own `run`, and names what it measures: a package or a module, whose Triton kernels count,
or a function, class or constant, such as picks tiles, warps and groups. Other Python that launches kernels does not
change their times.

The hash of a definition is of its syntax tree, without docstrings, annotations and the names that are its own. In the
place of another definition's name stands that one's hash (of a kernel: every helper's and constant's; of `run`: what
it uses of reproduce and benchmarks; of a function or class: what it uses of its module), or else a blank. So a result
that recorded a hash is stale if no definition has it any longer, wherever it is and whatever it is called.
"""

import ast
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

from .older_code import FASTER_SINCE, UNTOUCHED

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "model", "training", "data", "reproduce", "benchmarks")
EXPERIMENTS_IN = ("reproduce", "benchmarks")
EVERYTHING = ""  # as a scope: every definition is followed
# Fields of the syntax that change nothing; a kernel's annotations tell what is compiled in.
NO_KERNEL_CODE = ("ctx", "kind", "type_comment", "type_params")
NO_CODE = ("annotation", "returns", "decorator_list", *NO_KERNEL_CODE)
DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


class Definition(NamedTuple):
    """A function, class or constant at the top level of a module."""

    module: str
    name: str


class Tree:
    """The definitions below a root folder, and their hashes."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
        dotted = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
        names = [name.removesuffix(".__init__") for name in dotted]
        self.modules = {n: _Module(file.read_text("utf-8")) for n, file in zip(names, files, strict=True)}
        self._hashes: dict[tuple[Definition, str], str] = {}
        self._open: list[Definition] = []  # those being hashed, each because the one before refers to it
        self._lowest = 0  # the outermost of them that has been met again

    def record(self, run: str, measured: Iterable[str], gpu: bool = True) -> dict[str, str]:
        """Name -> hash of what an experiment depends on.

        Args:
            run: the module that has its `run`.
            measured: packages, modules, definitions and .json files. KeyError names one that is not there.
            gpu: without one, kernels in Gluon do not count: they run on Hopper GPUs alone.
        """
        found = {f"{run}.run": self.hash(Definition(run, "run"), run.split(".")[0])}
        for name in measured:
            if name.endswith(".json"):
                found[name] = _hash_of_json(self.root / name)
                continue
            for each in self._measured(name, gpu):
                found[".".join(each)] = self.hash(each, EVERYTHING if self._is_kernel(each) else each.module)
        return found

    def hashes(self) -> set[str]:
        """Every hash that `record` could give today."""
        found = {_hash_of_json(file) for file in (self.root / "kernels").rglob("*.json")}
        for name, module in self.modules.items():
            package = name.split(".")[0]
            for each in (Definition(name, own) for own in module.definitions):
                if package in EXPERIMENTS_IN and each.name == "run":
                    found.add(self.hash(each, package))
                found.add(self.hash(each, EVERYTHING if self._is_kernel(each) else name))
        return found

    def _measured(self, name: str, gpu: bool) -> Iterator[Definition]:
        """The kernels of a package or a module, or the definition of that name."""
        module, _, own = name.rpartition(".")
        if module in self.modules and own in self.modules[module].definitions:
            yield Definition(module, own)
            return
        inside = [each for each in self.modules if each == name or each.startswith(f"{name}.")]
        kernels = [Definition(each, d) for each in inside for d in self.modules[each].definitions]
        kernels = [each for each in kernels if self._is_kernel(each)]
        if not kernels:
            raise KeyError(name)
        yield from (each for each in kernels if gpu or not _is_gluon(self._node(each)))

    def _node(self, each: Definition) -> ast.stmt:
        return self.modules[each.module].definitions[each.name]

    def _is_kernel(self, each: Definition) -> bool:
        node = self._node(each)
        return isinstance(node, ast.FunctionDef) and any(
            isinstance(part, ast.Attribute) and part.attr == "jit"
            for decorator in node.decorator_list
            for part in ast.walk(decorator)
        )

    def hash(self, each: Definition, scope: str) -> str:
        """The hash of a definition; those it refers to are followed where their module is `scope` or inside it."""
        if each in self._open:  # recursion
            self._lowest = min(self._lowest, self._open.index(each))
            return "again,"
        if (each, scope) in self._hashes:
            return self._hashes[each, scope]
        depth, outer, self._lowest = len(self._open), self._lowest, len(self._open)
        self._open.append(each)
        node = self._node(each)
        found = _hash("".join(self._parts(node, each, scope, _own_names(node))))
        self._open.pop()
        if self._lowest >= depth:  # else it depends on where the recursion was entered
            self._hashes[each, scope] = found
        self._lowest = min(outer, self._lowest)
        return found

    def _parts(self, node: object, within: Definition, scope: str, own: dict[str, str]) -> Iterator[str]:
        """The node's syntax as text, in the normal form that is hashed."""
        match node:
            case list():
                for each in node:
                    yield from self._parts(each, within, scope, own)
            case ast.Constant():
                yield f"{node.value!r},"
            case ast.Expr(value=ast.Constant(value=str())) | ast.Import() | ast.ImportFrom():
                pass  # a docstring; what is imported counts where it is used
            case ast.Name() | ast.Attribute() if to := self._refers(node, within, own):
                yield self.hash(to, scope) if to.module.startswith(scope) else "another,"
            case ast.AST():
                yield f"{type(node).__name__}("
                for field, value in ast.iter_fields(node):
                    if value in (None, []) or field in (NO_CODE if scope else NO_KERNEL_CODE):
                        continue
                    if isinstance(value, str) and field != "attr" and not isinstance(node, ast.keyword):
                        value = own.get(value, value)
                    yield f"{field}="
                    yield from self._parts(value, within, scope, own)
                yield ")"
            case _:
                yield f"{node!r},"

    def _refers(
        self, node: ast.Name | ast.Attribute, within: Definition, own: dict[str, str]
    ) -> Definition | None:
        """The definition of this tree that a name, or a module's attribute, stands for; None for any other."""
        if isinstance(node, ast.Attribute):
            if not isinstance(node.value, ast.Name) or node.value.id in own:
                return None
            origin = self._origin(within.module, node.value.id)
            return self._defined(".".join(origin), node.attr) if origin else None
        return None if node.id in own else self._defined(within.module, node.id)

    def _defined(self, module: str, name: str) -> Definition | None:
        """Where `name` in `module` is defined, through imports; None if that is no module of this tree."""
        if module not in self.modules:
            return None
        if name in self.modules[module].definitions:
            return Definition(module, name)
        origin = self._origin(module, name)
        return self._defined(*origin) if origin else None

    def _origin(self, module: str, name: str) -> tuple[str, str] | None:
        """Where a name of `module` is imported from: the module, and its name there."""
        source, there = self.modules[module].imports.get(name, ("", ""))
        if not source:
            return None
        is_package = (self.root / module.replace(".", "/")).is_dir()
        return resolve_name(source, module if is_package else module.rpartition(".")[0]), there


class _Module:
    """A module's definitions and imports: name -> node, and name -> (module as it is written, name there)."""

    def __init__(self, source: str) -> None:
        tree = ast.parse(source)
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        for node in tree.body:
            if isinstance(node, DEFINITIONS):
                self.definitions |= dict.fromkeys(_names_of(node), node)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                source = "." * node.level + (node.module or "")
                self.imports |= {each.asname or each.name: (source, each.name) for each in node.names}


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def _own_names(node: ast.stmt) -> dict[str, str]:
    """The names that are bound inside a definition, and its own -> their numbers, by first appearance."""
    found = dict.fromkeys(_names_of(node))
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            found[part.arg] = None
        elif isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            found[part.id] = None
        elif isinstance(part, ast.FunctionDef) and not (isinstance(node, ast.ClassDef) and part in node.body):
            found[part.name] = None
    return {name: f"own{number}" for number, name in enumerate(found)}


def _is_gluon(node: ast.stmt) -> bool:
    return "gluon" in "".join(map(ast.dump, node.decorator_list))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _hash_of_json(file: Path) -> str:
    return _hash(json.dumps(json.loads(file.read_text("utf-8"))))


@functools.cache
def tree() -> Tree:
    """This project's, read once."""
    return Tree()


@functools.cache
def _today() -> set[str]:
    return tree().hashes()


def changed(recorded: dict[str, str]) -> list[str]:
    """The recorded names whose hash no definition has today, unless nothing measured was touched."""
    known = _today() | UNTOUCHED.keys() | FASTER_SINCE.keys()
    return [name for name, its in recorded.items() if its not in known]
