"""Ring attention over real ranks, held to attention of the whole sequence in float64."""

from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kernels import AttentionError
from kernels.naive import naive_attention
from kernels.ring import gathered, gathers_keys, passes, ring_attention, shard_positions
from kernels.ring.blocks import Block, Layout
from tests.kernels.accuracy import assert_as_accurate
from tests.kernels.ring_ranks import Case, Results, of_all_ranks

# In two rows of 64 tokens, cut into 4 or 8 chunks: documents that end on a chunk's end, that reach over several
# chunks, that cross a row's end, of one token, and empty ones.
DOCUMENTS = (16, 0, 5, 1, 30, 20, 8, 48)
EXACT = [
    replace(case, with_d_lse=True)
    for ranks in (2, 4)
    for case in (
        Case(ranks),
        Case(ranks, causal=False),
        Case(ranks, heads=3, kv_heads=1),
        Case(ranks, documents=DOCUMENTS),
        Case(ranks, documents=(128,)),
        Case(ranks, gather_keys=True),
        Case(ranks, causal=False, gather_keys=True),
        Case(ranks, heads=3, kv_heads=1, gather_keys=True),
    )
]
FLASH = [
    Case(2, "flash", torch.float32, compiled=True),
    Case(2, "flash", torch.float32, causal=False),
    Case(4, "flash", torch.float16),
    Case(2, "flash", torch.float32, documents=DOCUMENTS),
    Case(2, "flash", torch.float32, compiled=True, gather_keys=True),
    Case(4, "flash", torch.float16, gather_keys=True),
]
ON_GPU = [
    Case(
        2, "flash", dtype, causal, head_dim=head_dim, length=length, documents=documents, gather_keys=gathered
    )
    for dtype, head_dim in ((torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 64))
    for causal, length, documents in (
        (True, 4096, ()),
        (False, 4096, ()),
        (True, 1000, ()),
        (True, 4096, (1000, 3096, 500, 3500, 96)),
    )
    for gathered in (False, *(True,) * (not documents))
]


def name(case: Case) -> str:
    mask = "documents" if case.documents else "causal" if case.causal else "full"
    exchange = "gathered" if case.gather_keys else "ring"
    return f"{case.ranks} {case.attention} {case.heads}/{case.kv_heads} {mask} {case.dtype} {exchange}"


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Results]:
    """Of the cases that were selected, in one launch."""
    tests = [
        each for each in request.session.items if each.path == request.path and hasattr(each, "callspec")
    ]
    asked = {each.callspec.params.get("case") for each in tests}
    cases = [case for case in EXACT + FLASH if case in asked]
    return dict(zip(cases, of_all_ranks(cases, 4, "cpu", tmp_path_factory.mktemp("ring")), strict=True))


@pytest.mark.parametrize("case", EXACT, ids=name)
def test_a_ring_is_attention_of_the_whole_sequence(case: Case, results: dict[Case, Results]):
    """To the precision of float64: the output, the log-sum-exp, and the gradients through both."""
    *qkv, d_out = case.tensors("cpu")
    out, lse = naive_attention(*qkv, return_lse=True, **case.options("cpu"))
    gradients = torch.autograd.grad((out, lse), qkv, (d_out, case.d_lse("cpu")))
    want = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))
    for each, x in want.items():
        torch.testing.assert_close(results[case][each], x, atol=1e-14, rtol=1e-13)


