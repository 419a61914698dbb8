"""The Hopper backward kernels alone, on a Hopper GPU: accuracy at every length, views, bit for bit repeats.

Up to head_dim 128 tests run with dQ's product in its own step and, except for bounded and listed work items, also one
step later, whichever of the two a length would use.
"""

import pytest
import torch

from kernels.naive import naive_attention
from tests.kernels.accuracy import BOUNDS, LISTED, assert_as_accurate, block_mask, documents, inputs
from tests.kernels.bits import assert_equal, assert_repeats, programs_of_hopper
from tests.kernels.hopper import ON_HOPPER

pytestmark = [pytest.mark.gpu, ON_HOPPER]

LENGTHS = [1, 17, 63, 64, 65, 127, 128, 129, 200, 1000, 1024, 1025, 2048, 4096]
UNEQUAL = [(1, 239), (113, 203), (256, 512), (512, 256), (1023, 1024), (1024, 1023), (1, 4096), (700, 30)]


def force(delay: int, patch: pytest.MonkeyPatch) -> None:
    from kernels import launch
    from kernels.flash.hopper import launch as hopper_launch

    patch.setattr(hopper_launch, "choose_dq_delay", lambda *_: delay)
    patch.setattr(launch, "_known", {})  # earlier launches, whose key does not say whether they were delayed


@pytest.fixture(autouse=True, params=[0, 1], ids=["no delay", "delay"])
def delay(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    force(request.param, monkeypatch)
    return request.param


def gradients(
    tensors: list[torch.Tensor],
    causal: bool,
    window: tuple[int, int] | None = None,
    cu_seqlens: torch.Tensor | None = None,
    block_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
) -> dict[str, torch.Tensor]:
    """dq, dk, dv of (q, k, v, d_out, out, lse), into NaN so that what is not written shows."""
    from kernels.flash.call import Options, Tensors
    from kernels.flash.hopper.launch import backward, fits_backward
    from kernels.flash.masks import block_lists, document_bounds

    q, k, v, d_out, out, lse = tensors
    assert fits_backward(q, k, v, out, d_out)
    dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
    delta = torch.full_like(lse, float("nan"))
    left, _ = window or (-1, 0)
    starts = ends = key_blocks = query_blocks = None
    if cu_seqlens is not None:
        starts, ends = document_bounds(cu_seqlens, q.shape[0], q.shape[2])
    if block_mask is not None:
        key_blocks, query_blocks = block_lists(block_mask, q.shape[2], k.shape[2], causal, -1, -1)
    seed = torch.tensor(dropout_seed, device="cuda") if dropout_p else None
    features = Tensors(seed, None, None, starts, ends, None, key_blocks, query_blocks)
    options = Options(causal, q.shape[3] ** -0.5, dropout_p, left)
    backward(d_out, None, out, out, lse, q, k, v, dq, dk, dv, delta, features, options)
    torch.testing.assert_close(delta, (out.float() * d_out.float()).sum(-1), atol=1e-3, rtol=1e-3)
    return {"dq": dq, "dk": dk, "dv": dv}


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, causal: bool, **features: object
) -> list[torch.Tensor]:
    """The tensors that `gradients` takes, out and lse from float64."""
    q, k, v = (x.detach() for x in (q, k, v))
    options = {"causal": causal, "return_lse": True, **features}
    out, lse = naive_attention(q.double(), k.double(), v.double(), **options)
    return [q, k, v, d_out, out.to(q.dtype), lse.float().contiguous()]


def assert_accurate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, causal: bool, **features: object
) -> None:
    tensors = forward(q, k, v, d_out, causal, **features)
    got = gradients(tensors, causal, **features) | {"out": tensors[4]}
    assert_as_accurate(got, tensors[:3], d_out, causal=causal, **features)


