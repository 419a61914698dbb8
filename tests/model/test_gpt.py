"""GPT: initial weights, padding, causality, loss, dropout, published sizes, torch.compile. About 6 s."""

import math

import pytest
import torch
from torch.nn import functional as F

from model.config import GPTConfig
from model.gpt import GPT

TINY = {"vocab_size": 100, "seq_len": 32, "n_layer": 3, "n_head": 4, "n_embd": 64}


def plain_attention(q, k, v, *, causal=True, scale=None, dropout_p=0.0, dropout_seed=None):
    scores = q @ k.transpose(-2, -1) * (q.size(-1) ** -0.5 if scale is None else scale)
    if causal:
        future = torch.ones(q.size(2), k.size(2), dtype=torch.bool).triu(1 + k.size(2) - q.size(2))
        scores = scores.masked_fill(future, float("-inf"))
    weights = scores.softmax(-1)
    if dropout_p > 0.0:
        generator = torch.Generator().manual_seed(int(dropout_seed))
        weights = weights * (torch.rand(weights.shape, generator=generator) >= dropout_p) / (1.0 - dropout_p)
    return weights @ v


def sdpa(q, k, v, *, causal=True, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def tiny(attention=plain_attention, **changes) -> GPT:
    return GPT(GPTConfig(**TINY | changes), attention)


def some_tokens(*shape, seed=0) -> torch.Tensor:
    return torch.randint(TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def test_initial_weights_have_the_published_standard_deviations():
    model = GPT(GPTConfig(vocab_size=512, seq_len=256, n_layer=8, n_head=4, n_embd=256), plain_attention)
    for name, weight in model.named_parameters():
        if name.endswith("c_proj.weight"):
            assert weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.02), name
        elif weight.dim() == 2:
            assert weight.std().item() == pytest.approx(0.02, rel=0.02), name
            assert abs(weight.mean().item()) < 3e-4, name
        else:
            assert (weight == (0.0 if name.endswith("bias") else 1.0)).all(), name


def test_initial_weights_depend_on_the_generator_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = tiny()
    assert torch.equal(torch.get_rng_state(), state)  # the global generator was not touched
    torch.manual_seed(2)
    again = tiny(sdpa)
    other = GPT(GPTConfig(**TINY), plain_attention, generator=torch.Generator().manual_seed(1))
    for name, weight in first.named_parameters():
        assert torch.equal(weight, again.get_parameter(name)), name
    assert not torch.equal(first.wte.weight, other.wte.weight)
    again.init_weights(torch.Generator().manual_seed(1))
    assert torch.equal(again.h[2].mlp.c_proj.weight, other.h[2].mlp.c_proj.weight)


def test_padding_is_never_predicted_and_gets_no_gradient():
    model = tiny()
    assert model.wte.weight.size(0) == 128
    with torch.no_grad():
        model.wte.weight[100:] = 50.0 * model.ln_f.weight.new_ones(64)  # would win if it were used
    tokens = some_tokens(2, 32)
    logits = model(tokens)
    assert logits.shape == (2, 32, 100)
    loss = model(tokens, tokens)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
    loss.backward()
    assert (model.wte.weight.grad[100:] == 0.0).all()
    assert (model.wte.weight.grad[:100] != 0.0).all()


@pytest.mark.parametrize("attention", [plain_attention, sdpa])
def test_a_later_token_changes_no_earlier_logits(attention):
    model = tiny(attention)
    tokens = some_tokens(1, 32)
    before = model(tokens)
    for changed in (1, 16, 31):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % 100
        after = model(other)
        assert torch.equal(after[:, :changed], before[:, :changed])
        assert not torch.equal(after[:, changed:], before[:, changed:])


def test_attention_backends_agree_on_loss_and_gradients():
    tokens = some_tokens(2, 33)
    gradients = []
    for attention in (plain_attention, sdpa):
        model = tiny(attention, scale_attn_by_inverse_layer_idx=True)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        gradients.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_q_k_v_are_views_of_one_buffer():
    seen = []

    def spy(q, k, v, **options):
        seen.append((q, k, v))
        return plain_attention(q, k, v, **options)

    tiny(spy)(some_tokens(2, 32))
    for qkv in seen:
        assert len({part.untyped_storage().data_ptr() for part in qkv}) == 1
        assert all(part.shape == (2, 4, 32, 16) and part.stride(-1) == 1 for part in qkv)


def test_an_attention_with_a_packed_form_is_called_with_packed_qkv():
    def attention(q, k, v, **options):
        raise AssertionError("training is to call the packed one")

    def packed(qkv, **options):
        shapes.append(tuple(qkv.shape))
        return plain_attention(*qkv.permute(2, 0, 3, 1, 4), **options)

    shapes, tokens = [], some_tokens(2, 16)
    losses = [model(tokens, tokens) for model in (GPT(GPTConfig(**TINY), attention, packed=packed), tiny())]
    assert shapes == [(2, 16, 3, 4, 16)] * TINY["n_layer"]
    torch.testing.assert_close(*losses)


def test_a_block_calls_only_its_own_modules():
    """Sharding block by block (FSDP) depends on it."""
    model, owners = tiny(), []
    for index, block in enumerate(model.h):
        for module in block.modules():
            module.register_forward_pre_hook(lambda *_, index=index: owners.append(index))
    model(some_tokens(2, 16))
    assert owners == sorted(owners)
    assert {owners.count(index) for index in range(TINY["n_layer"])} == {len(list(model.h[0].modules()))}


def test_attention_scale_is_divided_by_the_layer_number():
    scales = []

    def spy(q, k, v, *, causal, scale):
        scales.append(scale)
        return plain_attention(q, k, v, causal=causal, scale=scale)

    tiny(spy, scale_attn_by_inverse_layer_idx=True)(some_tokens(1, 4))
    assert scales == pytest.approx([0.25, 0.25 / 2, 0.25 / 3])


def test_targets_of_minus_one_are_left_out_of_the_loss():
    model = tiny()
    tokens, targets = some_tokens(2, 32), some_tokens(2, 32, seed=1)
    nll = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none").view(2, 32)
    targets[0, 5:] = -1
    kept = torch.cat([nll[0, :5], nll[1]])
    torch.testing.assert_close(model(tokens, targets), kept.mean())
    assert model(tokens, torch.full_like(targets, -1)) == 0.0


def test_loss_can_be_replaced():
    def summed(hidden, weight, targets, vocab_size):
        logits = (hidden @ weight.t())[:, :vocab_size]
        return F.cross_entropy(logits, targets, reduction="sum")

    tokens = some_tokens(2, 32)
    ours = GPT(GPTConfig(**TINY), plain_attention, loss=summed)(tokens, tokens)
    torch.testing.assert_close(ours, 64 * tiny()(tokens, tokens))


def test_loss_is_float32_under_autocast():
    tokens = some_tokens(2, 32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = tiny()(tokens, tokens)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, tiny()(tokens, tokens), rtol=1e-2, atol=0)


def test_dropout_repeats_with_its_seeds_and_is_off_in_eval():
    model = tiny(dropout=0.2)
    tokens = some_tokens(2, 32)

    def loss(attention_seed, torch_seed):
        torch.manual_seed(torch_seed)
        return model(tokens, tokens, dropout_seed=torch.tensor(attention_seed)).item()

    assert loss(3, 5) == loss(3, 5)
    assert loss(3, 5) != loss(4, 5)  # attention weights
    assert loss(3, 5) != loss(3, 6)  # embeddings and residual branches
    model.eval()
    assert loss(3, 5) == tiny()(tokens, tokens).item()


def test_dropout_masks_of_neighbouring_seeds_and_layers_differ():
    seeds = []

    def spy(q, k, v, *, causal, scale, dropout_p, dropout_seed):
        assert dropout_p == 0.2
        seeds.append(int(dropout_seed))
        return plain_attention(q, k, v, causal=causal, scale=scale)

    model = tiny(spy, dropout=0.2)
    for step in range(4):
        model(some_tokens(1, 4), dropout_seed=torch.tensor(step))
    assert len(set(seeds)) == 4 * 3


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ((12, 12, 768), 124_439_808),
        ((24, 16, 1024), 354_823_168),
        ((36, 20, 1280), 774_030_080),
        ((48, 25, 1600), 1_557_611_200),
    ],
)
def test_parameter_counts_are_the_published_ones(size, count):
    n_layer, n_head, n_embd = size
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd), plain_attention)
    assert model.num_parameters() == count
    assert model.num_parameters(position_embeddings=False) == count - 1024 * n_embd


