"""Documents and block masks as the kernels read them, against the same in plain torch. About 5 s."""

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

import kernels
from tests.kernels.accuracy import inputs

masks = pytest.importorskip("kernels.flash.masks")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPU_ONLY = pytest.mark.skipif(DEVICE == "cuda", reason="shapes that take the interpreter seconds")


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def bounds_in_torch(cu_seqlens: torch.Tensor, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token, the last offset up to it (or its row's start) and the first one after it (or its row's end)."""
    starts, ends = [], []
    for row_start in range(0, batch * length, length):
        tokens = torch.arange(row_start, row_start + length, device=DEVICE)[:, None]
        begun = cu_seqlens <= tokens
        first = torch.where(begun, cu_seqlens, row_start).amax(1).clamp(min=row_start)
        last = torch.where(begun, row_start + length, cu_seqlens).amin(1).clamp(max=row_start + length)
        starts.append(first - row_start)
        ends.append(last - row_start)
    return torch.stack(starts).int(), torch.stack(ends).int()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "bounds",
    [
        [0, 600],
        [0, 3, 3, 67, 68, 299, 301, 599, 600],
        [0, 0, 0, 600, 600, 600],
        list(range(601)),
        [0, 250, 400],  # documents that end early
        [5, 10, 700],  # documents that begin late and end late
        [-7, 300, 600],
        [700, 900],
    ],
    ids=lambda bounds: str(bounds[:9]),
)
def test_document_bounds(bounds: list[int]) -> None:
    bounds = ints(bounds)
    # Rows of one token get a program each. 70 of them suffice: 600 would be 600 of the test's 615 programs.
    for batch, length in ((1, 600), (2, 300), (70, 1)):
        got, want = masks.document_bounds(bounds, batch, length), bounds_in_torch(bounds, batch, length)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    strided = bounds.repeat_interleave(2)[::2]
    assert torch.equal(masks.document_bounds(strided, 2, 300)[0], masks.document_bounds(bounds, 2, 300)[0])


@pytest.mark.parametrize("seed", range(6))
def test_unordered_offsets_make_documents_that_do_not_overlap(seed: int) -> None:
    """Otherwise the Hopper kernels would deadlock: a consumer would wait for a block that is never loaded."""
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.randint(-100, 700, (1 + 3 * seed,), generator=generator).to(DEVICE, torch.int32)
    for batch, length in ((1, 600), (2, 300)):
        for starts, ends in zip(
            *(x.tolist() for x in masks.document_bounds(bounds, batch, length)), strict=True
        ):
            token = 0
            while token < length:  # all tokens of a document have that document's start and end
                end = ends[token]
                assert token < end <= length
                assert starts[token:end] == [token] * (end - token)
                assert ends[token:end] == [end] * (end - token)
                token = end


def test_document_bounds_of_no_tokens_are_empty() -> None:
    assert [x.shape for x in masks.document_bounds(ints([0, 0]), 2, 0)] == [(2, 0), (2, 0)]


def seen_in_torch(of_queries, of_keys, used, batch, q_len, kv_len, causal, left, right, covering):
    """Bool (batch, q_len, kv_len): whether the query sees the key, for offsets that ascend."""
    tokens = torch.arange(batch * q_len), torch.arange(batch * kv_len)
    document, of_key = (
        (offsets.cpu() <= each[:, None]).sum(1) - 1
        for offsets, each in zip((of_queries, of_keys), tokens, strict=True)
    )
    last = len(of_queries) - 1
    # Each document's part of a row is aligned bottom-right by itself.
    ends = [
        torch.tensor([*offsets.tolist()[1:], total])
        for offsets, total in ((of_queries, batch * q_len), (of_keys, batch * kv_len))
    ]
    first_key = of_keys.cpu()
    query_end, key_end = ends[0][document], ends[1][document]
    query_end = torch.where(document < 0, of_queries.cpu()[0], query_end)
    key_end = torch.where(document < 0, first_key[0], key_end)
    if used is not None:
        inside = (document >= 0) & (document < last)
        known = document.clamp(0, last - 1)
        key_end = torch.where(inside, (first_key[known] + used.cpu()[known]).minimum(key_end), key_end)
    row = tokens[0] // q_len
    query_end, key_end = query_end.minimum((row + 1) * q_len), key_end.minimum((row + 1) * kv_len)
    position = key_end - 1 - (query_end - 1 - tokens[0])
    key = tokens[1][None, :]
    seen = (document[:, None] == of_key) & (key < key_end[:, None]) & (key // kv_len == row[:, None])
    if not covering:
        seen &= ((document >= 0) & (document < last))[:, None]
    if left >= 0:
        seen &= key >= (position - left)[:, None]
    if causal or right >= 0:
        seen &= key <= (position + (0 if causal else right))[:, None]
    return torch.stack([each[:, row * kv_len :][:, :kv_len] for row, each in enumerate(seen.split(q_len))])


def seen_between(starts: torch.Tensor, ends: torch.Tensor, length: int) -> torch.Tensor:
    index = torch.arange(length, device=starts.device)
    return ((starts[..., None] <= index) & (index < ends[..., None])).cpu()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("covering", [True, False], ids=["covering", ""])
@pytest.mark.parametrize("used", [True, False], ids=["used", ""])
@pytest.mark.parametrize(
    ("causal", "left", "right"), [(True, -1, -1), (True, 30, -1), (False, -1, -1), (False, 20, 9)]
)
def test_keys_of_queries_and_the_queries_of_keys(
    causal: bool, left: int, right: int, used: bool, covering: bool
) -> None:
    of_queries, of_keys = ints([3, 3, 60, 61, 290, 300, 590]), ints([10, 40, 41, 41, 399, 420, 800])
    number = ints([7, 1, 0, 200, 30, 380]) if used else None
    for batch, q_len, kv_len in ((1, 600, 810), (2, 300, 405)):
        given = of_queries, of_keys, number, batch, q_len, kv_len, causal, left, right, covering
        want = seen_in_torch(*given)
        starts, ends = masks.keys_of_queries(*given)
        assert torch.equal(seen_between(starts, ends, kv_len), want)
        tensors = masks.Tensors(document_starts=starts, document_ends=ends)
        transposed = masks.queries_of_keys(tensors, kv_len)
        got = seen_between(transposed.document_starts, transposed.document_ends, q_len)
        assert torch.equal(got.transpose(1, 2), want)
        lengths = ints([250, 0][:batch])
        options = masks.Options(False, 1.0, ragged=True)
        q, k = (torch.empty(batch, 1, length, 16, device=DEVICE) for length in (q_len, kv_len))
        padded, _ = masks.by_query(tensors._replace(kv_lengths=lengths), options, q, k)
        got = seen_between(padded.document_starts, padded.document_ends, kv_len)
        assert torch.equal(got, want & (torch.arange(kv_len) < lengths.cpu()[:, None])[:, None])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_by_query_ascend_whatever_the_offsets(dtype: torch.dtype) -> None:
    """Else the Hopper kernels would deadlock: sums of such offsets overflow 32 bits."""
    draw, most = torch.Generator().manual_seed(0), torch.iinfo(dtype).max
    for number in range(40):
        batch, q_len, kv_len = 1 + number % 3, 300, 200
        some, any_, wild = (
            torch.randint(low, high, (3, 6), generator=draw)
            for low, high in ((-5, 610), (-most - 1, most), (0, 2))
        )
        offsets = torch.where(wild > 0, torch.where(any_ % 3 > 0, any_, most * (-1) ** (any_ % 2)), some)
        of_queries, of_keys, used = offsets.to(DEVICE, dtype)
        masks_of_call = (number % 2 > 0, (-1, 40, 2**31 - 1)[number % 3], -1, number % 4 > 1)
        used = None if number % 5 == 0 else used[1:]
        starts, ends = masks.keys_of_queries(of_queries, of_keys, used, batch, q_len, kv_len, *masks_of_call)
        assert (starts.diff(dim=1) >= 0).all()
        assert (ends.diff(dim=1) >= 0).all()
        assert (starts <= ends).all()
        assert starts.min() >= 0
        assert ends.max() <= kv_len


def lists_in_torch(mask, q_len, kv_len, causal, left, right):
    """The blocks that each block of queries visits, and those that each block of keys visits, as Python lists."""
    rows, keys = (
        torch.arange(mask.shape[2])[:, None] * 128 + (kv_len - q_len),
        torch.arange(mask.shape[3]) * 128,
    )
    visible = mask.cpu().clone()
    if causal or right >= 0:
        visible &= keys <= rows + 127 + (0 if causal else right)
    if left >= 0:
        visible &= keys + 127 >= rows - left
    return [
        [each.nonzero().flatten().tolist() for each in of.flatten(0, 2)]
        for of in (visible, visible.transpose(2, 3))
    ]


def assert_lists(got, mask, q_len, kv_len, causal, left, right):
    """Check the visited blocks, that an empty list holds one block beyond the last, and the positions of keys' blocks
    in the lists of queries."""
    want = lists_in_torch(mask, q_len, kv_len, causal, left, right)
    of_queries, of_keys = (of.flatten(0, 2).tolist() for of in got)
    for of, lists, beyond in ((of_queries, want[0], mask.shape[3]), (of_keys, want[1], mask.shape[2])):
        assert [each[0] for each in of] == [len(each) for each in lists]
        assert [each[1 : 1 + max(each[0], 1)] for each in of] == [each or [beyond] for each in lists]
    q_blocks, k_blocks = mask.shape[2:]
    for index, (keys, queries) in enumerate(zip(of_keys, want[1], strict=True)):
        head, key = divmod(index, k_blocks)
        places = [want[0][head * q_blocks + query].index(key) for query in queries]
        assert [keys[1 + q_blocks + query] for query in queries] == places


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("causal", "left", "right"), [(True, -1, -1), (True, 300, -1), (False, -1, -1), (False, 200, 90)]
)
@pytest.mark.parametrize(("q_len", "kv_len"), [(700, 700), (300, 1000), (1000, 300)])
def test_block_lists(causal: bool, left: int, right: int, q_len: int, kv_len: int) -> None:
    shape = (2, 3, -(-q_len // 128), -(-kv_len // 128))
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)).gt(0.4).to(DEVICE)
    for part in (mask, mask[:1, :1], mask[:1].transpose(2, 3).contiguous().transpose(2, 3)):
        got = masks.block_lists(part, q_len, kv_len, causal, left, right)
        assert_lists(got, part, q_len, kv_len, causal, left, right)


@CPU_ONLY
def test_block_lists_are_right_for_more_blocks_than_one_kernel_step() -> None:
    mask = torch.rand(1, 1, 2, 300, generator=torch.Generator().manual_seed(0)).gt(0.5)
    got = masks.block_lists(mask, 256, 300 * 128, False, -1, -1)
    assert_lists(got, mask, 256, 300 * 128, False, -1, -1)


def test_the_mask_operators_pass_torchs_own_checks() -> None:
    torch.library.opcheck(masks.document_bounds, (ints([0, 5, 40]), 2, 20))
    offsets = ints([0, 5, 40]), ints([0, 30, 60])
    torch.library.opcheck(masks.keys_of_queries, (*offsets, None, 2, 20, 30, True, 5, -1, True))
    mask = torch.ones(1, 2, 2, 3, dtype=torch.bool, device=DEVICE)
    torch.library.opcheck(masks.block_lists, (mask, 200, 300, True, 20, -1))


@CPU_ONLY
def test_a_mask_changed_in_place_takes_effect() -> None:
    flash = kernels.get_attention("flash")
    q, k, v, _ = (x.detach() for x in inputs(256, 256, 16, torch.float32))
    bounds, blocks = ints([0, 100, 256]), torch.eye(2, dtype=torch.bool)[None, None]
    for name, mask, change in (("cu_seqlens", bounds, (1, 30)), ("block_mask", blocks, ((0, 0, 1, 0), True))):
        before = flash(q, k, v, **{name: mask})
        mask[change[0]] = change[1]
        after = flash(q, k, v, **{name: mask})
        assert not torch.equal(before, after)
        assert torch.equal(after, flash(q, k, v, **{name: mask.clone()}))


@CPU_ONLY
def test_compiled_layers_share_the_preparation_of_a_mask() -> None:
    flash, counts = kernels.get_attention("flash"), []

    def layers(q, k, v, cu_seqlens, block_mask):
        for _ in range(3):
            q = flash(q, k, v, cu_seqlens=cu_seqlens)
            q = flash(q, k, v, block_mask=block_mask)
        return q

    def count(graph, _):
        names = [str(node.target) for node in graph.graph.nodes]
        counts.append(
            [
                sum(name in each for each in names)
                for name in ("document_bounds", "block_lists", "flash_forward")
            ]
        )
        return graph.forward

    q, k, v, _ = inputs(40, 40, 16, torch.float32)
    arguments = (q, k, v, ints([0, 7, 40]), torch.ones(1, 1, 1, 1, dtype=torch.bool))
    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)  # as inductor
    compiled = torch.compile(layers, fullgraph=True, backend=backend)
    assert torch.equal(compiled(*arguments), layers(*arguments))
    assert counts == [[1, 1, 6]]
