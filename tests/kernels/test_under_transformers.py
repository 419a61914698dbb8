"""transformers' models on our kernels, against its eager attention, in the interpreter. About 12 s."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from tests.conftest import ROOT
from tests.kernels.differential import Asked

transformers = pytest.importorskip("transformers")
if torch.cuda.is_available():
    pytest.skip("the interpreter's checks", allow_module_level=True)

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=50, n_positions=40),
    "llama": lambda: transformers.LlamaConfig(**SMALL, **GROUPED),
    "mistral": lambda: transformers.MistralConfig(**SMALL, **GROUPED, sliding_window=5),
    # softcap, and a window in every other layer
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, **GROUPED, sliding_window=5, query_pre_attn_scalar=16
    ),
    # sinks
    "gpt_oss": lambda: transformers.GptOssConfig(**SMALL, **GROUPED, **EXPERTS, sliding_window=5),
    # chunks of a window
    "llama4": lambda: transformers.Llama4TextConfig(
        **SMALL, **GROUPED, **EXPERTS, attention_chunk_size=5, intermediate_size_mlp=32
    ),
    # values narrower than queries and keys, or wider
    "deepseek_v3": lambda v_head_dim=16: transformers.DeepseekV3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=v_head_dim,
        first_k_dense_replace=1,
    ),
    "wide values": lambda: CONFIGS["deepseek_v3"](48),
    # windows to both sides
    "modernbert": lambda: transformers.ModernBertConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        local_attention=6,
        global_attn_every_n_layers=2,
        pad_token_id=0,
    ),
    "bert": lambda: transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32
    ),
}
TOKENS = torch.randint(50, (3, 14), generator=torch.Generator().manual_seed(0))
REAL = {
    "no padding": torch.ones_like(TOKENS),
    "left": (torch.arange(14) >= torch.tensor([[5], [0], [1]])).long(),
    "right": (torch.arange(14) < torch.tensor([[9], [14], [13]])).long(),
}


@pytest.fixture(autouse=True)
def registered():
    kernels.register_transformers()


def pair(name: str):
    """The same model with transformers' eager attention and with ours."""
    config, cls = CONFIGS[name](), transformers.AutoModelForCausalLM
    if name in ("bert", "modernbert"):
        cls = transformers.AutoModel
    torch.manual_seed(0)
    theirs = cls.from_config(config, attn_implementation="eager")
    ours = cls.from_config(copy.deepcopy(config), attn_implementation="tilegpt")
    with torch.no_grad():
        for each in theirs.parameters():
            each.mul_(4)  # as initialised, an attention hardly matters
    ours.load_state_dict(theirs.state_dict())
    return theirs.eval(), ours.eval()


def results(model, real: torch.Tensor, **inputs) -> list[torch.Tensor]:
    """The outputs of real tokens, and the gradients of all weights."""
    positions = (real.cumsum(1) - 1).clamp_min(0)
    inputs = {"attention_mask": real, "position_ids": positions} | inputs
    model.zero_grad()
    out = model(TOKENS[: len(real)], **inputs)[0][real.bool()]
    out.square().mean().backward()
    return [out.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_and_gradients_are_those_of_eager(name: str) -> None:
    theirs, ours = pair(name)
    for padding, real in REAL.items():
        for got, want in zip(results(ours, real), results(theirs, real), strict=True):
            torch.testing.assert_close(
                got, want, rtol=1e-4, atol=1e-5, msg=lambda said, at=padding: f"{at}: {said}"
            )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["gpt2", "mistral", "gpt_oss", "deepseek_v3", "wide values"])
def test_a_padded_batch_generates_as_with_eager(name: str, cache: str | None) -> None:
    """Past the window, token by token."""
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    theirs, ours = (
        model.generate(TOKENS, attention_mask=REAL["left"], disable_compile=True, **options)
        for model in pair(name)
    )
    assert len(theirs[0].unique()) > 5
    assert torch.equal(ours, theirs)


