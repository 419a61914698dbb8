"""Corpora of local files become the right tokens, whatever the format and the number of workers (15 s)."""

import base64
import glob
import gzip
import itertools
import json
import os
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
import tiktoken
import zstandard
from tiktoken_ext import openai_public

from data import DataError
from data.corpora import make_corpus
from data.loader import Corpus, TokenSplit, open_corpus
from data.local_files import TextFiles
from data.prepare import prepare
from data.progress import ConsoleProgress
from data.split import split_order
from data.tokenise import encode
from data.tokenizer import END_OF_TEXT, load_tokenizer
from data.workshop import Workshop


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("data.prepare.SHARD_BYTES", 1 << 14)
    monkeypatch.setattr("data.prepare.WORTH_A_PROCESS", 1 << 14)


class Recorder:
    """Progress that remembers."""

    def __init__(self):
        self.said: list[str] = []
        self.stages: list[str] = []
        self.totals: list[int] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def advance(self, stage: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.stages.append(stage)
        self.totals.append(total)


def decoded(split: TokenSplit) -> list[str]:
    """The documents of a split."""
    tokens = split.read(0, split.tokens)
    assert tokens[-1] == split.corpus.eot_token
    ends = np.flatnonzero(tokens == split.corpus.eot_token)
    return [split.corpus.tokenizer().decode(part[part != split.corpus.eot_token].tolist())
            for part in np.split(tokens, ends + 1)[:-1]]  # fmt: skip


def shards(corpus: Corpus) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in corpus.directory.glob("*.bin")}


def json_lines(documents: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in documents).encode()


def test_split_and_validation_order_match_hugging_face_datasets(
    documents: list[str], parquet: Path, rank_file: str, tmp_path: Path
):
    corpus = prepare(
        make_corpus("text_files", files=str(parquet)), rank_file, tmp_path, val_fraction=0.03, workers=1
    )
    split = datasets.Dataset.from_dict({"text": documents}).train_test_split(
        test_size=0.03, seed=2357, shuffle=True
    )
    assert decoded(corpus.val) == split["test"]["text"]
    assert sorted(decoded(corpus.train)) == sorted(split["train"]["text"])
    held_out = set(split_order(len(documents), 0.03, 2357).tolist())
    assert decoded(corpus.train) == [text for index, text in enumerate(documents) if index not in held_out]


@pytest.mark.parametrize(
    ("count", "fraction"), [(2, 0.01), (1999, 0.0005), (2001, 0.0005), (100_000, 0.0005)]
)
def test_split_order_matches_train_test_split_of_datasets(count: int, fraction: float):
    rows = datasets.Dataset.from_dict({"row": list(range(count))})
    expected = rows.train_test_split(test_size=fraction, seed=2357, shuffle=True)["test"]["row"]
    assert split_order(count, fraction, 2357).tolist() == list(expected)


def test_openwebtext_split_has_the_published_size():
    order = split_order(8_013_769, 0.0005, 2357)
    assert len(order) == len(np.unique(order)) == 4007


def test_tokens_are_those_of_encode_ordinary(
    documents: list[str], parquet: Path, rank_file: str, tmp_path: Path
):
    corpus = prepare(make_corpus("text_files", files=str(parquet)), rank_file, tmp_path, workers=1)
    encoding = load_tokenizer(rank_file)
    order = split_order(len(documents), 0.01, 2357).tolist()
    expected = [
        token
        for index in order
        for token in [*encoding.encode_ordinary(documents[index]), encoding.eot_token]
    ]
    assert corpus.val.read(0, 1 << 30).tolist() == expected
    counts = corpus.manifest
    assert sum(counts.documents.values()) == len(documents)
    assert sum(counts.utf8_bytes.values()) == sum(len(text.encode()) for text in documents)
    assert counts.tokens["train"] == sum(
        len(encoding.encode_ordinary(text)) + 1
        for index, text in enumerate(documents)
        if index not in set(order)
    )


