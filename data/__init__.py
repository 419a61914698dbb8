"""Text -> tokens -> batches.

    corpora.py       where text comes from: files here; openwebtext.py, hub_dataset.py: the Hub, and `datasets`
    tokenizer.py     tiktoken encodings by name or by file
    prepare.py       corpus -> token shards and a manifest, in parallel, resumable
    loader.py        token shards -> batches, by step number
    inspect.py       `python -m data.inspect PATH`: what is in a corpus, and is it whole

Importing this package imports nothing heavy.
"""

__all__ = ["DataError"]


class DataError(ValueError):
    """An error that the user can fix; the one-line message says what is wrong and how."""
