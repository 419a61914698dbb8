"""The comparison of runs as one self-contained HTML page: tables, warnings, charts, and what differs.

page.html is its template, and includes page.css and page.js, which draws the charts from the numbers in the page.
"""

import os
from pathlib import Path
from typing import Any

import jinja2

from training.console import plural

from . import seeds
from .charts import charts, colours, patterns
from .runs import COUNTS, Run, differing_environment, differing_settings, environments
from .table import HEADER, having, notes, table, warnings

# The parts of a step, and of a whole run: name -> colour.
_STEP = {"data": "#d9b45b", "forward+backward": "#5b7c99", "optimizer": "#9db4c7"}
_STEP |= {"exchange": "#c9825b", "other": "#c9cfd6"}
_RUN = {"steps": "#5b7c99", "rest": "#d9b45b", "start-up": "#c9cfd6"}
_RUN_KEY = {"rest": "rest: evaluation, checkpoints", "start-up": "start-up of the first step"}


def page(runs: list[Run]) -> str:
    """One HTML document that needs no other file and no network."""
    lines = zip(runs, colours(runs), patterns(runs), strict=True)
    sweep, different = seeds.is_sweep(runs), differing_settings(runs)
    facts = {"Settings that differ": different, "Environment": environments(runs)}
    return _template().render(
        title="Comparison of " + (f"{len(runs)} runs" if len(runs) > 1 else "one run"),
        shared=_shared(runs),
        warnings=warnings(runs),
        notes=notes(runs),
        over_seeds=seeds.shown(runs) if sweep else None,
        table=(HEADER, table(runs)),
        folders=(("run", "folder"), [[run.label, os.path.relpath(run.path)] for run in runs]),
        bars=[each for each in _bars(runs) if each["longest"]],
        facts={
            title: {key: having(runs, values) for key, values in found.items()}
            for title, found in facts.items()
        },
        red=[*(() if sweep or seeds.attentions(runs) == 1 else different), *differing_environment(runs)],
        numbers={
            "runs": [{"label": run.label, "colour": shade, "pattern": each} for run, shade, each in lines],
            "charts": charts(runs),
        },
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["sentence"] = lambda text: text[0].upper() + text[1:]
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("page.html")


def _bars(runs: list[Run]) -> list[dict[str, Any]]:
    """The charts that have a bar for each run, made of (name, value, colour)."""

    def divided(splits: list[dict[str, float] | None], shades: dict[str, str]) -> list[list[tuple]]:
        return [[(name, part, shades[name]) for name, part in (split or {}).items()] for split in splits]

    steps = [run.step_split() for run in runs]
    peaks = [
        [(*run.peak_memory, shade)] if run.peak_memory else []
        for run, shade in zip(runs, colours(runs), strict=True)
    ]
    bars = [
        {
            "title": "Where the time of a step goes",
            "unit": "ms",
            "parts": divided(steps, _STEP),
            "key": {name: _STEP[name] for name in _STEP if any(name in (split or ()) for split in steps)},
        },
        {
            "title": "Where the time of a run went",
            "unit": "s",
            "parts": divided([run.time_split() for run in runs], _RUN),
            "key": {_RUN_KEY.get(name, name): shade for name, shade in _RUN.items()},
        },
        {"title": "Peak memory", "unit": "GiB", "parts": peaks, "key": {}},
    ]
    for each in bars:
        each["longest"] = max(sum(value for _, value, _ in parts) for parts in each["parts"])
    return bars


_SHARED = (*COUNTS, "data.source", "data.tokenizer")


def _shared(runs: list[Run]) -> str:
    """What the first run trained, in one line; it is named if others trained something else."""
    config = runs[0].config
    if not all(name in config for name in _SHARED):
        return ""
    layers, heads, width, context, tokens, steps, source, tokenizer = (config[name] for name in _SHARED)
    return (
        (f"{runs[0].label}: " if set(_SHARED) & set(differing_settings(runs)) else "")
        + f"{plural(layers, 'layer')}, {plural(heads, 'head')}, {width} wide, context {context:,} · "
        f"{source}, tokenizer {tokenizer} · {tokens:,} tokens a step, {steps:,} steps"
    )
