"""Each switch of GPTConfig against float64 written out head by head, in training, sampling, compiled and fused."""

import math

import pytest
import torch
from torch import Tensor

from kernels import AttentionError, get_attention, packed_form, resolve_attention
from kernels.layers.dropout import dropout
from kernels.layers.embedding import embedding
from kernels.layers.linear_add_norm import dropout_add_norm
from kernels.layers.linear_gelu import linear_gelu
from model.cache import KVCache
from model.config import GPTConfig
from model.fused import FusedLayers
from model.generate import generate
from model.gpt import GPT
from model.modern import FusedModernGPT, ModernGPT, build_gpt, rotated
from tests.model.test_fused import LAYERS

SHAPE = {"vocab_size": 50, "seq_len": 24, "n_layer": 3, "n_head": 4, "n_embd": 64}
ALL = {
    **{"n_kv_head": 2, "window": 5, "window_pattern": "SSL", "softcap": 3.0, "sinks": True, "qk_norm": True},
    **{"rope": True, "rope_theta": 50.0, "rmsnorm": True, "mlp": "swiglu"},
}
ONE_BY_ONE = [
    {},
    {"n_kv_head": 1},
    {"n_kv_head": 2},
    {"window": 5},
    {"window": 1, "window_pattern": "S"},
    {"softcap": 0.5},
    {"sinks": True},
    {"qk_norm": True},
    {"rope": True},
    {"rmsnorm": True},
    {"mlp": "relu2"},
    {"mlp": "swiglu"},
    {"rope": True, "document_end": 0},
    ALL,
    ALL | {"document_end": 0, "scale_attn_by_inverse_layer_idx": True, "mlp": "relu2"},
]
switches = pytest.mark.parametrize(
    "on", ONE_BY_ONE, ids=lambda on: "all" if len(on) > 8 else ",".join(on) or "gpt2"
)
# Those that the fused layers can compute.
fusible = pytest.mark.parametrize(
    "on", [on for on in ONE_BY_ONE[1:] if "mlp" not in on], ids=lambda on: ",".join(on)
)


