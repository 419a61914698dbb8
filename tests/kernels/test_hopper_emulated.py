"""The Hopper kernels on any machine, by `emulator`: their numbers, their waits and their order of sums.

What only a GPU shows is in test_hopper_forward.py and test_hopper_backward.py, which test much more.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.flash.call import Options, Tensors
from kernels.flash.hopper import groups, wide_dkdv, wide_dq
from kernels.flash.hopper import launch as hopper
from kernels.flash.hopper.columns import first_of, multiplied, rest_of
from kernels.flash.hopper.descriptors import layout_of, tile_width
from kernels.flash.hopper.pipeline import fetch, make_ring
from kernels.flash.hopper.spec import specify
from kernels.flash.hopper.split_tiles import box_width, is_split
from kernels.flash.masks import block_lists, document_bounds, keys_of_queries
from kernels.naive import naive_attention
from tests.kernels.accuracy import assert_as_accurate, block_mask, documents, inputs
from tests.kernels.bits import assert_equal
from tests.kernels.emulator import emulate

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU runs the kernels itself"
)
SLOW = pytest.mark.slow
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128])
ONE_QUICK_HEAD_DIM = pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=SLOW)])
LONG = 4096  # from here on the forward's schedule stays the same
SCORE_MODS = [{"softcap": 1.5}, {"alibi_slopes": torch.tensor([0.5, 0.01])}]
MORE_BY_TMA = [(200, 130, 64), (300, 300, 128), (1, 65, 128), (520, 200, 128)]
LENGTHS = [(300, 300), (333, 1), (300, 130), pytest.param(40, 300, marks=SLOW)]
ORDERS = [(1, 1), (2, 5)]  # seed and programs, after 0 and 3


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """An emulated GPU in place of a real one: how many programs it runs, the seed of the order of events, the bytes
    of global memory that were asked for, and what else `check` runs: of ORDERS one, by name, unless -m asks for
    more than the quick tests. Half of the tests, by name, claim documents' tiles early."""
    chosen: dict[str, Any] = {"seed": 0, "programs": 3, "moved": 0, "orders": ORDERS}
    if request.config.option.markexpr == "not slow":
        chosen["orders"] = ORDERS[crc32(request.node.name.encode()) % 2 :][:1]

    def launch(pointers, key, prepare, moved=(), describe=None) -> None:
        kernel, grid, numbers, _ = prepare()
        arguments = (*(describe(*moved) if moved else ()), *pointers, *numbers)
        if isinstance(kernel, gluon._runtime.GluonJITFunction):
            chosen["moved"] += emulate(kernel, grid, arguments, chosen["seed"])
        else:
            kernel[grid](*arguments)

    monkeypatch.setattr(hopper, "launch", launch)
    monkeypatch.setattr(hopper, "sm_count", lambda device: chosen["programs"])
    if crc32(request.node.name.encode()) % 4 > 1:  # documents' tiles are claimed early
        monkeypatch.setattr(hopper, "LATE", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield chosen
    torch.set_num_threads(threads)


def features(q_len: int, kv_len: int, batch: int, causal: bool, given: dict[str, object]) -> Tensors:
    starts = ends = keys = queries = None
    if "cu_seqlens_k" in given:
        offsets = (given["cu_seqlens"], given["cu_seqlens_k"], None)
        starts, ends = keys_of_queries(
            *offsets, batch, q_len, kv_len, causal, *given.get("window", (-1, -1)), True
        )
    elif "cu_seqlens" in given:
        starts, ends = document_bounds(given["cu_seqlens"], batch, q_len)
    if "block_mask" in given:
        keys, queries = block_lists(given["block_mask"], q_len, kv_len, causal, -1, -1)
    seed = torch.tensor(given["dropout_seed"]) if "dropout_p" in given else None
    return Tensors(
        seed,
        given.get("alibi_slopes"),
        given.get("sinks"),
        starts,
        ends,
        given.get("kv_lengths"),
        keys,
        queries,
    )


def run(
    which: str, tensors: tuple[torch.Tensor, ...], causal: bool, given: dict[str, object]
) -> dict[str, torch.Tensor]:
    """out, lse and, if asked, out's rounding error, or dq, dk, dv of float64's out and lse; into NaN, so that what is
    not written shows."""
    *leaves, d_out = tensors
    q, k, v = (x.detach() for x in leaves)
    (batch, _, q_len, head_dim), kv_len = q.shape, k.shape[2]
    left, right = given.get("window", (-1, -1))
    precise = given.get("precise_delta", False)
    options = Options(
        causal, head_dim**-0.5, given.get("dropout_p", 0.0), left, right, given.get("softcap", 0.0),
        precise_delta=precise,
    )  # fmt: skip
    extra = features(q_len, kv_len, batch, causal, given)
    if "cu_seqlens_k" in given:
        options = options._replace(causal=False, left=-1, right=-1, ragged=True)
    clean = q, k, v
    if "kv_lengths" in given:
        k, v = (poisoned(x, given["kv_lengths"]) for x in (k, v))
    if which == "forward":
        out, low, lse = (torch.full_like(x, float("nan")) for x in (q, q, q[..., 0].float()))
        hopper.forward(q, k, v, out, low, lse, extra, options)
        return {"out": out, "lse": lse} | ({"low": low} if precise else {})
    exact, lse = naive_attention(*(x.double() for x in clean), causal=causal, return_lse=True, **given)
    out, lse = exact.to(q.dtype), lse.float().contiguous()
    low = (exact - out).to(q.dtype)
    dq, dk, dv, delta = (torch.full_like(x, float("nan")) for x in (q, k, v, lse))
    assert hopper.fits_backward(q, k, v, out, d_out)
    hopper.backward(d_out, None, out, low, lse, q, k, v, dq, dk, dv, delta, extra, options)
    of_delta = exact if precise else out.double()
    torch.testing.assert_close(delta.double(), (of_delta * d_out).sum(-1), rtol=1e-5, atol=1e-5)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def offsets(q_len: int, kv_len: int, batch: int) -> dict[str, torch.Tensor]:
    """Packed documents of queries and keys of unequal numbers: one without queries whose keys fill blocks, one
    without keys, one that a row's end cuts, and some of a few tokens."""
    shares = torch.tensor([[0, 0], [3, 2], [3, 47], [30, 47], [55, 60], [55, 61], [96, 80], [100, 100]])
    whole = torch.tensor([batch * q_len, batch * kv_len])
    queries, keys = (shares * whole // 100).to(torch.int32).unbind(1)
    return {"cu_seqlens": queries.contiguous(), "cu_seqlens_k": keys.contiguous()}


def poisoned(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """x with NaN as padding, which may hold anything."""
    padding = torch.arange(x.shape[2]) >= lengths[:, None]
    return x.masked_fill(padding[:, None, :, None], float("nan"))


def check(
    which: str,
    machine: dict[str, Any],
    q_len: int,
    kv_len: int,
    head_dim: int,
    causal: bool,
    batch: int = 1,
    kv_heads: int = 1,
    **given: object,
) -> None:
    """Accurate, and the same bit for bit in another order of events, and with another number of programs."""
    heads = {"batch": batch, "heads": 2, "kv_heads": kv_heads}
    tensors = inputs(q_len, kv_len, head_dim, torch.float16, seed=q_len, **heads)
    first = run(which, tensors, causal, given)
    assert_as_accurate(first, tensors[:3], tensors[3], causal=causal, **given)
    for seed, programs in machine["orders"]:
        machine |= {"seed": seed, "programs": programs}
        assert_equal(run(which, tensors, causal, given), first)


@pytest.mark.one_in(9)
@CAUSAL
@HEAD_DIMS
@pytest.mark.parametrize("delay", [0, 1], ids=["", "delay"])
@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
def test_backward(
    machine, monkeypatch, q_len: int, kv_len: int, delay: int, head_dim: int, causal: bool
) -> None:
    monkeypatch.setattr(hopper, "choose_dq_delay", lambda *_: delay)
    check("backward", machine, q_len, kv_len, head_dim, causal)


@pytest.mark.one_in(5)
@HEAD_DIMS
@pytest.mark.parametrize(
    ("cached", "delay"),
    [(1, 0), (1 << 18, 1), pytest.param(1, 1, marks=SLOW), pytest.param(1 << 18, 0, marks=SLOW)],
    ids=["groups of a head", "of several, delay", "of a head, delay", "of several"],
)
@pytest.mark.parametrize(("q_len", "kv_len"), [*LENGTHS[:1], *LENGTHS[2:]])
def test_backward_upwards(
    machine, monkeypatch, q_len: int, kv_len: int, cached: int, delay: int, head_dim: int
) -> None:
    """All heads but those of the last group go upwards."""
    monkeypatch.setattr(hopper, "choose_dq_delay", lambda *_: delay)
    monkeypatch.setattr(groups, "CACHED", cached)
    check("backward", machine, q_len, kv_len, head_dim, True, batch=2)


@pytest.mark.parametrize(("length", "rows"), [(1024, 128), (2048, 192)])
def test_the_forward_asks_for_the_bytes_of_docs_ladder(machine, length: int, rows: int) -> None:
    """q, out and lse once, and K and V for every tile of queries, which from 2048 on has 192."""
    run("forward", inputs(length, length, 64, torch.float16), False, {})
    assert machine["moved"] == (2 + 2 * -(-length // rows)) * 2 * length * 64 + 4 * length
    page = (Path(__file__).parents[2] / "docs" / "ladder.md").read_text()
    assert length != 1024 or f"(#8-the-hopper-kernels) | {machine['moved']:,} |" in page


@CAUSAL
@pytest.mark.parametrize(
    "head_dim", [64, 160, *(pytest.param(each, marks=SLOW) for each in (128, 136, 192, 256))]
)
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 300), pytest.param(70, 333, marks=SLOW)])
def test_forward_with_dropout(machine, q_len: int, kv_len: int, head_dim: int, causal: bool) -> None:
    check("forward", machine, q_len, kv_len, head_dim, causal, dropout_p=0.2, dropout_seed=2**40 + 1)


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 160, *(pytest.param(each, marks=SLOW) for each in (128, 192, 256))])
def test_forward_with_sinks(machine, head_dim: int, causal: bool) -> None:
    """More queries than keys: under the causal mask some see their sink only."""
    check("forward", machine, 300, 130, head_dim, causal, sinks=torch.tensor([1.5, -torch.inf]))


