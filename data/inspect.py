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

import numpy as np

from . import DataError
from .files import readable
from .loader import Corpus, TokenSplit
from .manifest import FILE
from .progress import ConsoleProgress, Progress
from .repair import rebuild_shard
from .workers import cpu_count

_SHOWN_CHARACTERS = 300


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.inspect", description=__doc__.splitlines()[0]
    )
    parser.add_argument("path", type=Path, help="a corpus folder, or a run directory")
    parser.add_argument("--documents", type=int, default=3, help="decoded documents to show (default 3)")
    parser.add_argument(
        "--repair", nargs="?", const="", metavar="SHARD", help="rebuild the damaged shards, or this one"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="the corpus's tokenizer file, if it has moved")
    options = parser.parse_args(arguments)
    progress = ConsoleProgress()
    sys.stdout.reconfigure(errors="replace")  # any text, where the terminal or file is not of UTF-8
    try:
        return inspect(options, progress)
    except DataError as error:
        progress.close()  # else tqdm draws its bar once more, behind the error
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


def corpus_folder(path: Path) -> Path:
    """Return the corpus folder that `path` is, or that the run there was trained on."""
    named = path / "corpus"
    if not (path / FILE).exists() and named.is_file():
        return Path(named.read_text(encoding="utf-8").strip())
    if not path.is_dir():
        raise DataError(f"there is no folder {path}: name a corpus folder or a run directory")
    if runs := sorted(path.glob("*/corpus")):
        raise DataError(f"{path} holds runs: name one of them, for example {runs[0].parent}")
    if not (path / FILE).exists() and (corpora := sorted(path.glob(f"*/{FILE}"))):
        names = ", ".join(each.parent.name for each in corpora)
        raise DataError(f"{path} holds prepared corpora: name one of these folders in it: {names}")
    return path.absolute()


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
        f"{key}={value}" for key, value in manifest.source.items() if value not in ("", None, [], ())
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
    for index in range(len(split.shards)):
        tokens = split.shard_tokens(index)
        ends = np.flatnonzero(tokens == split.corpus.eot_token)
        if len(ends):
            lengths = np.diff(ends, prepend=-1 - before) - 1
            counts += np.bincount(np.frexp(lengths)[1], minlength=64)  # exponent e: 2^(e-1) <= length < 2^e
        before = before + len(tokens) if not len(ends) else len(tokens) - 1 - int(ends[-1])
    print(f"\ntokens per document, {split.name}")
    last = int(np.flatnonzero(counts)[-1])
    for exponent in range(int(np.flatnonzero(counts)[0]), last + 1):
        label = "0" if exponent == 0 else f"{1 << exponent - 1} to {(1 << exponent) - 1}"
        bar = "#" * int(np.ceil(50 * counts[exponent] / counts.max()))
        print(f"{label:>20} {counts[exponent]:>12,} {bar}".rstrip())


def print_documents(corpus: Corpus, count: int, tokenizer: str | None) -> None:
    """Print the beginnings of the first validation documents."""
    encoding = corpus.tokenizer(tokenizer)
    start = 0
    for number in range(min(count, corpus.val.documents)):
        text, length = "", 0
        while True:
            tokens = corpus.val.read(start + length, 1 << 16)
            end = np.flatnonzero(tokens == corpus.eot_token)
            if not text:
                text = encoding.decode(tokens[: end[0] if len(end) else len(tokens)].tolist())
            if len(end):
                break
            length += len(tokens)
        start += length + int(end[0]) + 1
        shown = text[:_SHOWN_CHARACTERS] + ("..." if len(text) > _SHOWN_CHARACTERS else "")
        print(f"\nvalidation document {number}: {length + int(end[0]):,} tokens\n{shown}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, as it ends cat
    sys.exit(main())
