"""Text -> tokens -> batches.

    corpora.py       sources of text by name: local_files.py, openwebtext.py, hub_dataset.py (network: hub.py)
    read_*.py        a file format each: a text is read in parts (parts.py), cut where no token changes (cuts.py)
    tokenizer.py     tiktoken encodings by name or by file
    prepare.py       corpus -> token shards and a manifest, in parallel, resumable: tokenise.py, split.py, workshop.py
    loader.py        token shards -> batches, by step number
    mix.py           several corpora as one, in given proportions: interleave.py
    inspect.py       `python -m data.inspect PATH`: what is in a corpus, and is it whole; repair.py, if it is not

Importing this package imports nothing heavy.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

# `datasets` and `zstandard` are needed by some sources alone.
if missing := [name for name in ("numpy", "tiktoken", "filelock", "tqdm") if find_spec(name) is None]:
    checkout = Path(__file__).parent.joinpath("../requirements.txt").is_file()
    packages = "-r requirements.txt" if checkout else " ".join(missing)
    hint = f"not installed: {', '.join(missing)} (pip install {packages})"
    # `python -m data.inspect` loads this package before the module: an import raises, a command ends with one line.
    if any(word.startswith(f"{__name__}.") for word in sys.orig_argv):
        sys.exit(f"error: {hint}")
    raise ModuleNotFoundError(hint, name=missing[0])

__all__ = ["DataError"]


class DataError(ValueError):
    """An error that the user can fix; the one-line message says what is wrong and how to fix it."""