@pytest.mark.one_in(5)
@CAUSAL
@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [160, 136, 192])
def test_alibi_beside_padding_in_split_tiles(machine, head_dim: int, which: str, causal: bool) -> None:
    """No key in a batch, one, some of the last block, all. Padding is NaN."""
    lengths = torch.tensor([0, 1, 150, 194], dtype=torch.int32)
    given = {"alibi_slopes": torch.tensor([0.5, 0.01]), "kv_lengths": lengths}
    check(which, machine, 130, 194, head_dim, causal, batch=4, **given)


@pytest.mark.parametrize("mask", ["window", "documents", "padding", "by query"])
def test_wide_sinks_with_masks(machine, mask: str) -> None:
    masks = {
        "window": {"window": (100, 0)},
        "documents": {"cu_seqlens": documents(200, 2)},
        "padding": {"kv_lengths": torch.tensor([0, 130], dtype=torch.int32)},
    }
    masks["by query"] = masks["documents"] | masks["padding"]
    check("forward", machine, 200, 200, 160, True, batch=2, sinks=torch.tensor([1.5, -2.0]), **masks[mask])


@pytest.mark.one_in(5)
@CAUSAL
@ONE_QUICK_HEAD_DIM
@pytest.mark.parametrize("delay", [0, 1], ids=["", "delay"])
def test_backward_with_dropout(machine, monkeypatch, delay: int, head_dim: int, causal: bool) -> None:
    monkeypatch.setattr(hopper, "choose_dq_delay", lambda *_: delay)
    check("backward", machine, 300, 300, head_dim, causal, dropout_p=0.2, dropout_seed=2**40 + 1)


