"""Tokenizers by name and by file (2 s)."""

import base64
import hashlib
import os
import random
import shutil
import time
from pathlib import Path

import pytest
from tiktoken_ext import openai_public

from data import DataError
from data.tokenizer import load_encoder, load_tokenizer, tokenizer_hash

TEXT = "naïve <|endoftext|> 东京\r\n\x00 don't"


def test_the_bytes_tokenizer_encodes_utf8_bytes():
    encoding = load_tokenizer("bytes")
    assert encoding.encode_ordinary(TEXT) == list(TEXT.encode())
    assert (encoding.n_vocab, encoding.eot_token) == (257, 256)
    assert encoding.decode([*TEXT.encode(), 256]) == TEXT + "<|endoftext|>"


def test_a_rank_file_gives_merges_and_end_of_text_is_the_last_token(rank_file: str):
    encoding = load_tokenizer(rank_file)
    assert encoding.eot_token == encoding.n_vocab - 1 == len(Path(rank_file).read_text().splitlines())
    tokens = encoding.encode_ordinary(TEXT + " the tion")
    assert encoding.decode(tokens) == TEXT + " the tion"
    assert len(tokens) < len((TEXT + " the tion").encode())


def test_the_tokenizer_hash_depends_on_the_ranks_not_on_the_name(rank_file: str, tmp_path: Path):
    copy = shutil.copy(rank_file, tmp_path / "other.tiktoken")
    assert tokenizer_hash(load_tokenizer(str(copy))) == tokenizer_hash(load_tokenizer(rank_file))
    assert tokenizer_hash(load_tokenizer(rank_file)) != tokenizer_hash(load_tokenizer("bytes"))


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"IQ== 0\n", "256 single bytes"), (b"not a rank file", "base64"), (None, "cannot read")],
)
def test_a_bad_rank_file_is_refused(content: bytes | None, words: str, tmp_path: Path):
    path = tmp_path / "bad.tiktoken"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=words) as refusal:
        load_tokenizer(str(path))
    assert str(path) in str(refusal.value)


def test_an_unknown_tokenizer_name_lists_the_known_ones():
    with pytest.raises(DataError, match=r"no tokenizer 'gpt-2'.*bytes.*gpt2.*\.tiktoken"):
        load_tokenizer("gpt-2")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)


@pytest.mark.parametrize(("name", "suggested"), [("cl100k_base", True), ("o200k_harmony", False)])
def test_a_missing_vocabulary_suggests_a_rank_file_where_one_is_enough(
    name: str, suggested: bool, no_network: None
):
    with pytest.raises(DataError, match=rf"{name} is not in .*TIKTOKEN_CACHE_DIR") as refusal:
        load_tokenizer(name)
    assert (f"{name}.tiktoken" in str(refusal.value)) == suggested


