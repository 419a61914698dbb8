"""The tables of README and docs/measurements.md agree with the files in results/, and links lead somewhere."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest

from reproduce.experiment import pick
from reproduce.timing import FASTER, Times, timed, took, versus
from reproduce.training_figures import mfu, rate
from tests.conftest import ROOT
from training.command_line import composed
from training.config import Config

# Folders of results, by the card's name in the tables.
CARDS = {"H100": ROOT / "results" / "nvidia-h100-80gb-hbm3", "H200": ROOT / "results" / "nvidia-h200"}

ATTENTION = {
    "flash": "flash",
    "FlashAttention-4": "fa4",
    "torch: cuDNN": "sdpa_cudnn",
    "FlexAttention": "flex",
    "standard": "standard",
    "standard, cut": "standard+cut",
}
# Columns of the training tables.
GROUPS = {
    "small, eager, fp16, 16 sequences a forward": ("small", "gpt2_small", "eager"),
    "small, eager as CUDA graphs": ("replayed", "gpt2_small", "replayed"),
    "medium, eager as CUDA graphs": ("replayed", "gpt2_medium", "replayed"),
    "medium, eager, fp16, 16": ("medium", "gpt2_medium", "eager"),
    "small, compiled, bf16, 16": ("compiled", "gpt2_small", "compiled"),
    "small, compiled, bf16, 16, dropout 0.1": ("dropout", "gpt2_small", "compiled"),
    "small, compiled, bf16, 64": ("whole", "gpt2_small", "compiled"),
    "medium, compiled, bf16, 64": ("whole", "gpt2_medium", "compiled"),
}
CONTENDERS = {
    "ours, fused": ("flash+fused",),
    "ours, flash, torch's other layers": ("flash",),
    "ours, torch's attention and layers": ("sdpa",),
    "ours, standard attention, torch's other layers": ("standard",),
    "ours, standard attention cut to its mask, same layers": ("standard+cut",),
    "ours, naive, torch's other layers": ("naive",),
    "nanoGPT's model, with GPT-2's biases / without": ("nanogpt_biases", "nanogpt"),
    "Hugging Face's, its eager attention": ("hf_eager",),
    "Hugging Face's, PyTorch's SDPA (transformers' default)": ("hf_sdpa",),
}


def table(in_its_head: str, page: str = "measurements") -> list[list[str]]:
    """The cells of each row of a table, with its header and without the line below the header; none without it."""
    lines = (ROOT / "docs" / f"{page}.md").read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(in_its_head)]
    assert len(starts) < 2, in_its_head
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[starts[0] :] if starts else [])
    return [
        [cell.strip() for cell in row.strip("|").split("|")] for row in rows if not row.startswith("|---")
    ]


def numbers(cell: str) -> list[str]:
    return re.findall(r"[\d.]+", cell)


def document(card: str, experiment: str) -> dict:
    """What was measured on the card; without it, no samples."""
    paths = [CARDS[card] / f"{experiment}{state}.json" for state in (".partial", "")]
    there = [path for path in paths if path.exists()]
    return json.loads(there[0].read_text()) if there else {"samples": []}


@pytest.mark.parametrize("card", CARDS)
def test_attention_table_shows_median_times_with_those_that_none_beats_in_bold(card: str) -> None:
    samples = [
        s for s in timed(document(card, "attention"), kind="time", causal=True) if s["figure"] != "fa1"
    ]
    head, *rows = table(f"| {card}: batch x heads x length x head_dim") or [[]]
    assert len(rows) >= min(len(samples), 7)
    for shape, *cells in rows:
        batch, heads, length, head_dim = map(int, numbers(shape)[:4])
        place = {"batch": batch, "heads": heads, "length": length, "head_dim": head_dim}
        (sample,) = (each for each in samples if place.items() <= each.items())
        for phase, part in (("forward", 0), ("backward", 1)):
            measured = {name: took(sample, backend, phase) for name, backend in ATTENTION.items()}
            printed = {
                name: cell.split(" / ")[part]
                for name, cell in zip(head[1:], cells, strict=True)
                if cell != "-"
            }
            assert {name for name, times in measured.items() if times} == set(printed)
            least = min(float(value.strip("*")) for value in printed.values())
            for name, value in printed.items():
                number = value.strip("*")
                decimals = len(number.partition(".")[2])
                assert number == f"{measured[name].median:.{decimals}f}", (shape, name, phase)
                beaten = FASTER in (versus(measured[other], measured[name]) for other in printed)
                assert (value != number) == (float(number) == least or not beaten), (shape, name, phase)


def speeds(results: dict) -> dict[tuple[str, str, str], dict]:
    """The timing samples of the training tables' columns."""
    found = {(s["part"], s["model"], s["mode"]): s for s in timed(results, kind="speed")}
    return {group: found[group] for group in GROUPS.values() if group in found}


@pytest.mark.parametrize("card", CARDS)
def test_training_table_shows_the_measured_tokens_per_second_and_mfu(card: str) -> None:
    results = document(card, "training")
    samples = speeds(results)
    head, *rows = table(f"| {card} | small, ") or [[]]
    shown = [GROUPS[each] for each in head[1:]]
    assert set(shown) == samples.keys()
    timed_in = {each for group in shown for each in samples[group]["ms"]}
    assert [name.strip("*") for name, *_ in rows] == [
        name for name, contenders in CONTENDERS.items() if timed_in.issuperset(contenders)
    ]
    for name, *cells in rows:
        for group, cell in zip(shown, cells, strict=True):
            sample, contenders = samples[group], CONTENDERS[name.strip("*")]
            if cell == "-":
                assert not set(contenders) & set(sample["ms"]), (name, group)
                continue
            thousands, share = re.fullmatch(r"([^(]*)(?:\(([\d.]+) %\))?", cell).groups()
            rates = [f"{rate(sample, each).median / 1e3:.0f}" for each in contenders]
            assert numbers(thousands) == rates, (name, group)
            if share:
                assert share == f"{100 * mfu(results, sample, contenders[0]).median:.1f}", (name, group)