@pytest.mark.one_in(11)
@CAUSAL
@pytest.mark.parametrize("head_dim", [256, 160, 192, 136])
@pytest.mark.parametrize(("q_len", "kv_len"), [(172, 300), (130, 195), (300, 130)])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padding"])
def test_wide_backward_with_dropout(
    machine, padded: bool, q_len: int, kv_len: int, head_dim: int, causal: bool
) -> None:
    given = {"dropout_p": 0.2, "dropout_seed": 2**40 + 1}
    if padded:
        given["kv_lengths"] = torch.tensor([0, 70], dtype=torch.int32)
    check("backward", machine, q_len, kv_len, head_dim, causal, batch=2, **given)


def test_backward_with_dropout_that_rounds_to_none(machine) -> None:
    """The form without dropout, in which fewer columns are multiplied, though there is a seed."""
    check("backward", machine, 172, 130, 32, True, dropout_p=1e-6, dropout_seed=3)


@pytest.mark.one_in(5)
@CAUSAL
@ONE_QUICK_HEAD_DIM
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_block_masks(machine, which: str, head_dim: int, causal: bool) -> None:
    check(which, machine, 400, 400, head_dim, causal, block_mask=block_mask(400, 400, 1, 2))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("which", "head_dim"),
    [("backward", 64), ("forward", 160), ("forward", 64), ("forward", 256)]
    + [pytest.param(which, 128, marks=SLOW) for which in ("forward", "backward")],
)
@pytest.mark.parametrize("bound", ["documents", "window"])
def test_windows_and_documents(machine, bound: str, which: str, head_dim: int) -> None:
    given = {"window": (100, 0)} if bound == "window" else {"cu_seqlens": documents(300, 2)}
    check(which, machine, 300, 300, head_dim, True, batch=2, **given)


