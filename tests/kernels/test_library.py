"""torch's own attention behind our attention signature. About 5 s."""

import pytest
import torch

import kernels
from kernels import AttentionError, get_attention
from tests.kernels.accuracy import inputs
from tests.kernels.differential import Asked, assert_matches_float64, draw
from tests.random_cases import random_cases

CPU_BACKENDS = ["sdpa", "sdpa_flash", "sdpa_math"]


@pytest.mark.parametrize("name", CPU_BACKENDS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(9, 9), (4, 9), (9, 4), (1, 9)])
@pytest.mark.parametrize("causal", [True, False])
def test_results_match_naive_at_equal_and_unequal_lengths(
    name: str, q_len: int, kv_len: int, causal: bool
) -> None:
    *tensors, d_out = inputs(q_len, kv_len, 16, torch.float32, batch=2, heads=4, kv_heads=2)
    results = []
    for attention in (get_attention(name), get_attention("naive")):
        out = attention(*tensors, causal=causal, scale=0.3)
        results.append((out, *torch.autograd.grad(out, tensors, d_out)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", CPU_BACKENDS)
def test_queries_that_see_nothing_are_cut_off_since_cudnn_masks_them_wrongly(name: str) -> None:
    q, k, v, _ = inputs(200, 130, 16, torch.float32, heads=4, kv_heads=2)
    with Asked() as asked:
        out = get_attention(name)(q, k, v)
    assert asked.lengths == [130, 130, 130]
    assert asked.options["is_causal"]
    assert asked.options["attn_mask"] is None
    assert not out[:, :, :70].any()


@pytest.mark.parametrize("name", CPU_BACKENDS)
@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(2, 5, 0), (2, 0, 5), (2, 0, 0), (0, 5, 5)])
@pytest.mark.parametrize("causal", [True, False])
def test_empty_inputs_give_zeros_and_gradients(
    name: str, batch: int, q_len: int, kv_len: int, causal: bool
) -> None:
    *tensors, d_out = inputs(q_len, kv_len, 16, torch.float32, batch=batch)
    out = get_attention(name)(*tensors, causal=causal)
    assert out.shape == d_out.shape
    assert not out.any()
    assert not any(x.any() for x in torch.autograd.grad(out, tensors, d_out))


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_efficient"])
def test_a_call_that_the_forced_backend_has_no_kernel_for_is_refused_by_name(name: str) -> None:
    q, k, v, _ = inputs(8, 8, 16, torch.float32)
    with pytest.raises(
        AttentionError, match=f"^attention={name} has no kernel for torch.float32 q .* on cpu .*; use"
    ):
        get_attention(name)(q, k, v)


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim", "why"),
    [
        ("sdpa_efficient", torch.float64, 64, "it takes float16, bfloat16 and float32, not torch.float64"),
        (
            "sdpa_efficient",
            torch.bfloat16,
            20,
            "it takes a head_dim that is a multiple of 8 in torch.bfloat16, not 20",
        ),
        ("sdpa_efficient", torch.float32, 20, None),
        (
            "sdpa_efficient",
            torch.float32,
            18,
            "it takes a head_dim that is a multiple of 4 in torch.float32, not 18",
        ),
        ("flex", torch.float64, 64, "it takes float16, bfloat16 and float32, not torch.float64"),
        ("flex", torch.bfloat16, 8, "it takes a head_dim of at least 16, not 8"),
    ],
)
def test_what_torchs_kernels_lack_is_refused_before_the_first_step(name, dtype, head_dim, why) -> None:
    request = kernels.AttentionRequest(torch.device("cuda"), dtype, head_dim)
    assert kernels.ATTENTION[name].refuses(request) == why


@pytest.mark.parametrize("name", ["sdpa", "sdpa_math"])
def test_dropout_is_seeded_and_leaves_torchs_generator_unchanged(name: str) -> None:
    q, k, v, _ = inputs(64, 64, 16, torch.float32)
    before = torch.random.get_rng_state()
    attention = get_attention(name)
    first, again, other = (
        attention(q, k, v, dropout_p=0.5, dropout_seed=seed) for seed in (1, torch.tensor(1), 2)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, attention(q, k, v))
    # Although torch's generator would accept it.
    with pytest.raises(AttentionError, match="dropout_seed must fit int64"):
        attention(q, k, v, dropout_p=0.5, dropout_seed=2**63)


