"""GPT-2 checkpoints from and to Hugging Face transformers, which is imported only when a function here runs.

Two layouts differ. transformers keeps its projections as Conv1D, weights (in, out) where Linear has (out, in), and
it does not pad the vocabulary. Names are the same but for the prefix `transformer.` and the tied `lm_head.weight`.

A model with rope, rmsnorm and mlp=swiglu, grouped heads or not, is a Llama with biases, and is written as one.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .config import GPTConfig, MLPKind
from .gpt import GPT, AttentionFn

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, LlamaForCausalLM

_CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
# The switches of a Llama; n_kv_head may be on too.
_LLAMA = {"rope": True, "rmsnorm": True, "mlp": MLPKind.swiglu}
# What GPT computes, where a transformers config may ask for something else.
_REQUIRED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
}


def from_huggingface(
    source: "str | os.PathLike | GPT2LMHeadModel", attention: AttentionFn, *, dropout: float = 0.0
) -> GPT:
    """A GPT, float32 on the CPU, with the weights of source: a local checkpoint directory or a GPT2LMHeadModel.

    dropout: for further training; the three values of the transformers config are not used. Nothing is
    downloaded. Raises ValueError when source is not GPT-2 as published, or incomplete, naming what differs.
    """
    if isinstance(source, str | os.PathLike):
        source = _load(Path(source))
    if "GPT2LMHeadModel" not in (each.__name__ for each in type(source).__mro__):
        raise ValueError(f"source must be a directory or a GPT2LMHeadModel, got a {type(source).__name__}")
    theirs = source.config
    for name, accepted in _REQUIRED.items():
        if getattr(theirs, name) not in accepted:
            wanted = " or ".join(map(repr, accepted))
            raise ValueError(
                f"{name}={getattr(theirs, name)!r} in the checkpoint, but GPT-2 here has {wanted}"
            )
    if theirs.n_inner not in (None, 4 * theirs.n_embd):
        raise ValueError(f"n_inner={theirs.n_inner} in the checkpoint, but the MLP here has 4 n_embd")
    config = GPTConfig(
        vocab_size=theirs.vocab_size,
        seq_len=theirs.n_positions,
        n_layer=theirs.n_layer,
        n_head=theirs.n_head,
        n_embd=theirs.n_embd,
        dropout=dropout,
        scale_attn_by_inverse_layer_idx=theirs.scale_attn_by_inverse_layer_idx,
    )
    state = source.state_dict()
    if broken := [name for name, weight in state.items() if not weight.isfinite().all()]:
        raise ValueError(f"{broken[0]} holds values that are not finite")
    if not torch.equal(state["lm_head.weight"], state["transformer.wte.weight"]):
        raise ValueError(
            "lm_head.weight differs from transformer.wte.weight, but GPT-2 here has one for both"
        )
    with torch.device("meta"):
        model = GPT(config, attention)
    model.load_state_dict(_from_their_names(state, config), assign=True)
    return model


def to_huggingface(model: GPT) -> "GPT2LMHeadModel | LlamaForCausalLM":
    """A GPT2LMHeadModel, float32 on the CPU, that computes what model does, dropout included if it is in training
    mode; its save_pretrained writes it out. Only config.document_end has no equivalent there: the result
    sees across documents.

    With switches a LlamaForCausalLM, which drops nothing; ValueError names a switch that neither format has.
    """
    for wrapped in ("module", "_orig_mod"):  # by DistributedDataParallel, by torch.compile
        model = getattr(model, wrapped, model)
    config = model.config
    if config.switches:
        return _to_llama(model)
    with _transformers_imports():
        from transformers import GPT2Config, GPT2LMHeadModel

        theirs = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=config.vocab_size,
                n_positions=config.seq_len,
                n_layer=config.n_layer,
                n_head=config.n_head,
                n_embd=config.n_embd,
                resid_pdrop=config.dropout,
                embd_pdrop=config.dropout,
                attn_pdrop=config.dropout,
                scale_attn_by_inverse_layer_idx=config.scale_attn_by_inverse_layer_idx,
                # GPT-2's own id, where the vocabulary has it
                bos_token_id=50256 if config.vocab_size == 50257 else None,
                eos_token_id=50256 if config.vocab_size == 50257 else None,
            )
        )
    theirs.load_state_dict(_to_their_names(model.state_dict(), config))
    return theirs.train(model.training)


def _to_llama(model: GPT) -> "LlamaForCausalLM":
    config = model.config
    if missing := [name for name, value in _LLAMA.items() if config.switches.get(name) != value]:
        raise ValueError(
            f"{', '.join(config.switches)}: GPT-2's format has no such part, and Llama's only together with "
            f"{', '.join('mlp=swiglu' if name == 'mlp' else name for name in missing)}"
        )
    unknown = sorted(config.switches.keys() - _LLAMA.keys() - {"n_kv_head"})
    unknown += ["scale_attn_by_inverse_layer_idx"] * config.scale_attn_by_inverse_layer_idx
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: neither GPT-2's format nor Llama's has such a part")
    with _transformers_imports():
        from transformers import LlamaConfig, LlamaForCausalLM

        theirs = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.n_embd,
                intermediate_size=config.mlp_width,
                num_hidden_layers=config.n_layer,
                num_attention_heads=config.n_head,
                num_key_value_heads=config.kv_heads,
                max_position_embeddings=config.seq_len,
                rms_norm_eps=model.ln_f.eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                attention_bias=True,
                mlp_bias=True,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    theirs.load_state_dict(_to_llamas_names(model.state_dict(), config))
    return theirs.train(model.training)


def _to_llamas_names(ours: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    embedding = ours["wte.weight"][: config.vocab_size]
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    state["model.norm.weight"] = ours["ln_f.weight"]
    names = {
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_proj": "self_attn.o_proj",
        "mlp.c_gate": "mlp.gate_proj",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    }
    for name, tensor in ours.items():
        if not name.startswith("h."):
            continue
        _, layer, part = name.split(".", 2)
        part, _, kind = part.rpartition(".")
        if part == "attn.c_attn":
            for which, rows in zip("qkv", tensor.split(config.qkv_rows), strict=True):
                state[f"model.layers.{layer}.self_attn.{which}_proj.{kind}"] = rows
        else:
            state[f"model.layers.{layer}.{names[part]}.{kind}"] = tensor
    return state


def _load(directory: Path) -> "GPT2LMHeadModel":
    """The checkpoint in a directory, whole: transformers would draw what is missing at random, with a warning."""
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{directory} is not a transformers checkpoint, a directory with a config.json (`hf download` gets one)"
        )
    with _transformers_imports():
        from transformers import GPT2LMHeadModel

        options: dict[str, Any] = {
            "local_files_only": True,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,
        }
        loaded: Any = GPT2LMHeadModel.from_pretrained(directory, **options)
    model, found = loaded
    if missing := sorted(set(found["missing_keys"]) - {"lm_head.weight"}):  # which is wte.weight
        names = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise ValueError(f"{directory} lacks {len(missing)} of the model's weights: {names}")
    if mismatched := sorted(found["mismatched_keys"]):
        told = (f"{name} is {tuple(has)}, not {tuple(wanted)}" for name, has, wanted in mismatched)
        raise ValueError(f"{directory} does not fit its config.json: {', '.join(told)}")
    return model


def _from_their_names(theirs: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    state = {}
    for name, weight in theirs.items():
        if not name.startswith("transformer."):
            continue  # lm_head.weight, the same tensor as wte.weight
        name = name.removeprefix("transformer.")
        weight = weight.detach().float().cpu()
        state[name] = weight.t().contiguous() if name.endswith(_CONV1D) else weight.clone()
    padding = state["wte.weight"].new_zeros(config.padded_vocab_size - config.vocab_size, config.n_embd)
    state["wte.weight"] = torch.cat([state["wte.weight"], padding])
    return state


def _to_their_names(ours: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    ours = ours | {"wte.weight": ours["wte.weight"][: config.vocab_size]}
    state = {
        f"transformer.{name}": weight.t() if name.endswith(_CONV1D) else weight
        for name, weight in ours.items()
    }
    return state | {"lm_head.weight": ours["wte.weight"]}


@contextmanager
def _transformers_imports() -> Iterator[None]:
    """In a checkout, hide the package `kernels` while transformers loads its modules.

    There the name means this project's kernels; transformers would take it for the Hub's package of that name, where
    that one is installed, and fail on what it lacks.
    """
    if "." in __package__:  # installed, as tilegpt.model beside tilegpt.kernels
        yield
        return
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "kernels"}
    for name in hidden:
        del sys.modules[name]
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["kernels"]
        sys.modules.update(hidden)
