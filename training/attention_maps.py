"""Draw the attention weights of a run's model for a text: `python -m training.attention_maps RUN "a text"`.

A row of the picture is a layer, a column a head; with --layer and --head it is one map, labelled with the text's
tokens. In a map a row is a query's token, a column a key's; the darker, the larger the weight.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from . import installed  # noqa: F401  (ends with one line if a package is missing)
from .config import ConfigError, one_line_errors

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes


def main() -> None:
    name = "python -m training.attention_maps"
    parser = argparse.ArgumentParser(prog=name, description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run directory, or one of its checkpoints")
    parser.add_argument("text", help="what the model reads")
    parser.add_argument(
        "-o", "--output", default="attention.png", help="the picture: .png, .svg or .pdf (attention.png)"
    )
    parser.add_argument("--layer", type=int, help="only this layer, from 0")
    parser.add_argument("--head", type=int, help="only this head, from 0")
    parser.add_argument("--tokenizer", metavar="PATH", help="the run's tokenizer file, if it has moved")
    args = parser.parse_args()
    with one_line_errors():
        maps, tokens = maps_of(Path(args.run), args.text, args.tokenizer)
        draw(Path(args.output), maps, tokens, args.layer, args.head)
    print(args.output)


def maps_of(run: Path, text: str, tokenizer_name: str | None = None) -> tuple[torch.Tensor, list[str]]:
    """The maps (n_layer, n_head, T, T) of a run's model, by naive attention in float32, and the text's T tokens."""
    import torch

    from .load_run import load_run

    model, tokenizer = load_run(run, "cpu", "naive", tokenizer_name)
    ids = tokenizer.encode_ordinary(text)
    if not 1 <= len(ids) <= model.config.seq_len:
        raise ConfigError(f"the text has {len(ids)} tokens; the model reads 1 to {model.config.seq_len}.")
    tokens = [tokenizer.decode([each]) for each in ids]
    return model.attention_maps(torch.tensor([ids]))[:, 0], tokens


def draw(path: Path, maps: torch.Tensor, tokens: list[str], layer: int | None, head: int | None) -> None:
    """Draw the maps (n_layer, n_head, T, T), or those of one layer or head."""
    layers, heads = _chosen("layer", layer, maps.size(0)), _chosen("head", head, maps.size(1))
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("training.attention_maps needs matplotlib: pip install matplotlib.") from None
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    alone = len(layers) == len(heads) == 1
    side = max(4.0, 0.22 * len(tokens) + 1.5) if alone else 1.5
    size = (side * len(heads) + 1.2, side * len(layers) + 0.5)
    figure, grid = plt.subplots(len(layers), len(heads), figsize=size, squeeze=False, layout="constrained")
    for row, number in zip(grid, layers, strict=True):
        for axis, which in zip(row, heads, strict=True):
            image = _draw_map(axis, maps[number, which], f"layer {number}, head {which}")
            if alone:
                _name_tokens(axis, tokens)
    figure.supxlabel("the token that it looks at", fontsize=9)
    figure.supylabel("the token that looks", fontsize=9)
    figure.colorbar(image, ax=grid, label="attention weight", shrink=0.8, aspect=40)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib does not draw
        raise ConfigError(f"{path} cannot be written: {str(error).splitlines()[0]}.") from None
    finally:
        plt.close(figure)


def _chosen(what: str, asked: int | None, count: int) -> list[int]:
    if asked is None:
        return list(range(count))
    if not 0 <= asked < count:
        raise ConfigError(f"--{what} {asked}: the model has {what}s 0 to {count - 1}.")
    return [asked]


def _draw_map(axis: Axes, weights: torch.Tensor, title: str):
    """Draw weights (T, T) on a square-root scale, so that small ones show; masked ones (the future) stay grey."""
    import torch
    from matplotlib.colors import PowerNorm

    future = torch.ones_like(weights, dtype=torch.bool).triu(1)
    axis.set_facecolor("#d9d9d9")
    axis.set_title(title, fontsize=8)
    axis.set_xticks([])
    axis.set_yticks([])
    shown = weights.masked_fill(future, float("nan")).numpy()
    return axis.imshow(shown, cmap="Blues", norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest")


def _name_tokens(axis: Axes, tokens: list[str]) -> None:
    names = [
        each.replace("$", r"\$").replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") for each in tokens
    ]
    axis.set_xticks(range(len(names)), names, fontsize=7, rotation=90, family="monospace")
    axis.set_yticks(range(len(names)), names, fontsize=7, family="monospace")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    main()