@pytest.mark.one_in(29)
@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 500), (400, 200)])
@pytest.mark.parametrize("with_", ["", "window", "padding"])
def test_keys_with_offsets_of_their_own(
    machine, with_: str, q_len: int, kv_len: int, which: str, head_dim: int, causal: bool
) -> None:
    given: dict[str, object] = offsets(q_len, kv_len, 2)
    if with_ == "window":
        given["window"] = (70, 0 if causal else 30)
    if with_ == "padding":
        given["kv_lengths"] = torch.tensor([kv_len - 130, 128], dtype=torch.int32)
    check(which, machine, q_len, kv_len, head_dim, causal, batch=2, **given)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("window", [(-1, 0), (60, 0), (60, 20)], ids=str)
def test_documents_with_key_padding(machine, window: tuple[int, int], which: str, head_dim: int) -> None:
    """No key in a batch, one, as many as a block, part of the last. Padding is NaN."""
    lengths = torch.tensor([0, 1, 128, 230], dtype=torch.int32)
    given = {"cu_seqlens": documents(300, 4), "kv_lengths": lengths, "window": window}
    check(which, machine, 300, 300, head_dim, window[1] == 0, batch=4, **given)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("window", [(-1, -1), (60, 20), (-1, 0)], ids=str)
def test_full_documents(machine, window: tuple[int, int], which: str, head_dim: int) -> None:
    check(which, machine, 300, 300, head_dim, False, batch=2, cu_seqlens=documents(300, 2), window=window)


@pytest.mark.one_in(44)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 256])
@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 300), (130, 400), (300, 130)])
@pytest.mark.parametrize("window", [(60, 20), (-1, 30), (40, 0)], ids=str)
@pytest.mark.parametrize("padded", [True, False], ids=["padded", ""])
def test_windows_that_are_full_or_beside_padding(
    machine, padded: bool, window: tuple[int, int], q_len: int, kv_len: int, which: str, head_dim: int
) -> None:
    """Blocks of keys that no query sees, and queries that see no key."""
    given = {"window": window}
    if padded:
        given["kv_lengths"] = torch.tensor([kv_len - 90, 0 if window[0] == 60 else 1], dtype=torch.int32)
    heads = {"batch": 2, "kv_heads": 2 if q_len < kv_len else 1}
    check(which, machine, q_len, kv_len, head_dim, padded and window[1] == 0, **heads, **given)


@ONE_QUICK_HEAD_DIM
@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(130, 400), pytest.param(300, 130, marks=SLOW)])
@pytest.mark.parametrize("left", [50, pytest.param(0, marks=SLOW)])
def test_windows_of_unequal_lengths(
    machine, left: int, q_len: int, kv_len: int, which: str, head_dim: int
) -> None:
    """A block of keys that no query sees, and queries that see no key."""
    check(which, machine, q_len, kv_len, head_dim, True, batch=2, window=(left, 0))