def test_a_static_cache_of_the_prompt_alone_generates_as_with_eager() -> None:
    """Its keys are the queries' own, so the mask is a Mask, which generate makes and the model asks for again."""
    options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    theirs, ours = (model.generate(TOKENS, **options) for model in pair("llama"))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_packed_documents_are_kept_apart(name: str) -> None:
    """As transformers knows them, by positions that begin again, or by the offsets of its collator."""
    positions = torch.tensor([[*range(6), *range(5), *range(3)]])
    offsets = torch.tensor([0, 6, 11, 14])
    theirs, ours = pair(name)
    real = REAL["no padding"][:1]
    packed = {"attention_mask": None, "position_ids": positions, "use_cache": False}
    want = results(theirs, real, **packed)
    got = results(ours, real, **packed)
    collated = results(
        ours, real, **packed, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=6, max_length_k=6
    )
    for mine, again, other in zip(got, collated, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(again, other, rtol=1e-4, atol=1e-5)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "padding"),
    [("gpt2", None), ("gpt2", "left"), pytest.param("mistral", "left", marks=pytest.mark.slow)],
)
def test_one_graph_compiles_it(name: str, padding: str | None) -> None:
    theirs, ours = pair(name)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    real = REAL[padding or "no padding"]
    inputs = {"use_cache": False} | ({} if padding else {"attention_mask": None})
    for got, want in zip(results(compiled, real, **inputs), results(theirs, real, **inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_dropout_comes_from_torchs_generator_and_is_repeated_by_a_checkpoint() -> None:
    _, model = pair("gpt2")
    gradients = []
    for checkpointed in (False, True, False):
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        else:
            model.gradient_checkpointing_disable()
        torch.manual_seed(len(gradients) // 2)
        results(model, REAL["no padding"], use_cache=False)
        gradients.append(model.transformer.h[0].attn.c_attn.weight.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[0], gradients[2])


def test_what_it_cannot_do_is_refused_in_one_line() -> None:
    theirs, ours = pair("gpt2")
    refused = 'attn_implementation="tilegpt" does not support '
    between = torch.tensor([[1] * 5 + [0] * 4 + [1] * 5])
    with pytest.raises(kernels.AttentionError, match=refused + "padding between tokens") as error:
        ours(TOKENS[:1], attention_mask=between)
    assert "\n" not in str(error.value)
    with pytest.raises(kernels.AttentionError, match=refused + "a mask of your own, torch.float32"):
        ours(TOKENS, attention_mask=torch.zeros(3, 1, 14, 14))
    attention = transformers.AttentionInterface()["tilegpt"]
    with pytest.raises(kernels.AttentionError, match=refused + "output_attentions"):
        attention(theirs, *torch.zeros(3, 1, 1, 1, 16), None, output_attentions=True)
    cache = ours(TOKENS, attention_mask=REAL["left"], use_cache=True).past_key_values
    more = torch.cat([REAL["left"], REAL["left"][:, -1:]], 1)
    with pytest.raises(kernels.AttentionError, match=refused + "gradients where a cache meets padding"):
        ours(TOKENS[:, :1], attention_mask=more, past_key_values=cache)
    t5 = transformers.T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    t5 = transformers.T5ForConditionalGeneration._from_config(t5, attn_implementation="tilegpt")
    with pytest.raises(kernels.AttentionError, match=refused + "position biases, as T5"):
        t5(TOKENS, labels=TOKENS)


def test_a_compiled_gpt2_under_sdpa_gets_a_dense_mask_and_under_ours_none() -> None:
    """Why `kernels.register` does not reach it: SDPA's flash backend takes no mask. transformers cannot ask a graph
    whether a row holds one document, so it makes the mask of several (and before torch 2.14 any mask)."""
    config = CONFIGS["gpt2"]()
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").eval()
    masks = []

    def noting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        masks.extend(
            node.kwargs["attn_mask"]
            for node in graph.graph.nodes
            if node.target is torch.nn.functional.scaled_dot_product_attention
        )
        return graph

    torch.compile(model, backend=noting)(TOKENS, use_cache=False)
    assert len(masks) == 1
    assert masks[0] is not None
    with Asked() as asked:
        model(TOKENS)
    assert asked.options["attn_mask"] is None


@pytest.mark.slow
def test_a_checkout_is_not_taken_for_the_hubs_library_of_the_same_name(tmp_path: Path) -> None:
    """Where that is installed: transformers would look for its functions in ours."""
    version = transformers.utils.import_utils.KERNELS_MIN_VERSION
    (tmp_path / f"kernels-{version}.dist-info").mkdir()
    told = f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n"
    (tmp_path / f"kernels-{version}.dist-info" / "METADATA").write_text(told)
    use = "import kernels; kernels.register_transformers(); print(kernels.flash.__name__)"
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", use], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "kernels.flash\n", done.stderr
