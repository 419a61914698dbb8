"""`python -m data.inspect` on a corpus and on a run (2 s)."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import data.inspect
from data import DataError
from data.corpora import make_corpus
from data.inspect import corpus_folder
from data.loader import Corpus
from data.prepare import prepare
from data.tokenizer import load_tokenizer
from tests.conftest import ROOT


@pytest.fixture
def corpus(parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setattr("data.prepare.SHARD_BYTES", 1 << 16)
    return prepare(make_corpus("text_files", files=str(parquet)), "bytes", tmp_path / "cache", workers=1)


Inspect = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    """The command from ROOT, in this process: to start another one takes 0.3 s."""

    def inspect(*arguments: object) -> subprocess.CompletedProcess:
        load_tokenizer.cache_clear()
        capsys.readouterr()
        with contextlib.chdir(ROOT):
            code = data.inspect.main([*map(str, arguments)])
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return inspect


def test_a_run_directory_shows_the_same_as_its_corpus(inspect: Inspect, corpus: Corpus, tmp_path: Path):
    command = [sys.executable, "-m", "data.inspect", str(corpus.directory), "--documents", "2"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    for split in (corpus.train, corpus.val):
        assert f"{split.documents:,}" in shown.stdout
        assert f"{split.tokens:,}" in shown.stdout
    histogram = shown.stdout.split("tokens per document, train\n")[1].split("\n\n")[0]
    assert (
        sum(int(line.replace(",", "").split("#")[0].split()[-1]) for line in histogram.splitlines())
        == corpus.train.documents
    )
    assert shown.stdout.count("validation document") == 2
    assert corpus.tokenizer().decode(corpus.val.read(0, 100).tolist())[:50] in shown.stdout
    run = tmp_path / "run"
    run.mkdir()
    (run / "corpus").write_text(f"{corpus.directory}\n")
    assert inspect(run, "--documents", 2).stdout == shown.stdout


def test_damaged_shards_are_reported_and_repaired(inspect: Inspect, corpus: Corpus):
    for shard in ("train-00001.bin", "val-00000.bin"):
        path = corpus.directory / shard
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        path.write_bytes(content)
    found = inspect(corpus.directory)
    assert found.returncode == 1
    assert found.stdout.count("--repair") == 2
    repaired = inspect(corpus.directory, "--repair")
    assert repaired.returncode == 0, repaired.stderr
    assert "rebuilt train-00001.bin" in repaired.stdout
    assert inspect(corpus.directory).returncode == 0


def test_a_closed_output_pipe_is_not_an_error(corpus: Corpus):
    """As `python -m data.inspect CORPUS | head` does."""
    command = [sys.executable, "-m", "data.inspect", str(corpus.directory)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""


def test_a_folder_of_several_runs_or_corpora_asks_to_name_one(corpus: Corpus, tmp_path: Path):
    with pytest.raises(
        DataError, match=f"holds prepared corpora: name one of these folders in it: {corpus.directory.name}$"
    ):
        corpus_folder(corpus.directory.parent)
    for run in ("0_nano_naive", "1_nano_sdpa"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "corpus").write_text("anywhere")
    with pytest.raises(DataError, match=r"name one of them, for example .*/0_nano_naive$"):
        corpus_folder(tmp_path)


@pytest.mark.parametrize("arguments", [["nowhere"], ["."], ["{corpus}", "--repair", "train-99999.bin"]])
def test_a_path_that_is_not_a_corpus_or_shard_is_a_one_line_error(
    inspect: Inspect, corpus: Corpus, arguments: list[str]
):
    refused = inspect(*(argument.format(corpus=corpus.directory) for argument in arguments))
    assert refused.returncode == 1
    assert len(refused.stderr.strip().splitlines()) == 1
    assert refused.stderr.startswith("error: ")


def test_repair_needs_the_text_not_the_times_of_the_source_files(inspect: Inspect, tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")
    corpus = prepare(
        make_corpus("text_files", files=str(tmp_path / "a.txt"), separator="\n\n"),
        "bytes",
        tmp_path / "cache",
    )
    files = [corpus.directory / shard["file"] for shard in corpus.manifest.shards]
    good = [file.read_bytes() for file in files]
    for text in ("one\n\ntwo\n\nthreE", "One\n\nTwo\n\nthree", "one\n\ntwo"):
        (tmp_path / "a.txt").write_text(text)
        for file, content in zip(files, good, strict=True):
            refused = inspect(corpus.directory, "--repair", file.name)
            if refused.returncode:
                assert f"has changed since then, so {file.name} cannot be rebuilt" in refused.stderr
            assert file.read_bytes() == content  # a good shard is not replaced by another text's
    (tmp_path / "a.txt").write_text("One\n\ntwo\n\nthree")
    files[0].unlink()
    refused = inspect(corpus.directory, "--repair")
    assert refused.returncode == 1
    assert "has changed since" in refused.stderr
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")  # the same text, at another time
    assert inspect(corpus.directory, "--repair").returncode == 0
    assert [file.read_bytes() for file in files] == good
    assert sorted(path.name for path in corpus.directory.iterdir() if path.suffix != ".bin") == [
        ".lock",
        "manifest.json",
    ]


def test_a_changed_tokenizer_file_is_refused(
    inspect: Inspect, documents: list[str], rank_file: str, tmp_path: Path
):
    ranks = Path(shutil.copy(rank_file, tmp_path / "own.tiktoken"))
    (tmp_path / "a.txt").write_text("\n\n".join(documents))
    corpus = prepare(
        make_corpus("text_files", files=tmp_path / "a.txt", separator="\n\n"), str(ranks), tmp_path, workers=1
    )
    *lines, last = ranks.read_text().splitlines(keepends=True)
    ranks.write_text("".join(lines))
    refused = inspect(corpus.directory)
    assert refused.returncode == 1
    changed = f"error: {ranks} has changed since {corpus.directory} was made with it"
    assert refused.stderr == f"{changed}: restore the old file, or prepare the corpus again with this one\n"
    ranks.write_text("".join([*lines, last]))
    assert inspect(corpus.directory).returncode == 0


def test_a_relative_tokenizer_path_is_found_from_another_folder(
    inspect: Inspect, documents: list[str], rank_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "a=b c"
    folder.mkdir()
    ranks = Path(shutil.copy(rank_file, folder / "own.tiktoken"))
    (folder / "a.txt").write_text("\n\n".join(documents))
    monkeypatch.chdir(folder)
    source = make_corpus("text_files", files="a.txt", separator="\n\n")
    corpus = prepare(source, "own.tiktoken", "cache", workers=1)
    shown = inspect(corpus.directory)  # from ROOT
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("validation document") == 3
    # The tokenizer's path is not part of the corpus's identity.
    moved = ranks.rename(tmp_path / "moved.tiktoken")
    assert prepare(source, "../moved.tiktoken", "cache", workers=1).directory == corpus.directory
    (corpus.directory / "train-00000.bin").unlink()
    refused = inspect(corpus.directory, "--repair")
    assert refused.returncode == 1
    assert refused.stderr == (
        f"error: cannot read the tokenizer file {ranks} (No such file or directory): put it there, or say where it "
        "is with data.tokenizer=PATH (or --tokenizer PATH, where a command has that)\n"
    )
    repaired = inspect(corpus.directory, "--repair", "--tokenizer", moved)
    assert repaired.returncode == 0, repaired.stderr
    assert repaired.stdout == f"rebuilt train-00000.bin\n{shown.stdout}"
    wrong = inspect(corpus.directory, "--tokenizer", "bytes")
    assert wrong.stderr == (
        f"error: {corpus.directory} was made with tokenizer {ranks}, and bytes is a different one: name "
        f"the original with data.tokenizer={ranks} (or --tokenizer, where a command has that), or prepare the corpus "
        "again with bytes\n"
    )
