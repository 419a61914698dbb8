"""`python -m benchmarks`: the tiny forms run to the end, and results are held to our own aims. 10 s."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.aims_page import page
from reproduce.experiment import pick

SLOW = ("documents", "features", "huggingface", "loss", "neighbour")  # 3 to 5 s of processor time each


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in BENCHMARKS]
)
def test_the_tiny_form_runs_to_the_end(name, tmp_path):
    assert main([name, "--tiny", "--device", "cpu", "--results", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "cpu" / f"{name}.json").read_text())
    assert results["state"] == "complete"
    assert pick(results, kind="time")
    assert not [sample for sample in results["samples"] if "failed" in sample]
    assert results["command"][:4] == ["python", "-m", "benchmarks", name]
    assert (tmp_path / "cpu" / f"{name}.svg").is_file()


# As nanoGPT's model.py, with our own model in its place.
NANOGPT_LIKE = """
import torch
from dataclasses import dataclass
from model.config import GPTConfig as Shape
from model.gpt import GPT as Ours

@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        shape = Shape(config.vocab_size, config.block_size, config.n_layer, config.n_head, config.n_embd)
        self.transformer = Ours(shape, lambda q, k, v, causal, scale: torch.nn.functional.
                                scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale))
    def forward(self, tokens, targets):
        return None, self.transformer(tokens, targets)
    def configure_optimizers(self, decay, lr, betas, device):
        return torch.optim.AdamW(self.parameters(), lr=lr)
"""


def test_a_cpu_step_is_timed_against_nanogpts_and_every_sample_is_written(tmp_path, capsys):
    (tmp_path / "model.py").write_text(NANOGPT_LIKE)
    out = tmp_path / "step.json"
    command = ["step", "--nanogpt", str(tmp_path / "model.py"), "--shapes", "nano", "--seconds", "0"]
    assert main([*command, "--out", str(out)]) == 0
    nano = json.loads(out.read_text())["shapes"]["nano"]
    assert nano["agreement"]["worst_relative_gradient_difference"] < 1e-4
    assert {len(seconds) for seconds in nano["seconds"].values()} == {5}
    ratios = [a / b for a, b in zip(nano["seconds"]["ours"], nano["seconds"]["same function"], strict=True)]
    assert nano["ratios"]["same function"]["median"] == pytest.approx(sorted(ratios)[2], rel=1e-6)
    assert re.search(r"nano +as published", capsys.readouterr().out)
    assert main(["step", "--nanogpt", "nowhere.py"]) == 1
    assert "nanogpt=nowhere.py is not a file" in capsys.readouterr().err


def test_the_list_names_benchmarks_and_tools(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    for name in (*BENCHMARKS, "aims", "step", "preparation"):
        assert name in said
    assert "claims" not in said
    assert "needs cpu" not in said  # no row has it


def test_the_committed_page_is_of_the_committed_results_and_held_to_the_aims():
    text, summary = page(Path("results"))
    assert text == Path("results", "BENCHMARKS.md").read_text()
    assert re.fullmatch(r"\d+ aims met, \d+ missed; \d+ figures without an aim\.", summary)