@pytest.mark.parametrize("kv_heads", [2, pytest.param(1, marks=SLOW)])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "given"),
    [
        (40, 500, {}),
        (40, 500, {"window": (20, 10)}),
        *(pytest.param(280, 820, each, marks=SLOW) for each in ({}, {"window": (20, 150)}, *SCORE_MODS)),
    ],
    ids=str,
)
def test_keys_that_a_window_hides_from_all_queries(
    machine, q_len: int, kv_len: int, given: dict[str, object], kv_heads: int
) -> None:
    """More of them than of others: at head_dim 128 the main kernel sets their gradients to 0, in shares of which the
    last ends early, but for grouped heads."""
    given = {"window": (20, 0), **given}
    check("backward", machine, q_len, kv_len, 128, given["window"][1] == 0, 2, kv_heads, **given)


def test_hidden_keys_of_gradients_with_strides_of_their_own(machine) -> None:
    """Heads side by side in both, and in dv only; nothing but dk and dv is written."""
    q, k, v, d_out = (x.detach() for x in inputs(40, 300, 128, torch.float16, batch=2, heads=2, kv_heads=2))
    out, lse = naive_attention(
        q.double(), k.double(), v.double(), causal=True, window=(20, 0), return_lse=True
    )
    want = None
    for dk_packed, dv_packed in ((False, False), (True, True), (False, True)):
        outer = [torch.full((2, 300, 3, 2, 128) if packed else (2, 2, 300, 128), torch.nan).half()
                 for packed in (dk_packed, dv_packed)]  # fmt: skip
        dk, dv = (x[:, :, 1].transpose(1, 2) if x.dim() == 5 else x for x in outer)
        dq, delta = torch.full_like(q, torch.nan), torch.full_like(lse, torch.nan).float()
        hopper.backward(
            d_out, None, out.half(), None, lse.float().contiguous(), q, k, v, dq, dk, dv, delta, Tensors(),
            Options(True, 128**-0.5, left=20),
        )  # fmt: skip
        got = {"dq": dq, "dk": dk.contiguous(), "dv": dv.contiguous()}
        want = want or got
        assert_equal(got, want)
        assert not any(x[:, :, :128].any() for x in (dk, dv))
        assert all(x[:, :, each].isnan().all() for x in outer if x.dim() == 5 for each in (0, 2))


@pytest.mark.one_in(5)
@CAUSAL
@pytest.mark.parametrize("head_dim", [64, pytest.param(96, marks=SLOW), pytest.param(128, marks=SLOW)])
@pytest.mark.parametrize(("which", "delay"), [("forward", 0), ("backward", 0), ("backward", 1)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(172, 300), pytest.param(200, 333, marks=SLOW)])
def test_key_padding(
    machine, monkeypatch, q_len: int, kv_len: int, which: str, delay: int, head_dim: int, causal: bool
) -> None:
    """No key in a batch, one, as many as a block, the first block and part of another, all. Padding is NaN."""
    monkeypatch.setattr(hopper, "choose_dq_delay", lambda *_: delay)
    lengths = torch.tensor([0, 1, 128, 190, kv_len], dtype=torch.int32)
    check(which, machine, q_len, kv_len, head_dim, causal, batch=5, kv_lengths=lengths)


@pytest.mark.one_in(5)
@CAUSAL
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=SLOW)])
@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("delay", [0, pytest.param(1, marks=SLOW)], ids=["", "delay"])
@pytest.mark.parametrize("given", SCORE_MODS, ids=lambda given: next(iter(given)))
def test_score_modifiers(
    machine, monkeypatch, given: dict[str, object], delay: int, which: str, head_dim: int, causal: bool
) -> None:
    monkeypatch.setattr(hopper, "choose_dq_delay", lambda *_: delay)
    check(which, machine, 300, 130, head_dim, causal, **given)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("given", SCORE_MODS, ids=lambda given: next(iter(given)))