def check_flash(case: Case, got: Results, device: str = "cpu") -> None:
    """The accuracy gate of the kernels on one GPU, and bit for bit the same once more. device: the ranks', whose
    generator draws other numbers than another's."""
    *qkv, d_out = case.tensors(device)
    results = {each: got[each].to(device) for each in ("out", "lse", "dq", "dk", "dv")}
    assert_as_accurate(results, qkv, d_out, **case.options(device))
    assert got["repeats"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", FLASH, ids=name)
def test_a_ring_of_flash_is_as_accurate_as_flash_and_repeats(case: Case, results: dict[Case, Results]):
    check_flash(case, results[case])


@pytest.mark.parametrize("case", [case for case in FLASH if case.compiled], ids=name)
def test_a_ring_compiles_in_one_graph(case: Case, results: dict[Case, Results]):
    assert results[case]["compiles"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_ring_over_nccl_is_as_accurate_as_flash_and_repeats(tmp_path: Path):
    for case, got in zip(ON_GPU, of_all_ranks(ON_GPU, 2, "cuda", tmp_path), strict=True):
        check_flash(case, got, "cuda")


# ---- the layout ----------------------------------------------------------------------------------


def seen(ranks: int, length: int, causal: bool, spans: torch.Tensor | None = None) -> torch.Tensor:
    """How many blocks show each query each key: int64 (length, length)."""
    count = torch.zeros(length, length, dtype=torch.int64)
    for rank in range(ranks):
        layout = Layout(rank, ranks, length // ranks, causal, spans)
        queries = shard_positions(length, rank, ranks)
        for source in range(ranks):
            keys = shard_positions(length, source, ranks)
            for block in chain(*layout.own()) if source == rank else layout.between(source):
                q, k = queries[block.queries], keys[block.keys]
                visible = torch.ones(len(q), len(k), dtype=torch.int64)
                count[q[:, None], k] += visible.tril(len(k) - len(q)) if block.causal else visible
    return count


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_blocks_show_every_key_once_and_nothing_that_the_mask_hides(ranks: int):
    length = 48
    assert seen(ranks, length, causal=True).equal(torch.ones(length, length, dtype=torch.int64).tril())
    assert seen(ranks, length, causal=False).equal(torch.ones(length, length, dtype=torch.int64))


def test_under_the_causal_mask_all_ranks_have_the_same_work_in_every_step():
    ranks, length = 8, 64

    def work(block: Block) -> int:
        return len(range(length)[block.queries]) * len(range(length)[block.keys])

    layouts = [Layout(rank, ranks, length, causal=True, spans=None) for rank in range(ranks)]
    for step in range(1, ranks):
        assert len({sum(map(work, each.between((each.rank - step) % ranks))) for each in layouts}) == 1


# ---- the default -----------------------------------------------------------------------------------


def test_keys_are_gathered_up_to_where_that_was_measured_to_be_faster_and_while_they_fit():
    assert gathers_keys(1, 12, 8192, 64, ranks=4)
    assert gathers_keys(1, 12, 8192, 64, ranks=8)
    assert not gathers_keys(1, 12, 16384, 64, ranks=4)
    assert not gathers_keys(4, 12, 8192, 64, ranks=4)
    assert not gathers_keys(1, 12, 8192, 64, ranks=16)  # 200 million numbers on each
    assert not gathers_keys(64, 12, 512, 64, ranks=8)


@pytest.mark.parametrize(
    ("ring_from", "offsets", "expected"), [(2e11, None, True), (2e11, (0, 8), False), (1e3, None, False)]
)
def test_nobody_asked_short_sequences_gather_their_keys_but_not_those_of_documents(
    group_of_one, monkeypatch, ring_from, offsets, expected
):
    orders, q = [], torch.zeros(1, 1, 8, 16)
    for order in (gathered, passes):
        its = partial(
            lambda order, forward, *inputs: orders.append(order) or forward(*inputs), order, order.forward
        )
        monkeypatch.setattr(order, "forward", its)
    monkeypatch.setattr(gathered, "RING_FROM", ring_from)
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    ring_attention(q, q, q, attention="naive", cu_seqlens=cu_seqlens)
    assert orders == [gathered if expected else passes]


# ---- what is refused -----------------------------------------------------------------------------


OFFSETS = torch.tensor([0, 8], dtype=torch.int32)


@pytest.fixture
def group_of_one(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("length", "options", "said"),
    [
        (8, {"window": (4, 0)}, "does not support window"),
        (8, {"alibi_slopes": torch.ones(1)}, "does not support alibi_slopes"),
        (8, {"dropout_p": 0.1}, "does not support dropout_p"),
        (8, {"attention": "sdpa"}, "use attention=flash, or naive"),
        (7, {}, "an even number, got 7 and 7"),
        (8, {"causal": False, "cu_seqlens": OFFSETS}, "causal=True only"),
        (8, {"gather_keys": True, "cu_seqlens": OFFSETS}, "with gather_keys=False only"),
        (8, {"cu_seqlens": torch.tensor([0, 8])}, "cu_seqlens must be torch.int32, got torch.int64"),
        (8, {"dtype": torch.float64}, "attention=flash: it takes float16"),
    ],
)
def test_what_a_ring_cannot_compute_is_refused_in_one_line(group_of_one, length: int, options, said: str):
    q = torch.zeros(1, 1, length, 16, dtype=options.pop("dtype", torch.float32))
    with pytest.raises(AttentionError, match=said) as refused:
        ring_attention(q, q, q, **options)
    assert "\n" not in str(refused.value)


def test_tokens_outside_of_all_offsets_form_documents_too(group_of_one):
    q = torch.randn(2, 1, 8, 16)
    for offsets in ([3, 10], [0, 12], [5, 16]):
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        want = naive_attention(q, q, q, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(ring_attention(q, q, q, attention="naive", cu_seqlens=cu_seqlens), want)


def test_flash_refuses_a_ring_whose_head_dim_is_not_the_last_axis_in_memory(group_of_one):
    q, k = torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 16, 8).mT
    with pytest.raises(AttentionError, match=r"k's last stride must be 1, .*; pass k.contiguous\(\)"):
        ring_attention(q, k, q)


def test_a_ring_needs_a_process_group_and_parts_of_equal_size():
    q = torch.zeros(1, 1, 8, 16)
    with pytest.raises(AttentionError, match="init_process_group"):
        ring_attention(q, q, q)
    with pytest.raises(ValueError, match="a sequence of 10 tokens cannot be cut into 4 chunks"):
        shard_positions(10, 0, 2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank must be 0 to 1, one of 2 ranks, got {rank}"):
            shard_positions(8, rank, 2)
