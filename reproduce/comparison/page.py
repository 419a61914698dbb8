"""The comparison of runs as one self-contained HTML page: tables, warnings, charts, and what differs.

page.css and page.js are put into it; page.js draws the charts from the numbers, which are in the page as JSON.
"""

from __future__ import annotations

import html
import json
import os
from pathlib import Path

from training.console import plural

from ..common import html_table
from . import seeds
from .charts import charts, colours, patterns
from .runs import Run, differing_environment, differing_settings
from .table import HEADER, having, notes, table, warnings

_HERE = Path(__file__).parent
# The parts of a step, and of a whole run: name -> colour.
_STEP = {"data": "#d9b45b", "forward+backward": "#5b7c99", "optimizer": "#9db4c7", "other": "#c9cfd6"}
_RUN = {"steps": "#5b7c99", "rest": "#d9b45b", "start-up": "#c9cfd6"}
_RUN_KEY = {"rest": "rest: evaluation, checkpoints", "start-up": "start-up of the first step"}


def page(runs: list[Run]) -> str:
    """One HTML document that needs no other file and no network."""
    title = "Comparison of " + (f"{len(runs)} runs" if len(runs) > 1 else "one run")
    shades, drawn = colours(runs), charts(runs)
    warned = "".join(f"<li>{_escape(_sentence(each))}</li>" for each in warnings(runs))
    pairs = zip(runs, shades, strict=True)
    names = [f'<i class="dot" style="--shade:{shade}"></i>{_escape(run.label)}' for run, shade in pairs]
    rows = [[name, *map(_shown, cells)] for name, (_, *cells) in zip(names, table(runs), strict=True)]
    folders = [[name, _escape(os.path.relpath(run.path))] for name, run in zip(names, runs, strict=True)]
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="sub">{_escape(_shared(runs))}</p>',
        f'<ul class="warn">{warned}</ul>' if warned else "",
        _by_attention(runs),
        _card("Runs", html_table(HEADER, rows)),
        f'<p class="note">{_escape(" ".join(map(_sentence, notes(runs))))}</p>',
        _charts(drawn),
        _split_bars("Where the time of a step goes", "ms", [run.step_split() for run in runs], _STEP, runs),
        _split_bars("Where the time of a run went", "s", [run.time_split() for run in runs], _RUN, runs),
        _memory_bars(runs, shades),
        _facts("Settings that differ", runs, differing_settings(runs)),
        _facts("Environment", runs, _environment(runs), differing_environment(runs)),
        _card("Where the runs are", html_table(("run", "folder"), folders)),
    ]
    lines = zip(runs, shades, patterns(runs), strict=True)
    numbers = {
        "runs": [{"label": run.label, "colour": shade, "pattern": each} for run, shade, each in lines],
        "charts": drawn,
    }
    embedded = json.dumps(numbers, separators=(",", ":"), allow_nan=False).replace("<", r"\u003c")
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
        f'<body><main>{"".join(parts)}</main><script type="application/json" id="numbers">{embedded}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _by_attention(runs: list[Run]) -> str:
    if not seeds.is_sweep(runs):
        return ""
    rows = [[*map(_shown, row)] for row in seeds.table(runs)]
    return _card("By attention, over seeds", html_table(seeds.HEADER, rows))


def _charts(drawn: list[dict]) -> str:
    figures = ""
    for number, chart in enumerate(drawn):
        button = "<button>whole curves</button>" if chart.get("from") is not None else ""
        caption = f"<figcaption><span>{_escape(chart['title'])}</span>{button}</figcaption>"
        figures += f'<figure data-chart="{number}">{caption}</figure>'
    if not figures:
        return ""
    key = '<p class="note">Line: training; dot: validation. Point at a chart for its numbers.</p>'
    return f'<h2>Curves</h2><div class="legend"></div><div class="charts">{figures}</div>{key}'


