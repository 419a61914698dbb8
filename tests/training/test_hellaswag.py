"""HellaSwag in a run: scored as lm-evaluation-harness scores it, downloaded once. About 5 s, without lm_eval."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.tokenizer import load_tokenizer
from tests.conftest import measured
from tests.local_server import Handler, Server
from tests.training.conftest import CPU, having
from training import hellaswag
from training.checkpoint import saved
from training.config import ConfigError
from training.distributed import World
from training.export import export
from training.load_run import load_run
from training.trainer import train

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box quite happily".split()  # noqa: SIM905


def rows(count: int) -> list[dict]:
    """Questions in the released format, with the marks of its WikiHow half."""
    draw = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    return [
        {
            "ind": number,
            "activity_label": text(1, 2).capitalize(),
            "ctx_a": f"[header] How to {text(2, 4)} [title] {text(3, 30)}.",
            "ctx_b": draw.choice(["", text(1, 3)]),
            "ctx": "not read, as its parts are",
            "split": "val",
            "endings": [f"{text(1, 8)}. [substeps] {text(1, 2)}" for _ in range(4)],
            "label": draw.randrange(4),
        }
        for number in range(count)
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "hellaswag_val.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(40)))
    return path


@pytest.fixture
def longer(config):
    """A run of sequences that hold every ending, but not every context."""
    longer = having(config, batch_tokens=256, eval_every=2)
    return replace(longer, model=replace(longer.model, seq_len=128))


def test_a_run_logs_the_accuracy_that_each_ending_alone_gives(longer, file, tmp_path):
    run = tmp_path / "run"
    summary = train(having(longer, hellaswag=True, hellaswag_file=str(file), steps=4), run)
    logged = measured(run, "val/hellaswag")
    assert list(logged) == [2, 4]
    assert summary["val/hellaswag"] == pytest.approx(logged[4])

    model, tokenizer = load_run(run, "cpu", "naive", None)
    right = cut = 0
    for row in map(json.loads, file.read_text().splitlines()):
        context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        context = context.strip().replace("[header]", "").replace(" [title]", ". ").replace("  ", " ")
        scores = []
        for ending in row["endings"]:
            ending = ending.replace("[substeps]", "").replace("  ", " ")
            tokens = torch.tensor(tokenizer.encode_ordinary(f"{context} {ending}"))
            cut += len(tokens) > 129
            logs = model(tokens[None, -129:-1])[0].log_softmax(-1).gather(1, tokens[1:][-128:, None])
            scores.append(logs[-len(tokenizer.encode_ordinary(f" {ending}")) :].sum().item() / len(ending))
        right += scores.index(max(scores)) == row["label"]
    assert logged[4] == pytest.approx(right / 40)
    assert cut


def test_the_accuracy_does_not_depend_on_the_size_of_a_batch(longer, file, tmp_path):
    train(having(longer, steps=1), tmp_path / "run")
    model, tokenizer = load_run(tmp_path / "run", "cpu", "naive", None)
    questions = hellaswag.load(having(longer, hellaswag=True, hellaswag_file=str(file)), tokenizer, CPU)
    batches = [hellaswag.batches(questions, size, CPU) for size in (1, 7, 64, 1000)]
    found = {hellaswag.accuracy(model, each, CPU, torch.no_grad) for each in batches}
    assert len(found) == 1


def test_ranks_share_the_questions_and_take_as_many_batches(longer, file):
    """Between two batches they ask each other whether to stop."""
    questions = hellaswag.load(
        having(longer, hellaswag=True, hellaswag_file=str(file)), load_tokenizer("bytes"), CPU
    )
    shares = [hellaswag.batches(questions, 4, World(CPU.device, rank, 3)) for rank in range(3)]
    assert [len(share) for share in shares] == [14, 14, 14]
    assert sum(len(batch) for share in shares for batch in share) == len(questions)


def test_a_signal_during_it_ends_the_run_saved(longer, file, tmp_path, monkeypatch):
    whole = hellaswag.accuracy

    def told(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return whole(*arguments)

    monkeypatch.setattr(hellaswag, "accuracy", told)
    with pytest.raises(SystemExit, match="143"):
        train(having(longer, hellaswag=True, hellaswag_file=str(file), steps=4), tmp_path)
    assert [path.name for path in saved(tmp_path)] == ["step-00000002"]


@pytest.mark.slow
def test_lm_eval_finds_the_same_accuracy_in_the_exported_model(longer, file, tmp_path):
    pytest.importorskip("lm_eval")
    summary = train(having(longer, hellaswag=True, hellaswag_file=str(file)), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "exported")
    (tmp_path / "utils.py").write_text("from lm_eval.tasks.hellaswag.utils import process_docs")
    (tmp_path / "mine.yaml").write_text(
        f"""
