"""The Hopper forward kernel alone, on a Hopper GPU: accuracy at every length, views, bit for bit repeats."""

import pytest
import torch

from kernels.naive import naive_attention
from tests.kernels.accuracy import BOUNDS, LISTED, assert_within, block_mask, documents, inputs
from tests.kernels.bits import assert_equal, assert_repeats, programs_of_hopper
from tests.kernels.hopper import ON_HOPPER

LENGTHS = [1, 17, 63, 64, 65, 127, 128, 129, 200, 1000, 1024, 1025, 2048, 4096]
UNEQUAL = [(1, 239), (113, 203), (108, 256), (256, 512), (512, 256), (1023, 1024), (1024, 1023), (1, 4096)]
UNEQUAL += [(700, 30)]
HEAD_DIMS = [64, 128, 256]
PADDED = [16, 32, 72, 80, 96, 136, 160, 192, 200]  # their tiles are filled up with zeros

pytestmark = [pytest.mark.gpu, ON_HOPPER]


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: tuple[int, int] | None = None,
    cu_seqlens: torch.Tensor | None = None,
    block_mask: torch.Tensor | None = None,
    low: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; low gets what rounding took from out."""
    from kernels.flash.call import Options, Tensors
    from kernels.flash.hopper.launch import fits_forward, forward
    from kernels.flash.masks import block_lists, document_bounds

    assert fits_forward(q, k, v)
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:3], float("nan"), device=q.device)
    left, _ = window or (-1, 0)
    starts = blocks = None
    if cu_seqlens is not None:
        starts, _ = document_bounds(cu_seqlens, q.shape[0], q.shape[2])
    if block_mask is not None:
        blocks, _ = block_lists(block_mask, q.shape[2], k.shape[2], causal, -1, -1)
    tensors = Tensors(
        dropout_seed, sinks=sinks, document_starts=starts, kv_lengths=kv_lengths, key_blocks=blocks
    )
    options = Options(causal, q.shape[3] ** -0.5, dropout_p, left, precise_delta=low is not None)
    forward(q, k, v, out, out if low is None else low, lse, tensors, options)
    return out, lse


def assert_accurate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **bounds: object
) -> None:
    """The gate of accuracy.py for out and lse."""
    out, lse = run(q, k, v, causal, **bounds)
    options = {"causal": causal, **bounds}
    want, want_lse = naive_attention(q.double(), k.double(), v.double(), return_lse=True, **options)
    peer = naive_attention(q, k * q.shape[3] ** -0.5, v, scale=1.0, **options)
    assert_within({"out": out, "lse": lse}, {"out": want, "lse": want_lse}, [{"out": peer}])


def normal(q_len: int, kv_len: int, head_dim: int, dtype: torch.dtype, **options) -> list[torch.Tensor]:
    tensors = inputs(q_len, kv_len, head_dim, dtype, seed=q_len, device="cuda", **options)
    return [x.detach() for x in tensors[:3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, *PADDED])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_exact_at_every_length(causal: bool, head_dim: int, dtype: torch.dtype) -> None:
    for q_len, kv_len in [(length, length) for length in LENGTHS] + UNEQUAL:
        assert_accurate(*normal(q_len, kv_len, head_dim, dtype, batch=2, heads=3, kv_heads=3), causal)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_exact_with_several_tiles_per_program(causal: bool, head_dim: int) -> None:
    """More tiles than the GPU has processors, with diagonals that do and do not begin on a block."""
    for q_len, kv_len in [(1024, 1024), (1000, 1000), (700, 777), (777, 700), (130, 1300)]:
        assert_accurate(
            *normal(q_len, kv_len, head_dim, torch.bfloat16, batch=16, heads=12, kv_heads=12), causal
        )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("q_len", "kv_len", "causal"),
    [
        (2100, 2100, True),
        (2100, 2100, False),
        (2100, 900, False),
        (4100, 4100, True),
        (4100, 4137, True),
        (4137, 4100, True),
    ],
)
def test_exact_with_several_dynamically_claimed_tiles_per_program(
    q_len: int, kv_len: int, causal: bool, head_dim: int
) -> None:
    """With two consumer warpgroups and, for head_dim 64, three; 256 claims those of (2100, causal) alone."""
    assert_accurate(*normal(q_len, kv_len, head_dim, torch.bfloat16, batch=1, heads=16, kv_heads=16), causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("left", "packed"), BOUNDS)
def test_windows_and_documents(left: int | None, packed: bool, head_dim: int, dtype: torch.dtype) -> None:
    window = None if left is None else (left, 0)
    for length in LENGTHS:
        tensors = normal(length, length, head_dim, dtype, batch=2, heads=4, kv_heads=2)
        cu_seqlens = documents(length, 2, "cuda") if packed else None
        assert_accurate(*tensors, True, window=window, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shared", [(2, 4), (1, 4), (2, 1), (1, 1)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_block_masks(causal: bool, shared: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    for q_len, kv_len in LISTED:
        if not causal or (kv_len - q_len) % 128 == 0:
            tensors = normal(q_len, kv_len, head_dim, dtype, batch=2, heads=4, kv_heads=2)
            assert_accurate(*tensors, causal, block_mask=block_mask(q_len, kv_len, *shared, device="cuda"))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 1)])
def test_packed_views_and_grouped_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    qkv = torch.randn(2, 333, heads + 2 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2) for x in qkv.split([heads, kv_heads, kv_heads], 2))
    assert_accurate(q, k, v, causal=True)
    assert_accurate(q.clone(), k, v, causal=False)  # laid out (batch, length, heads, head_dim), and so is out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 96, 160])
@pytest.mark.parametrize(
    "bound",
    ["causal", "full", "window", "documents", "blocks", "padding", "dropout", "full dropout", "sinks"],
)
def test_precise_delta_keeps_what_rounding_takes_from_out(
    bound: str, head_dim: int, dtype: torch.dtype
) -> None:
    """Of equal scores, P is 1 and sums of V are exact up to float32."""
    if head_dim > 128 and bound not in ("causal", "full", "window", "documents"):
        pytest.skip("the portable kernels have those there")
    for length in (129, 1000, 2100, 4100):  # 4100: three consumers
        q, k, v = normal(length, length, head_dim, dtype, batch=2, heads=4, kv_heads=2)
        q = torch.zeros_like(q.transpose(1, 2)).transpose(1, 2)  # tokens before heads, as in a packed qkv
        options: dict[str, object] = {"causal": "full" not in bound}
        if bound == "window":
            options["window"] = (200, 0)
        elif bound == "documents":
            options["cu_seqlens"] = documents(length, 2, "cuda")
        elif bound == "blocks":
            options["block_mask"] = block_mask(length, length, 2, 4, device="cuda")
        elif bound == "padding":
            options["kv_lengths"] = torch.tensor([0, length // 2], dtype=torch.int32, device="cuda")
        elif "dropout" in bound:
            options |= {"dropout_p": 0.5, "dropout_seed": torch.tensor(3, device="cuda")}
        elif bound == "sinks":
            options["sinks"] = torch.tensor([0.0, -torch.inf] * 2, device="cuda")  # e^0 is exact too
        low = torch.full_like(q, float("nan"))
        out, lse = run(q, k, v, low=low, **options)
        want = naive_attention(q.double(), k.double(), v.double(), **options)
        torch.testing.assert_close(out.double() + low.double(), want, rtol=2**-16, atol=1e-5)
        assert not torch.allclose(out.double(), want, rtol=2**-16, atol=1e-5)
        plain = run(q, k, v, **options)
        assert all(map(torch.equal, (out, lse), plain))


@pytest.mark.parametrize("length", [256, 1000, 2100])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_250_repeats_agree_bit_for_bit(causal: bool, head_dim: int, length: int) -> None:
    tensors = normal(length, length, head_dim, torch.bfloat16, batch=16, heads=12, kv_heads=12)
    assert_repeats(run, *tensors, causal)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("programs", [1, 7])
def test_any_number_of_programs_gives_the_same(programs: int, head_dim: int) -> None:
    cases = [(1000, 1000, {}), (129, 65, {}), (700, 30, {}), (64, 2000, {}), (4100, 4100, {})]
    cases += [(1000, 1000, {"cu_seqlens": documents(1000, 2, "cuda")}), (1000, 1000, {"window": (200, 0)})]
    if head_dim <= 128:
        cases += [(1000, 1000, {"block_mask": block_mask(1000, 1000, 2, 6, device="cuda")})]
    for q_len, kv_len, bounds in cases:
        tensors = normal(q_len, kv_len, head_dim, torch.bfloat16, batch=2, heads=6, kv_heads=3)
        got = run(*tensors, True, **bounds)
        with programs_of_hopper(programs):
            assert_equal(run(*tensors, True, **bounds), got)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_250_repeats_of_documents_agree_bit_for_bit(head_dim: int) -> None:
    tensors = normal(1000, 1000, head_dim, torch.bfloat16, batch=16, heads=12, kv_heads=12)
    assert_repeats(run, *tensors, True, cu_seqlens=documents(1000, 16, "cuda"))


def test_extreme_scores_stay_finite() -> None:
    """All scores equal and hugely negative, one key that wins everything, zeros."""
    q, k, v = normal(300, 300, 64, torch.bfloat16, heads=2, kv_heads=2)
    for a, b in [(q.abs() * 30, -k.abs() * 30), (q * 0, k), (q * 30, k * 30)]:
        assert_accurate(a, b, v, causal=True)


def test_layouts_that_tma_cannot_load_are_refused() -> None:
    from kernels.flash.hopper.launch import fits_forward

    x = torch.randn(2, 4, 64, 84, device="cuda", dtype=torch.bfloat16)
    assert not fits_forward(x, x, x)
    odd = torch.randn(2, 4, 64, 68, device="cuda", dtype=torch.bfloat16)[..., :64]
    assert not fits_forward(odd, odd, odd)
    shifted = torch.randn(2 * 4 * 64 * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(2, 4, 64, 64)
    assert not fits_forward(shifted, shifted, shifted)
    many = torch.empty(
        1024, 512, 128, 64, device="meta", dtype=torch.bfloat16
    )  # tokens of out 2^25 elements apart
    assert not fits_forward(many, many, many)
    assert fits_forward(many[:, 1:], many[:, 1:], many[:, 1:])
