"""Batches: a pure function of n, every sequence once an epoch, every validation token once (7 s)."""

import copy
import itertools
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from data import DataError
from data.corpora import make_corpus
from data.loader import Batches, Corpus, EvaluationBatches, prefetch
from data.permutation import Permutation
from data.prepare import prepare
from tests.conftest import ROOT

SEQ_LEN, PER_BATCH = 16, 8


@pytest.fixture(scope="module")
def corpus(parquet: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.prepare.SHARD_BYTES", 1 << 16)
        return prepare(
            make_corpus("text_files", files=str(parquet)),
            "bytes",
            tmp_path_factory.mktemp("cache"),
            workers=1,
        )


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 17, 64, 1000, 65537])
def test_a_permutation_takes_every_value_once(n: int):
    assert np.array_equal(np.sort(Permutation(n, seed=1, epoch=0)(np.arange(n))), np.arange(n))


def test_permutations_differ_by_seed_and_epoch_and_spread_evenly():
    index = np.arange(10_000)
    first = Permutation(10_000, seed=0, epoch=0)(index)
    for other in (Permutation(10_000, 0, 1), Permutation(10_000, 1, 0)):
        assert np.mean(other(index) == first) < 0.01
    # neighbours do not stay neighbours, and any stretch of positions covers the range evenly
    assert np.mean(np.abs(np.diff(first)) <= 10) < 0.01
    assert abs(np.corrcoef(index, first)[0, 1]) < 0.05
    counts = np.bincount(first[:2000] // 1000, minlength=10)
    assert counts.min() > 150
    assert counts.max() < 250


def test_a_split_reads_as_one_sequence_over_its_shards(corpus: Corpus):
    assert len(corpus.train.shards) > 3
    whole = np.concatenate([np.fromfile(corpus.directory / s["file"], "<u2") for s in corpus.train.shards])
    assert np.array_equal(corpus.train.read(0, 1 << 30), whole)
    edge = corpus.train.shards[0]["tokens"]
    assert np.array_equal(corpus.train.read(edge - 5, 10), whole[edge - 5 : edge + 5])
    assert len(corpus.train.read(corpus.train.tokens - 3, 10)) == 3


def test_runs_of_different_lengths_see_the_same_tokens_in_every_batch(corpus: Corpus):
    """With one block_len: the batch of short sequences is that of long ones, cut."""
    long = Batches(corpus.train, 64, 4, seed=3)
    short = Batches(corpus.train, 16, 16, seed=3, block_len=64)
    epoch = long.windows // 4
    for n in (0, 1, epoch, epoch + 1):
        for ours, theirs in zip(short.batch(n), long.batch(n), strict=True):
            assert ours.shape == (16, 16)
            assert np.array_equal(ours.reshape(4, 64), theirs)
    halves = [short.batch(1, rank, 2)[0] for rank in (0, 1)]
    assert np.array_equal(np.concatenate(halves), short.batch(1)[0])


@pytest.mark.parametrize(("block_len", "sequences"), [(24, 6), (64, 6)])
def test_a_block_that_cannot_be_cut_evenly_is_refused(corpus: Corpus, block_len: int, sequences: int):
    with pytest.raises(DataError, match=f"block_len={block_len} must be a multiple"):
        Batches(corpus.train, 16, sequences, seed=0, block_len=block_len)


@pytest.mark.parametrize("batches", [partial(Batches, seed=0), EvaluationBatches])
def test_arguments_that_make_no_batch_are_refused_by_name(corpus: Corpus, batches: Callable):
    with pytest.raises(DataError, match="seq_len=0, sequences_per_batch=4: at least 1 each"):
        batches(corpus.train, 0, 4)
    with pytest.raises(DataError, match="seq_len=16, sequences_per_batch=-1: at least 1 each"):
        batches(corpus.train, 16, -1)
    with pytest.raises(TypeError, match=r"such as open_corpus\(FOLDER\)\.train, not 'data/cache'"):
        batches("data/cache", 16, 4)


@pytest.mark.slow
def test_a_split_may_have_more_shards_than_file_descriptors(tmp_path: Path):
    """OpenWebText has 4,800 shards, a shell allows 1,024 descriptors."""
    (tmp_path / "a.txt").write_text("\n".join(f"line {number:03d}" for number in range(300)))
    code = """if True:
        import os, resource, sys
        import data.prepare, pyarrow
        from data.corpora import make_corpus
        limit = len(os.listdir("/proc/self/fd")) + 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        data.prepare.SHARD_BYTES = 8
        source = make_corpus("text_files", files=sys.argv[1], separator="\\n")
        corpus = data.prepare.prepare(source, "bytes", sys.argv[2], val_fraction=0.3, workers=1)
        assert len(corpus.train.shards) >= 200
        print(len(corpus.train.read(0, 1 << 30)) + corpus.val.tokens)"""
    command = [sys.executable, "-c", code, str(tmp_path / "a.txt"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "2700\n", done.stderr


def test_targets_are_inputs_shifted_by_one_and_windows_are_aligned(corpus: Corpus):
    batches = Batches(corpus.train, SEQ_LEN, PER_BATCH, seed=0)
    inputs, targets = batches.batch(3)
    assert inputs.shape == targets.shape == (PER_BATCH, SEQ_LEN)
    assert inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    whole = corpus.train.read(0, 1 << 30)
    windows = {tuple(whole[i * SEQ_LEN : i * SEQ_LEN + SEQ_LEN]) for i in range(batches.windows)}
    assert all(tuple(row) in windows for row in inputs)


def test_every_sequence_comes_once_an_epoch(corpus: Corpus):
    batches = Batches(corpus.train, SEQ_LEN, PER_BATCH, seed=0)
    count = 2 * batches.windows // PER_BATCH + 1
    stream = np.concatenate([batches._windows(n, 0, 1) for n in range(count)])
    first, second = stream[: batches.windows], stream[batches.windows : 2 * batches.windows]
    assert batches.windows % PER_BATCH  # a batch straddles the epochs
    assert np.array_equal(np.sort(first), np.arange(batches.windows))
    assert np.array_equal(np.sort(second), np.arange(batches.windows))
    assert np.mean(first == second) < 0.05


@pytest.mark.one_in(3)
@pytest.mark.parametrize("per_batch", [1, 24, 512, 700])
def test_a_batch_does_not_depend_on_the_batches_read_before(corpus: Corpus, per_batch: int):
    """Batches are looked up in groups: going back and forth across the end of a group or an epoch mixes up none."""
    batches = Batches(corpus.train, SEQ_LEN, per_batch, seed=3)
    group, border = max(1, 512 // per_batch), batches.windows // per_batch
    for n in (0, group, group - 1, 2 * group, border + 1, border, max(border - 1, 0), 10**6, 0):
        expected = []
        for sequence in range(n * per_batch, (n + 1) * per_batch):
            epoch, position = divmod(sequence, batches.windows)
            expected += Permutation(batches.windows, 3, epoch)(np.array([position])).tolist()
        assert batches._windows(n, 0, 1).tolist() == expected
        if per_batch > 1:
            assert batches._windows(n, 1, 2).tolist() == expected[per_batch // 2 :]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_batches_can_be_copied_and_pickled_without_the_tokens(corpus: Corpus, copied: Callable):
    batches = Batches(Corpus(corpus.directory).train, SEQ_LEN, PER_BATCH, seed=0)
    expected = batches.batch(5)
    assert corpus.train.tokens > 20_000
    assert len(pickle.dumps(batches)) < 20_000
    another = copied(batches)
    assert all(map(np.array_equal, another.batch(5), expected))
    another.seed = 1
    assert not np.array_equal(another.batch(5)[0], expected[0])
    assert all(map(np.array_equal, batches.batch(5), expected))


@pytest.mark.parametrize("world_size", [2, 8])
def test_ranks_together_read_the_batch_of_a_single_process(corpus: Corpus, world_size: int):
    batches = Batches(corpus.train, SEQ_LEN, PER_BATCH, seed=5)
    for n in (0, 7, 10_000):
        alone = batches.batch(n)
        shares = [batches.batch(n, rank, world_size) for rank in range(world_size)]
        for index in range(2):
            assert np.array_equal(np.concatenate([share[index] for share in shares]), alone[index])


def test_a_batch_depends_only_on_number_and_seed_and_is_read_fast(corpus: Corpus):
    batches = Batches(corpus.train, SEQ_LEN, PER_BATCH, seed=0)
    inputs, _ = batches.batch(4)
    batches.batch(100)
    assert np.array_equal(
        inputs, Batches(Corpus(corpus.directory).train, SEQ_LEN, PER_BATCH, seed=0).batch(4)[0]
    )
    assert not np.array_equal(inputs, Batches(corpus.train, SEQ_LEN, PER_BATCH, seed=1).batch(4)[0])
    start = time.thread_time()  # of this thread alone, however busy the machine is
    batches.batch(10**9)
    assert time.thread_time() - start < 0.1


def test_ranks_that_do_not_divide_a_batch_are_refused(corpus: Corpus):
    with pytest.raises(DataError, match="a batch of 8 sequences cannot be shared equally by 3 ranks: 9 can"):
        Batches(corpus.train, SEQ_LEN, PER_BATCH, seed=0).batch(0, 0, 3)


def test_a_corpus_too_small_for_a_run_is_refused_with_its_epochs(corpus: Corpus):
    tokens = corpus.train.tokens
    assert corpus.train.epochs(tokens // 2) == pytest.approx(0.5, rel=0.01)
    assert corpus.train.epochs(4 * tokens, at_most=4) == 4
    with pytest.raises(
        DataError, match=rf"are 8 epochs of its {tokens:,}, more than 4: .*at most {4 * tokens:,} "
    ):
        corpus.train.epochs(8 * tokens, at_most=4)


def test_a_corpus_shorter_than_a_sequence_is_refused(corpus: Corpus):
    tokens = corpus.val.tokens
    assert Batches(corpus.val, tokens - 1, 1, seed=0).batch(5)[0].shape == (1, tokens - 1)
    with pytest.raises(
        DataError, match=f"has {tokens:,} tokens, but one sequence takes {tokens + 1:,}.*model.seq_len"
    ):
        Batches(corpus.val, tokens, 1, seed=0)


@pytest.mark.parametrize(("world_size", "seq_len"), [(1, 16), (2, 16), (4, 100), (4, 100_000)])
def test_evaluation_predicts_every_token_once(corpus: Corpus, world_size: int, seq_len: int):
    batches = EvaluationBatches(corpus.val, seq_len, PER_BATCH)
    whole = corpus.val.read(0, 1 << 30)
    asked = []
    for n, rank in itertools.product(range(len(batches)), range(world_size)):
        inputs, targets = batches.batch(n, rank, world_size)
        assert inputs.shape == targets.shape == (PER_BATCH // world_size, seq_len)
        seen = targets != -1
        asked.append(targets[seen])
        both = seen[:, 1:]
        assert np.array_equal(inputs[:, 1:][both], targets[:, :-1][both])
    assert np.array_equal(np.concatenate(asked), whole[1:])


def test_prefetch_gives_the_same_batches_as_tensors_and_ends_its_thread(corpus: Corpus):
    batches = Batches(corpus.train, SEQ_LEN, PER_BATCH, seed=0)
    threads = threading.active_count()
    with closing(prefetch(batches, start=3, rank=1, world_size=2)) as stream:
        for n in range(3, 8):
            inputs, targets = next(stream)
            assert inputs.dtype == torch.int64
            expected = batches.batch(n, 1, 2)
            assert np.array_equal(inputs.numpy(), expected[0])
            assert np.array_equal(targets.numpy(), expected[1])
    assert threading.active_count() == threads
    evaluation = EvaluationBatches(corpus.val, SEQ_LEN, PER_BATCH)
    for stop in (None, len(evaluation)):
        assert len(list(prefetch(evaluation, stop=stop))) == len(evaluation)


def test_prefetch_passes_errors_on(corpus: Corpus):
    batches = Batches(corpus.train, SEQ_LEN, PER_BATCH, seed=0)
    with pytest.raises(DataError, match="cannot be shared"):
        next(prefetch(batches, world_size=3))


def test_a_token_outside_the_vocabulary_is_refused_with_its_shard(corpus: Corpus):
    damaged = Corpus(corpus.directory)
    damaged.n_vocab = 100
    with pytest.raises(
        DataError, match=r"train-0000\d.bin holds token \d+, but the vocabulary has 100.*--repair"
    ):
        Batches(damaged.train, 1000, PER_BATCH, seed=0).batch(0)


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, data.corpora; print(sorted({'torch', 'datasets', 'tiktoken', 'numpy'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout
        == "[]\n"
    )
