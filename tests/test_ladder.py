"""docs/ladder.md quotes our code as it is and shows figures of results/; examples/ladder.py counts bytes rightly."""

import json
import math
import re
import statistics
import subprocess
import sys
from functools import partial

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "ladder.md").read_text()
H200 = "results/nvidia-h200"
OF_THEIR_OWN = ("safe softmax", "online softmax", "one pass")  # rungs that are no backend
SHAPE = {"length": 1024, "head_dim": 64, "causal": False, "mask": "plain"}


def sample(path: str, **place: object) -> dict:
    """The one sample of a file of results/ that has these values."""
    samples = json.loads((ROOT / path).read_text())["samples"]
    (found,) = (each for each in samples if place.items() <= each.items())
    return found


def took(name: str, contender: str, phase: str, **place: object) -> float:
    """Milliseconds on the H200: the median of the processes' medians."""
    samples = json.loads((ROOT / H200 / f"{name}.json").read_text())["samples"]
    found = [each["ms"][contender][phase] for each in samples if place.items() <= each.items()]
    return statistics.median(map(statistics.median, found))


def code(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def test_the_page_quotes_our_code() -> None:
    quoted = re.findall(r"From \[[^]]*\]\(\.\./([^)]*\.py)\):\n(.*?)(?=\n- \*\*Bytes)", PAGE, re.DOTALL)
    assert len(quoted) == 8
    for path, text in quoted:
        source = code((ROOT / path).read_text())
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            assert code(block) in source, f"{path} no longer has:\n{block}"


def rows() -> dict[str, list[str]]:
    """Rung -> the figures of the page's table: bytes, ms."""
    found = re.findall(r"^\| \[\d ([^]]*)\]\([^)]*\) \| ([^|]*) \| ([^|]*) \| [^|]* \|$", PAGE, re.MULTILINE)
    return {rung: cells for rung, *cells in found}


def test_the_table_shows_measured_bytes_and_times() -> None:
    table = rows()
    assert len(table) == 8
    backends = {"standard": "standard", "two passes": "two_pass"}
    for rung, backend in (backends | {"FlashAttention": "flash1", "Hopper kernels": "flash"}).items():
        assert (
            table[rung][1] == f"{took('traffic', backend, 'forward', kind='time', batch=64, **SHAPE):.2f}"
        ), rung
    assert (
        table["FlashAttention-2"][1]
        == f"{took('traffic', '128', 'all', kind='tiles', batch=64, **SHAPE):.2f}"
    )
    alone = [took("traffic", rung, "all", kind="rungs", batch=64, **SHAPE) for rung in OF_THEIR_OWN]
    assert [table[rung][1] for rung in OF_THEIR_OWN] == [f"{ms:.2f}" for ms in alone]
    for rung, backend in (backends | {"FlashAttention-2": "flash"}).items():
        counted = sample("results/cpu/traffic.json", kind="count", backend=backend, **SHAPE)["forward"]
        assert table[rung][0] == f"{counted['read'] + counted['written']:,}"


def test_the_rungs_show_measured_figures() -> None:
    sections = re.split(r"^## \d ", PAGE, flags=re.MULTILINE)[1:]
    for (rung, (_, ms)), section in zip(rows().items(), sections, strict=True):
        assert f"**Time**: {ms} ms" in section, rung
    softmax = partial(took, "history", phase="all", kind="softmax", rows=4000, length=25000, k=5)
    one, many = (took("history", n, "all", kind="programs", heads=1, length=16384) for n in ("one", "many"))
    order = {"kind": "order", "length": 16384, "batch": 1, "heads": 16, "head_dim": 128, "causal": True}
    forward, backward = (
        [took("history", name, phase, **order) for name in ("flash", "flash, portable")]
        for phase in ("forward", "backward")
    )
    moved = {
        backend: sum(counters[key] for key in ("dram_read", "dram_written")) / 1e9
        for backend in ("standard", "flash")
        for counters in [sample(f"{H200}/traffic.json", kind="ncu", backend=backend, **SHAPE)]
    }
    products = {
        backend: sample("results/cpu/history.json", kind="backward count", backend=backend)["products"]
        for backend in ("flash1", "two_pass", "flash")
    }
    accesses = {
        name: sample("results/cpu/history.json", kind="softmax count", softmax=name)["accesses"]
        for name in ("safe", "online")
    }
    page = " ".join(PAGE.split())
    for sentence in (
        f"4000 float32 rows of 25,000: {softmax('safe'):.3f} ms",
        f"as in rung 2: {softmax('online'):.3f} ms",
        f"where it took {took('traffic', 'standard', 'all', kind='rungs', batch=64, **SHAPE):.2f}",
        f"{one:.1f} ms in one program, {many:.3f} ms in many",
        f"forward {forward[0]:.2f} ms where rung 7 takes {forward[1]:.2f}, "
        f"backward {backward[0]:.2f} where it takes {backward[1]:.2f}",
        f"move {moved['standard']:.1f} GB of DRAM in standard attention and {moved['flash']:.1f} GB in flash",
        f"with {products['flash1']:.0f} matrix products, where two passes for D take {products['two_pass']:.0f}",
        f"so that no two programs write the same memory: {products['flash']:.0f} products",
        f"**Bytes**: {accesses['safe']:.0f} accesses an element, three",
        f"**Bytes**: {accesses['online']:.0f} accesses an element (",
    ):
        assert sentence in page, sentence


def drawn() -> list[list[float]]:
    """For every rung the bytes that the page's picture shows at each length. The last curve gives the scale."""
    picture = (ROOT / "docs" / "ladder.svg").read_text()
    paths = re.findall(r'<g id="curve-\d">\s*<path d="([^"]*)"', picture)
    *heights, scale = ([float(y) for y in re.findall(r"[ML] \S+ (\S+)", path)] for path in paths)
    least, most = (math.log(8 * 64 * length) for length in (2**8, 2**16))
    steepness = (most - least) / (scale[-1] - scale[0])
    return [[math.exp(least + steepness * (y - scale[0])) for y in curve] for curve in heights]


def test_the_picture_shows_the_tables_bytes() -> None:
    for (rung, (shown, _)), curve in zip(rows().items(), drawn(), strict=True):
        assert curve[2] == pytest.approx(int(shown.replace(",", "")), rel=1e-4), rung


COUNT = """
import json, torch, ladder
from tests.kernels import emulator
from reproduce.counting import counting
from tests.interpreter import hasten
hasten()
asked, emulate = [], emulator.emulate
emulator.emulate = lambda *call: asked.append(emulate(*call)) or asked[-1]
rows = {}
for name, attend in ladder.RUNGS.items():
    q, k, v = torch.randn(3, 1, 1, 256, ladder.HEAD_DIM, dtype=torch.float16)
    formula = [ladder.bytes_moved(name, length) for length in ladder.LENGTHS]
    with counting() as traffic:
        attend(q, k, v)
    # The emulator counts for itself; its own torch operators are no traffic.
    rows[name] = asked.pop() if name == ladder.HOPPER else traffic.read + traffic.written, formula
print(json.dumps(rows))
"""


@pytest.mark.slow
def test_the_examples_formulas_are_what_its_rungs_load_and_store(user_environment) -> None:
    path = ":".join(map(str, (ROOT / "examples", ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=240,
        env=user_environment | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = rows()
    for (rung, (counted, formula)), curve in zip(json.loads(done.stdout).items(), drawn(), strict=True):
        assert counted == formula[0], rung
        assert table[rung][0] == f"{formula[2]:,}"
        assert curve == pytest.approx(formula, rel=1e-4), rung
