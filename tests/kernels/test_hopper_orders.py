"""The orders of the Hopper backward on any machine: that of work items and turns, whatever the sizes, and that of its
overlapping kernels, whatever starts when.

Why it cannot hang, as these tests check it: items are claimed in ascending order by programs that run, and where a
block of queries is given its turns, a later turn belongs to a later item. So the earliest unfinished item waits for
nothing but its own program's warps; and no program waits for one that has not started.
"""

import itertools
import os
from collections.abc import Iterator

import pytest
import torch

from kernels.flash.call import Options, Tensors
from kernels.flash.hopper import groups, wide_dkdv
from kernels.flash.hopper import launch as hopper
from kernels.flash.hopper.backward_schedule import BLOCK_M, KEYS, BackwardSizes, block_at, decode_work_item
from kernels.flash.hopper.bounds import Bounds, end_keys, end_rows, first_keys, start_rows
from kernels.flash.hopper.dq import turns_of
from kernels.flash.hopper.launch import _bounds
from kernels.flash.hopper.spec import FEW
from kernels.flash.masks import (
    ANY,
    by_query,
    by_query_kernel,
    document_bounds,
    keys_of_queries,
    queries_of_keys,
)
from kernels.naive import naive_attention
from tests.kernels.accuracy import assert_as_accurate, documents, inputs
from tests.kernels.emulated_stream import Call, Stream
from tests.kernels.emulator import Registers, Scalar, _argument, _Emulated, _Machine
from tests.kernels.test_hopper_emulated import features

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU runs the kernels itself"
)

LENGTHS = [1, 63, 64, 65, 127, 128, 129, 191, 255, 257, 300, 385, 511, 640, 700]


class Alone(_Machine):
    """For functions that no other warp disturbs."""

    def turn(self, *_: object) -> None:
        pass


