"""docs/usage.md: its tables of backends, columns, batches and times are what the code and results/ say. About 5 s."""

import itertools
import re
import sys
from types import ModuleType

import pytest
import torch

from kernels import ATTENTION, AttentionError, AttentionRequest, get_attention
from kernels.features import FEATURES
from reproduce.comparison import seeds
from reproduce.comparison import table as comparison
from reproduce.experiment import pick
from reproduce.timing import timed, took
from reproduce.training_figures import rate
from tests.test_readme import CARDS, GROUPS, ROOT, document, speeds, table
from training.command_line import composed
from training.loggers import COLUMNS
from training.wandb_logger import BEGIN_SECONDS

PAGE = (ROOT / "docs" / "usage.md").read_text()
HALF = {torch.float16, torch.bfloat16}
DTYPES = {"16": HALF, "16, 32": HALF | {torch.float32}, "any": HALF | {torch.float32, torch.float64}}
LONGEST = 400  # head_dim, of those that are asked for


def usage(in_its_head: str) -> list[list[str]]:
    head, *rows = table(in_its_head, "usage")
    return [head, *([cell.replace("`", "") for cell in row] for row in rows)]


def matrix() -> dict[str, dict[str, str]]:
    """Of each row of the table of backends: backend -> cell."""
    (_, *heads), *rows = usage("| | `naive` |")
    names = [re.findall("`(.*?)`", head) for head in heads]
    cells = {
        row: {name: cell for each, cell in zip(names, its, strict=True) for name in each}
        for row, *its in rows
    }
    assert all(set(row) == set(ATTENTION) for row in cells.values())
    return cells


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch):
    """Whether a backend takes a request, not in the interpreter, as if flash-attn-4 were installed."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))

    def asks(
        name: str, *features: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, head_dim=64
    ) -> bool:
        features = (*features, "cu_seqlens") if "cu_seqlens_k" in features else features
        request = AttentionRequest(torch.device(device), dtype, head_dim, frozenset(features))
        return ATTENTION[name].refuses(request) is None

    return asks


def head_dims(cell: str) -> set[int]:
    """any; 8, 16 ...; 8, 16 ... 128."""
    if cell == "any":
        return set(range(1, LONGEST))
    first, second, last = re.fullmatch(r"(\d+), (\d+) \.\.\. ?(\d*)", cell).groups()
    return set(range(int(first), int(last or LONGEST - 1) + 1, int(second) - int(first)))


def test_each_backend_takes_the_devices_dtypes_and_head_dims_of_its_column(takes) -> None:
    cells = matrix()
    for name in ATTENTION:
        assert takes(name), name
        assert takes(name, device="cpu") == (cells["device"][name] == "any"), name
        dtypes = {dtype for dtype in DTYPES["any"] if takes(name, dtype=dtype)}
        assert dtypes == DTYPES[cells["dtype, bits"][name]], name
        found = {each for each in range(1, LONGEST) if takes(name, head_dim=each)}
        assert found == head_dims(cells["head_dim"][name]), name
    every_fourth = {
        each for each in range(1, 99) if takes("sdpa_efficient", dtype=torch.float32, head_dim=each)
    }
    assert every_fourth == set(range(4, 99, 4))
    assert takes("sdpa_flash", device="cpu", dtype=torch.float64, head_dim=300)


def test_each_backend_takes_the_features_of_its_column(takes) -> None:
    cells = matrix()
    assert [row for row in cells if row in FEATURES] == [*FEATURES]
    for feature, name in itertools.product(FEATURES, ATTENTION):
        on = [device for device in ("cuda", "cpu") if takes(name, device=device)]
        found = [device for device in on if takes(name, feature, device=device)]
        shown = {"yes": on, "-": [], "GPU": ["cuda"], "CPU": ["cpu"]}[cells[feature][name]]
        assert found == shown, (feature, name)


def test_what_a_backend_has_goes_together_but_for_what_the_page_says(takes) -> None:
    for name, (one, other) in itertools.product(ATTENTION, itertools.combinations(FEATURES, 2)):
        if not (takes(name, one) and takes(name, other)):
            continue
        pair = {one, other}
        alone = name.startswith(("sdpa", "flex")) and pair & {"cu_seqlens", "cu_seqlens_k"}
        refused = alone and pair != {"cu_seqlens", "cu_seqlens_k"}
        refused = refused or (name == "flash" and pair == {"alibi_slopes", "cu_seqlens_k"})
        assert takes(name, *pair) != bool(refused), (name, pair)


def test_the_backends_that_torch_compile_puts_into_one_graph_are_the_table_s(takes) -> None:
    cells = matrix()
    for name, backend in ATTENTION.items():
        for row, features in (
            ("one graph in torch.compile", ()),
            ("the same with cu_seqlens", ("cu_seqlens",)),
        ):
            request = AttentionRequest(torch.device("cuda"), torch.bfloat16, 64, frozenset(features))
            whole = takes(name, *features) and not backend.breaks(request)
            assert cells[row][name] == ("yes" if whole else "-"), (row, name)


@pytest.mark.parametrize("name", sorted(set(ATTENTION) - {"fa4"}))
def test_a_backend_that_runs_here_takes_the_shapes_of_its_column(name: str) -> None:
    """On a GPU all of them, in tests/kernels/test_library_gpu.py."""
    cells = {row: its[name] for row, its in matrix().items()}
    attention, naive = get_attention(name), get_attention("naive")
    q, k = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16)
    assert {cells[row] for row in ("causal", "full", "grouped heads")} == {"yes"}
    assert cells["unequal lengths"] == ("partly" if name == "sdpa_flash" else "yes")
    interpreted = name in ("flash", "flash1", "two_pass") and not torch.cuda.is_available()
    if cells["device"] == "any" or interpreted:
        for causal, q_len in itertools.product((True, False), (9, 4)):
            rows = q[:, :, :q_len]
            torch.testing.assert_close(attention(rows, k, k, causal=causal), naive(rows, k, k, causal=causal))
    if cells["another head_dim for v"] == "yes":
        assert attention(q, k, k[..., :8]).shape == (1, 4, 9, 8)
    else:
        with pytest.raises(AttentionError, match="k and v must share a shape"):
            attention(q, k, k[..., :8])


def test_the_list_of_metrics_is_that_of_the_columns_with_their_units() -> None:
    _, *rows = usage("| column | unit |")
    assert [name for names, *_ in rows for name in names.split(", ")] == COLUMNS
    for names, unit, _ in rows:
        for end, its in (("_ms", "ms"), ("_gib", "GiB"), ("_second", "tokens/s")):
            assert unit == its or end not in re.findall(r"_[a-z]+\b", names), names


def test_steps_and_batches_are_those_of_the_models() -> None:
    _, *rows = usage("| `model` | steps |")
    assert {name.partition(",")[0] for name, *_ in rows} == {
        path.stem for path in (ROOT / "configs" / "model").glob("*.yaml")
    }
    for name, *cells in rows:
        config = composed(f"model={name.partition(',')[0]}")
        trainer = config.trainer
        whole = f"all {trainer.batch_tokens // config.model.seq_len}"
        at_once = whole if trainer.micro_batch is None else str(trainer.micro_batch)
        assert cells == [f"{trainer.steps:,}", f"{trainer.batch_tokens:,}", at_once], name


def test_a_long_run_takes_what_the_measured_speed_makes_of_its_tokens() -> None:
    _, *rows = usage("| GPU | sequences a forward |")
    assert len(rows) == 4
    trainer = composed("model=gpt2_small").trainer
    tokens = trainer.steps * trainer.batch_tokens
    assert f"{trainer.steps:,} steps on one GPU, {tokens / 1e9:.2f} billion tokens" in PAGE
    for card, sequences, *cells in rows:
        assert card in CARDS
        group = GROUPS[f"small, compiled, bf16, {sequences}"]
        results = document(card, "training")
        (memory,) = pick(results, kind="memory", part=group[0], model=group[1], contender="flash+fused")
        speed = rate(speeds(results)[group], "flash+fused").median
        hours, gib = tokens / speed / 3600, memory["peak_bytes"] / 2**30
        assert cells == [f"{speed / 1e3:.0f}", f"{hours:.1f}", f"{gib:.1f}"], (card, sequences)


def test_the_time_of_a_generated_token_is_the_measured_one() -> None:
    (sample,) = timed(document("H200", "decode"), kind="time", batch=1)
    graph, without = (took(sample, form, "token").median for form in ("split-KV, CUDA graph", "split-KV"))
    assert f"takes {graph:.2f} ms on an H200, {without:.1f} without the\ngraph" in PAGE


def test_the_errors_of_the_list_are_errors_of_the_code() -> None:
    paths = [path for folder in ("training", "kernels") for path in (ROOT / folder).rglob("*.py")]
    code = "".join(path.read_text() for path in paths)
    _, *rows = table("| it says | what helps |", "usage")
    for error in re.findall("`(.*?)`", " ".join(says for says, _ in rows)):
        assert error.replace("is nan", "is {loss}") in code, error


def test_the_sample_of_a_comparison_has_the_columns_of_today() -> None:
    lines = [tuple(re.split("  +", line.strip())) for line in PAGE.splitlines()]
    assert comparison.HEADER in lines
    assert seeds.HEADER[1:] in lines  # seeds alone differ


def test_what_the_page_repeats_of_others_is_what_they_say() -> None:
    words = " ".join(PAGE.split())
    assert f"does not answer within {BEGIN_SECONDS} s" in words
    (gap,) = re.findall(r"a gap of ([\d.]+) nats", words)
    (apart,) = re.findall(r"up to \[([\d.]+) %\]", words)
    measurements = " ".join((ROOT / "docs" / "measurements.md").read_text().split())
    assert f"than runs of other weights are to each other ({gap})" in measurements
    assert f"up to {apart} % apart" in measurements
    (cost,) = re.findall(r"\[([^]]*%)\]\([^)]*what-precise_delta-costs", words)
    assert f"[{cost} of attention's time]" in measurements