VERSIONS = ROOT / "results" / "versions"


def test_the_newest_versions_tables_are_those_of_their_files() -> None:
    def of(version: str, experiment: str) -> dict:
        (path,) = (VERSIONS / version).glob(f"*/{experiment}.partial.json")
        return json.loads(path.read_text())

    steps, *rows = table("| | torch 2.13.0, triton 3.7.1, cuDNN 9.20")
    for column, head in enumerate(steps[1:], 1):
        torch, triton, cudnn = (word.split()[1] for word in head.split(", "))
        results = of(f"torch-{torch}", "training")
        environment = results["environment"]
        assert environment["torch"].startswith(torch)
        assert environment["triton"] == triton
        assert str(environment["cudnn"]).startswith(cudnn.replace(".", ""))
        (sample,) = timed(results, kind="speed")
        for name, *cells in rows:
            contender = CONTENDERS.get(name.strip("*"), ("nanogpt",))[0]
            (memory,) = pick(results, kind="memory", contender=contender)
            rates = rate(sample, contender)
            figures = [f"{each / 1e3:.0f}" for each in (rates.median, rates.low, rates.high)]
            assert numbers(cells[column - 1]) == [*figures, f"{memory['peak_bytes'] / 2**30:.1f}"], name

    text = " ".join((ROOT / "docs" / "measurements.md").read_text().split()).replace("**", "")
    for cudnn, words in ("9.28.1", "of the time of cuDNN 9.28.1"), ("9.20.0", "of 9.20's"):
        samples = timed(of(f"cudnn-{cudnn}", "attention"), kind="time")
        samples = [each for each in samples if took(each, "sdpa_cudnn", "forward")]
        assert len(samples) == 12
        assert all(len(took(each, "flash", "forward")) == 3 for each in samples)
        ratios = (
            [took(s, "flash", phase).median / took(s, "sdpa_cudnn", phase).median for s in samples]
            for phase in ("forward", "backward")
        )
        assert " and ".join(f"{min(each):.2f} to {max(each):.2f}" for each in ratios) + f" {words}" in text


@pytest.mark.parametrize("card", CARDS)
def test_readmes_results_are_those_of_the_training_experiment(card: str) -> None:
    rows = [row.split("|")[1:-1] for row in (ROOT / "README.md").read_text().splitlines() if "| " in row]
    (column,) = {row.index(f" one {card} ") for row in rows if f" one {card} " in row}
    shown = {row[0].strip(): row[column].strip() for row in rows if len(row) > column}
    results, whole = document(card, "training"), {"part": "whole", "model": "gpt2_small"}
    peaks = {s["contender"]: f"{s['peak_bytes'] / 2**30:.1f}" for s in pick(results, kind="memory", **whole)}
    ours, theirs = "flash+fused", "nanogpt"
    speed = memory = "not measured"
    for sample in timed(results, kind="speed", **whole):
        thousands = {  # the median, with the range once there are several processes
            each: Times(ms / 1e3 for ms in rate(sample, each)).shown("{:.0f}") for each in (ours, theirs)
        }
        share = f"{100 * mfu(results, sample, ours).median:.1f}"
        speed = f"**{thousands[ours]}** thousand tokens/s, {share} % MFU; nanoGPT's model {thousands[theirs]}"
        memory = f"**{peaks[ours]}** GiB; nanoGPT's model {peaks[theirs]}"
    assert shown["speed, 64 sequences a forward"] == speed
    assert shown["peak memory of that step"] == memory


@pytest.mark.slow
def test_every_override_in_usage_composes() -> None:
    page = (ROOT / "docs" / "usage.md").read_text()
    rows = [line.split("|")[3] for line in page.splitlines() if line.startswith("| ") and "=" in line]
    assert len(rows) > 15
    for row in rows:
        for code in re.findall("`([^`]*=[^`]*)`", row):
            assert isinstance(composed(*shlex.split(code)), Config), code


def test_every_training_command_in_the_docs_could_begin() -> None:
    """Its settings exist, and its ranks can share its batch. Of a sweep this holds for the first run."""
    found = 0
    for page in (ROOT / "docs").glob("*.md"):
        text = re.sub(r" \\\n *", " ", page.read_text())
        for ranks, command in re.findall(
            r"^    (?:torchrun .*per.node=(\d+)|python).* train\.py (.*)$", text, re.MULTILINE
        ):
            words = [word for word in shlex.split(command, comments=True) if re.match(r"[a-z_.]+=", word)]
            words = [word if re.search(r"=.*[\[{(]", word) else word.partition(",")[0] for word in words]
            config = composed(*(word for word in words if "(" not in word and not word.startswith("hydra.")))
            config.accumulation_steps(int(ranks or 1) // config.parallel.context)
            found += 1
    assert found > 15


def anchors(page: Path, level: str = "#+") -> set[str]:
    """As GitHub names the headings of a page."""
    headings = re.findall(rf"^{level} (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = sorted(
    path for path in ROOT.rglob("*.md") if path.relative_to(ROOT).parts[0] not in ("runs", "results")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            path, _, heading = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), target
            assert not heading or heading in anchors(there), target


def test_the_kernels_log_lists_every_section_of_its_pages() -> None:
    listed = set(re.findall(r"\((log/\S+#\S+)\)", (ROOT / "kernels" / "LOG.md").read_text()))
    pages = (ROOT / "kernels" / "log").glob("*.md")
    assert listed == {f"log/{page.name}#{section}" for page in pages for section in anchors(page, "##")}
