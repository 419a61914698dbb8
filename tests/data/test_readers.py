"""Files are cut where no token changes, and long lines and rows are read as short ones are. 2 s."""

import base64
import json
import random
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data import DataError
from data.corpora import make_corpus
from data.read_parquet import parquet_parts
from data.read_text import text_parts
from data.tokenise import encode
from data.tokenizer import load_tokenizer
from data.workshop import Workshop


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_a_long_parquet_row_is_read_in_pieces_with_the_same_tokens(
    kind: str, tmp_path: Path, rank_file: Path, monkeypatch: pytest.MonkeyPatch
):
    """In pieces, since a single emoji makes a str take four times the memory."""
    monkeypatch.setattr("data.read_parquet.BATCH_BYTES", 1000)
    monkeypatch.setattr("data.parts.PIECE_BYTES", 1000)
    texts = [
        "the words, they said 🙂 and said again " * 300,
        "",
        "東京。それは、" * 400,
        "thé" * 2000,
        "short",
    ]
    column = pyarrow.array([text or None for text in texts])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    parts = make_corpus("text_files", files=tmp_path / "a.parquet").parts(1 << 20)
    pieces = [piece for part in parts for piece in part.pieces()]
    assert len(pieces) > 15
    assert "".join(text + "|" * ends for text, ends in pieces) == "".join(text + "|" for text in texts)
    encoding = load_tokenizer(str(rank_file))
    expected = [token for text in texts for token in [*encoding.encode_ordinary(text), encoding.eot_token]]
    blocks = encode(parts, Workshop(tmp_path, str(rank_file), "<u4"))
    assert np.concatenate([tokens for tokens, _ in blocks]).tolist() == expected


def test_a_long_json_line_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("data.read_json_lines.LONG_LINE", 1000)
    monkeypatch.setattr("data.parts.PIECE_BYTES", 1000)
    text = "the words, they said 🙂 and said again " * 300
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in (text, "short")))
    (part,) = make_corpus("text_files", files=tmp_path / "a.jsonl").parts(1 << 20)
    *pieces, (short, _) = part.pieces()
    assert short == "short"
    assert "".join(piece for piece, _ in pieces) == text
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 10


LINES = [
    b'{"text": "a\\n\\u00e9 \\ud83d\\ude42 \\"q\\" \\/ \\\\"}\n',
    '{"x": [1, {"y": 2}], "text": "é東🙂", "date": "2020-01-01"}\n'.encode(),
    b'  {"text" : "2020-01-01T00:00:00Z"}  \r\n',
    b'{"text": "a", "text": "b"}\n',
    b'{"text": "nul \\u0000, half \\ud83d"}\n',
    b'{"text": "x", "big": 123456789012345678901234567890, "n": NaN}\n',
    b'\xef\xbb\xbf{"text": "behind a mark"}\n',
    b'{"text": ""}\n',
    b'{"text": null}\n',
    b'{"title": "x"}\n',
    b'{"text": 3}\n',
    b'{"text": "a"} {"text": "b"}\n',
    b'{"text": "tab\there"}\n',
    b'{"text": "\xff"}\n',
    b"[1]\n",
    b'{"text": "no end of the line"}',
]


@pytest.mark.parametrize("line", LINES)
def test_a_long_line_is_read_or_refused_as_a_short_one(line: bytes, tmp_path: Path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(line)

    def read() -> list[tuple[str, bool]] | str:
        try:
            (part,) = make_corpus("text_files", files=tmp_path / "a.jsonl").parts(1 << 20)
            return list(part.pieces())
        except DataError as error:
            return str(error)

    short = read()
    monkeypatch.setattr("data.read_json_lines.LONG_LINE", 0)
    assert read() == short


@pytest.mark.parametrize(("separator", "letters"), [("\n\n", "\nx"), ("\r\n\r\n", "\r\nx"), ("aba", "abx")])
def test_splitting_a_file_into_parts_keeps_its_documents(
    separator: str, letters: str, tmp_path: Path, monkeypatch
):
    """A separator can overlap another: of three newlines the first two end a document, the third begins one."""
    choose = random.Random(0)
    for block in (1, 3, 1000):
        monkeypatch.setattr("data.cuts.SEARCH_BYTES", block)
        for _ in range(50):
            text = "".join(choose.choices(letters, k=60))
            (tmp_path / "a.txt").write_bytes(text.encode())
            parts = text_parts(tmp_path / "a.txt", 7, separator)
            documents = [document for part in parts for document, _ in part.pieces()]
            assert documents == [document for document in text.split(separator) if document], repr(text)


def test_cjk_text_is_cut_at_its_punctuation_never_within_a_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("data.cuts.SEARCH_BYTES", 40)
    path = tmp_path / "a.txt"
    path.write_text("東京は大きい。京都は古い、" * 20, encoding="utf-8")
    for step in range(10, 60):
        first, *others = ([text for text, _ in part.pieces()] for part in text_parts(path, step))
        assert len(others) > 5
        assert not first[0].startswith(("。", "、"))
        assert all(text.startswith(("。", "、")) for (text,) in others)
    path.write_text("東京", encoding="utf-8")
    for step in range(1, 7):  # also where the last part would begin within the last character
        pieces = [text for part in text_parts(path, step) for text, _ in part.pieces()]
        assert "".join(pieces) == "東京"


def test_text_is_never_cut_beside_an_ideographic_space(tmp_path: Path):
    """U+3000 and a space are one piece of white space, and can be one token."""
    tokens = [bytes([value]) for value in range(256)]
    tokens += ["\u3000".encode()[:2], "\u3000".encode(), "\u3000 ".encode()]
    ranks = tmp_path / "wide.tiktoken"
    ranks.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens)))
    text = "東京\u3000 \u3000x x" * 20
    (tmp_path / "a.txt").write_text(text)
    encoding = load_tokenizer(str(ranks))
    for step in range(5, 15):
        parts = text_parts(tmp_path / "a.txt", step)
        assert len(parts) > 10
        pieces = [piece for part in parts for piece, _ in part.pieces()]
        tokens = [token for piece in pieces for token in encoding.encode_ordinary(piece)]
        assert tokens == encoding.encode_ordinary(text)


def test_reading_time_stays_linear_with_thousands_of_row_groups(tmp_path: Path):
    """With the metadata parsed again for each row group, these 2,000 took 8 s, and 8,000 took 180 s."""
    texts = [f"row {row}" for row in range(4000)]
    table = pyarrow.table({"text": texts, "id": texts, "url": texts})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=2)
    start = time.process_time()
    parts = parquet_parts(tmp_path / "rows.parquet", 8 << 20, "text")
    assert [piece for part in parts for piece in part.pieces()] == [(text, True) for text in texts]
    assert time.process_time() - start < 3