@pytest.mark.parametrize("mask", ["window", "documents", "padding", "padding, full"])
def test_score_modifiers_with_masks(machine, mask: str, given: dict[str, object], which: str) -> None:
    masks = {
        "window": {"window": (100, 0)},
        "documents": {"cu_seqlens": documents(200, 2)},
        "padding": {"kv_lengths": torch.tensor([0, 130], dtype=torch.int32)},
        "padding, full": {"kv_lengths": torch.tensor([200, 130], dtype=torch.int32)},
    }
    check(which, machine, 200, 200, 64, "full" not in mask, batch=2, **given, **masks[mask])


@pytest.mark.one_in(9)
@CAUSAL
@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
def test_wide_backward(machine, q_len: int, kv_len: int, causal: bool) -> None:
    check("backward", machine, q_len, kv_len, 256, causal)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("head_dim", [256, 160, 192])
@pytest.mark.parametrize("given", [{}, *SCORE_MODS], ids=lambda given: next(iter(given), "plain"))
@pytest.mark.parametrize(
    "mask",
    ["causal", "full", "window", "documents", "both", "more keys", "own key", "more queries", "a query"],
)
def test_wide_backward_with_features(machine, mask: str, given: dict[str, object], head_dim: int) -> None:
    """Windows hide 0, 64, 128 and 256 keys, whole blocks, from every query; of more queries some see no key."""
    documented = {"cu_seqlens": documents(300, 2)}
    q_len, kv_len, bounds = {
        "causal": (300, 130, {}),
        "full": (300, 130, {}),
        "window": (300, 300, {"window": (100, 0)}),
        "documents": (300, 300, documented),
        "both": (300, 300, {"window": (70, 0)} | documented),
        "more keys": (130, 333, {"window": (80, 0)}),
        "own key": (130, 300, {"window": (0, 0)}),
        "more queries": (300, 130, {"window": (50, 0)}),
        "a query": (1, 300, {"window": (3, 0)}),
    }[mask]
    heads = {"batch": 2, "kv_heads": 2 if mask == "more keys" else 1}
    check("backward", machine, q_len, kv_len, head_dim, mask != "full", **heads, **given, **bounds)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("head_dim", [160, 192])
@pytest.mark.parametrize("of_dq", [4, 5])
@pytest.mark.parametrize("mask", ["causal", "full", "window", "padding"])
def test_wide_backward_with_more_stages(machine, monkeypatch, mask: str, of_dq: int, head_dim: int) -> None:
    """Tiles of 128 and 64 columns leave room for more stages than the kernels take."""
    monkeypatch.setattr(wide_dkdv, "SPLIT_STAGES", 3)
    monkeypatch.setattr(wide_dq, "SPLIT_STAGES", of_dq)
    lengths = torch.tensor([0, 230], dtype=torch.int32)
    padding = {"kv_lengths": lengths, "dropout_p": 0.2, "dropout_seed": 1}
    given = {"window": {"window": (70, 0)}, "padding": padding}.get(mask, {})
    batch = 2 if mask == "padding" else 1
    check("backward", machine, 300, 300, head_dim, mask != "full", batch, **given)


@pytest.mark.one_in(29)
@CAUSAL
@pytest.mark.parametrize("head_dim", [256, 160, 192, 136])
@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("given", [{}, {"softcap": 1.5}], ids=["plain", "softcap"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(172, 300), (130, 195), (1, 65)])
def test_wide_key_padding(
    machine, q_len: int, kv_len: int, given: dict[str, object], which: str, head_dim: int, causal: bool
) -> None:
    """No key in a batch, one, as many as a block, some of the last block, all. Padding is NaN."""
    lengths = torch.tensor([0, 1, 64, kv_len - 1, kv_len], dtype=torch.int32)
    check(which, machine, q_len, kv_len, head_dim, causal, batch=5, kv_lengths=lengths, **given)


