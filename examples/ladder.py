"""From standard attention to our Hopper kernels, a rung at a time: docs/ladder.md, running.

    python examples/ladder.py [PICTURE.svg]

Half a minute on a CPU, in Triton's interpreter. Every rung computes the same attention of one head in float16, is
checked against float64, and says how many bytes it asks of memory; the picture shows these against length. Editors
run the cells between `# %%` one by one. In a checkout `tilegpt` is the folder beside this file; elsewhere
`pip install . matplotlib` brings what it needs, but for the last rung, which the tests' emulator runs.
"""

# %% Triton decides when it is imported whether to interpret.
import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch
from tilegpt.kernels import get_attention
from tilegpt.kernels.versions import gluon_lacks, kernels_lack

if missing := kernels_lack():
    sys.exit(f"our kernels need {missing}")

from tilegpt.kernels.history import flash1
from tilegpt.kernels.history.one_pass import one_pass
from tilegpt.kernels.history.softmax import online_softmax, safe_softmax

HEAD_DIM = 64
# Queries in a tile, which share each load of K and V; on rung 6 keys, which share one of q and out.
TILES = {"two passes": 64, "FlashAttention": 128, "FlashAttention-2": 128}
HOPPER = "Hopper kernels"  # their tiles depend on the length
EMULATOR = Path(__file__).parents[1] / "tests" / "kernels" / "emulator.py"
LENGTHS = [2**n for n in range(8, 17)]  # of the picture
COLOURS = ("#D55E00", "#E69F00", "#CC79A7", "#009E73", "#7F7F7F", "#000000", "#0072B2", "#8B4513", "#56B4E9")


# %% Rungs 1 to 3: scores and probabilities in memory. What differs is how often softmax walks over them.
def with_softmax(softmax):
    def attend(q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        scores = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.mT, beta=0, alpha=HEAD_DIM**-0.5)
        return torch.bmm(softmax(scores[0])[None], v)[None]

    return attend


# %% Rungs 4, 6 and 7 are backends of `attention=`; rung 5, one query a program, is for reading.
def backend(name):
    attention = get_attention(name)
    return lambda q, k, v: attention(q, k, v, causal=False)


def first_flash(q, k, v):
    # The tile of a GPU; the interpreter's own is smaller.
    with flash1.forced(forward=flash1.FORWARD[HEAD_DIM]):
        return backend("flash1")(q, k, v)


# %% Rung 8 is in Gluon, which Triton's interpreter does not run: the tests' emulator does, warp by warp.
def hopper_kernels(q, k, v):
    sys.path.insert(0, str(EMULATOR.parents[2]))
    from tilegpt.kernels.flash.call import Options, Tensors
    from tilegpt.kernels.flash.hopper import launch as hopper

    from tests.kernels.emulator import emulate

    def launch(pointers, _, prepare, moved, describe):
        kernel, grid, numbers, _ = prepare()
        asked = emulate(kernel, grid, (*describe(*moved), *pointers, *numbers))
        assert asked == bytes_moved(HOPPER, q.shape[2])

    out, statistic = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    with mock.patch.multiple(hopper, launch=launch, sm_count=lambda device: 1):
        hopper.forward(q, k, v, out, out, statistic, Tensors(), Options(False, HEAD_DIM**-0.5))
    return out


RUNGS = {
    "standard": with_softmax(partial(torch.softmax, dim=-1)),
    "safe softmax": with_softmax(safe_softmax),
    "online softmax": with_softmax(online_softmax),
    "two passes": backend("two_pass"),
    "one pass": one_pass,
    "FlashAttention": first_flash,
    "FlashAttention-2": backend("flash"),
    HOPPER: hopper_kernels,
}


# %% Bytes that a rung reads and writes for one head in 16 bits; tests hold the formulas to counted accesses.
def bytes_moved(rung, length):
    matrix = 2 * length**2  # the scores, or the probabilities
    rows = 2 * length * HEAD_DIM  # q, k, v or out
    floats = 4 * length  # a statistic of each query
    in_tile = TILES.get(rung, length) if rung != HOPPER else 192 if length >= 2048 else 128
    tiles = -(-length // in_tile)
    products = 4 * rows + 2 * matrix + 4  # operands read, results written once; a zero for baddbmm
    return {
        "standard": products + 2 * matrix,
        "safe softmax": products + 4 * matrix,
        "online softmax": products + 3 * matrix,
        # q and out once; for every tile of queries K twice, V once
        "two passes": (2 + 3 * tiles) * rows + floats,
        # for every query K and V
        "one pass": (2 + 2 * length) * rows,
        # K and V once; for every tile of keys q, out and two statistics; the first reads nothing back
        "FlashAttention": (2 + 3 * tiles - 1) * rows + 2 * (2 * tiles - 1) * floats,
        # q and out once; for every tile of queries K and V
        "FlashAttention-2": (2 + 2 * tiles) * rows + floats,
        HOPPER: (2 + 2 * tiles) * rows + floats,
    }[rung]


# %% Run and check them.
def run(length=256):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, length, HEAD_DIM, dtype=torch.float16)
    exact = torch.softmax(q.double() * HEAD_DIM**-0.5 @ k.double().mT, dim=-1) @ v.double()
    print(f"one head, {length} queries and keys, head_dim {HEAD_DIM}, float16, not causal")
    print(f"{'rung':18}{'largest error':>14}{'bytes':>12}{'at 1024':>13}")
    for name, attend in RUNGS.items():
        if name == HOPPER and (missing := gluon_lacks() or (not EMULATOR.exists() and "a checkout's tests/")):
            print(f"{name:18}not run: here they need {missing}")
            continue
        error = (attend(q, k, v).double() - exact).abs().max().item()
        print(f"{name:18}{error:14.1e}{bytes_moved(name, length):12,}{bytes_moved(name, 1024):13,}")
        assert error < 2e-3, f"{name} is wrong"  # float16 keeps 11 bits of values below 2


# %% Draw the curves: the same file each time.
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "ladder",
}


def draw(picture):
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    curves = {f"{n} {rung}": [bytes_moved(rung, x) for x in LENGTHS] for n, rung in enumerate(RUNGS, 1)}
    curves["q, k, v and out once"] = [8 * length * HEAD_DIM for length in LENGTHS]
    with pyplot.rc_context(STYLE):
        figure, (whole, pair) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
        for number, (name, curve) in enumerate(curves.items()):
            colour = COLOURS[number]
            dashes = "--" if HOPPER in name else "-"  # up to 1024 on the curve before
            whole.plot(LENGTHS, curve, dashes, color=colour, gid=f"curve-{number}")
            per_pair = [count / length**2 for count, length in zip(curve, LENGTHS, strict=True)]
            pair.plot(LENGTHS, per_pair, dashes, color=colour, label=name)
        for axes, title in (
            (whole, "Bytes read and written"),
            (pair, "Bytes for each pair of query and key"),
        ):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.minorticks_off()
            axes.set_xticks(
                LENGTHS, [length if length < 1024 else f"{length // 1024}k" for length in LENGTHS]
            )
            axes.set_xlabel("length")
            axes.set_title(title)
        figure.legend(*pair.get_legend_handles_labels(), loc="outside right center", frameon=False)
        figure.suptitle(f"Forward of one head, head_dim {HEAD_DIM}, 16 bits", x=0.01, ha="left")
        figure.savefig(picture, metadata={"Date": None, "Creator": None})
    print(f"picture: {picture}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", nargs="?", type=Path, help="default: in a folder of its own")
    picture = parser.parse_args().picture
    run()
    draw(picture or Path(tempfile.mkdtemp()) / "ladder.svg")