def test_an_unreadable_cached_vocabulary_is_named_with_the_remedy(
    no_network: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cached = tmp_path / "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"
    cached.write_text("")
    plain = open

    def closed(path, *args, **options):  # for root every file is open
        if Path(path) == cached:
            raise PermissionError(13, "Permission denied", path)
        return plain(path, *args, **options)

    monkeypatch.setattr("builtins.open", closed)
    with pytest.raises(DataError, match=rf"cannot be read from {tmp_path} \(Permission denied\).*TIKTOKEN"):
        load_tokenizer("gpt2")


def test_a_vocabulary_without_network_names_the_files_to_provide(no_network: None, tmp_path: Path):
    start = time.perf_counter()
    with pytest.raises(DataError) as refusal:
        load_tokenizer("gpt2")
    assert time.perf_counter() - start < 10
    message = str(refusal.value)
    for part in (str(tmp_path), "TIKTOKEN_CACHE_DIR", "vocab.bpe", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
                 "encoder.json", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "r50k_base.tiktoken",
                 "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4", "data.tokenizer=", "gpt2.tiktoken"):  # fmt: skip
        assert part in message
    # the remedy that needs no file named by a hash comes first
    assert message.index("data.tokenizer=") < message.index("TIKTOKEN_CACHE_DIR")


@pytest.mark.skipif("TILEGPT_GPT2_RANKS" not in os.environ, reason="TILEGPT_GPT2_RANKS=path of gpt2.tiktoken")
def test_gpt2_loads_from_its_one_cached_rank_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from data.openwebtext import _GPT2_HASH

    ranks = os.environ["TILEGPT_GPT2_RANKS"]
    shutil.copy(ranks, tmp_path / "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    load_tokenizer.cache_clear()
    encoding = load_tokenizer("gpt2")
    assert (encoding.n_vocab, encoding.eot_token) == (50257, 50256)
    assert encoding.encode_ordinary("Hello world") == [15496, 995]
    assert tokenizer_hash(encoding) == tokenizer_hash(load_tokenizer(ranks)) == _GPT2_HASH
    cut = tmp_path / "gpt2-8192.tiktoken"
    cut.write_bytes(b"".join(Path(ranks).read_bytes().splitlines(keepends=True)[:8192]))
    small = load_tokenizer(str(cut))
    assert (small.n_vocab, small.eot_token) == (8193, 8192)
    assert small.encode_ordinary(" the of and") == encoding.encode_ordinary(" the of and")
    assert small.decode(small.encode_ordinary(TEXT)) == TEXT


def test_a_rank_file_of_another_split_pattern_is_refused(rank_file: str, tmp_path: Path):
    """Read with GPT-2's pattern, a cl100k_base.tiktoken would give other tokens than cl100k_base without a word."""
    path = tmp_path / "cl100k_base.tiktoken"
    lines = Path(rank_file).read_text().splitlines()
    path.write_text("\n".join([*lines, f"{base64.b64encode(b');').decode()} {len(lines)}"]))
    assert load_tokenizer(str(path)).encode_ordinary(");") == [len(lines)]
    load_tokenizer.cache_clear()
    path.write_text("\n".join([*lines, f"{base64.b64encode(b');' + bytes([10])).decode()} {len(lines)}"]))
    with pytest.raises(
        DataError, match=r"not made with GPT-2's split pattern.*its token '\);\\n' could never"
    ):
        load_tokenizer(str(path))


def test_a_file_of_tiktokens_own_is_that_encoding_under_any_name(tmp_path: Path, monkeypatch):
    """tiktoken knows its files by their hashes; here one of them is small."""
    path = tmp_path / "downloaded.tiktoken"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)))

    def cl100k_base() -> dict:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        ranks = openai_public.load_tiktoken_bpe("https://host/cl100k_base.tiktoken", expected_hash=digest)
        special = {"<|endoftext|>": 257, "<|fim_prefix|>": 258}
        return {
            "name": "cl100k_base",
            "pat_str": r"\S+|\s+",
            "mergeable_ranks": ranks,
            "special_tokens": special,
        }

    monkeypatch.setitem(openai_public.ENCODING_CONSTRUCTORS, "cl100k_base", cl100k_base)
    encoding = load_tokenizer(str(path))
    assert (encoding.name, encoding.eot_token, encoding.n_vocab) == ("cl100k_base", 257, 259)


def test_the_first_lines_of_a_rank_file_are_a_smaller_vocabulary(rank_file: str, tmp_path: Path):
    lines = Path(rank_file).read_text().splitlines(keepends=True)
    cut = tmp_path / "cut-260.tiktoken"
    cut.write_text("".join(lines[:260]))
    small, whole = load_tokenizer(str(cut)), load_tokenizer(rank_file)
    assert (small.name, small.n_vocab, small.eot_token) == ("cut-260", 261, 260)
    text = TEXT + " the tion"
    assert small.decode(small.encode_ordinary(text)) == text
    assert len(text.encode()) > len(small.encode_ordinary(text)) > len(whole.encode_ordinary(text))
    assert small._pat_str == openai_public.r50k_pat_str


@pytest.mark.skipif(
    "TILEGPT_CL100K_RANKS" not in os.environ, reason="TILEGPT_CL100K_RANKS=path of cl100k_base.tiktoken"
)
def test_cl100k_base_from_its_file_is_cl100k_base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    ranks = Path(os.environ["TILEGPT_CL100K_RANKS"])
    shutil.copy(ranks, tmp_path / "9b5ad71b2ce5302211f9c61530b329a4922fc6a4")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    copy = shutil.copy(ranks, tmp_path / "any.tiktoken")
    encoding = load_tokenizer(str(copy))
    assert tokenizer_hash(encoding) == tokenizer_hash(load_tokenizer("cl100k_base"))
    assert (encoding.n_vocab, encoding.eot_token) == (100277, 100257)
    cut = tmp_path / "cut.tiktoken"
    cut.write_bytes(b"".join(ranks.read_bytes().splitlines(keepends=True)[:8192]))
    with pytest.raises(DataError, match="not made with GPT-2's split pattern"):
        load_tokenizer(str(cut))


def test_the_fast_encoder_gives_the_same_tokens(rank_file: str):
    slow, fast = load_tokenizer(rank_file), load_encoder(rank_file)
    assert slow._pat_str != fast._pat_str
    choose = random.Random(0)
    alphabet = [
        *" \t\n\r\x0b\x1c\x85\u00a0\u2003\u3000'\u2019sdtmrvle09٣²½é東🙂_-?\x00",
        "'ll",
        "  ",
        "   ",
        "\r\n",
        " the",
    ]
    for length in (1, 2, 3, 5, 8, 20, 200):
        for _ in range(2000):
            text = "".join(choose.choices(alphabet, k=length))
            assert fast.encode_ordinary(text) == slow.encode_ordinary(text), ascii(text)