@pytest.mark.parametrize("head_dim", [128, 160, 256])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_padding_beside_scores_far_below_zero(machine, which: str, head_dim: int) -> None:
    """Cleared keys have scores of 0, and exp(0 - lse) overflows where they are not masked too."""
    *shifted, d_out = inputs(194, 194, head_dim, torch.float16, batch=2, heads=2, kv_heads=1)
    q, k, v = (x.detach() for x in shifted)
    leaves = [x.requires_grad_() for x in (q.abs() + 4, -k.abs() - 4, v)]
    given = {"kv_lengths": torch.tensor([70, 10], dtype=torch.int32)}
    assert_as_accurate(run(which, (*leaves, d_out), False, given), leaves, d_out, causal=False, **given)


@pytest.mark.one_in(9)
@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
def test_forward(machine, q_len: int, kv_len: int, head_dim: int, causal: bool) -> None:
    check("forward", machine, q_len, kv_len, head_dim, causal)


@CAUSAL
@pytest.mark.parametrize(
    ("q_len", "kv_len", "head_dim"),
    [
        (200, 200, 64),
        (300, 130, 128),
        (129, 60, 72),
        *(pytest.param(*each, marks=SLOW) for each in MORE_BY_TMA),
    ],
)
def test_forward_whose_tiles_are_dealt_and_out_stored_by_tma(
    machine, monkeypatch, q_len: int, kv_len: int, head_dim: int, causal: bool
) -> None:
    spec = specify(head_dim, causal, q_len, kv_len)
    assert spec.OUT_BY_TMA.value
    assert not spec.DYNAMIC.value
    monkeypatch.setattr(groups, "HEADS", 1)  # a causal call's tiles of a head next to each other
    check("forward", machine, q_len, kv_len, head_dim, causal, kv_heads=2)


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128, 192, pytest.param(256, marks=SLOW)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 300), pytest.param(400, 130, marks=SLOW)])
def test_forward_of_long_sequences(
    machine, monkeypatch, q_len: int, kv_len: int, head_dim: int, causal: bool
) -> None:
    """Their schedule on few blocks: dynamic, at head_dim 64 with three consumers; static above 128."""
    monkeypatch.setattr(
        hopper,
        "specify",
        lambda width, causal, q_len, kv_len, *rest: specify(
            width, causal, q_len + LONG, kv_len + LONG, *rest
        ),
    )
    check("forward", machine, q_len, kv_len, head_dim, causal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "seed", "programs"),
    [(160, 13, 1), (160, 1, 2), (160, 10, 3), (256, 7, 2), (256, 34, 2), (256, 58, 2)],
)
def test_a_q_that_lands_after_its_tiles_keys(machine, head_dim: int, seed: int, programs: int) -> None:
    """In orders of events in which, of three slots, another consumer's Q was taken for the next tile's."""
    tensors = inputs(200, 100, head_dim, torch.float16, batch=2, heads=2, kv_heads=1)
    machine |= {"programs": programs, "seed": seed}
    assert not run("forward", tensors, False, {})["out"].isnan().any()


def test_head_dims_that_share_a_kernel_multiply_the_same_columns() -> None:
    """The backward up to head_dim 128 is compiled for `multiplied`; no column of head_dim is left out."""
    for head_dim in range(8, 257, 8):
        columns = multiplied(head_dim)
        assert head_dim <= columns <= tile_width(head_dim)
        assert [first_of(columns), rest_of(columns)] == [first_of(head_dim), rest_of(head_dim)]


def test_the_two_tiles_of_a_stage_have_all_columns_that_are_multiplied() -> None:
    """128 and 64, three times what a descriptor moves."""
    split = [head_dim for head_dim in range(8, 257, 8) if is_split(head_dim)]
    assert split == list(range(136, 193, 8))
    for head_dim in split:
        assert (first_of(head_dim), box_width(head_dim)) == (128, 64)
        assert rest_of(head_dim) <= 64


