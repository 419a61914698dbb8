"""A model and its tokenizer as one GGUF file, the format of llama.cpp and what is built on it.

llama-cpp-python 0.3.36 gives the same tokens, logits and greedy text as our model, for bytes and for GPT-2's
tokenizer; tests/training/test_export.py checks this again where it is installed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from .config import ConfigError

if TYPE_CHECKING:
    import tiktoken
    from transformers import GPT2LMHeadModel, PreTrainedModel

CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # (in, out) in transformers, (out, in) in GGUF


def merges_of(encoding: tiktoken.Encoding) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """An encoding's vocabulary and merges, each byte a character as in GPT-2's files.

    tiktoken merges the neighbours whose union has the lowest rank, so every split of a token into two others is a
    merge of its rank.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    character = bytes_to_unicode()
    ranks = encoding._mergeable_ranks
    name = {token: "".join(character[value] for value in token) for token in ranks}
    vocabulary = {name[token]: rank for token, rank in ranks.items()} | encoding._special_tokens
    merges = [
        (name[token[:cut]], name[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    return vocabulary, merges


def check_gguf(model: PreTrainedModel, encoding: tiktoken.Encoding) -> None:
    """Raise ConfigError where the package is missing, or GGUF's GPT-2 cannot express a model or its tokenizer."""
    from tiktoken_ext import openai_public

    if model.config.model_type != "gpt2":
        raise ConfigError(
            "--gguf writes GPT-2's format, which has no rope, rmsnorm or swiglu; leave --gguf out."
        )
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("--gguf needs the package gguf: pip install gguf.")
    if model.config.scale_attn_by_inverse_layer_idx:
        raise ConfigError("--gguf: GGUF's GPT-2 has no scale_attn_by_inverse_layer_idx.")
    merges = len(encoding._mergeable_ranks) > 256
    if merges and encoding._pat_str != openai_public.r50k_pat_str:
        raise ConfigError(f"--gguf: the tokenizer {encoding.name} splits text otherwise than GPT-2's does.")


def write_gguf(model: GPT2LMHeadModel, encoding: tiktoken.Encoding, path: Path) -> None:
    """Write the weights, float32, and the tokenizer, which `check_gguf` has let through."""
    import gguf

    config = model.config
    vocabulary, merges = merges_of(encoding)
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    names = {token: name for name, token in vocabulary.items()}
    control = set(encoding._special_tokens.values())
    ids = range(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(token, f"[PAD{token}]") for token in ids])
    kinds = gguf.TokenType
    writer.add_token_types(
        [
            kinds.CONTROL if token in control else kinds.NORMAL if token in names else kinds.UNUSED
            for token in ids
        ]
    )
    # gguf writes no empty list, and llama.cpp reads no file without merges: for bytes, one that never applies.
    end = names[encoding.eot_token]
    writer.add_token_merges([" ".join(pair) for pair in merges or [(end, end)]])
    writer.add_bos_token_id(encoding.eot_token)
    writer.add_eos_token_id(encoding.eot_token)
    writer.add_add_bos_token(False)
    place = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer)
    for name, weight in model.transformer.state_dict(prefix="transformer.").items():
        weight = weight.T if name.endswith(CONV1D) else weight
        writer.add_tensor(
            place.get_name(name, try_suffixes=(".weight", ".bias")), weight.float().contiguous().numpy()
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