def test_flops_per_token_count_parameters_and_attention():
    model = tiny()
    n = model.num_parameters() - 32 * 64
    assert model.flops_per_token(16) == 6 * n + 12 * 3 * 64 * 16


def test_errors_name_the_remedy():
    with pytest.raises(ValueError, match="33 tokens, but seq_len=32"):
        tiny()(some_tokens(1, 33))
    for seed in (None, 1, torch.tensor([1]), torch.tensor(1, dtype=torch.int32), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="needs dropout_seed, a 0-d int64 tensor"):
            tiny(dropout=0.1)(some_tokens(1, 4), dropout_seed=seed)
    with pytest.raises(ValueError, match=r"\(batch, length\), got shape \(4,\)"):
        tiny()(some_tokens(1, 4)[0])
    for mistaken in ("flash", ("flash", plain_attention)):  # the second is what resolve_attention returns
        with pytest.raises(TypeError, match=r"attention is .*'flash'.*: pass the function alone"):
            GPT(tiny().config, mistaken)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_makes_one_graph_for_all_dropout_seeds(backend):
    """The loss and the gradients are those of the uncompiled model."""

    def attention(q, k, v, *, causal, scale, dropout_p, dropout_seed):
        scores = (q @ k.transpose(-2, -1) * scale).masked_fill(
            torch.ones(q.size(2), k.size(2), dtype=torch.bool).triu(1), float("-inf")
        )
        return (scores + dropout_seed.to(scores.dtype) * 0.01).softmax(-1) @ v

    model = tiny(attention, dropout=0.1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    tokens = some_tokens(2, 32)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            losses = []
            for call in (compiled, model):
                model.zero_grad()
                torch.manual_seed(7)
                loss = call(tokens, tokens, dropout_seed=torch.tensor(seed))
                loss.backward()
                losses.append([loss.detach(), *(weight.grad.clone() for weight in model.parameters())])
            torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)
            assert (model.wte.weight.grad[100:] == 0.0).all()
    torch._dynamo.reset()
