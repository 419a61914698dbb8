"""A run as a Hugging Face folder: `python -m training.export RUN FOLDER`.

The folder holds the weights as GPT-2's in safetensors (with model.rope, rmsnorm and mlp=swiglu as Llama's), the
tokenizer, and generation settings that are those of sample.py, so `transformers.pipeline("text-generation", FOLDER)`
continues text at once.
"""

from __future__ import annotations

import argparse
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import training.installed  # noqa: F401  (ends with one line if a package is missing)
from data.tokenizer import END_OF_TEXT

from .config import ConfigError, one_line_errors
from .files import readable_as
from .gguf_file import check_gguf, merges_of, write_gguf

if TYPE_CHECKING:
    import tiktoken
    from tokenizers import Tokenizer
    from transformers import GenerationConfig, PreTrainedTokenizerFast


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.export", description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run directory, or one of its checkpoints")
    parser.add_argument("folder", help="where to write; a new or an empty one")
    parser.add_argument("--tokenizer", metavar="PATH", help="the run's tokenizer file, if it has moved")
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="upload it too; a repository made here is private"
    )
    parser.add_argument(
        "--gguf", action="store_true", help="also model.gguf, for llama.cpp; needs the package gguf"
    )
    args = parser.parse_args()
    folder = Path(args.folder)
    with one_line_errors():
        export(Path(args.run), folder, args.tokenizer, args.gguf)
        print(f"{folder}: for transformers.pipeline('text-generation', {str(folder)!r})")
        if args.push:
            print(f"pushed: {push(folder, args.push)}")


def export(run: Path, folder: Path, tokenizer_name: str | None = None, gguf: bool = False) -> None:
    """Write the model of a run directory or checkpoint. Raises ConfigError where that cannot be done.

    tokenizer_name: what data.tokenizer has to be now, if the run's rank file has moved. gguf: also as model.gguf.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder: name a new one.")
    from model.huggingface import to_huggingface

    from .load_run import load_run

    model, encoding = load_run(run, "cpu", "naive", tokenizer_name)
    if model.config.document_end is not None:
        raise ConfigError(
            f"{run} was trained with data.document_mask=true, which GPT-2's format cannot express: there every "
            "token sees the documents before its own. For texts of one document use to_huggingface in Python."
        )
    try:
        theirs = to_huggingface(model)
        tokenizer = tokenizer_of(encoding, model.config.seq_len)
    except ImportError:
        raise ConfigError("training.export needs transformers: pip install transformers.") from None
    except ValueError as error:  # a switch of the model that no format has
        raise ConfigError(f"{run} cannot be exported: {error}.") from None
    if gguf:
        check_gguf(theirs, encoding)
    end = encoding.eot_token
    theirs.config.bos_token_id = theirs.config.eos_token_id = theirs.config.pad_token_id = end
    theirs.generation_config = generation_of(encoding, model.config.seq_len)
    try:
        theirs.save_pretrained(folder)
        readable_as(folder / "config.json", *folder.glob("*.safetensors"))
        tokenizer.save_pretrained(folder)
        if gguf:
            write_gguf(theirs, encoding, folder / "model.gguf")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror or error}).") from None


def tokenizer_of(encoding: tiktoken.Encoding, seq_len: int) -> PreTrainedTokenizerFast:
    """Gives the same tokens for the same text, except that <|endoftext|> in it is the end of a document."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(encoding),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=seq_len,
        clean_up_tokenization_spaces=False,
    )


def byte_level_bpe(encoding: tiktoken.Encoding) -> Tokenizer:
    """A tiktoken encoding as a tokenizer of the package `tokenizers`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary, merges = merges_of(encoding)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    # A + after {1,3} means possessive to tiktoken's engine and "again" to this one; at an alternative's end, as
    # cl100k_base and o200k_base have it, the greedy form matches the same.
    pattern = re.sub(r"(\{\d+,\d+\})\+", r"\1", encoding._pat_str)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in encoding._special_tokens])
    return tokenizer


def generation_of(encoding: tiktoken.Encoding, seq_len: int) -> GenerationConfig:
    """Settings to draw as sample.py does, to the end of the context."""
    from transformers import GenerationConfig

    from .sampling import unused_ids

    end = encoding.eot_token
    return GenerationConfig(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        do_sample=True,
        temperature=0.8,
        top_k=50,
        # With it transformers warns whoever asks for max_new_tokens, and then uses that. Without it a pipeline
        # goes on for 256 tokens: at a context of 64 an IndexError (transformers 5.24).
        max_length=seq_len,
        suppress_tokens=unused_ids(encoding).tolist() or None,
    )


def push(folder: Path, repo: str) -> str:
    """Upload an exported folder to the Hub; returns the commit's address. A missing repository is created."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # of httpx, or of httpx2, whichever it uses

    try:
        HfApi().create_repo(repo, private=True, exist_ok=True)
        return HfApi().upload_folder(repo_id=repo, folder_path=folder).commit_url
    except (OSError, ValueError, HTTPError) as error:  # no token, no such owner, no network
        reason = " ".join(str(error).split()).removesuffix(".")
        raise ConfigError(
            f"{folder} is written, but not pushed ({reason}): `hf upload {repo} {folder}` tries again."
        ) from None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    main()
