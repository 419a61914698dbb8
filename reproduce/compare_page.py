"""The comparison of runs as one self-contained HTML page: the table, its warnings, plots, and what differs."""

from __future__ import annotations

import html
import os

from training.console import plural

from .compare import HEADER, notes, table, value_text, warnings
from .compare_plots import colours, plots
from .runs import Run, differing_environment, differing_settings

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #f4f5f7; margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 34px 0 10px; }
p.sub { color: #616e7c; margin: 0 0 18px; } p.note { color: #616e7c; font-size: 13px; margin: 8px 2px; }
section.card, .plots figure { background: #fff; border: 1px solid #e1e5ea; border-radius: 8px; }
section.card { padding: 6px 16px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; color: #616e7c; font-weight: 600; font-size: 13px; }
th, td { padding: 7px 14px 7px 0; border-bottom: 1px solid #eef0f3; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
td small { color: #616e7c; } .facts td { white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
.facts td:first-child { white-space: nowrap; }
i.dot { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 8px; }
ul.warn { background: #fff4f2; border: 1px solid #f3b8ae; border-left: 5px solid #c8321f; border-radius: 8px;
  padding: 12px 16px 12px 34px; margin: 0 0 18px; }
.red { color: #c8321f; font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 16px; }
.plots figure { margin: 0; padding: 10px; } .plots svg { width: 100%; height: auto; display: block; }
.split td:nth-child(2) { width: 60%; } .split tr:last-child td { color: #616e7c; font-size: 13px; }
.split tr:last-child i:not(:first-child) { margin-left: 14px; }
.bar { display: flex; height: 18px; } .bar b { display: block; }
"""
# The colours that `compare_plots` uses for the split of a run's time.
_SPLIT_COLOURS = {
    "data": "#d9b45b",
    "forward+backward": "#5b7c99",
    "optimizer": "#9db4c7",
    "other": "#c9cfd6",
}


def page(runs: list[Run]) -> str:
    """One self-contained HTML document."""
    title = "Comparison of " + (f"{len(runs)} runs" if len(runs) > 1 else "one run")
    shades = colours(runs)
    warned = "".join(f"<li>{_escape(each[0].upper() + each[1:])}</li>" for each in warnings(runs))
    figures = "".join(f"<figure>{svg}</figure>" for svg in plots(runs))
    head = "".join(f"<th>{_escape(name)}</th>" for name in HEADER)
    body = "".join(
        f"<tr>{_named(run, shade)}{''.join(_cell(cell) for cell in row[1:])}</tr>"
        for run, shade, row in zip(runs, shades, table(runs), strict=True)
    )
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="sub">{_escape(_shared(runs))}</p>',
        f'<ul class="warn">{warned}</ul>' if warned else "",
        f'<section class="card"><table><tr>{head}</tr>{body}</table></section>',
        f'<p class="note">{_escape(" ".join(each[0].upper() + each[1:] for each in notes(runs)))}</p>',
        _split_bars(runs, shades),
        f'<h2>Plots</h2><div class="plots">{figures}</div>' if figures else "",
        _facts_table("Settings that differ", runs, differing_settings(runs), shades),
        _facts_table("Environment", runs, _environment(runs), shades, differing_environment(runs)),
        "<h2>Where the runs are</h2>",
        f'<section class="card"><table class="facts">{_places(runs, shades)}</table></section>',
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _split_bars(runs: list[Run], shades: list[str]) -> str:
    """A stacked bar for each run that shows where a step's time goes."""
    splits = {run.label: split for run in runs if (split := run.step_split())}
    if not splits:
        return ""
    longest = max(sum(split.values()) for split in splits.values())
    rows = ""
    for run, shade in zip(runs, shades, strict=True):
        split = splits.get(run.label, {})
        pieces = "".join(
            f'<b style="width:{ms / longest:.2%};background:{_SPLIT_COLOURS[name]}" title="{name} {ms:.2f} ms"></b>'
            for name, ms in split.items()
        )
        told = ", ".join(f"{name} {ms:.2f}" for name, ms in split.items()) or "not logged"
        rows += f'<tr>{_named(run, shade)}<td><div class="bar">{pieces}</div></td><td>{told}</td></tr>'
    legend = " ".join(
        f'<i class="dot" style="background:{shade}"></i>{name}' for name, shade in _SPLIT_COLOURS.items()
    )
    return (
        '<h2>Where the time of a step goes</h2><section class="card"><table class="split">'
        f"<tr><th></th><th></th><th>ms a step</th></tr>{rows}<tr><td></td><td>{legend}</td><td></td></tr>"
        "</table></section>"
    )


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


def _facts_table(
    title: str, runs: list[Run], facts: dict[str, list], shades: list[str], differing: dict | None = None
) -> str:
    """A table with facts as rows and runs as columns; the rows in `differing` (by default all) are red."""
    if not facts:
        return ""
    head = "".join(_named(run, shade, "th") for run, shade in zip(runs, shades, strict=True))
    rows = ""
    for key, values in facts.items():
        red = ' class="red"' if differing is None or key in differing else ""
        cells = "".join(f"<td>{_escape(value_text(value))}</td>" for value in values)
        rows += f"<tr{red}><td>{_escape(key)}</td>{cells}</tr>"
    table = f'<table class="facts"><tr><th></th>{head}</tr>{rows}</table>'
    return f'<h2>{title}</h2><section class="card">{table}</section>'


def _places(runs: list[Run], shades: list[str]) -> str:
    return "".join(
        f"<tr>{_named(run, shade)}<td>{_escape(os.path.relpath(run.path))}</td></tr>"
        for run, shade in zip(runs, shades, strict=True)
    )


def _named(run: Run, shade: str, tag: str = "td") -> str:
    return f'<{tag}><i class="dot" style="background:{shade}"></i>{_escape(run.label)}</{tag}>'


def _cell(content: str) -> str:
    """A table cell; text in brackets is set smaller."""
    value, bracket, rest = content.partition(" (")
    if not bracket or not rest.endswith(")"):
        return f"<td>{_escape(content)}</td>"
    return f"<td>{_escape(value)} <small>{_escape(rest[:-1])}</small></td>"


def _escape(content: object) -> str:
    return html.escape(str(content))
