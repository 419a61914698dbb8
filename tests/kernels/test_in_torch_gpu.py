"""Flash attention inside PyTorch on a GPU: CUDA graphs, torch's checks of operators, inductor, and under SDPA."""

import inspect
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernels
from kernels.flash.call import Options, Tensors
from tests.kernels.accuracy import inputs

pytestmark = pytest.mark.gpu

SHAPE = {"batch": 2, "heads": 4, "device": "cuda"}
Tensor = torch.Tensor


@pytest.fixture(scope="module")
def flash() -> Callable[..., Tensor]:
    return kernels.get_attention("flash")


def forward_and_backward(attention, tensors: list[Tensor], d_out: Tensor, **options) -> tuple[Tensor, ...]:
    out = attention(*tensors, **options)
    return out, *torch.autograd.grad(out, tensors, d_out)


def captured(step: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, which a capture must not
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(*pair) for pair in zip(a, b, strict=True))


def test_a_cuda_graph_replays_with_new_inputs_and_new_dropout(flash) -> None:
    *tensors, d_out = inputs(300, 300, 64, torch.bfloat16, **SHAPE)
    seed = torch.tensor(3, device="cuda")
    options = {"dropout_p": 0.2, "dropout_seed": seed}
    graph, results = captured(lambda: forward_and_backward(flash, tensors, d_out, **options))
    replays = []
    for value in (3, 4):
        seed.fill_(value)
        graph.replay()
        replays.append([x.clone() for x in results])
        assert equal(replays[-1], forward_and_backward(flash, tensors, d_out, **options))
    assert not torch.equal(replays[0][0], replays[1][0])
    with torch.no_grad():
        for x in (*tensors, d_out):
            x.normal_()
    graph.replay()
    assert equal(results, forward_and_backward(flash, tensors, d_out, **options))