NARROW = [(head_dim, delay) for head_dim in (64, 128) for delay in (0, 1)]
# Those whose tiles are filled up with zeros.
PADDED = [(head_dim, delay) for head_dim in (16, 32, 80, 96, 104) for delay in (0, 1)]
PADDED += [(head_dim, 0) for head_dim in (136, 160, 192, 200)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("head_dim", "delay"), PADDED, indirect=["delay"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_exact_at_other_head_dims(causal: bool, head_dim: int, dtype: torch.dtype) -> None:
    for q_len, kv_len in [(1, 1), (63, 63), (200, 200), (1025, 1025), *UNEQUAL]:
        tensors = inputs(
            q_len, kv_len, head_dim, dtype, batch=2, heads=4, kv_heads=2, seed=q_len, device="cuda"
        )  # fmt: skip
        assert_accurate(*tensors, causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("head_dim", "delay"), [*NARROW, (256, 0)], indirect=["delay"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
class TestOnHopper:
    def test_exact_at_every_length(self, causal: bool, head_dim: int, dtype: torch.dtype) -> None:
        for q_len, kv_len in [(length, length) for length in LENGTHS] + UNEQUAL:
            tensors = inputs(
                q_len, kv_len, head_dim, dtype, batch=2, heads=3, kv_heads=3, seed=q_len, device="cuda"
            )  # fmt: skip
            assert_accurate(*tensors, causal)

    def test_views_of_a_packed_qkv_are_exact(self, causal: bool, head_dim: int, dtype: torch.dtype) -> None:
        qkv = torch.randn(2, 333, 3, 4, head_dim, device="cuda", dtype=dtype)
        d_out = torch.randn(2, 333, 4, head_dim, device="cuda", dtype=dtype).transpose(1, 2)
        assert_accurate(*(qkv[:, :, each].transpose(1, 2) for each in range(3)), d_out, causal)

    @pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (6, 1)])
    def test_grouped_heads(
        self, heads: int, kv_heads: int, causal: bool, head_dim: int, dtype: torch.dtype
    ) -> None:
        """Odd and even numbers of blocks, keys without queries, queries without keys, many work items."""
        for batch, q_len, kv_len in [
            (2, 333, 333),
            (1, 128, 700),
            (1, 700, 30),
            (1, 65, 129),
            (16, 1024, 1024),
        ]:
            tensors = inputs(
                q_len, kv_len, head_dim, dtype, batch=batch, heads=heads, kv_heads=kv_heads, device="cuda"
            )  # fmt: skip
            assert_accurate(*tensors, causal)

    @pytest.mark.parametrize("kv_heads", [12, 4])
    def test_250_repeats_agree_bit_for_bit(
        self, kv_heads: int, causal: bool, head_dim: int, dtype: torch.dtype
    ) -> None:
        """With several work items for each program, so that their order in time varies."""
        *qkv, d_out = inputs(
            1000, 1000, head_dim, dtype, batch=16, heads=12, kv_heads=kv_heads, device="cuda"
        )  # fmt: skip
        assert_repeats(gradients, forward(*qkv, d_out, causal), causal)

    @pytest.mark.parametrize("programs", [1, 7])
    def test_any_number_of_programs_gives_the_same(
        self, programs: int, causal: bool, head_dim: int, dtype: torch.dtype
    ) -> None:
        """A single program must process all work items in an order in which none waits for a later one."""
        cases = [(q_len, kv_len, {}) for q_len, kv_len in [(1000, 1000), (129, 65), (700, 30), (64, 2000)]]
        if head_dim <= 128:
            cases.append((1000, 1000, {"dropout_p": 0.1, "dropout_seed": 5}))
        for q_len, kv_len, features in cases:
            *qkv, d_out = inputs(
                q_len, kv_len, head_dim, dtype, batch=2, heads=6, kv_heads=3, device="cuda"
            )  # fmt: skip
            tensors = forward(*qkv, d_out, causal, **features)
            got = gradients(tensors, causal, **features)
            with programs_of_hopper(programs):
                assert_equal(gradients(tensors, causal, **features), got)

    def test_extreme_scores_stay_finite(self, causal: bool, head_dim: int, dtype: torch.dtype) -> None:
        """All scores hugely negative, all equal, one key that wins everything; lengths that fill no tile."""
        q, k, v, d_out = inputs(
            300, 300, head_dim, dtype, heads=2, kv_heads=2, device="cuda"
        )  # fmt: skip
        q, k, v = q.detach(), k.detach(), v.detach()
        for a, b in [(q.abs() * 30, -k.abs() * 30), (q * 0, k), (q * 30, k * 30)]:
            got = gradients(forward(a, b, v, d_out, causal), causal)
            assert all(torch.isfinite(x).all() for x in got.values())

    def test_layouts_that_tma_cannot_load_are_refused(
        self, causal: bool, head_dim: int, dtype: torch.dtype
    ) -> None:
        from kernels.flash.hopper.launch import fits_backward

        x = torch.randn(2, 4, 64, head_dim, device="cuda", dtype=dtype)
        assert fits_backward(x, x, x, x, x)
        odd = torch.randn(2, 4, 64, head_dim + 4, device="cuda", dtype=dtype)[..., :head_dim]
        assert not fits_backward(odd, x, x, x, x)
        assert not fits_backward(x, x, x, x, x[:1, :1, :1].expand(2, 4, 64, head_dim))
        assert not fits_backward(x[..., :44], x[..., :44], x[..., :44], x[..., :44], x[..., :44])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("head_dim", "delay"), NARROW, indirect=["delay"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
class TestDropoutAndDelay:
    def test_dropout(self, causal: bool, head_dim: int, dtype: torch.dtype) -> None:
        """The mask of kernels/philox.py, which naive attention uses too; grouped heads, many work items."""
        many = [(1, 128, 700), (1, 700, 30), (16, 1024, 1024)]
        for batch, q_len, kv_len in [(2, length, length) for length in LENGTHS[:-1]] + many:
            tensors = inputs(
                q_len, kv_len, head_dim, dtype, batch=batch, heads=4, kv_heads=2, seed=q_len, device="cuda"
            )  # fmt: skip
            assert_accurate(*tensors, causal, dropout_p=0.2, dropout_seed=2**40 + q_len)

    def test_delaying_the_dq_product_by_a_step_changes_no_bit(
        self, delay: int, causal: bool, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        *qkv, d_out = inputs(
            1000, 1000, head_dim, dtype, batch=2, heads=12, kv_heads=12, device="cuda"
        )  # fmt: skip
        for features in ({}, {"dropout_p": 0.1, "dropout_seed": 5}):
            force(delay, monkeypatch)
            tensors = forward(*qkv, d_out, causal, **features)
            got = gradients(tensors, causal, **features)
            force(1 - delay, monkeypatch)
            assert_equal(gradients(tensors, causal, **features), got)


@pytest.mark.parametrize(
    "delay", [0], indirect=True, ids=["no delay"]
)  # bounded work items are never delayed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
class TestWindowsAndDocuments:
    @pytest.mark.parametrize(("left", "packed"), BOUNDS)
    def test_exact_at_every_length(
        self, left: int | None, packed: bool, head_dim: int, dtype: torch.dtype
    ) -> None:
        window = None if left is None else (left, 0)
        for length in LENGTHS[:-1]:
            tensors = inputs(
                length, length, head_dim, dtype, batch=2, heads=4, kv_heads=2, seed=length, device="cuda"
            )  # fmt: skip
            cu_seqlens = documents(length, 2, "cuda") if packed else None
            assert_accurate(*tensors, True, window=window, cu_seqlens=cu_seqlens)

    def test_250_repeats_agree_bit_for_bit(self, head_dim: int, dtype: torch.dtype) -> None:
        *qkv, d_out = inputs(
            1000, 1000, head_dim, dtype, batch=16, heads=12, kv_heads=12, device="cuda"
        )  # fmt: skip
        cu_seqlens = documents(1000, 16, "cuda")
        tensors = forward(*qkv, d_out, True, cu_seqlens=cu_seqlens)
        assert_repeats(gradients, tensors, True, cu_seqlens=cu_seqlens)

    @pytest.mark.parametrize("programs", [1, 7])
    def test_any_number_of_programs_gives_the_same(
        self, programs: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        for bounds in ({"cu_seqlens": documents(1000, 2, "cuda")}, {"window": (200, 0)}):
            *qkv, d_out = inputs(
                1000, 1000, head_dim, dtype, batch=2, heads=6, kv_heads=3, device="cuda"
            )  # fmt: skip
            tensors = forward(*qkv, d_out, True, **bounds)
            got = gradients(tensors, True, **bounds)
            with programs_of_hopper(programs):
                assert_equal(gradients(tensors, True, **bounds), got)


@pytest.mark.parametrize("delay", [0], indirect=True, ids=["no delay"])  # nor are listed ones
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
class TestBlockMasks:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    @pytest.mark.parametrize("shared", [(2, 4), (1, 4), (2, 1), (1, 1)])
    def test_exact_at_every_length(
        self, shared: tuple[int, int], dtype: torch.dtype, causal: bool, head_dim: int
    ) -> None:
        for q_len, kv_len in LISTED:
            if causal and (kv_len - q_len) % 128:
                continue
            tensors = inputs(
                q_len, kv_len, head_dim, dtype, batch=2, heads=4, kv_heads=2, seed=q_len, device="cuda"
            )  # fmt: skip
            mask = block_mask(q_len, kv_len, *shared, device="cuda")
            assert_accurate(*tensors, causal, block_mask=mask)

    @pytest.mark.parametrize("share", [0.1, 0.9])
    def test_250_repeats_agree_bit_for_bit(self, share: float, causal: bool, head_dim: int) -> None:
        *qkv, d_out = inputs(
            2000, 2000, head_dim, torch.bfloat16, batch=8, heads=12, kv_heads=12, device="cuda"
        )  # fmt: skip
        mask = block_mask(2000, 2000, 8, 12, share, device="cuda")
        assert_repeats(gradients, forward(*qkv, d_out, causal, block_mask=mask), causal, block_mask=mask)

    @pytest.mark.parametrize("programs", [1, 7])
    def test_any_number_of_programs_gives_the_same(self, programs: int, causal: bool, head_dim: int) -> None:
        mask = block_mask(1000, 1000, 2, 6, device="cuda")
        *qkv, d_out = inputs(
            1000, 1000, head_dim, torch.bfloat16, batch=2, heads=6, kv_heads=3, device="cuda"
        )  # fmt: skip
        tensors = forward(*qkv, d_out, causal, block_mask=mask)
        got = gradients(tensors, causal, block_mask=mask)
        with programs_of_hopper(programs):
            assert_equal(gradients(tensors, causal, block_mask=mask), got)