@pytest.mark.parametrize(
    ("head_dim", "causal"),
    [
        (32, False),
        (96, True),
        (160, False),
        *(pytest.param(head_dim, True, marks=SLOW) for head_dim in (16, 72, 104, 136, 192, 200)),
        *(pytest.param(head_dim, False, marks=SLOW) for head_dim in (80, 136, 192)),
    ],
)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_tiles_that_are_filled_up_with_zeros(machine, which: str, head_dim: int, causal: bool) -> None:
    """Of a tile's columns all are multiplied only at 104 and 200."""
    check(which, machine, 300, 130, head_dim, causal, kv_heads=2)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("bound", "head_dim"),
    [
        (bound, 64)
        for bound in ("causal", "full", "window", "documents", "blocks", "padding", "dropout", "sinks")
    ]
    + [pytest.param("causal", head_dim, marks=SLOW) for head_dim in (72, 128, 160, 256)]
    + [pytest.param(bound, 128, marks=SLOW) for bound in ("padding", "dropout", "sinks")]
    + [pytest.param("dropout", head_dim, marks=SLOW) for head_dim in (136, 160)]
    + [("by query", 64), pytest.param("by query", 256, marks=SLOW)],
)
def test_precise_delta(machine, bound: str, head_dim: int) -> None:
    """The forward keeps what rounding takes from out: of equal scores, P is 1 and sums of V are exact up to float32.
    The backward adds it (`run` compares delta)."""
    q_len, batch, causal = 200, 2, bound != "full"
    given: dict[str, object] = {
        "window": {"window": (100, 0)},
        "documents": {"cu_seqlens": documents(q_len, batch)},
        "blocks": {"block_mask": block_mask(q_len, q_len, batch, 2)},
        "padding": {"kv_lengths": torch.tensor([0, 130], dtype=torch.int32)},
        "by query": offsets(q_len, q_len, batch) | {"kv_lengths": torch.tensor([90, 130], dtype=torch.int32)},
        "dropout": {"dropout_p": 0.5, "dropout_seed": 3},
        "sinks": {"sinks": torch.tensor([0.0, -torch.inf])},  # e^0 is exact too
    }.get(bound, {})
    q, k, v, d_out = inputs(q_len, q_len, head_dim, torch.float16, batch=batch, heads=2, kv_heads=1)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # tokens before heads, as in a packed qkv
    tensors = (q, k * 0, v, d_out)
    got = run("forward", tensors, causal, {**given, "precise_delta": True})
    want = naive_attention(*(x.detach().double() for x in tensors[:3]), causal=causal, **given)
    assert got["low"].stride() == q.stride()
    torch.testing.assert_close(got["out"].double() + got["low"].double(), want, rtol=2**-20, atol=1e-6)
    assert not torch.allclose(got["out"].double(), want, rtol=2**-20, atol=1e-6)
    machine |= {"seed": 1, "programs": 5}
    assert_equal(run("forward", tensors, causal, {**given, "precise_delta": True}), got)
    assert_equal(got, run("forward", tensors, causal, given))
    gradients = run("backward", (q, k, v, d_out), causal, {**given, "precise_delta": True})
    assert_as_accurate(gradients, (q, k, v), d_out, causal=causal, **given)


@gluon.jit
def read(Out, ring, WAITS: gl.constexpr, PHASE: gl.constexpr):
    if WAITS:
        mbarrier.wait(ring.full.index(0), PHASE)
    gl.store(Out + gl.arange(0, 64)[:, None] * 64 + gl.arange(0, 64)[None, :], ring.tiles.index(0).load(None))


@gluon.jit
def load(desc, ring):
    fetch(desc, [0, 0], ring, 0, 0)


@gluon.jit
def copy(desc, Out, WAITS: gl.constexpr, PHASE: gl.constexpr):
    ring = make_ring(desc, 1, 1)
    gl.warp_specialize([(read, (Out, ring, WAITS, PHASE)), (load, (desc, ring))], [1], [24])


def copied(waits: bool, phase: int) -> bool:
    """Whether a kernel that waits or not copies a tile, in all of 20 orders of events."""
    x, out = torch.randn(64, 64, dtype=torch.float16), torch.empty(64, 64, dtype=torch.float16)
    desc = TensorDescriptor(x, [64, 64], [64, 1], [64, 64], layout_of((64, 64), x.dtype))
    for seed in range(20):
        emulate(copy, (1,), (desc, out.fill_(0), waits, phase), seed)
        if not torch.equal(out, x):
            return False
    return True


def test_the_emulator_notices_a_missing_wait_and_a_wrong_phase() -> None:
    assert copied(True, 0)
    assert not copied(False, 0)
    assert not copied(True, 1)  # the phase before the first counts as over