def test_every_format_and_any_number_of_workers_give_the_same_tokens(documents, parquet, rank_file, tmp_path):
    lines = json_lines(documents)
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(lines))
    results = []
    for workers, files in enumerate(["a.jsonl", "b.jsonl.gz", "c.jsonl.zst"], 1):
        source = make_corpus("text_files", files=tmp_path / files)
        results.append(prepare(source, rank_file, tmp_path / files[0], workers=workers))
    results.append(prepare(make_corpus("text_files", files=str(parquet)), rank_file, tmp_path, workers=1))
    whole = [
        [corpus.train.read(0, 1 << 30).tolist(), corpus.val.read(0, 1 << 30).tolist()] for corpus in results
    ]
    assert whole[0] == whole[1] == whole[2] == whole[3]
    again = prepare(
        make_corpus("text_files", files=str(tmp_path / "a.jsonl")), rank_file, tmp_path / "2", workers=2
    )
    assert len(shards(again)) > 3
    assert shards(again) == shards(results[0])


def test_a_long_document_is_cut_without_changing_its_tokens(
    documents: list[str], rank_file: str, tmp_path: Path
):
    long = "".join(documents).replace("\n", " ")
    (tmp_path / "a.txt").write_text(long)
    (tmp_path / "b.txt").write_text("short")
    corpus = prepare(
        make_corpus("text_files", files=str(tmp_path)), rank_file, tmp_path / "c", val_fraction=0.5, workers=2
    )
    assert sorted([decoded(corpus.train), decoded(corpus.val)]) == sorted([[long], ["short"]])
    encoding = load_tokenizer(rank_file)
    assert sum(corpus.manifest.tokens.values()) == sum(
        len(encoding.encode_ordinary(t)) + 1 for t in (long, "short")
    )


def with_ranks(name: str, ranks: dict[bytes, int], monkeypatch: pytest.MonkeyPatch) -> tiktoken.Encoding:
    """tiktoken's encoding of that name, with these ranks in place of its own, which are not here."""
    for load in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(openai_public, load, lambda *_, **__: {})
    pattern = getattr(openai_public, name)()["pat_str"]
    special = {END_OF_TEXT: len(ranks)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


@pytest.mark.parametrize("name", ["bytes", "gpt2", "cl100k_base", "o200k_base"])
def test_a_long_line_is_cut_without_changing_its_tokens(name: str, tmp_path: Path, monkeypatch):
    """Every pair of bytes is a token, so that a cut within a pre-token would change the tokens."""
    pairs = [bytes(pair) for pair in itertools.product(range(256), repeat=2)]
    ranks = {token: rank for rank, token in enumerate([*(bytes([value]) for value in range(256)), *pairs])}
    encoding = load_tokenizer(name) if name == "bytes" else with_ranks(name, ranks, monkeypatch)
    monkeypatch.setattr("data.tokenizer.load_tokenizer", lambda _: encoding)
    monkeypatch.setattr("data.tokenise.BLOCK_CHARACTERS", 20)
    letters = [
        *"   \t\n\r\x1c\x85\u00a0\u3000'.,_-/aZé\u0301東。、\uff0c1²\u0663🙂\ud83d",
        "\r\n",
        "'ll",
        "the",
        " a",
    ]
    choose = random.Random(0)
    texts = ["".join(choose.choices(letters, k=choose.randrange(200))) for _ in range(1000)]
    texts += ["", "x" * 100, "東" * 100, " " * 100, "1" * 100]  # no place to cut
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts))
    parts = make_corpus("text_files", files=tmp_path / "a.jsonl").parts(1 << 14)
    blocks = list(encode(parts, Workshop(tmp_path, f"pairs split as {name}", "<u4")))
    assert len(blocks) > 3 * len(texts)
    assert sum(documents for _, documents in blocks) == len(texts)
    expected = [token for text in texts for token in [*encoding.encode_ordinary(text), encoding.eot_token]]
    assert np.concatenate([tokens for tokens, _ in blocks]).tolist() == expected


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "blank"),
    [("gpt2", " "), ("gpt2", "\n"), ("cl100k_base", " "), ("cl100k_base", "\t"), ("o200k_base", " ")],
)
def test_blanks_that_overflow_tiktokens_stack_are_tokenised(
    name: str, blank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """tiktoken refuses the document. Its tokens are those of a thousand times fewer blanks, and more blanks."""
    merged = [blank.encode() * 2, blank.encode() * 4, b"the", b" the", b"\tthe"]
    ranks = {token: rank for rank, token in enumerate([*(bytes([value]) for value in range(256)), *merged])}
    encoding = with_ranks(name, ranks, monkeypatch)
    monkeypatch.setattr("data.tokenizer.load_tokenizer", lambda _: encoding)
    few, many = ("The end." + count * blank + "the next" for count in (1200, 1_200_000))
    (tmp_path / "a.txt").write_text(many)
    (tmp_path / "b.txt").write_text("short")
    with pytest.raises(ValueError, match="stack size"):
        encoding.encode_to_numpy(many)
    parts = make_corpus("text_files", files=str(tmp_path / "*.txt")).parts(1 << 30)
    blocks = encode(parts[:1], Workshop(tmp_path, f"{name} with {blank!r}", "<u4"))
    found = np.concatenate([tokens for tokens, _ in blocks]).tolist()
    expected, four = encoding.encode_ordinary(few), ranks[blank.encode() * 4]
    at = expected.index(four)
    assert found == [*expected[:at], *[four] * 299_700, *expected[at:], encoding.eot_token]


def test_a_text_that_tiktoken_cannot_encode_is_refused_with_its_file(tmp_path: Path, monkeypatch):
    """No encoding of tiktoken's has a pattern that fails here; one with another such weakness may come."""
    ranks = {bytes([value]): value for value in range(256)}
    encoding = tiktoken.Encoding(
        "weak", pat_str="[^!]+(?=!)|.", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256}
    )
    monkeypatch.setattr("data.tokenizer.load_tokenizer", lambda _: encoding)
    (tmp_path / "a.txt").write_text("x" * 1_200_000)
    (tmp_path / "b.txt").write_text("short")
    parts = make_corpus("text_files", files=str(tmp_path / "*.txt")).parts(1 << 30)
    with pytest.raises(DataError, match=rf"^{tmp_path}/a.txt: weak cannot encode the text that begins 'xxx"):
        list(encode(parts, Workshop(tmp_path, "weak", "<u4")))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says what the most memory was")
