"""Mixtures of prepared corpora: shares that hold, batches that are a function of their number (4 s)."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from data import DataError
from data.corpora import make_corpus
from data.inspect import main as inspect
from data.loader import Batches, Corpus, EvaluationBatches, open_corpus
from data.prepare import prepare
from data.progress import ConsoleProgress
from data.tokenizer import load_tokenizer
from training.command_line import composed
from training.config import ConfigError
from training.corpus import prepare_corpus

SEQ_LEN, PER_BATCH = 8, 20


def prepared(folder: Path, letter: str, documents: int, length: int) -> Corpus:
    """A corpus of documents of one letter: which corpus a token is from can be seen."""
    (folder / f"{letter}.txt").write_text(".".join([letter * length] * documents))
    source = make_corpus("text_files", files=str(folder / f"{letter}.txt"), separator=".")
    return prepare(source, "bytes", folder / "cache", val_fraction=0.1, workers=1)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Corpus]:
    folder = tmp_path_factory.mktemp("parts")
    return prepared(folder, "a", 200, 49), prepared(folder, "b", 40, 49)


def mixed(folder: Path, *weighted: tuple[Corpus, float]) -> Corpus:
    corpora = {str(corpus.directory): weight for corpus, weight in weighted}
    return prepare(make_corpus("mix", corpora=corpora), "bytes", folder)


@pytest.fixture(scope="module")
def mix(parts: tuple[Corpus, Corpus], tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Three quarters are from the smaller corpus, so that it repeats soon."""
    return mixed(tmp_path_factory.mktemp("mixed"), (parts[0], 1), (parts[1], 3))


