"""Tokenizers are tiktoken encodings: one of tiktoken's own by name, `bytes`, or a local `.tiktoken` rank file."""

import base64
import binascii
import hashlib
import os
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken_ext import openai_public  # type: ignore[import-untyped]

from . import DataError

END_OF_TEXT = "<|endoftext|>"

_HOST = "https://openaipublic.blob.core.windows.net"
_GPT2_FILES = (f"{_HOST}/gpt-2/encodings/main/vocab.bpe", f"{_HOST}/gpt-2/encodings/main/encoder.json")
# The rank file of an encoding is named after it, but for these.
_SAME_RANKS = {"gpt2": "r50k_base", "p50k_edit": "p50k_base", "o200k_harmony": "o200k_base"}
_ENCODINGS = ("gpt2", "r50k_base", "p50k_base", "p50k_edit", "cl100k_base", "o200k_base", "o200k_harmony")
FAST_GPT2_PATTERN = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)" + r"|\s++$|\s+(?!\S)|\s"
_SECONDS = 5
_BY_PATH = "with data.tokenizer=PATH (or --tokenizer PATH, where a command has that)"


def findable(name: str) -> str:
    """Return `name` so that it works from any folder: for a `.tiktoken` file its absolute path, with ~ expanded."""
    return str(Path(name).expanduser().absolute()) if name.endswith(".tiktoken") else name


@lru_cache(maxsize=4)
def load_tokenizer(name: str) -> tiktoken.Encoding:
    """Return the encoding called `name`.

    `bytes`: the 256 byte values, and <|endoftext|> = 256. The path of a `.tiktoken` file of tiktoken's own: that
    encoding. Another `.tiktoken` file: its ranks with GPT-2's split pattern, and <|endoftext|> after the last one, so
    the first lines of GPT-2's are a smaller vocabulary. Anything else: tiktoken's encoding of that name, whose
    vocabulary tiktoken keeps in TIKTOKEN_CACHE_DIR and downloads at first use.

    Raises DataError when there is no such encoding, its vocabulary is neither on disk nor within reach, or the tokens
    of a file are not those of GPT-2's split pattern.
    """
    if name == "bytes":
        ranks = {bytes([value]): value for value in range(256)}
        # how the text is split changes nothing where nothing merges; in 64s it is 4 times as fast as one by one
        return tiktoken.Encoding(
            "bytes", pat_str=r"[\s\S]{1,64}", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256}
        )
    if name.endswith(".tiktoken"):
        return _load_rank_file(Path(findable(name)))
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(sorted(["bytes", *tiktoken.list_encoding_names()]))
        raise DataError(
            f"there is no tokenizer {name!r}: choose one of {known}, or the path of a .tiktoken rank file"
        )
    if name == "gpt2" and _cached(_rank_url("gpt2")):
        name = "r50k_base"  # the same ranks and pattern, from one file instead of two
    elif name in _ENCODINGS:
        _require_vocabulary(name)
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:
        raise DataError(
            f"the vocabulary of {name} cannot be read from {_cache_dir()} ({error.strerror or error}): set "
            "TIKTOKEN_CACHE_DIR to a readable folder"
        ) from None


@lru_cache(maxsize=4)
def load_encoder(name: str) -> tiktoken.Encoding:
    """Return an encoding that turns text into the tokens of load_tokenizer(name), faster where one is known.

    GPT-2's split pattern needs a look-ahead for white space, which keeps the regex engine in its slow, backtracking
    mode for every alternative. With the other alternatives in one group it runs them in its fast mode: 23 instead
    of 13 MB/s on one core. They are tried in the same order, and a greedy run that nothing follows in the pattern
    is the same as a possessive one, so the pieces are the same.
    """
    encoding = load_tokenizer(name)
    if encoding._pat_str != openai_public.r50k_pat_str:
        return encoding
    return tiktoken.Encoding(
        encoding.name,
        pat_str=FAST_GPT2_PATTERN,
        mergeable_ranks=encoding._mergeable_ranks,
        special_tokens=encoding._special_tokens,
    )