def seen(
    mask: str, q_len: int, kv_len: int, flat_heads: int, left: int, right: int
) -> tuple[torch.Tensor, torch.Tensor, Bounds | None]:
    """The first and the last key that each query sees, (flat_heads, q_len), and the kernels' bounds."""
    rows, bounds = torch.arange(q_len).expand(flat_heads, -1), None
    first, last = torch.zeros_like(rows), torch.full_like(rows, kv_len - 1)
    if mask == "causal":
        last = rows + kv_len - q_len
    if mask == "window":
        last = rows + kv_len - q_len
        first = (last - left).clamp(min=0)
        bounds = Bounds(
            None, None, Scalar(left - (kv_len - q_len)), Scalar(q_len), None, None, None, None, None
        )
    if mask == "full window":
        own = rows + kv_len - q_len
        first, last = (own - left).clamp(min=0), (own + right).clamp(max=kv_len - 1)
        sides = Scalar(left - (kv_len - q_len)), Scalar(right + (kv_len - q_len))
        bounds = Bounds(None, None, sides[0], Scalar(q_len), None, None, sides[1], Scalar(kv_len), None)
    if mask == "documents":
        starts, ends = document_bounds(documents(q_len, flat_heads), flat_heads, q_len)
        first, last = starts.long(), rows
        bounds = Bounds(
            _argument(starts), _argument(ends), Scalar(ANY), Scalar(q_len), None, None, None, None, None
        )
    return first, last, bounds


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mask", ["causal", "full", "window", "full window", "documents"])
@pytest.mark.parametrize("width", [64, 128])
def test_later_turns_belong_to_later_items(width: int, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of keys of each head is one item, whose steps are the blocks of queries that see some of it; and
    the turns of a block of queries, in the order of items, ascend from the first one without a gap."""
    block_m, keys, causal = BLOCK_M[width], KEYS.value, not mask.startswith("full")
    kernel = _Emulated(Alone(0), 1)
    decode, at, turns = (kernel.function(f) for f in (decode_work_item, block_at, turns_of))
    alike = zip(LENGTHS, LENGTHS, strict=True)
    pairs = alike if mask == "documents" else itertools.product(LENGTHS, LENGTHS)
    for number, (q_len, kv_len) in enumerate(pairs):
        if width == 128 and mask == "causal":
            q_len = q_len % 20 + 2048  # from where on heads go upwards
        flat_heads, left, right = 1 + number % 5, number % 7 * 50, number % 3 * 70
        if "window" in mask and kv_len - q_len - left >= keys:
            continue  # a block that no query sees, which `hopper.backward` leaves out
        if mask == "full window" and kv_len < q_len:
            continue  # bounds from memory: `masks.by_query`
        monkeypatch.setattr(groups, "CACHED", 1 << 16 + number % 5 if causal else 32 << 20)
        monkeypatch.setattr(hopper, "sm_count", lambda device, number=number: 1 + number % 11)
        first, last, bounds = seen(mask, q_len, kv_len, flat_heads, left, right)
        q, k = (torch.empty(flat_heads, 1, length, width, device="meta") for length in (q_len, kv_len))
        sides = {"window": (left, -1), "full window": (left, right)}.get(mask, (-1, -1))
        options = Options(causal, 1.0, 0.0, *sides)
        tensors = Tensors(document_starts=first if mask == "documents" else None)
        _, _, numbers, _ = hopper._prepare_backward(q, k, tensors, options)
        own = (x if x is None else Scalar(x) for x in numbers[: BackwardSizes._fields.index("bounds")])
        sizes = BackwardSizes(*own, bounds, None, None, None, None)
        if mask == "full" and width == 64 and q_len == kv_len <= FEW:
            assert int(sizes.heads_per_group) >= flat_heads  # all at a time
        begin = first[:, ::block_m] // keys  # as delta_kernel sets the turns
        last_rows = (torch.arange(0, q_len, block_m) + block_m - 1).clamp(max=q_len - 1)
        end = last[:, last_rows].div(keys, rounding_mode="floor") + 1
        done, items = begin.clone(), set()
        for index in range(sizes.key_blocks * flat_heads):
            item = decode(Scalar(index), sizes, block_m, causal)
            items.add((item.flat_head, item.key_block))
            assert item.steps > 0
            for step in range(item.steps):
                row_block = at(item, step, sizes, block_m)
                place = item.flat_head, row_block
                assert turns(item, row_block, sizes, block_m) == (begin[place], done[place])
                done[place] += 1
        assert len(items) == sizes.key_blocks * flat_heads
        assert torch.equal(done, end.maximum(begin))


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (5, 5), (5, 6), (3, 13), (1, 9)])
def test_bounds_of_windows_beside_padding_are_those_of_tables(q_len: int, kv_len: int) -> None:
    """And so the kernels synchronise by bounds that ascend, each of queries and keys those of the other. Those of
    padding decide nothing. Among the lengths are 0, and some that no batch should have."""
    kernel, lengths = _Emulated(Alone(0), 1), torch.arange(-2, kv_len + 3, dtype=torch.int32)
    of_kernels = [kernel.function(f) for f in (first_keys, end_keys, start_rows, end_rows)]
    queries, keys = (torch.arange(n, dtype=torch.int32).as_subclass(Registers) for n in (q_len, kv_len))
    q, k = (torch.empty(len(lengths), 1, n, 64, dtype=torch.float16) for n in (q_len, kv_len))
    for causal, left, right in itertools.product((True, False), (-1, 0, 1, 4, 20), (-1, 0, 2, 20)):
        if (causal and (left < 0 or right > 0)) or left == right == -1:
            continue
        tensors, options = by_query(Tensors(kv_lengths=lengths), Options(causal, 1.0, 0.0, left, right), q, k)
        assert tensors.document_starts is None
        assert not options.causal
        sides = hopper._sides(options, kv_len - q_len)
        table = [torch.empty(len(lengths), q_len, dtype=torch.int32) for _ in range(2)]
        tokens = (q_len, kv_len, options.left, options.right, 16)
        by_query_kernel[1, len(lengths), 1](*table, None, None, lengths, *tokens)
        of_keys = queries_of_keys(Tensors(document_starts=table[0], document_ends=table[1]), kv_len)
        wanted = (*table, of_keys.document_starts, of_keys.document_ends)
        left_side, right_side = map(Scalar, sides)
        bounds = Bounds(
            None, None, left_side, Scalar(q_len), None, None, right_side, Scalar(kv_len), _argument(lengths)
        )
        for batch, length in enumerate(lengths.clamp(min=0).tolist()):
            used = keys[:length]
            for of_kernel, places, want in zip(
                of_kernels, (queries, queries, used, used), wanted, strict=True
            ):
                assert (
                    of_kernel(places, Scalar(batch), bounds).tolist() == want[batch, : len(places)].tolist()
                )


def drawn_offsets(tokens: int, ascend: bool, draw: torch.Generator) -> torch.Tensor:
    """Of six documents, some without a token; as they may not be, unless `ascend`."""
    inner = torch.randint(-5, tokens + 5, (5,), generator=draw, dtype=torch.int32)
    inner = inner.clamp(0, tokens).sort().values if ascend else inner
    return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), tokens)])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("ascend", [True, False], ids=["", "any offsets"])
def test_bounds_by_query_give_turns_without_a_gap(width: int, ascend: bool) -> None:
    """Whatever the offsets: each block of keys that a block of queries sees adds to its dQ, from the first of them on
    each in its turn, also those between that it does not see. Items without a step have no turn."""
    block_m, keys = BLOCK_M[width], KEYS.value
    kernel, draw = _Emulated(Alone(0), 1), torch.Generator().manual_seed(width)
    decode, at, turns = (kernel.function(f) for f in (decode_work_item, block_at, turns_of))
    lengths_of = torch.randint(1, 900, (30, 2), generator=draw).tolist()
    without_step = 0
    for number, (q_len, kv_len) in enumerate(lengths_of):
        batch, causal, left = 1 + number % 3, number % 2 == 0, (-1, 40)[number // 2 % 2]
        offsets = (drawn_offsets(batch * each, ascend, draw) for each in (q_len, kv_len))
        starts, ends = keys_of_queries(*offsets, None, batch, q_len, kv_len, causal, left, -1, True)
        lengths = None
        if number % 3:
            lengths = torch.randint(kv_len + 1, (batch,), generator=draw, dtype=torch.int32)
        tensors = Tensors(document_starts=starts, document_ends=ends, kv_lengths=lengths)
        q, k = (torch.empty(batch, 1, length, width, dtype=torch.float16) for length in (q_len, kv_len))
        tensors, options = by_query(tensors, Options(False, 1.0, ragged=True), q, k)
        starts, ends, key_end, row_start = _bounds(tensors, options, kv_len)
        for each in (starts, ends, key_end, row_start):
            assert (each.diff(dim=1) >= 0).all()
        assert (starts <= key_end).all()
        assert (row_start <= ends).all()
        assert 0 <= starts.min() <= key_end.max() <= kv_len
        assert 0 <= row_start.min() <= ends.max() <= q_len
        _, _, numbers, _ = hopper._prepare_backward(q, k, tensors, options)
        own = (x if x is None else Scalar(x) for x in numbers[: BackwardSizes._fields.index("bounds")])
        of_queries, of_keys = map(_argument, (starts, ends))
        bounds = Bounds(
            of_queries,
            of_keys,
            Scalar(ANY),
            Scalar(q_len),
            None,
            _argument(row_start),
            None,
            Scalar(kv_len),
            None,
        )
        padding = None if lengths is None else _argument(lengths)
        sizes = BackwardSizes(*own, bounds, None, None, padding, None)
        done = starts[:, ::block_m] // keys  # as delta_kernel sets the turns
        visited = torch.zeros(batch, sizes.row_blocks, sizes.key_blocks, dtype=torch.bool)
        for index in range(sizes.key_blocks * batch):
            item = decode(Scalar(index), sizes, block_m, False)
            if item.keys_left <= 0:  # as `claim_keys` passes over it
                continue
            assert item.steps >= 0
            without_step += item.steps == 0
            for step in range(item.steps):
                row_block = at(item, step, sizes, block_m)
                first, turn = turns(item, row_block, sizes, block_m)
                assert turn == done[item.batch, row_block]
                assert first == starts[item.batch, row_block * block_m] // keys
                done[item.batch, row_block] += 1
                visited[item.batch, row_block, item.key_block] = True
        for row, query in (starts < key_end).nonzero().tolist():
            seen = slice(starts[row, query] // keys, (key_end[row, query] - 1) // keys + 1)
            assert visited[row, query // block_m, seen].all()
    assert without_step


@pytest.mark.parametrize("wide", [False, True], ids=["", "wide"])
@pytest.mark.parametrize("packed", [False, True], ids=["window", "documents"])
def test_a_block_where_padding_begins_ends_with_its_last_key(packed: bool, wide: bool) -> None:
    """It has no step for queries that see none of its keys. With steps to the last of 16,384 queries, a window of 512
    beside 2,733 keys took 1.5 to 2.2 of the portable backward's time."""
    length, used = 2048, 645
    q = torch.empty(1, 1, length, 64, dtype=torch.float16)
    tensors = Tensors(kv_lengths=torch.tensor([used], dtype=torch.int32))
    options, last = Options(True, 1.0, 0.0, 99), used - 1 + 99
    if packed:
        starts, ends = document_bounds(torch.tensor([0, 600, 770, length], dtype=torch.int32), 1, length)
        tensors = tensors._replace(document_starts=starts, document_ends=ends)
        options, last = Options(True, 1.0), 769
    tensors, options = by_query(tensors, options, q, q)
    _, ends, _, row_start = (x if x is None else _argument(x) for x in _bounds(tensors, options, length))
    left, right = (x if x is None else Scalar(x) for x in hopper._sides(options, 0))
    lengths, n, one = _argument(tensors.kv_lengths), Scalar(length), Scalar(1)
    bounds = Bounds(None, ends, left, n, None, row_start, right, n, None if packed else lengths)
    function = _Emulated(Alone(0), 1).function
    if wide:
        rows, keys = wide_dkdv.ROWS.value, wide_dkdv.KEYS.value
        counts = one, one, one, n, n, Scalar(length // rows), Scalar(length // keys)
        sizes = wide_dkdv.Sizes(*counts, bounds, None, lengths, None)
        item = function(wide_dkdv.decode_keys)(Scalar((used - 1) // keys), sizes, False)
    else:
        rows, keys = BLOCK_M[64], KEYS.value
        items = Scalar(length // keys)
        counts = one, one, one, items, n, n, Scalar(0), Scalar(length // rows), items
        sizes = BackwardSizes(*counts, None, bounds, None, None, lengths, None)
        item = function(decode_work_item)(Scalar((used - 1) // keys), sizes, rows, False)
    assert item.last_block == last // rows
    assert item.steps == last // rows + 1 - (used - 1) // keys * keys // rows


def capture_launches(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What `launch.forward` and `launch.backward` launch, as they come."""
    launched: list[Call] = []

    def launch(pointers, key, prepare, moved=(), describe=None) -> None:
        kernel, grid, numbers, options = prepare()
        arguments = (*(describe(*moved) if moved else ()), *pointers, *numbers)
        launched.append(Call(kernel, grid, arguments, options.get("launch_pdl", False)))

    monkeypatch.setattr(hopper, "launch", launch)
    monkeypatch.setattr(hopper, "sm_count", lambda device: 3)
    return launched


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """What `launch.backward` launches on a GPU, whose new tensors hold what their memory held before."""
    launched = capture_launches(monkeypatch)

    def new_empty(x: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return x.new_full(shape, float("nan") if (dtype or x.dtype).is_floating_point else 3, dtype=dtype)

    monkeypatch.setattr(hopper, "OVERLAPPED", {"launch_pdl": True})
    monkeypatch.setattr(groups, "CACHED", 1)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield launched
    torch.set_num_threads(threads)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("bound", ["window", "documents", "own offsets"])
def test_what_no_step_reaches_is_0(bound: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside padding of any length: dK and dV of the blocks of keys that are passed over, and of no others; and dQ of
    queries that see no key, whose sum holds NaN where no step adds to it."""
    calls, draw = capture_launches(monkeypatch), torch.Generator().manual_seed(width)
    emulated = _Emulated(Alone(0), 1)
    decode, at = (emulated.function(f) for f in (decode_work_item, block_at))
    passed_over = blind = 0
    for number, (q_len, more) in enumerate(torch.randint(1, 600, (12, 2), generator=draw).tolist()):
        batch, causal = 1 + number % 3, number % 2 == 0
        kv_len = q_len + more * (bound != "documents") * (number % 3 - 1 or 1)
        kv_len = kv_len if kv_len > 0 else more
        lengths = torch.randint(-3, kv_len + 4, (batch,), generator=draw, dtype=torch.int32)
        # None, a block; and just those that the window hides from all queries, or some more.
        lengths[0] = (0, 128, max(kv_len - q_len - 20, 0))[number % 3]
        tensors, options = Tensors(kv_lengths=lengths), Options(causal, 1.0)
        row, key = torch.arange(q_len)[:, None], torch.arange(kv_len)
        visible = (key < lengths[:, None, None]).expand(batch, q_len, kv_len)
        if bound == "window":
            left, right, own = 10 * number % 40, -1 if causal else 30, row + kv_len - q_len
            options = options._replace(left=left, right=right)
            visible = visible & (key >= own - left) & (key <= own + max(right, 0))
        else:
            offsets = [drawn_offsets(batch * each, number % 4 > 1, draw) for each in (q_len, kv_len)]
            starts, ends = document_bounds(offsets[0], batch, q_len)
            if bound == "documents":
                visible = visible & ((key <= row) | (not causal))
            else:
                options = options._replace(causal=False, ragged=True)
                starts, ends = keys_of_queries(*offsets, None, batch, q_len, kv_len, causal, -1, -1, True)
            tensors = tensors._replace(document_starts=starts, document_ends=ends)
            visible = visible & (key >= starts[:, :, None]) & (key < ends[:, :, None])
        q, k = (torch.zeros(batch, 1, length, width, dtype=torch.float16) for length in (q_len, kv_len))
        dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, k))
        lse, delta = torch.zeros(2, batch, 1, q_len)
        calls.clear()
        hopper.backward(q, None, q, None, lse, q, k, k, dq, dk, dv, delta, tensors, options)
        by_name = {
            call.kernel.__name__: dict(zip(call.kernel.arg_names, call.arguments, strict=False))
            for call in calls
        }
        of_main = by_name["hopper_backward_kernel"]
        given = {name: x if x is None else _argument(x) for name, x in of_main.items()}
        named = (given[name] for name in ("DocumentStart", "DocumentEnd", "left", "q_len"))
        bounds = Bounds(
            *(*named, None, given["RowStart"], given["right"], given["kv_len"]),
            given["KvLengths"] if bound == "window" and q_len <= kv_len else None,
        )
        sizes = BackwardSizes(*(given.get(name) for name in BackwardSizes._fields))._replace(bounds=bounds)
        reached = torch.zeros(batch, sizes.row_blocks, sizes.key_blocks, dtype=torch.bool)
        for index in range(sizes.key_blocks * batch):
            item = decode(Scalar(index), sizes, BLOCK_M[width], False)
            for step in range(item.steps if item.keys_left > 0 else 0):
                reached[item.batch, at(item, step, sizes, BLOCK_M[width]), item.key_block] = True
        total = by_name["round_kernel"]["Sum"].view(batch, sizes.row_blocks, -1).fill_(1.0)
        total[~reached.any(2)] = float("nan")
        for call in calls:
            if call.kernel.__name__ in ("clear_kernel", "round_kernel"):
                call.kernel[call.grid](*call.arguments)
        seeing = visible.any(2)
        assert torch.equal(dq[:, 0], seeing[:, :, None].expand(dq[:, 0].shape).half())
        kept = reached.any(1).repeat_interleave(KEYS.value, 1)[:, :kv_len]
        for each in (dk, dv):
            assert torch.equal(each[:, 0].isnan().all(2), kept)
            assert not each[:, 0][~kept].any()
        assert not (visible & ~kept[:, None]).any()
        passed_over, blind = passed_over + (~kept).any().item(), blind + (~seeing).any().item()
    assert passed_over > 3
    assert blind > 3


@pytest.mark.parametrize(
    ("batch", "kv_heads", "length", "bound", "together"),
    [
        (1, 16, 16384, "causal", 4),  # as many heads as have K and V of 32 MB
        (1, 16, 16384, "window", 4),
        (1, 16, 16384, "documents", 16),
        (1, 8, 16384, "documents", 16),
        (2, 20, 16384, "documents", 20),
        (4, 16, 4096, "documents", 16),
    ],
)
def test_heads_side_by_side_in_the_forward(
    batch: int, kv_heads: int, length: int, bound: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With documents at least 16, of the queries' heads."""
    prepared: list[tuple[object, ...]] = []
    monkeypatch.setattr(hopper, "launch", lambda pointers, key, prepare, *_: prepared.append(prepare()[2]))
    heads = max(kv_heads, 16)
    q, out = (torch.empty(batch, heads, length, 128, device="meta") for _ in range(2))
    k, v = (torch.empty(batch, kv_heads, length, 128, device="meta") for _ in range(2))
    starts = torch.empty(batch, length, device="meta") if bound == "documents" else None
    options = Options(True, 0.1, left=1024 if bound == "window" else -1)
    monkeypatch.setattr(hopper, "sm_count", lambda device: 132)
    hopper.forward(q, k, v, out, out, torch.empty(0), Tensors(document_starts=starts), options)
    assert prepared[0][5:8] == (heads, batch, together)


def backward(q_len: int, kv_len: int, causal: bool, seed: int, **given: object):
    """Ask for a backward; returns its gradients, NaN until the stream has run, and how to check them."""
    batch = 3 if given else 1
    tensors = inputs(q_len, kv_len, 64, torch.float16, batch=batch, heads=2, kv_heads=2, seed=seed)
    *leaves, d_out = tensors
    q, k, v = (x.detach() for x in leaves)
    out, lse = naive_attention(q.double(), k.double(), v.double(), causal=causal, return_lse=True, **given)
    dq, dk, dv, delta = (torch.full_like(x, float("nan")) for x in (q, k, v, lse.float()))
    extra = features(q_len, kv_len, batch, causal, given)
    half, options = out.to(q.dtype), Options(causal, 0.125)
    hopper.backward(d_out, None, half, None, lse.float(), q, k, v, dq, dk, dv, delta, extra, options)
    found = {"dq": dq, "dk": dk, "dv": dv}
    return found, lambda: assert_as_accurate(found, tensors[:3], d_out, causal=causal, **given)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("room", [1, 5])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_kernels_that_overlap(calls: list[Call], causal: bool, room: int) -> None:
    """And again with the same memory, as a graph's replays do, in another order of events: the same bits."""
    found, check = backward(300, 300, causal, 0)
    assert [call.dependent for call in calls] == [False, True, True]
    Stream(0, room).run_all(calls)
    check()
    first = {name: x.clone() for name, x in found.items()}
    for x in found.values():
        x.fill_(float("nan"))
    Stream(1, room).run_all(calls * 2)
    assert all(torch.equal(found[name], first[name]) for name in first)


def test_calls_of_two_threads_on_one_stream(calls: list[Call]) -> None:
    (_, check), (_, check_other) = backward(200, 200, True, 0), backward(130, 300, True, 1)
    Stream(0).run_all([calls[each] for each in (0, 3, 1, 4, 2, 5)])
    check()
    check_other()


def test_a_kernel_between_that_does_not_overlap(calls: list[Call]) -> None:
    """With key padding, whose dK and dV are cleared before dQ is rounded."""
    _, check = backward(130, 300, False, 0, kv_lengths=torch.tensor([0, 128, 300], dtype=torch.int32))
    assert [call.dependent for call in calls] == [False, True, False, True]
    Stream(0).run_all(calls)
    check()


@pytest.mark.parametrize(
    "deaf", ["load_tiles", "round_kernel"]
)  # the other warps read what load_tiles claims
def test_the_stream_notices_a_missing_wait(calls: list[Call], deaf: str) -> None:
    backward(200, 200, True, 0)
    with pytest.raises(AssertionError, match=f"{deaf} accesses memory before"):
        Stream(0, deaf=[deaf]).run_all(calls)