task: mine
dataset_path: json
dataset_kwargs: {{ data_files: {{ validation: {file} }} }}
output_type: multiple_choice
validation_split: validation
process_docs: !function utils.process_docs
doc_to_text: "{{{{query}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: choices
metric_list: [{{ metric: acc_norm }}]
"""
    )
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--tasks", "mine"]
    model = ["--model_args", f"pretrained={tmp_path / 'exported'},dtype=float32"]
    folders = ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out.json")]
    done = subprocess.run(
        [*command, *model, *folders], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("out*.json")
    assert json.loads(written.read_text())["results"]["mine"]["acc_norm,none"] == pytest.approx(
        summary["val/hellaswag"]
    )


@pytest.fixture
def released(file, monkeypatch):
    """A server of the file, as if it were the released one; returns what it was asked for."""
    asked = []

    content = file.read_bytes()

    class Released(Handler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send(content)

    monkeypatch.setattr(
        hellaswag, "GIT_BLOB", hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    )
    with Server(Released) as server:
        monkeypatch.setattr(hellaswag, "URL", f"{server.url}/{file.name}")
        yield asked


def test_it_is_downloaded_once(longer, released, tmp_path):
    cached = replace(longer, data=replace(longer.data, cache_dir=str(tmp_path / "cache")))
    first, second = (hellaswag.load(cached, load_tokenizer("bytes"), CPU) for _ in range(2))
    assert len(first) == 40
    assert first == second
    assert released == ["/hellaswag_val.jsonl"]


def test_another_file_than_the_released_one_is_refused(longer, released, monkeypatch, tmp_path):
    monkeypatch.setattr(hellaswag, "GIT_BLOB", "0" * 40)
    cached = replace(longer, data=replace(longer.data, cache_dir=str(tmp_path / "cache")))
    with pytest.raises(ConfigError, match=r"is not the released file; try again\."):
        hellaswag.load(cached, load_tokenizer("bytes"), CPU)
    assert not list((tmp_path / "cache").iterdir())


def test_without_a_network_one_line_says_what_to_do(longer, monkeypatch, tmp_path):
    monkeypatch.setattr(hellaswag, "URL", "http://127.0.0.1:9/hellaswag_val.jsonl")
    cached = replace(longer, data=replace(longer.data, cache_dir=str(tmp_path / "cache")))
    with pytest.raises(ConfigError) as refused:
        train(having(cached, hellaswag=True), tmp_path / "run")
    assert "cannot be downloaded (" in str(refused.value)
    assert str(refused.value).endswith("name it with trainer.hellaswag_file.")
    assert "\n" not in str(refused.value)


def test_files_and_lengths_that_cannot_work_are_refused(config, longer, file, tmp_path):
    bytes_ = load_tokenizer("bytes")
    with pytest.raises(
        ConfigError, match=r"trainer\.hellaswag_file is read with trainer\.hellaswag=true only"
    ):
        having(longer, hellaswag_file=str(file))
    with pytest.raises(ConfigError, match=r"tokens, more than model\.seq_len=32; use a longer one"):
        hellaswag.load(having(config, hellaswag=True, hellaswag_file=str(file)), bytes_, CPU)
    with pytest.raises(ConfigError, match="does not exist"):
        hellaswag.load(
            having(longer, hellaswag=True, hellaswag_file=str(tmp_path / "gone.jsonl")), bytes_, CPU
        )
    file.write_text("")
    with pytest.raises(ConfigError, match="has no questions"):
        hellaswag.load(having(longer, hellaswag=True, hellaswag_file=str(file)), bytes_, CPU)
    file.write_text('{"question": 1}\n')
    with pytest.raises(ConfigError, match=r"is not a file of HellaSwag's \(KeyError: 'activity_label'\)"):
        hellaswag.load(having(longer, hellaswag=True, hellaswag_file=str(file)), bytes_, CPU)
    row = {"activity_label": "Cooking", "ctx_a": "A man", "ctx_b": "then", "endings": ["a", "b", "c", "d"]}
    for wrong in (
        {"label": 4},
        {"label": -1},
        {"label": 0, "endings": ["a", "b"]},
        {"label": 0, "endings": ["a", "b", "c", " "]},
    ):
        file.write_text(json.dumps(row | wrong) + "\n")
        with pytest.raises(
            ConfigError, match=r"is not a file of HellaSwag's \(ValueError: label -?\d of \d endings"
        ):
            hellaswag.load(having(longer, hellaswag=True, hellaswag_file=str(file)), bytes_, CPU)
