"""Runs that begin with weights of another run or of Hugging Face's. About 8 s, 4 of them transformers' import."""

import base64
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import train as command
from data.loader import EvaluationBatches, open_corpus
from model.config import GPTConfig
from model.gpt import GPT
from model.huggingface import _transformers_imports, to_huggingface
from tests.conftest import text_data
from tests.training.conftest import CPU, having
from training import checkpoint
from training.config import Config, ConfigError, OptimizerConfig, Positions, Precision, load_config
from training.export import export
from training.load_run import load_run
from training.trainer import Trainer, train


@pytest.fixture(scope="module")
def config(config: Config) -> Config:
    return replace(having(config, eval_every=0, sample_tokens=0), optimizer=OptimizerConfig(lr=1e-2))


@pytest.fixture(scope="module")
def trained(config: Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A run and its summary."""
    run = tmp_path_factory.mktemp("trained") / "run"
    return run, train(having(config, keep_checkpoints=3, save_every=4), run)


@pytest.fixture(scope="module")
def elsewhere(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The same config with another text."""
    text = tmp_path_factory.mktemp("elsewhere") / "text.txt"
    text.write_text("\n\n".join(f"{'pack my box with five dozen jugs ' * n}{n}" for n in range(30)))
    return replace(config, data=text_data(text))


@pytest.mark.slow
def test_evaluating_a_runs_weights_reproduces_its_final_loss(config, trained, tmp_path, capsys):
    run, ended = trained
    again = train(having(config, init_from=str(run), steps=0), tmp_path / "again")
    assert again["val/loss"] == ended["val/loss"]
    newest = str(run / "checkpoints" / "step-00000008")
    assert load_config(tmp_path / "again" / "config.yaml").trainer.init_from == newest
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  weights "))
    assert line.split()[1:] == ["from", newest]
    earlier = str(run / "checkpoints" / "step-00000004")
    before = train(having(config, init_from=earlier, steps=0), tmp_path / "before")
    assert before["val/loss"] > ended["val/loss"]
    rounded = having(config, init_from=str(run), steps=0, precision=Precision.bf16)
    assert train(rounded, tmp_path / "rounded")["val/loss"] == pytest.approx(ended["val/loss"], rel=0.01)


def test_finetuning_on_another_text_starts_from_the_given_weights(elsewhere, trained, tmp_path):
    """It begins at step 0 and resumes from its own checkpoint, which records where the weights came from."""
    run, _ = trained
    tuned, drawn = having(elsewhere, init_from=str(run)), Trainer(elsewhere, tmp_path / "drawn", CPU)
    first = Trainer(tuned, tmp_path / "a", CPU)
    assert first.plan.start.step == 0
    assert not any(value.any() for state in first.optimizer.state.values() for value in state.values())
    batch = [torch.from_numpy(part) for part in first.batches.batch(0)]
    losses = [float(each.train_step(0, *batch)[0]) for each in (first, drawn)]
    assert losses[0] < losses[1] - 0.5
    whole = train(tuned, tmp_path / "whole")
    train(having(tuned, save_every=4), tmp_path / "cut")
    goes_on = having(elsewhere, resume=str(tmp_path / "cut" / "checkpoints" / "step-00000004"))
    assert train(goes_on, tmp_path / "cut")["val/loss"] == whole["val/loss"]
    for name in ("whole", "cut"):
        began = load_config(tmp_path / name / "config.yaml").trainer.init_from
        assert began == str(run / "checkpoints" / "step-00000008")
    assert goes_on.trainer.init_from is None  # resuming does not change the caller's config


def test_mismatched_initial_weights_are_refused_with_the_settings_to_use(
    config, trained, tmp_path, monkeypatch
):
    run, _ = trained
    # They are refused before the corpus is prepared, which may take hours.
    monkeypatch.setattr("training.plan.prepare_corpus", None)

    def refused(said: str, config: Config = config, **settings) -> None:
        with pytest.raises(ConfigError, match=said) as refusal:
            Trainer(having(config, **{"init_from": str(run)} | settings), tmp_path / "refused", CPU)
        assert "\n" not in str(refusal.value)

    deeper = replace(config, model=replace(config.model, n_layer=2, seq_len=64))
    refused(r"needs model\.n_layer=1; this run has model\.n_layer=2", deeper)
    ranks = write_ranks(tmp_path / "own.tiktoken", 300)
    refused(
        r"needs data\.tokenizer=bytes; this run has data\.tokenizer=.*own\.tiktoken",
        replace(config, data=replace(config.data, tokenizer=ranks)),
    )
    of_ranks = shutil.copytree(run, tmp_path / "theirs" / "of_ranks")
    text = (of_ranks / "config.yaml").read_text()
    (of_ranks / "config.yaml").write_text(text.replace("tokenizer: bytes", "tokenizer: /a=b c/own.tiktoken"))
    (of_ranks / "tokenizer.json").write_text('{"sha256": "another"}')
    refused(
        r"""needs "data\.tokenizer='/a=b c/own\.tiktoken'" as the file was then; this run has data\.tokenizer=byt""",
        init_from=str(of_ranks),
    )
    refused(r"leave out trainer\.init_from", resume=str(run))
    refused(r"openai-community.gpt2 does not exist.*hf download", init_from="openai-community/gpt2")
    refused(r"holds no checkpoint.*hf download", init_from=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refused(r"cannot be read as a GPT-2: .*model_type=llama", init_from=str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    refused(r"cannot be read as a GPT-2", init_from=str(tmp_path))


# ---- another length ------------------------------------------------------------------------------


def at_length(config: Config, seq_len: int, **settings) -> Config:
    model = replace(config.model, seq_len=seq_len)
    return replace(config, model=model, trainer=replace(config.trainer, **settings))


def test_a_shorter_run_takes_the_first_positions(config, trained, tmp_path, capsys):
    """Its loss is the longer model's on sequences as short: no position has moved."""
    run, _ = trained
    summary = train(at_length(config, 16, init_from=str(run), steps=0), tmp_path / "short")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  weights "))
    assert line.endswith("; positions 32 -> 16: cut")
    model, _ = load_run(run)
    corpus = open_corpus((run / "corpus").read_text().strip())
    batches = EvaluationBatches(corpus.val, 16, 8)
    nats = tokens = 0
    for n in range(len(batches)):
        inputs, targets = (torch.from_numpy(part) for part in batches.batch(n))
        with torch.no_grad():
            nats += float(model(inputs, targets)) * int((targets != -1).sum())
        tokens += int((targets != -1).sum())
    assert summary["val/loss"] == pytest.approx(nats / tokens, rel=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", list(Positions))
def test_a_longer_run_extends_the_positions_in_the_way_that_is_named(config, trained, tmp_path, capsys, how):
    run, _ = trained
    longer = at_length(config, 80, init_from=str(run), init_positions=how, batch_tokens=160)
    first = Trainer(longer, tmp_path / "long", CPU).model.wpe.weight.detach()
    old = checkpoint.load_weights(checkpoint.find(run), "cpu")["wpe.weight"]
    if how is Positions.interpolate:
        assert torch.equal(first[[0, -1]], old[[0, -1]])
        between = first[1] - old[0]  # 31 steps of the old table are 79 of the new one
        assert torch.allclose(between, (old[1] - old[0]) * 31 / 79, atol=1e-6)
    else:
        assert torch.equal(first[:32], old)
    if how is Positions.repeat:
        assert torch.equal(first[32:], old.repeat(2, 1)[:48])
    if how is Positions.random:
        assert float(first[32:].std()) == pytest.approx(0.02, rel=0.1)
        assert torch.equal(first, Trainer(longer, tmp_path / "again", CPU).model.wpe.weight)
    whole = train(longer, tmp_path / "long")
    assert f"; positions 32 -> 80: {how.value}" in capsys.readouterr().out
    train(having(longer, save_every=4), tmp_path / "cut")
    resumes = at_length(config, 80, batch_tokens=160, resume=str(tmp_path / "cut/checkpoints/step-00000004"))
    assert train(resumes, tmp_path / "cut")["val/loss"] == whole["val/loss"]
    assert load_run(tmp_path / "cut")[0].config.seq_len == 80


def test_a_mismatched_model_size_is_reported_by_its_preset(config):
    """As when a user loads GPT-2's weights into the default run. A size without a preset is given by its settings."""
    from training.init_from import _differing

    theirs = GPTConfig(seq_len=512, n_layer=24, n_head=16, n_embd=1024)
    assert _differing(theirs, config.model)[1] == ["model=gpt2_medium", "model.seq_len=512"]
    theirs = replace(theirs, n_layer=23, seq_len=32)
    assert _differing(theirs, config.model)[1] == [
        *("model.n_layer=23", "model.n_head=16", "model.n_embd=1024"),
    ]


# ---- weights from Hugging Face -------------------------------------------------------------------


def write_ranks(path: Path, tokens: int) -> str:
    """A tokenizer with that many ranks: the bytes, and pairs of letters that merge."""
    ranks = [bytes([value]) for value in range(256)]
    pairs = [bytes([first, second]) for first in b"etaoinshrdlu" for second in b"etaoinshrdlu"]
    ranks += pairs[: tokens - 256]
    letters = bytes.maketrans(b"0123456789", b"abcdefghij")  # a word, as the split pattern has them
    ranks += [b"q" + (b"%d" % number).translate(letters) for number in range(tokens - len(ranks))]
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), n) for n, token in enumerate(ranks)))
    return str(path)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory):
    """A GPT-2 of transformers with GPT-2's vocabulary, and the folder it is saved in."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("theirs")
    with _transformers_imports():
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(n_positions=32, n_layer=1, n_head=2, n_embd=32)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))  # far from the loss of a uniform guess
    model.save_pretrained(folder)
    return model, folder


def test_hugging_face_weights_have_the_loss_that_transformers_computes(started, tiny, theirs, tmp_path):
    model, folder = theirs
    ranks = write_ranks(tmp_path / "gpt2.tiktoken", 50256)
    evaluation = [*tiny, "hydra.run.dir=run", "trainer.steps=0", f"trainer.init_from={folder}"]
    error = started(command.main, *evaluation)
    assert (
        error
        == f"error: trainer.init_from={folder} needs data.tokenizer=gpt2; this run has data.tokenizer=bytes."
    )
    assert started(command.main, *evaluation, f"data.tokenizer={ranks}") == 0
    run = tmp_path / "run"
    corpus = open_corpus((run / "corpus").read_text().strip())
    batches = EvaluationBatches(corpus.val, 32, 4)
    nats = tokens = 0
    for n in range(len(batches)):
        inputs, targets = (torch.from_numpy(part) for part in batches.batch(n))
        with torch.no_grad(), _transformers_imports():
            logits = model(inputs).logits
        nats += float(
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        )
        tokens += int((targets != -1).sum())
    summary = json.loads((run / "summary.json").read_text())
    assert summary["val/loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert abs(summary["val/loss"] - 10.82) > 0.1  # ln 50257, the loss of a uniform guess


@pytest.mark.parametrize("own", [False, True])
def test_an_exported_run_of_another_vocabulary_gives_its_weights_back(config, trained, tmp_path, own):
    pytest.importorskip("transformers")
    run, ended = trained
    if own:  # with merges
        tokens = [*(bytes([value]) for value in range(256)), b"th", b" q", b" qu"]
        lines = (b"%s %d\n" % (base64.b64encode(each), rank) for rank, each in enumerate(tokens))
        ranks = tmp_path / "own.tiktoken"
        ranks.write_bytes(b"".join(lines))
        config, run = replace(config, data=replace(config.data, tokenizer=str(ranks))), tmp_path / "run"
        ended = train(config, run)
    export(run, tmp_path / "exported")
    again = having(config, init_from=str(tmp_path / "exported"), steps=0)
    assert train(again, tmp_path / "again")["val/loss"] == pytest.approx(ended["val/loss"], rel=1e-6)


def test_hugging_face_weights_with_another_vocabulary_size_are_refused(config, tmp_path):
    pytest.importorskip("transformers")
    small = GPT(GPTConfig(257, 32, n_layer=1, n_head=2, n_embd=32), lambda q, k, v, **_: v)
    to_huggingface(small).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"vocabulary of 257, .*GPT-2's is 50257"):
        Trainer(having(config, init_from=str(tmp_path)), tmp_path / "run", CPU)


def test_hugging_face_weights_with_a_nan_are_refused_by_its_name(config, tmp_path):
    pytest.importorskip("transformers")
    broken = GPT(GPTConfig(257, 32, n_layer=1, n_head=2, n_embd=32), lambda q, k, v, **_: v)
    with torch.no_grad():
        broken.wte.weight[7, 7] = float("nan")
    to_huggingface(broken).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"transformer\.wte\.weight holds values that are not finite"):
        Trainer(having(config, init_from=str(tmp_path)), tmp_path / "run", CPU)