def tokenizer_hash(encoding: tiktoken.Encoding) -> str:
    """Return the sha256 of all that decides the tokens: ranks, split pattern and special tokens, not the name."""
    digest = hashlib.sha256(encoding._pat_str.encode())
    for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
        digest.update(b"%d %s\n" % (rank, binascii.hexlify(token)))
    for name, rank in sorted(encoding._special_tokens.items()):
        digest.update(f"{rank} {name}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def byte_lengths(name: str) -> np.ndarray:
    """Return how many bytes of text each token stands for; 0 for the special ones."""
    encoding = load_tokenizer(name)
    lengths = np.zeros(encoding.n_vocab, np.uint16)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def _load_rank_file(path: Path) -> tiktoken.Encoding:
    try:
        content = path.read_bytes()
        pairs = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    except OSError as error:
        raise DataError(
            f"cannot read the tokenizer file {path} ({error.strerror}): put it there, or say where it is {_BY_PATH}"
        ) from None
    except ValueError:
        raise DataError(
            f"{path} is not a rank file: each line must be a base64 token, a space and a rank"
        ) from None
    if known := _of_tiktoken(content, ranks):
        return known
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(
            f"{path} is not a complete rank file: it needs the 256 single bytes and ranks 0 to n-1; get it again"
        )
    encoding = tiktoken.Encoding(
        path.stem,
        pat_str=openai_public.r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
    )
    for token, rank in ranks.items():
        with suppress(UnicodeDecodeError):
            if encoding.encode_ordinary(token.decode()) != [rank]:
                raise DataError(
                    f"{path} was not made with GPT-2's split pattern, by which it would be read: its token "
                    f"{token.decode()!r} could never occur; of tiktoken's encodings name the whole file, or just the "
                    "encoding"
                )
    return encoding


def _of_tiktoken(content: bytes, ranks: dict[bytes, int]) -> tiktoken.Encoding | None:
    """The encoding of tiktoken that a rank file belongs to, by the hash that tiktoken compares at a download."""
    digest = hashlib.sha256(content).hexdigest()
    load = openai_public.load_tiktoken_bpe
    try:
        for name in ("r50k_base", "p50k_base", "cl100k_base", "o200k_base"):
            openai_public.load_tiktoken_bpe = lambda _, expected_hash: (
                ranks if expected_hash == digest else {}
            )
            arguments = openai_public.ENCODING_CONSTRUCTORS[name]()
            if arguments["mergeable_ranks"]:
                return tiktoken.Encoding(**arguments)
    finally:
        openai_public.load_tiktoken_bpe = load
    return None


def _rank_url(name: str) -> str:
    return f"{_HOST}/encodings/{_SAME_RANKS.get(name, name)}.tiktoken"


def _cache_dir() -> Path:
    """The cache folder of tiktoken, by its own rules."""
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    return Path(os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default)))


def _cached(url: str) -> bool:
    return (_cache_dir() / _cache_name(url)).is_file()


def _cache_name(url: str) -> str:
    return hashlib.sha1(url.encode()).hexdigest()


def _require_vocabulary(name: str) -> None:
    """Fail within seconds where tiktoken, which sets no timeout, would wait for ever."""
    import requests

    urls = _GPT2_FILES if name == "gpt2" else (_rank_url(name),)
    if all(_cached(url) for url in urls):
        return
    try:
        requests.head(urls[0], timeout=_SECONDS).raise_for_status()
    except requests.RequestException as error:
        single = _rank_url(name)
        wanted = f"{Path(single).name} as {_cache_name(single)}"
        if name == "gpt2":
            wanted += " (or " + " and ".join(f"{Path(url).name} as {_cache_name(url)}" for url in urls) + ")"
        # the others have the ranks of an encoding, and further special tokens
        ranks = (
            "" if name in ("p50k_edit", "o200k_harmony") else f"name a local {name}.tiktoken {_BY_PATH}, or "
        )
        raise DataError(
            f"the vocabulary of {name} is not in {_cache_dir()} and cannot be downloaded "
            f"({type(error).__name__}): {ranks}"
            f"set TIKTOKEN_CACHE_DIR to a folder that holds {wanted}"
        ) from None