def test_memory_does_not_grow_with_file_size_and_little_with_line_length(tmp_path: Path):
    """Three lines of 20 MB take 135 MB; 197 MB with the tokens memory-mapped, 330 MB if all copies of a line stay."""
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(3):
            file.write(b'{"text": "%s"}\n' % (b"word " * 4_000_000))
    code = """if True:
        import sys
        from data.corpora import make_corpus
        from data.prepare import prepare
        prepare(make_corpus("text_files", files=sys.argv[1]), "bytes", sys.argv[1] + ".tokens", workers=1)
        print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) >> 10)"""
    command = [sys.executable, "-c", code, str(tmp_path / "a.jsonl.gz")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert int(done.stdout) < 165, done.stderr


def test_a_separator_splits_a_text_file_into_documents(documents: list[str], tmp_path: Path):
    texts = [text.replace("\n", " ") for text in documents if text]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    for separator in ("\n\n", r"\n\n"):  # as typed on a command line
        corpus = prepare(
            make_corpus("text_files", files=str(tmp_path), separator=separator), "bytes", tmp_path, workers=1
        )
        order = split_order(len(texts), 0.01, 2357)
        assert decoded(corpus.val) == [texts[index] for index in order]
        assert sum(corpus.manifest.documents.values()) == len(texts)


def test_a_file_without_the_separator_is_one_document_and_said_to_be(tmp_path: Path, monkeypatch):
    """The first is read in blocks that end within the separator."""
    monkeypatch.setattr("data.cuts.SEARCH_BYTES", 4)
    for name, text in {"a": "12\n\n\nthree", "b": "a\nb", "c": "c"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    source = make_corpus("text_files", files=str(tmp_path), separator="\n\n\n")
    recorder = Recorder()
    corpus = prepare(source, "bytes", tmp_path / "cache", progress=recorder)
    assert sorted(decoded(corpus.train) + decoded(corpus.val)) == ["12", "a\nb", "c", "three"]
    words = rf"data.separator='\n\n\n' is missing in 2 of 3 .txt files ({tmp_path}/b.txt, ...)"
    assert recorder.said[0] == f"{words}: each is one document"


def test_a_limit_takes_the_first_documents(documents: list[str], parquet: Path, tmp_path: Path):
    recorder = Recorder()
    corpora = [
        prepare(
            make_corpus("text_files", files=str(parquet), limit_documents=170),
            "bytes",
            tmp_path / str(w),
            workers=w,
            progress=recorder,
        )
        for w in (1, 2)
    ]
    for corpus in corpora:
        assert sorted(decoded(corpus.train) + decoded(corpus.val)) == sorted(documents[:170])
    assert max(recorder.totals) < 2 * sum(map(len, documents[:170])) < sum(map(len, documents))
    assert shards(corpora[0]) == shards(corpora[1])
    assert corpora[0].name == "text_files-first-170"


def test_python_source_takes_py_files_but_no_installed_packages(tmp_path: Path):
    for name, text in {
        "a.py": "x = 1\n",
        "b/c.py": "y = '東'\n",
        "site-packages/d.py": "no",
        "e.txt": "no",
        "f.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    roots = [str(tmp_path), str(tmp_path / "b")]  # a folder named twice is read once
    corpus = prepare(make_corpus("python_source", roots=roots), "bytes", tmp_path / "cache")
    assert sorted(decoded(corpus.train) + decoded(corpus.val)) == ["x = 1\n", "y = '東'\n"]
    assert any(path.name == "argparse.py" for path in make_corpus("python_source").paths())
    (tmp_path / "site-packages" / "g.txt").write_text("text files are taken wherever they are")
    assert len(make_corpus("text_files", files=str(tmp_path)).paths()) == 2


def test_a_finished_corpus_is_reused_until_its_source_is_edited(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")
    source = make_corpus("text_files", files=str(tmp_path / "*.txt"), separator="\n\n")
    first, again = Recorder(), Recorder()
    corpus = prepare(source, "bytes", tmp_path, progress=first)
    assert prepare(source, "bytes", tmp_path, progress=again).directory == corpus.directory
    assert "tokenising" in first.stages
    assert "B free" in first.said[0]
    assert again.stages == again.said == []
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree\n\nfour")
    assert prepare(source, "bytes", tmp_path).directory != corpus.directory


def test_the_fingerprint_is_that_of_the_tokens_not_of_the_files(rank_file: str, tmp_path: Path):
    """What decides on resume: a text may be moved, copied or touched, but not edited."""

    def fingerprint(files: str, tokenizer: str = "bytes", val_fraction: float = 0.01) -> str:
        source = make_corpus("text_files", files=str(tmp_path / files), separator="\n\n")
        return prepare(source, tokenizer, tmp_path / "cache", val_fraction=val_fraction).fingerprint

    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")
    before = fingerprint("a.txt")
    os.utime(tmp_path / "a.txt", (0, 0))
    assert fingerprint("a.txt") == before
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert fingerprint("b.txt") == before
    assert len(list((tmp_path / "cache").iterdir())) == 3
    only_bytes = tmp_path / "bytes.tiktoken"
    only_bytes.write_text("".join(Path(rank_file).read_text().splitlines(keepends=True)[:256]))
    others = {
        fingerprint("b.txt", val_fraction=0.5),  # the same documents, split otherwise
        fingerprint("b.txt", str(only_bytes)),  # the same token ids, of another tokenizer
    }
    (tmp_path / "b.txt").write_text("one\n\ntwo\n\nthred")
    others.add(fingerprint("b.txt"))
    assert len(others | {before}) == 4


def test_empty_documents_are_kept_and_lone_surrogates_replaced(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.jsonl").write_bytes(
        b'{"text": ""}\n\n{"text": null}\n{"text": "a\\ud800b"}\n{"text": "c"}\n'
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), tmp_path / "d.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["", None, "e"]}), tmp_path / "e.parquet")
    corpus = prepare(
        make_corpus("text_files", files=str(tmp_path)), "bytes", tmp_path / "c", val_fraction=0.2
    )
    assert sorted(decoded(corpus.train) + decoded(corpus.val)) == ["", "", "", "", "a\ufffdb", "c", "e"]


def test_invalid_utf8_in_source_code_is_replaced_not_refused(tmp_path: Path):
    """The standard library's tests have such files."""
    (tmp_path / "a.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "b.py").write_bytes(b"x\n")
    corpus = prepare(make_corpus("python_source", roots=[str(tmp_path)]), "bytes", tmp_path / "cache")
    assert sorted(decoded(corpus.train) + decoded(corpus.val)) == ["# caf\ufffd\n", "x\n"]


def test_a_separator_is_found_across_search_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also after many blocks that contain no separator."""
    monkeypatch.setattr("data.cuts.SEARCH_BYTES", 5)
    monkeypatch.setattr("data.prepare.SHARD_BYTES", 50)
    texts = ["é" * length for length in (1, 7, 300, 3, 30, 31, 32, 33, 90, 2)]
    (tmp_path / "a.txt").write_text("<end>".join(texts))
    source = make_corpus("text_files", files=str(tmp_path / "a.txt"), separator="<end>")
    corpus = prepare(source, "bytes", tmp_path, workers=1)
    assert sorted(decoded(corpus.train) + decoded(corpus.val)) == sorted(texts)
    assert len(corpus.manifest.shards) > 4


def test_a_separator_typed_as_escapes_matches_windows_line_ends(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo")
    source = make_corpus("text_files", files=str(tmp_path / "a.txt"), separator=r"\r\n\r\n")
    corpus = prepare(source, "bytes", tmp_path)
    assert sorted(decoded(corpus.train) + decoded(corpus.val)) == ["one", "two"]


def test_a_byte_order_mark_at_the_start_of_a_file_is_dropped(tmp_path: Path):
    """PowerShell, Notepad and Excel write one; anywhere else U+FEFF is a character of the text."""
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n{"text": "second"}\n', encoding="utf-8-sig")
    (tmp_path / "b.txt").write_text("third \ufeff", encoding="utf-8-sig")
    corpus = prepare(make_corpus("text_files", files=str(tmp_path)), "bytes", tmp_path / "cache")
    assert sorted(decoded(corpus.train) + decoded(corpus.val)) == ["first", "second", "third \ufeff"]


@pytest.mark.parametrize("kind", ["string_view", "large_string", "dictionary"])
def test_every_arrow_string_type_is_read_as_text(kind: str, tmp_path: Path):
    """A categorical column of pandas becomes a dictionary."""
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.array(["one", "two", "one"])
    texts = texts.dictionary_encode() if kind == "dictionary" else texts.cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    corpus = prepare(make_corpus("text_files", files=str(tmp_path)), "bytes", tmp_path / "cache")
    assert sorted(decoded(corpus.train) + decoded(corpus.val)) == ["one", "one", "two"]


def test_a_file_name_with_brackets_is_not_taken_for_a_glob(tmp_path: Path):
    (tmp_path / "a[1].txt").write_text("one\n\ntwo")
    corpus = prepare(
        make_corpus("text_files", files=str(tmp_path / "a[1].txt"), separator="\n\n"), "bytes", tmp_path
    )
    assert sorted(decoded(corpus.train) + decoded(corpus.val)) == ["one", "two"]


def test_a_folder_or_file_linked_twice_is_read_once(tmp_path: Path):
    """As globs do. A link to the folder that contains the link adds nothing."""
    for name in ("texts/a.txt", "elsewhere/b.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    for link, target in {"one": "elsewhere", "two": "elsewhere", "around": "texts"}.items():
        (tmp_path / "texts" / link).symlink_to(tmp_path / target)
    folder = str(tmp_path / "texts")
    files = [tmp_path / "texts" / "a.txt", tmp_path / "texts" / "one" / "b.txt"]
    (tmp_path / "texts" / "b.txt").symlink_to("a.txt")  # a file by another name
    for patterns in (folder, f"{folder}/**/*.txt", f"{folder}/**", [folder, f"{folder}/around/a.txt"]):
        assert make_corpus("text_files", files=patterns).paths() == files
    # two of these would keep a glob of Python's busy for ever
    (tmp_path / "texts" / "again").symlink_to(tmp_path / "texts")
    assert make_corpus("text_files", files=f"{folder}/**/one/**/*.txt").paths() == files[1:]


def test_a_recursive_glob_finds_what_globs_of_python_find(tmp_path: Path):
    for name in ("a.txt", "b/a.txt", "b/c/a.txt", "b/c/d.txt", ".hidden/a.txt", "b/.e/a.txt", "[x]/c/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for pattern in (
        "**",
        "**/a.txt",
        "**/c/*.txt",
        "b/**/*.txt",
        "**/b/**",
        "*/**/c/**/a*",
        "[[]x]/**/*.txt",
    ):
        found = make_corpus("text_files", files=f"{tmp_path}/{pattern}").paths()
        matches = sorted(map(Path, glob.glob(f"{tmp_path}/{pattern}", recursive=True)))
        assert found == [match for match in matches if match.is_file()], pattern


def test_a_tilde_in_a_path_means_the_home_folder(
    rank_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A shell does not expand it in data.cache_dir=~/tokens."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("x = 1\n")
    (tmp_path / "code" / "b.py").write_text("y = 2\n")
    (tmp_path / "small.tiktoken").write_bytes(Path(rank_file).read_bytes())
    source = make_corpus("python_source", roots=["~/code"])
    corpus = prepare(source, "~/small.tiktoken", "~/tokens")
    # the manifest holds absolute paths, so that a repair finds the files from any folder
    assert corpus.manifest.tokenizer["name"] == str(tmp_path / "small.tiktoken")
    assert corpus.manifest.source["roots"] == [str(tmp_path / "code")]
    assert make_corpus("text_files", files="~/*.txt").arguments["files"] == (f"{tmp_path}/*.txt",)
    monkeypatch.chdir(tmp_path)
    assert make_corpus("python_source", roots="code") == source
    assert corpus.directory.parent == tmp_path / "tokens"
    assert sorted(decoded(corpus.train) + decoded(corpus.val)) == ["x = 1\n", "y = 2\n"]


def test_a_large_vocabulary_is_stored_in_uint32(tmp_path: Path):
    pairs = [bytes([i, j]) for i in range(128, 256) for j in range(256)]
    tokens = [*(bytes([i]) for i in range(256)), *pairs, *(b"\xff" + pair for pair in pairs)]
    ranks = tmp_path / "large.tiktoken"
    ranks.write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    )
    (tmp_path / "a.txt").write_text("zz\n\nzz zz\n\nÿÿ")
    source = make_corpus("text_files", files=str(tmp_path / "a.txt"), separator="\n\n")
    corpus = prepare(source, str(ranks), tmp_path)
    assert corpus.manifest.dtype == "<u4"
    assert corpus.eot_token == 65792
    assert sorted(decoded(corpus.train) + decoded(corpus.val)) == ["zz", "zz zz", "ÿÿ"]


def test_a_corpus_refuses_a_tokenizer_other_than_its_own(parquet: Path, rank_file: str, tmp_path: Path):
    source = make_corpus("text_files", files=str(parquet))
    corpus = prepare(source, "bytes", tmp_path, workers=1)
    with pytest.raises(DataError, match="made with tokenizer bytes"):
        corpus.tokenizer(rank_file)
    assert prepare(source, rank_file, tmp_path, workers=1).directory != corpus.directory


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no finished corpus"),
        (b"{", "damaged"),
        (b'{"version": 99}', "version 99, but this code reads version 2"),
    ],
)
def test_a_corpus_without_a_valid_manifest_is_refused(content: bytes | None, words: str, tmp_path: Path):
    (tmp_path / "train-00000.bin").write_bytes(b"\0" * 100)
    if content is not None:
        (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=words):
        open_corpus(tmp_path)


def test_a_manifest_edited_after_preparation_is_refused(parquet: Path, tmp_path: Path):
    corpus = prepare(make_corpus("text_files", files=str(parquet)), "bytes", tmp_path, workers=1)
    path = corpus.directory / "manifest.json"
    content = path.read_text()
    assert open_corpus(corpus.directory).manifest == corpus.manifest
    tokens = corpus.manifest.tokens["train"]
    path.write_text(content.replace(f'"train": {tokens}', f'"train": {tokens - 1}'))
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        open_corpus(corpus.directory)


@pytest.mark.parametrize("file", ["train-00001.bin", "val-00000.bin"])
@pytest.mark.parametrize("harm", ["truncated", "flipped", "removed"])
def test_a_damaged_shard_is_named_with_the_command_that_rebuilds_it(file, harm, parquet, rank_file, tmp_path):
    from data.inspect import main

    cache = tmp_path / "a folder; of mine"
    corpus = prepare(make_corpus("text_files", files=str(parquet)), rank_file, cache, workers=1)
    good = shards(corpus)
    path = corpus.directory / file
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content if harm == "flipped" else content[:-2])
    if harm == "removed":
        path.unlink()
    with pytest.raises(DataError, match=f"{file}.*python -m data.inspect .* --repair {file}") as refusal:
        open_corpus(corpus.directory)
    command = shlex.split(str(refusal.value).split("python -m data.inspect ")[1])
    untouched = {name: os.stat(corpus.directory / name).st_mtime_ns for name in good if name != file}
    assert main(command) == 0
    assert shards(open_corpus(corpus.directory)) == good
    assert untouched == {name: os.stat(corpus.directory / name).st_mtime_ns for name in untouched}


def test_a_corpus_with_an_interrupted_repair_is_checked_again(parquet: Path, tmp_path: Path):
    source = make_corpus("text_files", files=str(parquet))
    corpus = prepare(source, "bytes", tmp_path, workers=1)
    os.truncate(corpus.directory / "train-00000.bin", 10)
    (corpus.directory / "partial").mkdir()
    with pytest.raises(DataError, match=r"train-00000\.bin has 10 bytes"):
        prepare(source, "bytes", tmp_path, workers=1)


def test_a_corpus_that_misses_its_published_counts_is_refused(parquet: Path, tmp_path: Path):
    class Published(TextFiles):
        def expected(self, tokenizer_sha256: str, val_fraction: float) -> dict[str, int]:
            return {"documents": 401, "train": 1, "val": 1}

    with pytest.raises(DataError, match=r"has .*'documents': 400.* published counts are .*'documents': 401"):
        prepare(Published((str(parquet),)), "bytes", tmp_path, workers=1)
    assert not list(tmp_path.glob("*/manifest.json"))


def test_published_counts_apply_only_to_full_openwebtext_with_gpt2():
    gpt2 = "701d1e8ec4feb249e776a30ce771000e6f6efa186ccf07fa614bd7d2b2701688"
    published = {"documents": 8_013_769, "train": 9_035_582_198, "val": 4_434_897}
    assert make_corpus("openwebtext").expected(gpt2, 0.0005) == published
    assert make_corpus("openwebtext").expected(gpt2, 0.01) is None
    assert make_corpus("openwebtext").expected("another", 0.0005) is None
    assert make_corpus("openwebtext", limit_documents=10).expected(gpt2, 0.0005) is None
    assert make_corpus("openwebtext", files="*00001-of*").expected(gpt2, 0.0005) is None


def test_console_progress_shows_the_disk_and_a_bar_on_standard_error(parquet: Path, tmp_path: Path, capfd):
    prepare(
        make_corpus("text_files", files=str(parquet)),
        "bytes",
        tmp_path,
        workers=1,
        progress=ConsoleProgress(),
    )
    out, err = capfd.readouterr()
    assert out == ""
    assert "B free" in err
    assert "tokenising: 100%" in err
    assert "splitting: 100%" in err


def test_console_progress_in_a_file_is_not_redrawn_as_in_a_terminal(capfd):
    progress = ConsoleProgress()
    for done in (1, 2, 3):
        progress.advance("tokenising", done, 4)
        time.sleep(0.11)
    progress.advance("tokenising", 4, 4)
    said = ["tokenising: 25% of 4.00B", "tokenising: 100% of 4.00B, 00:00 left"]
    assert capfd.readouterr().err.splitlines() == said


def test_rank_0_prepares_and_shows_progress_even_if_rank_1_is_first(parquet: Path, tmp_path: Path):
    code = """if True:
        import sys
        from training.config import DataConfig
        from training.corpus import prepare_corpus
        files, cache, rank = sys.argv[1:]
        print("begins", flush=True)
        prepare_corpus(DataConfig("text_files", files=files, cache_dir=cache, workers=1), quiet=rank != "0")"""
    ranks, shown = {}, {}
    for rank in "10":  # rank 1 starts first
        ranks[rank] = subprocess.Popen(
            [sys.executable, "-c", code, str(parquet), str(tmp_path), rank],
            env={**os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert ranks[rank].stdout.readline() == "begins\n"
    for rank, process in ranks.items():
        _, shown[rank] = process.communicate(timeout=60)
        assert process.returncode == 0, shown[rank]
    assert "tokenising: 100%" in shown["0"]
    assert "another process" not in shown["0"]
    assert "tokenising" not in shown["1"]
