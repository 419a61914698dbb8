"""Our kernels as torch's own flash attention, in the interpreter. About 4 s."""

import importlib

import pytest
import torch
from torch.nn.attention import SDPBackend

import kernels
from kernels.flash import under_sdpa
from kernels.flash.under_sdpa import activate
from kernels.naive import naive_attention
from tests.kernels.accuracy import inputs
from tests.kernels.differential import Asked

if torch.cuda.is_available():
    pytest.skip("the interpreter's checks", allow_module_level=True)


@pytest.fixture
def activated():
    override = activate("CPU")  # the operators SDPA calls on CUDA, so that the interpreter can run them here
    yield torch.ops.aten._scaled_dot_product_flash_attention
    override.remove()


def test_torch_lists_activates_and_restores_our_kernels() -> None:
    kernels.register()
    assert "tilegpt" in torch.nn.attention.list_flash_attention_impls()
    torch.nn.attention.activate_flash_attention_impl("tilegpt")
    assert torch.nn.attention.current_flash_attention_impl() == "tilegpt"
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.parametrize("causal", [True, False])
def test_results_and_gradients_match_naive(activated, causal: bool) -> None:
    *tensors, d_out = inputs(70, 70, 16, torch.float32, heads=2, kv_heads=2)
    out = activated(*tensors, is_causal=causal, scale=0.3)[0]
    want = naive_attention(*tensors, causal=causal, scale=0.3)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(*(torch.autograd.grad(each, tensors, d_out) for each in (out, want)))


def test_dropout_comes_from_torchs_generator_and_is_replayed(activated) -> None:
    *tensors, d_out = inputs(40, 40, 16, torch.float32)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(activated(*tensors, dropout_p=0.5, is_causal=True))
    assert torch.equal(outs[0][0], outs[1][0])
    assert not torch.equal(outs[0][0], outs[2][0])
    seed = outs[0][6].view(torch.int64)[0]
    want = naive_attention(*tensors, dropout_p=0.5, dropout_seed=seed)
    torch.testing.assert_close(outs[0][0], want)
    torch.testing.assert_close(*(torch.autograd.grad(each, tensors, d_out) for each in (outs[0][0], want)))


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_scale_of_zero_or_below_is_right(activated, scale: float) -> None:
    *tensors, d_out = inputs(40, 40, 16, torch.float32, heads=2, kv_heads=2)
    q, k, v = tensors
    out = activated(q, k, v, is_causal=True, scale=scale)[0]
    want = naive_attention(q * scale, k, v, scale=1.0)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(*(torch.autograd.grad(each, tensors, d_out) for each in (out, want)))


def test_more_batches_than_a_launch_takes_are_attended_in_parts(activated, monkeypatch) -> None:
    *tensors, d_out = inputs(20, 20, 16, torch.float32, batch=5)
    monkeypatch.setattr(under_sdpa, "LARGEST_GRID", 2)  # as if batches were that many times more
    out = activated(*tensors, is_causal=True)[0]
    want = naive_attention(*tensors)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(*(torch.autograd.grad(each, tensors, d_out) for each in (out, want)))
    dropped, *_, state, _, _ = activated(*tensors, dropout_p=0.5, is_causal=True)
    seeds = [state.view(torch.int64)[0] + part for part in range(3)]
    parts = [
        naive_attention(*of_part, dropout_p=0.5, dropout_seed=seed)
        for seed, *of_part in zip(seeds, *(x.split(2) for x in tensors), strict=True)
    ]
    torch.testing.assert_close(dropped, torch.cat(parts))
    gradients = (torch.autograd.grad(each, tensors, d_out) for each in (dropped, torch.cat(parts)))
    torch.testing.assert_close(*gradients)


def test_cudnn_which_sdpa_prefers_on_hopper_is_off_while_ours_are_active() -> None:
    assert torch.backends.cuda.cudnn_sdp_enabled()
    kernels.register()
    torch.nn.attention.activate_flash_attention_impl("tilegpt")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_transformers_gpt2_asks_sdpa_for_what_our_kernels_serve() -> None:
    """is_causal and no mask, without which SDPA would not offer the call to its flash backend."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=50, n_positions=32)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").eval()
    with Asked() as asked:
        model(torch.randint(50, (2, 20)))
    assert asked.options["is_causal"]
    assert asked.options["attn_mask"] is None


def test_after_removal_torch_has_no_flash_attention_on_a_cpu() -> None:
    activate("CPU").remove()
    q, k, v, _ = inputs(8, 8, 16, torch.float32)
    with pytest.raises(NotImplementedError):
        torch.ops.aten._scaled_dot_product_flash_attention(q.detach(), k.detach(), v.detach())


def test_nested_tensors_under_sdpa_run_on_our_kernels(activated, monkeypatch) -> None:
    """With the choice of a backend as a GPU makes it: a CPU has none for them."""
    sdpa = importlib.import_module("torch.nested._internal.sdpa")
    monkeypatch.setattr(sdpa, "_select_sdp_backend", lambda *_: SDPBackend.FLASH_ATTENTION)
    parts = [torch.randn(length, 2, 16, requires_grad=True) for length in (5, 30, 1)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(nested, nested, nested, is_causal=True)
    for mine, part in zip(out.transpose(1, 2).unbind(), parts, strict=True):
        one = part.transpose(0, 1)[None]
        want = naive_attention(one, one, one)[0].transpose(0, 1)
        torch.testing.assert_close(mine, want)
    out.values().sum().backward()
    got = [part.grad.clone() for part in parts]
    for mine, part in zip(got, parts, strict=True):
        part.grad = None
        one = part.transpose(0, 1)[None]
        naive_attention(one, one, one).sum().backward()
        torch.testing.assert_close(mine, part.grad)