def _split_bars(
    title: str, unit: str, splits: list[dict[str, float] | None], parts: dict[str, str], runs: list[Run]
) -> str:
    """A stacked bar for each run that shows how its time divides."""
    longest = max((sum(split.values()) for split in splits if split), default=0)
    bars = []
    for split in splits:
        pieces = "".join(
            f'<b style="width:{part / longest:.2%};background:{parts[name]}" title="{name} {part:.2f} {unit}"></b>'
            for name, part in (split or {}).items()
            if longest
        )
        told = ", ".join(f"{name} {part:.2f}" for name, part in (split or {}).items())
        bars.append((pieces, f"{told} {unit}" if told else "not logged"))
    keys = ((_RUN_KEY.get(name, name), shade) for name, shade in parts.items())
    key = " ".join(f'<i class="dot" style="--shade:{shade}"></i>{name}&emsp;' for name, shade in keys)
    return _bars(title, runs, bars, f'<p class="note">{key}</p>') if longest else ""


def _memory_bars(runs: list[Run], shades: list[str]) -> str:
    peaks = [run.peak_memory or ("not logged", 0.0) for run in runs]
    most = max(gib for _, gib in peaks)
    bars = []
    for shade, (kind, gib) in zip(shades, peaks, strict=True):
        bar = f'<b class="own" style="width:{gib / (most or 1):.2%};--shade:{shade}"></b>'
        bars.append((bar, f"{gib:.2f} GiB {kind}" if gib else kind))
    return _bars("Peak memory", runs, bars) if most else ""


def _bars(title: str, runs: list[Run], bars: list[tuple[str, str]], below: str = "") -> str:
    """A bar for each run, of (its pieces, what stands beside it)."""
    lines = "".join(
        f'<span>{_escape(run.label)}</span><div class="bar">{pieces}</div><span>{told}</span>'
        for run, (pieces, told) in zip(runs, bars, strict=True)
    )
    return _card(title, f'<div class="bars">{lines}</div>{below}')


_SHARED = (
    *("model.n_layer", "model.n_head", "model.n_embd", "model.seq_len", "data.source", "data.tokenizer"),
    *("trainer.batch_tokens", "trainer.steps", "seed"),
)


def _shared(runs: list[Run]) -> str:
    """What the first run trained, in one line; a table below it shows where other runs differ."""
    config = runs[0].config
    if not all(name in config for name in _SHARED):
        return ""
    layers, heads, width, context = (
        config[f"model.{name}"] for name in ("n_layer", "n_head", "n_embd", "seq_len")
    )
    return (
        f"{plural(layers, 'layer')}, {plural(heads, 'head')}, {width} wide, context {context:,} · "
        f"{config['data.source']}, tokenizer {config['data.tokenizer']} · "
        f"{config['trainer.batch_tokens']:,} tokens a step, {config['trainer.steps']:,} steps, seed {config['seed']}"
    )


def _environment(runs: list[Run]) -> dict[str, list]:
    keys = dict.fromkeys(key for run in runs for key in run.environment if key != "command")
    return {key: [run.environment.get(key) for run in runs] for key in keys}


def _facts(title: str, runs: list[Run], facts: dict[str, list], differing: dict | None = None) -> str:
    """A row for each fact: its value, or its values with the runs that have them. Those in `differing` are red.

    Runs are no columns, so no number of them cuts the table off.
    """
    rows = ""
    for key, values in facts.items():
        shares = having(runs, values)
        red = ' class="red"' if differing is None or key in differing else ""
        told = ""
        for value, labels in shares.items():
            who = f" <small>{_escape(', '.join(labels))}</small>" if len(shares) > 1 else ""
            told += f"<div>{_escape(value)}{who}</div>"
        rows += f"<tr{red}><td>{_escape(key)}</td><td>{told}</td></tr>"
    return _card(title, f"<table>{rows}</table>") if rows else ""


def _shown(content: str) -> str:
    """A table's cell; text in brackets is set smaller, below."""
    value, bracket, rest = content.partition(" (")
    small = f"<small>{_escape(rest[:-1])}</small>" if bracket and rest.endswith(")") else ""
    return f"<span>{_escape(value if small else content)}{small}</span>"


def _card(title: str, content: str) -> str:
    return f'<h2>{title}</h2><section class="card">{content}</section>'


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _escape(content: object) -> str:
    return html.escape(str(content))
