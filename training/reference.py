"""configs/reference.yaml: every setting with its default and meaning, read from the dataclasses.

`python -m training.reference` writes it, and a test says when it is out of date.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import textwrap
import tokenize
from dataclasses import fields, is_dataclass
from enum import Enum, EnumType
from typing import Any, get_type_hints

import training.installed  # noqa: F401  (ends with one line if a package is missing)

from .command_line import CONFIGS, composed
from .config import Config, flatten

FILE = CONFIGS / "reference.yaml"
HEAD = """\
# Every setting of `python train.py`, with its default and its meaning. Nothing reads this file: copy a line of it to
# the command line (trainer.steps=50) or into a recipe under configs/experiment. Two groups chosen by default,
# model=nano and schedule=linear, set several at once; behind those stands what holds without the group.
# Written by `python -m training.reference` from the dataclasses that check the settings.

"""


def reference() -> str:
    """The text of configs/reference.yaml."""
    return HEAD + "".join(_section(Config, "", flatten(_plain(composed())), flatten(_plain(Config()))))


def _section(schema: type, prefix: str, value: dict[str, Any], bare: dict[str, Any]) -> list[str]:
    indent = "  " * prefix.count(".")
    about, types = comments(schema), get_type_hints(schema)
    lines = []
    for field in sorted(fields(schema), key=lambda field: is_dataclass(field.default_factory)):
        key = prefix + field.name
        if is_dataclass(field.default_factory):
            meaning = (field.default_factory.__doc__ or "").splitlines()
            lines += ["\n", *_comment(meaning[0], indent), f"{field.name}:\n"]
            lines += _section(field.default_factory, f"{key}.", value, bare)
            continue
        options = types[field.name]
        lines += _comment(about.get(field.name, ""), indent)
        if isinstance(options, EnumType):
            meanings = comments(options)
            lines += [
                f"{indent}#   {each.value}{': ' * bool(meanings.get(each.name))}{meanings.get(each.name, '')}\n"
                for each in options
            ]
        line = f"{indent}{field.name}: {_yaml(value[key])}"
        lines.append(f"{line} # without: {_yaml(bare[key])}\n" if value[key] != bare[key] else f"{line}\n")
    return lines


def comments(cls: type) -> dict[str, str]:
    """The comment of each name that a class and its bases define: above it, or after it."""
    found = comments(cls.__base__) if is_dataclass(cls.__base__) else {}
    source = textwrap.dedent(inspect.getsource(cls))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    at_line = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    above = 1
    for node in ast.parse(source).body[0].body:
        target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
        if isinstance(target, ast.Name):
            lines = [at_line[n] for n in range(above, node.end_lineno + 1) if n in at_line]
            if lines:
                found[target.id] = " ".join(lines)
        above = node.end_lineno + 1
    return found


def _comment(text: str, indent: str) -> list[str]:
    return [f"{indent}# {line}\n" for line in textwrap.wrap(text, 116 - len(indent))]


def _plain(config: Config) -> dict[str, Any]:
    from omegaconf import OmegaConf  # not above, where it would come before training.installed

    return OmegaConf.to_container(OmegaConf.structured(config))


def _yaml(value: Any) -> str:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./-]+", value) else f'"{value}"'
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


if __name__ == "__main__":
    FILE.write_text(reference())
