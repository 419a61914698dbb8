"""Show what a prepared corpus contains, and check that it is intact.

    python -m data.inspect CORPUS_OR_RUN [--documents N] [--repair [SHARD]] [--tokenizer PATH]

CORPUS_OR_RUN is a corpus folder, or a run directory whose file `corpus` names one. Every shard is hashed; --repair
makes the damaged ones (or the named one) again from the source. Exits with 1 if the corpus is not whole.
"""

import argparse
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from . import DataError
from .files import readable
from .loader import Corpus, TokenSplit
from .manifest import corpus_folder
from .progress import ConsoleProgress, Progress
from .repair import rebuild_shard
from .workers import cpu_count

_SHOWN_CHARACTERS = 300
_ENOUGH_TOKENS = 4 * (_SHOWN_CHARACTERS + 1)  # a token has at least a byte, and a character at most four


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.inspect",
        # argparse would put the path last, where --repair takes it for a shard
        usage="%(prog)s CORPUS_OR_RUN [--documents N] [--repair [SHARD]] [--tokenizer PATH]",
        description=__doc__.splitlines()[0],
    )
    parser.add_argument(
        "path", metavar="CORPUS_OR_RUN", type=Path, help="a corpus folder, or a run directory"
    )
    parser.add_argument(
        "--documents", metavar="N", type=int, default=3, help="decoded documents to show (default 3)"
    )
    parser.add_argument(
        "--repair", nargs="?", const="", metavar="SHARD", help="rebuild the damaged shards, or this one"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="the corpus's tokenizer file, if it has moved")
    options = parser.parse_args(arguments)
    progress = ConsoleProgress()
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # any text, where the terminal or file is not UTF-8
    try:
        return inspect(options, progress)
    except DataError as error:
        progress.close()  # else tqdm draws its bar once more, after the error
        print(f"error: {error}", file=sys.stderr)
        return 1


@readable()
def inspect(options: argparse.Namespace, progress: Progress) -> int:
    """Do what was asked for; return the exit status."""
    corpus = Corpus(corpus_folder(options.path))
    if options.repair:
        rebuild_shard(corpus, options.repair, progress, options.tokenizer)
    damaged = check(corpus)
    if options.repair == "":
        for file in damaged:
            rebuild_shard(corpus, file, progress, options.tokenizer)
            print(f"rebuilt {file}")
        damaged = {}
    for file, reason in damaged.items():
        print(corpus.damaged(file, reason))
    if damaged:
        return 1
    describe(corpus)
    print_documents(corpus, options.documents, options.tokenizer)
    return 0


def check(corpus: Corpus) -> dict[str, str]:
    """Hash every shard; return what is wrong, by file."""
    with ThreadPoolExecutor(cpu_count()) as pool:  # hashing releases the GIL
        reasons = pool.map(lambda shard: corpus.damage(shard, hashed=True), corpus.manifest.shards)
        return {
            shard["file"]: reason
            for shard, reason in zip(corpus.manifest.shards, reasons, strict=True)
            if reason
        }


def describe(corpus: Corpus) -> None:
    manifest = corpus.manifest
    settings = ", ".join(
        f"{key}={value!r}" for key, value in manifest.source.items() if value not in ("", None, [], ())
    )
    print(f"corpus     {corpus.name} in {corpus.directory}")
    print(f"source     {settings}, state {manifest.state[:12]}")
    print(f"tokenizer  {manifest.tokenizer['name']}, {corpus.n_vocab:,} tokens, stored as {manifest.dtype}")
    print(f"shards     {len(manifest.shards)}, all with the sha256 in the manifest\n")
    print(f"{'split':<6}{'documents':>14}{'tokens':>18}{'UTF-8 bytes':>18}{'bytes/token':>13}")
    for split in (corpus.train, corpus.val):
        ratio = split.utf8_bytes / split.tokens
        print(
            f"{split.name:<6}{split.documents:>14,}{split.tokens:>18,}{split.utf8_bytes:>18,}{ratio:>13.2f}"
        )
    for split in (corpus.train, corpus.val):
        print_histogram(split)


def print_histogram(split: TokenSplit) -> None:
    """Print how many documents have how many tokens, in powers of two; the end-of-text token is not counted."""
    counts = np.zeros(64, np.int64)
    before = 0  # tokens of a document that began in an earlier shard
    for shard in split.shards:
        tokens = shard_tokens(split.corpus, shard)
        ends = np.flatnonzero(tokens == split.corpus.eot_token)
        if len(ends):
            lengths = np.diff(ends, prepend=-1 - before) - 1
            counts += np.bincount(np.frexp(lengths)[1], minlength=64)  # exponent e: 2^(e-1) <= length < 2^e
        before = before + len(tokens) if not len(ends) else len(tokens) - 1 - int(ends[-1])
    print(f"\ntokens per document, {split.name}")
    used = np.flatnonzero(counts)
    for exponent in range(used[0], used[-1] + 1):
        label = "0" if exponent == 0 else f"{1 << exponent - 1} to {(1 << exponent) - 1}"
        bar = "#" * int(np.ceil(50 * counts[exponent] / counts.max()))
        print(f"{label:>20} {counts[exponent]:>12,} {bar}".rstrip())


def print_documents(corpus: Corpus, count: int, tokenizer: str | None) -> None:
    """Print the beginnings of the first validation documents."""
    encoding = corpus.tokenizer(tokenizer)
    (shard,) = corpus.val.shards
    tokens = shard_tokens(corpus, shard)
    start = 0
    for number, end in enumerate(np.flatnonzero(tokens == corpus.eot_token)[: max(0, count)].tolist()):
        text = encoding.decode(tokens[start : min(end, start + _ENOUGH_TOKENS)].tolist())
        shown = text[:_SHOWN_CHARACTERS] + ("..." if len(text) > _SHOWN_CHARACTERS else "")
        print(f"\nvalidation document {number}: {end - start:,} tokens\n{shown}")
        start = end + 1


def shard_tokens(corpus: Corpus, shard: dict[str, Any]) -> np.ndarray:
    """Return the tokens of a shard, memory-mapped by numpy: TokenSplit reads them through PyTorch, 2 s to import."""
    return np.memmap(corpus.directory / shard["file"], corpus.manifest.dtype, mode="r")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, as it ends cat
    sys.exit(main())