def test_concurrent_cuda_graphs_and_calls_do_not_disturb_each_other(flash) -> None:
    """Programs of a kernel share their work through a counter; launches that run concurrently each need their own."""
    steps = []
    for number in range(3):  # so few heads that all fit on the GPU at a time
        *tensors, d_out = inputs(
            4096, 4096, 64, torch.bfloat16, seed=number, heads=2, kv_heads=2, device="cuda"
        )
        steps.append(lambda tensors=tensors, d_out=d_out: forward_and_backward(flash, tensors, d_out))
    graphs = [captured(step) for step in steps]
    wanted = [step() for step in steps]
    streams = [torch.cuda.Stream() for _ in steps]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        for step, stream in zip(steps, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(step())
        torch.cuda.synchronize()
        for want, got, (_, replayed) in zip(wanted, results, graphs, strict=True):
            assert equal(want, got)
            assert equal(want, replayed)


def test_cuda_graphs_and_calls_read_the_current_content_of_masks(flash) -> None:
    *tensors, d_out = inputs(300, 300, 64, torch.bfloat16, **SHAPE)
    bounds = [
        torch.tensor([0, *inner, 600], dtype=torch.int32, device="cuda") for inner in ((100, 300), (7, 450))
    ]
    blocks = [torch.rand(1, 4, 3, 3, device="cuda") > 0.5 for _ in range(2)]
    for name, masks in (("cu_seqlens", bounds), ("block_mask", blocks)):
        source, mask = masks[0].clone(), masks[0].clone()
        graph, results = captured(lambda: forward_and_backward(flash, tensors, d_out, **{name: mask}))  # noqa: B023
        writer, _ = captured(lambda: (mask.copy_(source),))  # noqa: B023
        for each in masks:
            source.copy_(each)
            writer.replay()
            graph.replay()
            assert equal(results, forward_and_backward(flash, tensors, d_out, **{name: each}))
            assert equal(results, forward_and_backward(flash, tensors, d_out, **{name: mask}))


def test_a_cpu_seed_causes_no_device_synchronisation(flash) -> None:
    *tensors, _ = inputs(100, 100, 64, torch.bfloat16, **SHAPE)
    want = flash(*tensors, dropout_p=0.5, dropout_seed=torch.tensor(7, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = [flash(*tensors, dropout_p=0.5, dropout_seed=seed) for seed in (7, torch.tensor(7))]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(out, want) for out in outs)


@pytest.mark.parametrize("precise_delta", [False, True])
def test_the_operators_pass_torchs_own_checks(flash, precise_delta: bool) -> None:
    *tensors, d_out = inputs(130, 200, 64, torch.bfloat16, kv_heads=2, **SHAPE)
    operators, slopes = kernels.flash.operators, torch.rand(4, device="cuda")
    options = Options(True, 0.125, 0.1, 100, -1, 20.0, precise_delta=precise_delta)
    rest = (*Tensors(torch.tensor(5, device="cuda"), slopes), *options)
    torch.library.opcheck(operators.flash_forward, (*tensors, *rest))
    out, lse, low = operators.flash_forward(*(x.detach() for x in tensors), *rest)
    leaves = (out, lse, low if precise_delta else None, *(x.detach() for x in tensors))
    for d_lse in (None, torch.randn_like(lse)):
        torch.library.opcheck(operators.flash_backward, (d_out, d_lse, *leaves, *rest))


class Attention(torch.nn.Module):
    """As in GPT-2: views of a packed qkv go in, and heads are merged by a view."""

    def __init__(self, attention: Callable[..., Tensor], width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.attention, self.heads = attention, heads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("length", [300, 2100])  # at 2100, tiles are claimed dynamically
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_views_of_a_packed_qkv_under_inductor(flash, mode: str, length: int) -> None:
    torch.manual_seed(0)
    model = Attention(flash).to("cuda", torch.bfloat16)
    x, d_out = torch.randn(2, 4, length, 256, device="cuda", dtype=torch.bfloat16)[:, :2].unbind()
    results = []
    for step in (model, torch.compile(model, fullgraph=True, mode=mode)):
        # with CUDA graphs: twice to warm up, to record, to replay
        for _ in range(4 if step is not model else 1):
            torch.compiler.cudagraph_mark_step_begin()
            model.zero_grad()
            out = step(x)
            out.backward(d_out)
        results.append([out.detach().clone(), *(each.grad.clone() for each in model.parameters())])
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, want, atol=2e-2 * want.abs().max().item(), rtol=0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("tier", ["triton", "auto"])
def test_packed_qkv_equals_separate_q_k_v_bit_for_bit(flash, tier: str, compiled: bool) -> None:
    flash = kernels.bind(flash, tier=tier)
    packed = kernels.packed_form(flash)
    packed = torch.compile(packed, fullgraph=True) if compiled else packed
    qkv = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    d_out = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    results = []
    for out in (packed(qkv), flash(*qkv.permute(2, 0, 3, 1, 4).unbind())):
        results.append((out.detach(), *torch.autograd.grad(out, qkv, d_out)))
    assert equal(*results)


@pytest.fixture
def active() -> Iterator[None]:
    kernels.register()
    torch.nn.attention.activate_flash_attention_impl("tilegpt")
    yield
    torch.nn.attention.restore_flash_attention_impl()


@pytest.fixture
def under_sdpa(active) -> Iterator[None]:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The outputs of our forward under SDPA."""
    outs = []
    forward = kernels.flash.under_sdpa.flash_forward

    def noted(*inputs):
        results = forward(*inputs)
        outs.append(results[0])
        return results

    monkeypatch.setattr(kernels.flash.under_sdpa, "flash_forward", noted)
    return outs


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_sdpa_with_our_kernels_equals_flash_bit_for_bit(
    flash, under_sdpa, ran, causal: bool, packed: bool, compiled: bool
) -> None:
    *tensors, d_out = inputs(300, 300, 64, torch.bfloat16, kv_heads=4, **SHAPE)
    if packed:
        qkv = torch.stack([x.detach().transpose(1, 2) for x in tensors], 2)
        tensors = [qkv[:, :, each].transpose(1, 2).requires_grad_() for each in range(3)]

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    sdpa = torch.compile(sdpa, fullgraph=True) if compiled else sdpa
    got = forward_and_backward(sdpa, tensors, d_out)
    assert ran
    assert equal(got, forward_and_backward(flash, tensors, d_out, causal=causal))


def test_torch_multihead_attention_runs_on_our_kernels(flash, under_sdpa) -> None:
    torch.manual_seed(0)
    model = torch.nn.MultiheadAttention(256, 4, bias=False, batch_first=True).to("cuda", torch.bfloat16)
    x = torch.randn(2, 100, 256, device="cuda", dtype=torch.bfloat16)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(100, device="cuda", dtype=torch.bfloat16)
    got = model(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    q, k, v = F.linear(x, model.in_proj_weight).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
    want = F.linear(flash(q, k, v).transpose(1, 2).flatten(2), model.out_proj.weight)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-2)


def test_dropout_under_sdpa_comes_from_torchs_generator(under_sdpa) -> None:
    q, k, v, _ = inputs(100, 100, 64, torch.bfloat16, kv_heads=4, **SHAPE)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_more_batches_than_a_grid_axis_has_run_under_sdpa(flash, under_sdpa, ran) -> None:
    *tensors, d_out = inputs(16, 16, 64, torch.bfloat16, batch=70000, device="cuda")
    if torch.__version__ >= "2.15":  # which looks at the number before it calls us
        with pytest.raises(RuntimeError, match="No available kernel"):
            F.scaled_dot_product_attention(*tensors, is_causal=True)
        return
    got = forward_and_backward(F.scaled_dot_product_attention, tensors, d_out, is_causal=True)
    assert len(ran) == 2
    last = [x.detach()[-1000:].requires_grad_() for x in tensors]
    want = forward_and_backward(flash, last, d_out[-1000:])
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine[-1000:], theirs)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("shared", [False, True], ids=["two offsets", "documents"])
def test_varlen_attn_runs_on_our_kernels(flash, active, shared: bool, compiled: bool) -> None:
    """As torchtitan calls it; with one tensor of offsets for both on the Hopper kernels where those serve."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    grouped = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters  # not in torch 2.11
    gqa = {"enable_gqa": True} if grouped else {}
    kv_heads = 2 if grouped else 4
    *tensors, d_out = inputs(900, 900, 64, torch.bfloat16, heads=4, kv_heads=kv_heads, device="cuda")
    offsets = torch.tensor([0, 300, 301, 900], dtype=torch.int32, device="cuda")
    of_keys = offsets if shared else offsets.clone()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out = varlen.varlen_attn(q, k, v, offsets, of_keys, 599, 599, window_size=(-1, 0), **gqa)
        return out.transpose(0, 1)[None]

    got = forward_and_backward(torch.compile(attend, fullgraph=True) if compiled else attend, tensors, d_out)
    want = forward_and_backward(flash, tensors, d_out, cu_seqlens=offsets)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-2, rtol=1e-2)


def test_nested_tensors_run_on_our_kernels(flash, under_sdpa) -> None:
    parts = [torch.randn(length, 4, 64, device="cuda", dtype=torch.bfloat16) for length in (5, 300, 129)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    out = F.scaled_dot_product_attention(nested, nested, nested, is_causal=True)
    for mine, part in zip(out.transpose(1, 2).unbind(), parts, strict=True):
        one = part.transpose(0, 1)[None]
        torch.testing.assert_close(mine, flash(one, one, one)[0].transpose(0, 1), atol=1e-2, rtol=1e-2)


def small_gpt2(attention: str):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=128, n_head=2, n_layer=3, vocab_size=100, attn_pdrop=0.0)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation=attention)
    return model.to("cuda", torch.bfloat16).eval()


def test_transformers_gpt2_runs_on_our_kernels_under_sdpa(active, ran) -> None:
    """In 16 bits and without padding, and without forcing a backend: it passes is_causal and no mask."""
    model, tokens = small_gpt2("sdpa"), torch.randint(100, (2, 200), device="cuda")
    model(tokens, labels=tokens).loss.backward()
    assert len(ran) == 3
    got = model(tokens).logits
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(got, model(tokens).logits, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_transformers_gpt2_by_its_attention_interface(compiled: bool, padded: bool) -> None:
    kernels.register_transformers()
    tokens = torch.randint(100, (2, 200), device="cuda")
    real = torch.ones_like(tokens)
    real[0, : 70 * padded] = 0
    results = []
    for attention in ("tilegpt", "sdpa"):
        model = small_gpt2(attention)
        step = torch.compile(model, fullgraph=True) if compiled and attention == "tilegpt" else model
        logits = step(tokens, attention_mask=real, use_cache=False).logits[real.bool()]
        logits.float().square().mean().backward()
        results.append((logits, model.transformer.h[0].attn.c_attn.weight.grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-2 * theirs.abs().max().item(), rtol=2e-2)