def test_shares_hold_and_each_corpus_is_gone_through_before_it_repeats(mix, parts):
    batches = Batches(mix.train, SEQ_LEN, PER_BATCH, seed=0)
    stream = np.concatenate([batches.batch(n)[0] for n in range(10_000 // PER_BATCH)])
    for corpus, letter, share in zip(parts, b"ab", (0.25, 0.75), strict=True):
        from_it = (stream == letter).any(axis=1)
        assert from_it.sum() == 10_000 * share
        assert abs(from_it[:1000].mean() - share) < 0.05
        windows = (corpus.train.tokens - 1) // SEQ_LEN
        whole = corpus.train.read(0, windows * SEQ_LEN).reshape(-1, SEQ_LEN)
        theirs = stream[from_it]
        for epoch in range(len(theirs) // windows):
            seen = theirs[epoch * windows : (epoch + 1) * windows]
            assert sorted(map(tuple, seen)) == sorted(map(tuple, whole))
    # no sequence has tokens of both
    assert not ((stream == ord("a")).any(axis=1) & (stream == ord("b")).any(axis=1)).any()


def test_a_batch_is_a_function_of_its_number_for_any_world_size(mix):
    batches = Batches(mix.train, SEQ_LEN, PER_BATCH, seed=3)
    for n in (0, 10_000 // PER_BATCH - 1, 10_000 // PER_BATCH, 7, 10**6):
        alone = Batches(open_corpus(mix.directory).train, SEQ_LEN, PER_BATCH, seed=3).batch(n)
        shares = [batches.batch(n, rank, 4) for rank in range(4)]
        for index in range(2):
            assert np.array_equal(np.concatenate([share[index] for share in shares]), alone[index])
    other = Batches(mix.train, SEQ_LEN, PER_BATCH, seed=4)
    assert not np.array_equal(batches.batch(0)[0], other.batch(0)[0])
    blocks = Batches(mix.train, SEQ_LEN, PER_BATCH * 4, seed=3, block_len=4 * SEQ_LEN)
    longer = Batches(mix.train, 4 * SEQ_LEN, PER_BATCH, seed=3)
    assert np.array_equal(blocks.batch(2)[0].reshape(-1, 4 * SEQ_LEN), longer.batch(2)[0])


def test_validation_is_whole_documents_in_the_same_proportions(mix, parts, tmp_path, capsys):
    """The smaller split has 4 documents of 50 tokens: so many of it, and a third as many of the other, 1 of 20."""
    corpora = {str(corpus.directory): weight for corpus, weight in zip(parts, (1, 3), strict=True)}
    prepare(make_corpus("mix", corpora=corpora), "bytes", tmp_path, progress=ConsoleProgress())
    assert "validation has 250 of 1,200 tokens, for the same proportions" in capsys.readouterr().err
    whole = [corpus.val.read(0, 1 << 20) for corpus in parts]
    # evenly mixed, so that a beginning of it has the same proportions
    expected = [whole[1][:100], whole[0][:50], whole[1][100:]]
    assert np.array_equal(mix.val.read(0, 1 << 20), np.concatenate(expected))
    assert (mix.val.documents, mix.val.utf8_bytes) == (5, 5 * 49)
    batches = EvaluationBatches(mix.val, SEQ_LEN, 4)
    targets = np.concatenate([batches.batch(n)[1] for n in range(len(batches))])
    assert np.array_equal(targets[targets != -1], mix.val.read(1, 1 << 20))


def test_epochs_are_those_of_the_corpus_that_repeats_most(mix, parts):
    tokens = parts[1].train.tokens
    assert mix.train.epochs(4 * tokens) == 3
    with pytest.raises(
        DataError, match=rf"^text_files is too small: .* 3 epochs of its {tokens:,}, more than 2"
    ):
        mix.train.epochs(4 * tokens, at_most=2)


def test_other_shares_are_another_corpus_and_equal_ones_the_same(mix, parts, tmp_path):
    same = mixed(mix.directory.parent, (parts[0], 0.25), (parts[1], 0.75))
    assert same.directory == mix.directory
    moved = mixed(tmp_path, (parts[0], 25), (parts[1], 75))
    assert moved.fingerprint == mix.fingerprint
    assert mixed(tmp_path, (parts[0], 1), (parts[1], 3.01)).fingerprint != mix.fingerprint


def test_a_tokenizer_file_may_have_moved(rank_file, tmp_path):
    ranks = Path(shutil.copy(rank_file, tmp_path / "own.tiktoken"))
    corpora = {}
    for letter in "ab":
        (tmp_path / f"{letter}.txt").write_text(".".join([letter * 9] * 30))
        source = make_corpus("text_files", files=str(tmp_path / f"{letter}.txt"), separator=".")
        corpora[str(prepare(source, str(ranks), tmp_path / "cache", workers=1).directory)] = 1
    moved = ranks.rename(tmp_path / "moved.tiktoken")
    load_tokenizer.cache_clear()
    corpus = prepare(make_corpus("mix", corpora=corpora), str(moved), tmp_path / "cache")
    assert corpus.tokenizer().name == "moved"


def test_the_command_line_mixes_corpora_and_runs(parts, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "corpus").write_text(f"{parts[1].directory}\n")
    override = f"data.corpora={{{parts[0].directory}:1,{tmp_path / 'run'}:3}}"
    config = composed("data=mix", "data.tokenizer=bytes", f"data.cache_dir={tmp_path}", override)
    corpus = prepare_corpus(config.data, quiet=True)
    assert corpus.name == "mix (0.25 text_files, 0.75 text_files)"
    assert corpus.train.tokens == sum(part.train.tokens for part in parts)
    config = composed("data=mix", f"data.cache_dir={tmp_path}", override)  # without data.tokenizer
    with pytest.raises(
        DataError, match=r"was made with tokenizer bytes, and gpt2 is .*: name .* data\.tokenizer=bytes "
    ):
        prepare_corpus(config.data, quiet=True)
    for wrong in ("data.corpora=folder", "data.corpora={folder:much}", "data.corpora=[folder]"):
        with pytest.raises(ConfigError, match=r"data\.corpora must be folders with weights: '\{FOLDER: 0\.7"):
            composed("data=mix", wrong)


def test_inspect_shows_a_mix_and_says_whose_shard_is_damaged(parts, tmp_path, capsys):
    own = prepared(tmp_path, "c", 40, 49)
    corpus = mixed(tmp_path / "cache", (parts[0], 1), (own, 1))
    assert inspect([str(corpus.directory)]) == 0
    assert f"{corpus.train.tokens:,}" in capsys.readouterr().out
    (own.directory / "train-00000.bin").write_bytes(b"")
    assert inspect([str(corpus.directory)]) == 1
    assert f"inspect {own.directory} --repair train-00000.bin" in capsys.readouterr().out
    assert inspect([str(corpus.directory), "--repair"]) == 1
    assert "is a mix: repair the corpora in it" in capsys.readouterr().err
    assert inspect([str(own.directory), "--repair"]) == 0
    assert inspect([str(corpus.directory)]) == 0
    (shard,) = corpus.directory.glob("val-*.bin")
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    assert inspect([str(corpus.directory)]) == 1
    assert f"in the manifest: delete {corpus.directory}, and prepare the mix again" in capsys.readouterr().out


def test_what_cannot_be_mixed_is_refused(mix, parts, rank_file, tmp_path):
    first, second = (str(corpus.directory) for corpus in parts)
    wrong = {
        "at least two: data.corpora=": {first: 1},
        rf"the weight 0 of {first} is below 0.01% of all weights": {first: 0, second: 1},
        rf"the weight -1 of {first} is below": {first: -1, second: 2},
        "the weight nan of": {first: float("nan"), second: 2},
        "there is no folder .*nowhere: name a corpus folder": {first: 1, str(tmp_path / "nowhere"): 1},
        "holds prepared corpora: name one of": {first: 1, str(Path(first).parent): 1},
        "is a mix itself: name the corpora": {first: 1, str(mix.directory): 1},
        "names the same tokens twice": {first: 1, f"{first}/": 1, second: 1},
    }
    for words, corpora in wrong.items():
        with pytest.raises(DataError) as refusal:
            prepare(make_corpus("mix", corpora=corpora), "bytes", tmp_path)
        assert re.search(words, str(refusal.value)), str(refusal.value)
    both = {first: 1, second: 1}
    with pytest.raises(DataError, match=r"was made with tokenizer bytes, and .* is a different one"):
        prepare(make_corpus("mix", corpora=both), rank_file, tmp_path)
    with pytest.raises(
        DataError, match=r"data\.limit_documents does not apply to source mix, which uses corpora"
    ):
        make_corpus("mix", corpora=both, limit_documents=5)
    with pytest.raises(DataError, match=r"data\.val_fraction does not apply to a mix"):
        prepare(make_corpus("mix", corpora=both), "bytes", tmp_path, val_fraction=0.1)
    with pytest.raises(DataError, match=r"data\.corpora does not apply to source python_source"):
        make_corpus("python_source", corpora=both)
    with pytest.raises(
        DataError, match=r"the train split of text_files has 1,800 tokens, but one sequence takes"
    ):
        Batches(mix.train, 2000, PER_BATCH, seed=0)
