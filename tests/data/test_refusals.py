"""What cannot be prepared is refused in one line that names it, and leaves no corpus (2 s)."""

import errno
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data import DataError
from data.corpora import make_corpus
from data.prepare import prepare
from data.progress import Silence
from data.split import split_order


def refused(source_arguments: dict, cache: Path, workers: int = 1, **options) -> str:
    with pytest.raises(DataError) as refusal:
        prepare(make_corpus(**source_arguments), "bytes", cache, workers=workers, **options)
    assert "\n" not in str(refusal.value)
    assert not [*cache.glob("*/manifest.json"), *cache.glob("*/partial"), *cache.glob("*/.lock")]
    return str(refusal.value)


BAD_FILES = {
    "column.jsonl": (b'{"title": "x", "body": "y"}\n', r"no column 'text'.* title, body"),
    "number.jsonl": (b'{"text": 3}\n', "holds int, not text"),
    "list.jsonl": (b"[1]\n", "not an object"),
    "half.jsonl": (b'{"text": "a"}\n{"text": ', "byte 14 is not JSON"),
    "cut.jsonl.gz": (
        gzip.compress(b'{"text": "abcdefgh"}\n' * 1000)[:60],
        "cut.jsonl.gz: .*: get the file again",
    ),
    "cut.parquet": (b"PAR1 and nothing else", "cut.parquet cannot be read as parquet"),
    "one.txt": (b"a single document", r"has 1 document, .*data\.separator"),
    "windows.txt": (b"a\r\n\r\nb", r"windows.txt has Windows line ends.*data\.separator='\\r\\n\\r\\n'"),
    "unix.txt": (b"a\n\nb", r"unix.txt has Unix line ends.*data\.separator='\\n\\n'"),
    "lacking.txt": (b"a\nb", r"data\.separator='\\n\\n' is missing in 1 of 1 .txt files .*lacking.txt"),
    "empty.txt": (b"", "no .* file with text|all empty"),
    "separators.txt": (b"\n\n\n\n", "has 0 documents"),
    "blank.jsonl": (b'{"text": ""}\n{"text": ""}\n', r"has any text \(1 of 2 documents held out\)"),
    "table.csv": (b"a,b\n", r"not one of \.txt, \.jsonl.*such as CSV, use data=hub data\.repo=FOLDER"),
    "latin1.txt": (b"caf\xe9 au lait", r"latin1.txt: byte 3 \(0xe9\) is not UTF-8.*iconv"),
    "digits.jsonl": (b'{"text": "a", "n": %s}\n' % (b"9" * 5000), r"byte 0 is not JSON .*4300 digits"),
    "deep.jsonl": (b"[" * 100_000, r"byte 0 is not JSON .*recursion"),
    "notepad.txt": ("a\n\nb".encode("utf-16"), "it looks like UTF-16: iconv -f utf-16 -t utf-8"),
    "latin1.jsonl": (b'{"text": "a"}\n{"text": "\xff"}\n', r"latin1.jsonl: byte 24 \(0xff\) is not UTF-8"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_by_name(name: str, tmp_path: Path):
    content, words = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    arguments = {"source": "text_files", "files": str(tmp_path / name)}
    if name in ("separators.txt", "windows.txt", "latin1.txt", "notepad.txt", "lacking.txt"):
        arguments["separator"] = "\n\n"
    if name == "unix.txt":
        arguments["separator"] = "\r\n\r\n"
    message = refused(arguments, tmp_path / "cache")
    assert re.search(words, message), message


def test_one_text_without_a_separator_is_refused_before_it_is_read(tmp_path: Path):
    (tmp_path / "one.txt").write_text("a single document")
    with pytest.raises(DataError, match=r"has 1 document, .*data\.separator"):
        make_corpus("text_files", files=str(tmp_path / "one.txt")).parts(1 << 20)


def test_bad_parquet_columns_are_refused(parquet: Path, tmp_path: Path):
    files = {"source": "text_files", "files": str(parquet)}
    assert "has no column 'content'; it has text, id" in refused({**files, "column": "content"}, tmp_path)
    assert "column 'id' holds int64, not text" in refused({**files, "column": "id"}, tmp_path)
    twice = pyarrow.Table.from_arrays([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    files = {"source": "text_files", "files": str(tmp_path / "twice.parquet")}
    assert "twice.parquet has 2 columns 'text'" in refused(files, tmp_path)


def test_a_file_name_that_is_not_utf8_is_refused(parquet: Path, tmp_path: Path):
    try:
        shutil.copy(parquet / "part-0.parquet", os.fsencode(tmp_path) + b"/caf\xe9.parquet")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    assert "is not UTF-8" in refused({"source": "text_files", "files": str(tmp_path)}, tmp_path)


def test_text_that_changes_while_it_is_read_is_refused(tmp_path: Path):
    class Writer(Silence):
        def say(self, text: str) -> None:  # reports the disk space needed, after the files were listed
            (tmp_path / "a.txt").write_text("one, two, three and more")

    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    arguments = {"source": "text_files", "files": str(tmp_path)}
    assert "changed while they were read" in refused(arguments, tmp_path / "cache", progress=Writer())
    assert prepare(make_corpus(**arguments), "bytes", tmp_path / "cache", workers=1)


def test_bad_settings_are_refused(parquet: Path, tmp_path: Path):
    files = {"source": "text_files", "files": str(parquet)}
    assert "data.val_fraction=1.5: " in refused(files, tmp_path, val_fraction=1.5)
    assert "data.workers=0: " in refused(files, tmp_path, workers=0)
    assert "leaves none to train on" in refused(files, tmp_path, val_fraction=0.9999)
    assert "data.separator is for .txt files" in refused({**files, "separator": "x"}, tmp_path)
    assert "data.files" in refused({"source": "text_files"}, tmp_path)
    assert "nowhere" in refused({"source": "text_files", "files": "nowhere/*.txt"}, tmp_path)
    assert "python_source, text_files" in refused({"source": "c4"}, tmp_path)
    assert "data.repo" in refused({"source": "hub"}, tmp_path)
    assert "data.roots does not apply to source text_files" in refused({**files, "roots": ["/"]}, tmp_path)
    assert "data.split does not apply to source text_files" in refused({**files, "split": "test"}, tmp_path)
    assert "data.column does not apply" in refused({"source": "openwebtext", "column": "content"}, tmp_path)
    assert "40 hexadecimal digits" in refused({"source": "openwebtext", "revision": "main"}, tmp_path)
    assert "data.limit_documents=1: " in refused({**files, "limit_documents": 1}, tmp_path)
    assert "data.files" in refused({"source": "text_files", "files": ""}, tmp_path)
    for folder in ("/not/there", "~/not_there", "./there"):
        assert "there is no such folder" in refused({"source": "hub", "repo": folder}, tmp_path)
    assert "cannot read the folder /nowhere: No such" in refused(
        {"source": "python_source", "roots": ["/nowhere"]}, tmp_path
    )
    (tmp_path / "empty").mkdir()
    roots = {"source": "python_source", "roots": [str(Path(__file__).parent), str(tmp_path / "empty")]}
    assert f"no .py file with text below {tmp_path / 'empty'}" in refused(roots, tmp_path)


def test_a_folder_that_cannot_be_written_is_named(parquet: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    message = refused({"source": "text_files", "files": str(parquet)}, tmp_path / "file")
    assert str(tmp_path / "file") in message
    assert "data.cache_dir" in message


def test_a_folder_that_cannot_be_read_is_named_not_left_out(
    parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = shutil.copytree(parquet, tmp_path / "files")
    (folder / "closed").mkdir()
    scandir = os.scandir

    def closed(path):  # for root every folder is open
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    message = refused({"source": "text_files", "files": str(folder)}, tmp_path / "cache")
    assert f"cannot read the folder {folder / 'closed'}: Permission denied" in message


@pytest.mark.parametrize("name", ["closed.jsonl", "closed.txt"])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / name).write_text('{"text": "a"}\n\n{"text": "b"}\n')
    plain = open

    def closed(path, *args, **options):  # for root every file is open
        if str(path).endswith(name):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path, *args, **options)

    monkeypatch.setattr("builtins.open", closed)
    arguments = {"source": "text_files", "files": str(tmp_path / name)}
    if name == "closed.txt":
        arguments["separator"] = "\n\n"
    assert refused(arguments, tmp_path / "cache") == f"cannot read {tmp_path / name}: Permission denied"


@pytest.mark.slow
def test_the_space_estimate_allows_for_leading_empty_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each is one token and no text: judged by the first block alone, a byte of text would be 101 tokens."""
    monkeypatch.setattr("data.files.free_bytes", lambda path: 1 << 20)
    (tmp_path / "gaps.jsonl").write_text('{"text": ""}\n' * 20_000 + '{"text": "a"}\n' * 200)
    source = make_corpus("text_files", files=str(tmp_path / "gaps.jsonl"))
    corpus = prepare(source, "bytes", tmp_path / "cache", val_fraction=0.5, workers=1)
    assert sum(corpus.manifest.documents.values()) == 20_200


def test_too_little_disk_space_is_refused_before_preparation_starts(
    parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("data.files.free_bytes", lambda path: 1234)
    message = refused({"source": "text_files", "files": str(parquet)}, tmp_path)
    assert "not enough disk space" in message
    assert "1.23 kB free" in message


def test_a_validation_split_without_text_is_refused(tmp_path: Path):
    """Otherwise only the end of training would reveal it, in a division by the bytes of the split."""
    (held_out,) = split_order(4, 0.01, 2357)
    lines = [json.dumps({"text": "" if row == held_out else "text"}) for row in range(4)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    message = refused({"source": "text_files", "files": str(tmp_path / "a.jsonl")}, tmp_path / "cache")
    assert "has any text (1 of 4 documents held out)" in message
    assert "data.val_fraction" in message


SCRIPT = """
import data.prepare
from data.corpora import make_corpus
data.prepare.WORTH_A_PROCESS = 1
data.prepare.prepare(make_corpus("text_files", files="texts"), "bytes", "cache", workers=2)
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_refused_with_the_remedy(tmp_path: Path):
    """Its worker processes import it, would call its `prepare` in turn, and there wait for their own parent."""
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(b"word ")
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "needs `if __name__ == '__main__':` around its main code" in done.stderr