def built(on: dict, attention="naive", **options) -> GPT:
    """With every weight drawn: the initial ones would hide a gain, a bias or a sink that is not used."""
    model = build_gpt(GPTConfig(**SHAPE | on), get_attention(attention), **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(0.25 * drawn if weight.dim() == 2 else weight + 0.5 * drawn)
    return model


def some_tokens(batch: int, length: int) -> Tensor:
    return torch.randint(SHAPE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


# ---- the reference: float64, a head at a time ----------------------------------------------------


def reference(model: GPT, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of one sequence (T,), and the attention weights (n_layer, n_head, T, T)."""
    maps = []
    c = model.config
    weight = {name: tensor.double() for name, tensor in model.state_dict().items()}

    def linear(x, name):
        return x @ weight[f"{name}.weight"].T + weight[f"{name}.bias"]

    def norm(x, name):
        if c.rmsnorm:
            return rms_norm(x, weight[f"{name}.weight"])
        x = x - x.mean(-1, keepdim=True)
        return rms_norm(x, weight[f"{name}.weight"]) + weight[f"{name}.bias"]

    def mlp(x, name):
        h = linear(x, f"{name}.c_fc")
        if c.mlp.value == "gelu":
            h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        elif c.mlp.value == "relu2":
            h = h.clamp(min=0) ** 2
        else:
            gate = linear(x, f"{name}.c_gate")
            h = gate / (1 + torch.exp(-gate)) * h
        return linear(h, f"{name}.c_proj")

    def attention(x, layer):
        name, D = f"h.{layer}.attn", c.head_dim
        rows = linear(x, f"{name}.c_attn").split(D, dim=-1)  # of one head each
        kv_heads = c.n_kv_head or c.n_head
        out = []
        for head in range(c.n_head):
            shared = head // (c.n_head // kv_heads)
            q, k, v = rows[head], rows[c.n_head + shared], rows[c.n_head + kv_heads + shared]
            if c.qk_norm:
                q, k = (
                    rms_norm(part, weight[f"{name}.{which}_norm.weight"])
                    for part, which in ((q, "q"), (k, "k"))
                )
            if c.rope:
                q, k = (turned(part, c.rope_theta) for part in (q, k))
            scores = q @ k.T / math.sqrt(D)
            if c.scale_attn_by_inverse_layer_idx:
                scores = scores / (layer + 1)
            if c.softcap:
                scores = c.softcap * torch.tanh(scores / c.softcap)
            seen = torch.tensor(
                [[sees(c, tokens, layer, i, j) for j in range(len(x))] for i in range(len(x))]
            )
            weights = torch.where(seen, scores.exp(), 0.0)
            total = weights.sum(-1, keepdim=True)
            if c.sinks:
                total = total + weight[f"{name}.sinks"][head].exp()
            maps.append(weights / total)
            out.append(maps[-1] @ v)
        return linear(torch.cat(out, dim=-1), f"{name}.c_proj")

    x = weight["wte.weight"][tokens]
    if not c.rope:
        x = x + weight["wpe.weight"][: len(tokens)]
    for layer in range(c.n_layer):
        x = x + attention(norm(x, f"h.{layer}.ln_1"), layer)
        x = x + mlp(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp")
    logits = (norm(x, "ln_f") @ weight["wte.weight"].T)[:, : c.vocab_size]
    return logits, torch.stack(maps).view(c.n_layer, c.n_head, len(tokens), len(tokens))


def rms_norm(x, gain):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5) * gain


def turned(x, theta):
    """(T, D): pair d is the complex number x[d] + i x[d + D/2], turned by position * theta^(-2d/D)."""
    T, D = x.shape
    pairs = torch.complex(x[:, : D // 2], x[:, D // 2 :])
    angles = torch.tensor(
        [[t * theta ** (-2 * d / D) for d in range(D // 2)] for t in range(T)], dtype=x.dtype
    )
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def sees(c: GPTConfig, tokens: Tensor, layer: int, i: int, j: int) -> bool:
    windowed = c.window is not None and c.window_pattern[layer % len(c.window_pattern)] == "S"
    if j > i or (windowed and i - j >= c.window):
        return False
    return c.document_end is None or c.document_end not in tokens[j:i].tolist()


@switches
def test_logits_and_attention_maps_are_those_of_float64_written_out(on):
    model, tokens = built(on).double(), some_tokens(2, 24)
    tokens[0, 11] = 0  # a document ends where that means something
    logits, maps = model(tokens), model.attention_maps(tokens)
    for number, row in enumerate(tokens):
        expected = reference(model, row)
        torch.testing.assert_close((logits[number], maps[:, number]), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("on", [{}, ALL | {"document_end": 0}], ids=["gpt2", "all"])
def test_attention_maps_are_those_of_the_models_own_attention_and_leave_it_as_it_was(on):
    maps, tokens = [], some_tokens(2, 24)
    for name in ("naive", "flash"):
        model = built(on | {"dropout": 0.5}, name, packed=packed_form(get_attention(name)))
        expected = model.eval()(tokens)
        maps.append(model.train().attention_maps(tokens))
        assert model.training
        assert torch.equal(model.eval()(tokens), expected)
    assert maps[0].shape == (3, 2, 4, 24, 24)
    torch.testing.assert_close(*maps, rtol=1e-3, atol=1e-4)


# ---- training ------------------------------------------------------------------------------------


@switches
def test_a_gradient_reaches_every_parameter(on):
    model, tokens = built(on), some_tokens(2, 24)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.any(), name


@pytest.mark.one_in(4)
@switches
def test_flash_trains_it_as_naive_does(on):
    results = []
    for name in ("naive", "flash"):
        model, tokens = built(on, name, packed=packed_form(get_attention(name))), some_tokens(1, 24)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        results.append({"loss": loss} | {name: weight.grad for name, weight in model.named_parameters()})
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def test_initial_weights_are_gpt2s_with_gains_of_1_and_sinks_of_0():
    model = build_gpt(GPTConfig(**SHAPE | ALL), get_attention("naive"))
    for name, weight in model.named_parameters():
        if name.endswith("c_proj.weight"):
            assert weight.std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.1), name
        elif weight.dim() == 2:
            assert weight.std().item() == pytest.approx(0.02, rel=0.4 if name == "wte.weight" else 0.1), name
        else:
            assert (weight == (0.0 if name.endswith(("bias", "sinks")) else 1.0)).all(), name
    assert "wpe.weight" not in model.state_dict()


def test_what_keeps_q_k_and_v_alike_goes_to_the_packed_form():
    called = []
    naive = get_attention("naive")

    def packed(qkv, **options):
        called.append(options.keys() - {"causal", "scale"})
        return naive(*qkv.permute(2, 0, 3, 1, 4), **options)

    built({"window": 5, "softcap": 3.0, "sinks": True}, packed=packed)(some_tokens(1, 8))
    assert called == [{"softcap", "sinks", "window"}, {"softcap", "sinks"}, {"softcap", "sinks", "window"}]
    called.clear()
    for on in ({"n_kv_head": 2}, {"qk_norm": True}, {"rope": True}):
        built(on, packed=packed)(some_tokens(1, 8))
    assert called == []


def assert_compiles_alike(on: dict, attention: str) -> None:
    model, tokens = built(on | {"dropout": 0.1, "n_layer": 1}, attention), some_tokens(2, 24)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for call in (compiled, model):
        model.zero_grad()
        torch.manual_seed(7)
        loss = call(tokens, tokens, dropout_seed=torch.tensor(3))
        loss.backward()
        results.append([loss.detach(), *(weight.grad.clone() for weight in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()


@pytest.mark.slow
def test_torch_compile_makes_one_graph_of_all_switches():
    assert_compiles_alike(ALL, "flash")


@pytest.mark.slow
@pytest.mark.parametrize("on", [{}, *ONE_BY_ONE[-2:]], ids=["none", "all", "all with documents and relu2"])
def test_torch_compile_makes_one_graph_with_naive(on):
    """Every switch on and off: what breaks a graph is a switch's own code."""
    assert_compiles_alike(on, "naive")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_trains_under_autocast(dtype):
    model, tokens = built(ALL), some_tokens(2, 24)
    with torch.autocast("cpu", dtype):
        loss = model(tokens, tokens)
    loss.backward()
    torch.testing.assert_close(loss, model(tokens, tokens), rtol=3e-2, atol=0)
    assert all(weight.grad.any() for weight in model.parameters())


def test_rotated_queries_meet_keys_by_their_distance_alone():
    """So a cache may hold rotated keys, and a sequence may begin at any position."""
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    near, far = ((rotated(q, 5 + by, 50.0) * rotated(k, 2 + by, 50.0)).sum() for by in (0, 1000))
    torch.testing.assert_close(near, far)
    assert not torch.isclose(near, (rotated(q, 5, 50.0) * rotated(k, 3, 50.0)).sum())


# ---- sampling ------------------------------------------------------------------------------------


@switches
def test_logits_are_the_same_with_and_without_the_cache(on):
    model, tokens = built(on | {"document_end": None}).double().eval(), some_tokens(2, 24)
    cache = KVCache(max_len=24)
    pieces = [model.hidden(piece, cache=cache) for piece in tokens.split([5, 1, 1, 11, 6], dim=1)]
    torch.testing.assert_close(model.logits(torch.cat(pieces, dim=1)), model(tokens))
    heads = on.get("n_kv_head", 4)
    assert cache.k[0].shape == (2, heads, 24, 16)


@pytest.mark.one_in(4)
@switches
def test_generated_text_is_that_of_full_passes_also_beyond_the_context(on):
    model, tokens = built(on).double().eval(), some_tokens(1, 5)
    expected, start = tokens, 0
    for _ in range(40):
        if expected.size(1) - start > 24:
            start = expected.size(1) - 12
        expected = torch.cat([expected, model(expected[:, start:])[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generate(model, tokens, 40, temperature=0.0), expected)


# ---- fused ---------------------------------------------------------------------------------------


@fusible
def test_the_fused_form_computes_the_same_from_the_same_parameters(on):
    tokens, results = some_tokens(2, 24), []
    for layers in (None, LAYERS):
        model = built(on, layers=layers)
        loss = model(tokens, tokens)
        loss.backward()
        results.append((loss, {name: weight.grad for name, weight in model.named_parameters()}))
    assert type(model) is FusedModernGPT
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def test_our_kernels_compute_rmsnorm_in_the_fused_form() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, results = some_tokens(2, 24).to(device), []
    for layers in (None, FusedLayers(linear_gelu, dropout_add_norm, embedding, dropout)):
        model = built({"rmsnorm": True}, layers=layers).to(device)
        loss = model(tokens, tokens)
        results.append((loss, torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("on", [{"mlp": "relu2"}, ALL])
def test_what_the_fused_layers_lack_is_refused(on):
    with pytest.raises(ValueError, match="the fused layers have no such part"):
        built(on, layers=LAYERS)


# ---- counts and refusals -------------------------------------------------------------------------


def test_parameters_and_flops_count_every_switch():
    C, H, D, L, V, T = 768, 12, 64, 12, 50257, 1024
    attention, mlp, norms = 4 * C * C + 4 * C, 8 * C * C + 5 * C, 4 * C

    def counted(**on):
        with torch.device("meta"):
            model = build_gpt(GPTConfig(**on), get_attention("naive"))
        return model.num_parameters(), model.flops_per_token(T)

    gpt2 = V * C + T * C + L * (attention + mlp + norms) + 2 * C
    full = 12 * L * C * T
    assert counted() == (gpt2, 6 * (gpt2 - T * C) + full)
    assert counted(rope=True) == (gpt2 - T * C, 6 * (gpt2 - T * C) + full)
    n = gpt2 - L * 2 * (C + 1) * (C - 4 * D)
    assert counted(n_kv_head=4) == (n, 6 * (n - T * C) + full)
    n = gpt2 + L * (3 * 2048 * C + 2 * 2048 + C - mlp)  # 8/3 of 768 is 2048
    assert counted(mlp="swiglu") == (n, 6 * (n - T * C) + full)
    n = gpt2 - (2 * L + 1) * C
    assert counted(rmsnorm=True) == (n, 6 * (n - T * C) + full)
    n = gpt2 + L * (H + 2 * D)
    assert counted(sinks=True, qk_norm=True, softcap=30.0) == (n, 6 * (n - T * C) + full)
    assert counted(mlp="relu2") == counted()
    windowed = 12 * C * (9 * 128 + 3 * T)
    assert counted(window=128, window_pattern="SSSL") == (gpt2, 6 * (gpt2 - T * C) + windowed)
    assert counted(window=4096, window_pattern="S") == counted()


def test_swiglu_is_as_large_as_gelu_at_any_width():
    for width in (64, 128, 768, 1024, 1280, 1600):
        config = GPTConfig(n_embd=width, n_head=width // 64, mlp="swiglu")
        assert config.mlp_width % 64 == 0
        assert 0 <= 3 * config.mlp_width - 8 * width < 3 * 64


def test_gpt2_with_no_switch_on_is_gpt_and_gpt_refuses_a_switch():
    assert type(built({})) is GPT
    assert type(built({"n_kv_head": 4})) is GPT
    assert type(built({"rope": True})) is ModernGPT
    with pytest.raises(ValueError, match=r"rope, mlp: GPT-2 has no such part; model\.build_gpt does"):
        GPT(GPTConfig(**SHAPE, rope=True, mlp="relu2"), get_attention("naive"))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"n_kv_head": 3}, "n_kv_head=3 does not divide n_head=4: it may be 1, 2, 4"),
        ({"n_kv_head": 8}, "it may be 1, 2, 4"),
        ({"window": 0}, "window=0: it must be at least 1 token, or null"),
        ({"window": 4, "window_pattern": "SG"}, "window_pattern=SG: it must be of S"),
        ({"window_pattern": ""}, "window_pattern=: it must be of S"),
        (
            {"window_pattern": "SSL"},
            "window_pattern=SSL needs window=N; without a window use window_pattern=SL",
        ),
        ({"rope_theta": 500.0}, "rope_theta=500.0 needs rope=true"),
        ({"softcap": -1.0}, "softcap=-1.0: it must be positive and finite, or 0"),
        ({"softcap": math.inf}, "softcap=inf"),
        ({"rope": True, "n_embd": 60}, "the head dimension n_embd / n_head is 15: make it even"),
        ({"rope_theta": 0.0}, "rope_theta=0.0: it must be positive"),
        ({"mlp": "geglu"}, "mlp=geglu: it must be one of gelu, relu2, swiglu"),
    ],
)
def test_impossible_switches_are_refused(bad, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        GPTConfig(**SHAPE | bad)


@pytest.mark.one_in(4)
@switches
@pytest.mark.parametrize("name", ["sdpa", "sdpa_math", "flash1", "two_pass", "chunked"])
def test_a_backend_computes_it_or_says_which_switch_it_lacks(on, name):
    config = GPTConfig(**SHAPE | on | {"document_end": None})
    request = {"device": torch.device("cpu"), "dtype": torch.float32, "head_dim": config.head_dim}
    if config.switches.keys() & {"window", "softcap", "sinks"}:
        with pytest.raises(AttentionError, match=r"it does not support .*; use attention=naive"):
            resolve_attention(name, **request, **config.attention_features)
        return
    _, attention = resolve_attention(name, **request, **config.attention_features)
    model, tokens = built(on | {"document_end": None}), some_tokens(1, 24)
    expected = model(tokens)
    for block in model.h:
        block.attn.attention = attention
    torch.testing.assert_close(model(tokens), expected, rtol=1e-3, atol=1e-3)