@pytest.mark.gpu
def test_dropout_leaves_the_generators_of_all_devices_unchanged() -> None:
    for device in ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))):
        q = torch.randn(1, 1, 64, 16, device=device)
        before = torch.random.get_rng_state(), *torch.cuda.get_rng_state_all()
        first, again = (get_attention("sdpa")(q, q, q, dropout_p=0.5, dropout_seed=1) for _ in range(2))
        assert torch.equal(first, again)
        assert all(map(torch.equal, before, (torch.random.get_rng_state(), *torch.cuda.get_rng_state_all())))


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5, "dropout_seed": 3}])
def test_compiled_sdpa_repeats_its_dropout_after_the_same_torch_seed(options: dict[str, object]) -> None:
    attention = get_attention("sdpa")
    q, k, v, d_out = inputs(32, 32, 16, torch.float32)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = compiled(q, k, v, **options)
        results.append((out, *torch.autograd.grad(out, (q, k, v), d_out)))
    first, again, other = results
    assert all(map(torch.equal, first, again))
    assert torch.equal(first[0], other[0]) == (not options)
    if not options:
        torch.testing.assert_close(first[0], attention(q, k, v))


@pytest.mark.slow
def test_sdpa_compiles_without_graph_breaks_at_varying_lengths() -> None:
    torch._dynamo.reset()  # no graph of another test counts
    attention = get_attention("sdpa")
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for q_len, kv_len in ((20, 20), (32, 32), (40, 40), (32, 40), (1, 40), (40, 32), (50, 20)):
        q, k, v, _ = inputs(q_len, kv_len, 16, torch.float32)
        torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_sdpa_compiles_where_heads_are_symbolic(heads: int, kv_heads: int) -> None:
    torch._dynamo.reset()
    attention = get_attention("sdpa")
    q, k, v, _ = inputs(20, 20, 16, torch.float32, heads=heads, kv_heads=kv_heads)
    compiled = torch.compile(attention, backend="aot_eager", dynamic=True, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))


@pytest.mark.parametrize("feature", [{"window": (4, 0)}, {"return_lse": True}, {"sinks": torch.zeros(1)}])
def test_features_that_sdpa_lacks_are_refused(feature: dict[str, object]) -> None:
    q, k, v, _ = inputs(8, 8, 16, torch.float32)
    with pytest.raises(
        AttentionError, match=f"{next(iter(feature))}; attention=naive does, and flash on a GPU"
    ):
        get_attention("sdpa")(q, k, v, **feature)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_masks_and_modifies_scores_as_naive_does() -> None:
    """On a CPU, where the registry refuses it, direct calls are right too: compiled, those of 40 tokens were not."""
    flex = get_attention("flex")
    tensors = [x.detach() for x in inputs(40, 50, 16, torch.float32, heads=4, kv_heads=2)[:3]]
    for options in (
        {},
        {"causal": False},
        {"window": (7, 3), "causal": False},
        {"window": (5, 0), "softcap": 2.0, "alibi_slopes": torch.rand(4)},
    ):
        got = flex(*tensors, return_lse=True, **options)
        want = kernels.naive.naive_attention(*tensors, return_lse=True, **options)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    q, k, v = tensors
    with torch.autocast("cpu", torch.bfloat16):
        mixed = flex(q.bfloat16(), k, v)
    assert mixed.dtype is torch.bfloat16


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_flex_compiles_without_graph_breaks() -> None:
    q, k, v, _ = (x.detach() for x in inputs(40, 40, 16, torch.float32))
    compiled = torch.compile(get_attention("flex"), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), get_attention("naive")(q, k, v))


@pytest.mark.parametrize("number", random_cases(12))
@pytest.mark.parametrize("name", CPU_BACKENDS)
def test_random_calls_match_float64(name: str, number: int) -> None:
    call = draw(number, (torch.float32, torch.bfloat16, torch.float16), longest=200)
    assert_matches_float64(name, call, "cpu", number)
