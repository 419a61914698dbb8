"""The first step of a preparation: parts of text -> tokens, with an end-of-text token after each document."""

import re
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import chain, pairwise, starmap

import numpy as np
import tiktoken

from . import DataError
from .ahead import ahead
from .files import written_whole
from .parts import CUT, Part
from .tokenizer import byte_lengths, load_encoder
from .workshop import Workshop

BLOCK_CHARACTERS = 1 << 20
# A multiple of the longest token of blanks; not the last blank of a run, which belongs to the next word.
_MANY_BLANKS = re.compile(r"\s{65536}(?=\s)")


def tokenise_unit(workshop: Workshop, unit: int, parts: list[Part], limit: int | None) -> int:
    """Write the staged file of a unit, at most `limit` documents of it; return the number of documents."""
    documents = size = 0
    with written_whole(workshop.staged(unit), workshop.partial) as file:
        for tokens, ends in encode(parts, workshop, limit):
            documents += ends
            size += len(tokens)
            file.write(tokens.data)
    workshop.record_staged(unit, documents, size)
    return documents


def measure(parts: list[Part], workshop: Workshop) -> tuple[float, float]:
    """Return tokens per byte and bytes per document, measured on the first block of text."""
    with closing(encode(parts, workshop)) as blocks:
        tokens, documents = next(blocks, (np.empty(0, np.int64), 0))
    utf8_bytes = max(1, int(byte_lengths(workshop.tokenizer)[tokens].sum(dtype=np.int64)))
    # Empty documents are a token each and no text; in a file they take more than a byte.
    return min(1.0, len(tokens) / utf8_bytes), utf8_bytes / max(1, documents)


def encode(
    parts: list[Part], workshop: Workshop, limit: int | None = None
) -> Generator[tuple[np.ndarray, int], None, None]:
    """Yield the tokens of the parts, block by block, with the number of documents that end in the block."""
    encoding = load_encoder(workshop.tokenizer)
    documents = 0
    end_of_text = np.array([encoding.eot_token], np.uint32)
    # a thread reads the next blocks while this one tokenises, which frees the GIL
    with closing(ahead(_blocks(parts), depth=2)) as blocks:
        for block in blocks:
            tokens = []
            before = documents
            for text, ends, where in block:
                tokens.append(_encode_text(encoding, text, where))
                if ends:
                    tokens.append(end_of_text)
                    documents += 1
                    if documents == limit:
                        break
            yield np.concatenate(tokens, dtype=workshop.dtype, casting="unsafe"), documents - before
            if documents == limit:
                return


def _encode_text(encoding: tiktoken.Encoding, text: str, where: str) -> np.ndarray:
    try:
        # the tokens of encode_ordinary() without the Python list
        return encoding.encode_to_numpy(text, disallowed_special=())
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can escape and UTF-8 cannot hold
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return _encode_text(encoding, whole, where)
    except ValueError as error:  # a million blanks in a row overflow the stack of the regex engine
        cuts = [0, *(blanks.end() for blanks in _MANY_BLANKS.finditer(text)), len(text)]
        if len(cuts) == 2:
            raise DataError(
                f"{where}: {encoding.name} cannot encode the text that begins {text[:40]!r}: {error}"
            ) from None
        return np.concatenate([_encode_text(encoding, text[slice(*cut)], where) for cut in pairwise(cuts)])


def _blocks(parts: list[Part]) -> Iterator[list[tuple[str, bool, str]]]:
    """Yield the pieces, with the file of each, in blocks of about a million characters."""
    block, characters = [], 0
    for part in parts:
        where = getattr(part, "path", str(part))
        try:
            for piece in chain.from_iterable(starmap(_cut, part.pieces())):
                block.append((*piece, where))
                characters += len(piece[0])
                if characters >= BLOCK_CHARACTERS:
                    yield block
                    block, characters = [], 0
        except OSError as error:
            # pyarrow's own errors, of damaged compression, have no strerror
            reason = error.strerror or f"{error}: get the file again, then rerun the command"
            raise DataError(f"cannot read {where}: {reason}") from None
    if block:
        yield block


def _cut(text: str, ends: bool) -> Iterator[tuple[str, bool]]:
    """Cut a piece longer than a block: until they are written, its tokens take up to 8 times its memory."""
    start = 0
    while match := CUT.search(text, start + BLOCK_CHARACTERS):
        yield text[start : match.start()], False
        start = match.start()
    yield text[start:], ends
