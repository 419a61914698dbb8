"""What attention.tier=hopper accepts is compiled by compile_report: every combination of features, causal and full,
of as many keys as queries. 1 s."""

import itertools
from unittest import mock

import pytest
import torch
import triton

from kernels.compile_jobs import APART, shipped
from kernels.features import FEATURES
from kernels.flash import dispatch
from kernels.registry import AttentionRequest
from kernels.versions import OLDEST_GLUON, numbers_of

pytestmark = pytest.mark.skipif(
    numbers_of(triton.__version__) < OLDEST_GLUON, reason="the Hopper kernels do not compile with this triton"
)

KERNELS = {"forward": {"hopper_forward"}, "backward": {"hopper_backward", "hopper_dkdv"}}


@pytest.mark.parametrize("which", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_combination_that_is_accepted_is_compiled(
    head_dim: int, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "machine_lacks", lambda device: None)
    dispatch.choose.cache_clear()
    jobs = [job for job in shipped([90], [head_dim]) if job.kernel in KERNELS[which]]
    jobs = [job for job in jobs if job.head_dim == head_dim]
    compiled = {(job.causal, frozenset(job.feature.split()).difference(APART)) for job in jobs}
    accepted = set()
    for count in range(len(FEATURES) + 1):
        for features, causal in itertools.product(itertools.combinations(FEATURES, count), (True, False)):
            device, dtype = torch.device("cuda"), torch.bfloat16
            asked = AttentionRequest(
                device, dtype, head_dim, frozenset(features), tier="hopper", causal=causal
            )
            if dispatch.choose(which, asked).kernels == "hopper":
                form = asked.features - dispatch.NO_FORM[which]
                # Documents and a window are one form: its left side is a number.
                accepted.add((causal, form - {"window"} if "cu_seqlens" in form else form))
    dispatch.choose.cache_clear()
    assert {(True, frozenset()), (False, frozenset({"cu_seqlens"}))} <= accepted
    assert accepted <= compiled, [(causal, sorted(form)) for causal, form in accepted - compiled]


@pytest.mark.parametrize("head_dim", [40, 64, 72, 128, 256])
def test_a_launch_has_the_tensors_that_its_form_takes(head_dim: int) -> None:
    """Whether out is moved by TMA, and whether there is a counter of tiles, is asked before the form is made."""
    from kernels.flash.call import Options, Tensors
    from kernels.flash.hopper import launch as hopper

    kinds = ({}, {"softcap": 30.0}, {"precise_delta": True}, {"left": 100}, {"dropout_p": 0.1})
    for length, causal, kv_heads, given in itertools.product(
        (1, 128, 129, 256, 257, 512, 513, 1024, 2047, 2048, 4095, 4096), (True, False), (1, 2), kinds
    ):
        q, kv = torch.empty(1, 2, length, head_dim, dtype=torch.bfloat16), (1, kv_heads, length, head_dim)
        k, seed = torch.empty(kv, dtype=torch.bfloat16), torch.tensor(1) if "dropout_p" in given else None
        with mock.patch.object(hopper, "launch") as launch:
            lse = q.new_empty(q.shape[:3], dtype=torch.float32)
            hopper.forward(q, k, k, q, q, lse, Tensors(seed), Options(causal, 1.0, **given))
        pointers, key, prepare, moved, describe = launch.call_args.args
        _, _, numbers, _ = prepare()
        spec, where = numbers[-1], (length, causal, kv_heads, given)
        assert len(moved) == len(describe(*moved)) == (4 if spec.OUT_BY_TMA.value else 3), where
        assert (pointers[0] is lse) == spec.OUT_BY_TMA.value, where
        _, low, counter, *_ = pointers if spec.OUT_BY_TMA.value else pointers[1:]
        assert (counter is not None) == spec.DYNAMIC.value, where
        assert (low is not None) == ("precise_delta" in given), where
        assert q.dtype in key


@pytest.mark.parametrize(
    ("consumers", "length", "given"),
    [
        (3, 4096, {}),
        (2, 2048, {}),
        (2, 4096, {"right": 0}),  # a causal window by another name
        (2, 4096, {"causal": True}),
        (2, 4096, {"causal": True, "padded": True}),
        (2, 4096, {"ragged": True}),  # whether it was causal, its bounds alone know
        (2, 4096, {"precise_delta": True}),
    ],
)
def test_long_windows_without_a_causal_mask_have_three_consumers(
    consumers: int, length: int, given: dict[str, bool]
) -> None:
    """As full documents. With a causal mask, by query, three took 1.00 to 1.12 of two consumers' time."""
    from kernels.flash.call import Options, Tensors
    from kernels.flash.hopper import launch as hopper

    given = {"causal": False, "scale": 1.0, "left": 100} | given
    padded = torch.ones(1, dtype=torch.int32) if given.pop("padded", False) else None
    q = torch.empty(1, 2, length, 64, dtype=torch.bfloat16)
    starts = torch.zeros(1, length, dtype=torch.int32)
    tensors = Tensors(document_starts=starts, document_ends=starts, kv_lengths=padded)
    with mock.patch.object(hopper, "launch") as launch, mock.patch("kernels.flash.masks.launch"):
        hopper.forward(q, q, q, q, q, q[..., 0].float(), tensors, Options(**given))
    _, _, numbers, _ = launch.call_args.args[2]()
    assert numbers[-1].CONSUMERS.value == consumers


@pytest.mark.parametrize("head_dim", [136, 160, 192, 200, 256])
def test_few_wide_tiles_are_dealt_where_that_was_timed(head_dim: int) -> None:
    """And not with grouped heads or features; nothing of it is in the form of dQ, which claims its tiles."""
    from kernels.flash.hopper.spec import specify

    few = {length: specify(head_dim, True, length, length) for length in (1, 128, 256, 512, 513)}
    dealt = [length for length, spec in few.items() if not spec.DYNAMIC.value]
    assert dealt == ([1, 128, 256, 512] if head_dim > 192 else [])
    assert [n for n, spec in few.items() if spec.EXP_BEFORE_WAIT.value] == dealt
    for given in ({"group": 2}, {"bounded": True}, {"padded": True}, {"softcap": 30.0}, {"precise": True}):
        assert specify(head_dim, True, 512, 512, **given).DYNAMIC.value, given


@pytest.mark.parametrize(("batch", "groups"), [(32, 1), (31, 124), (1, 4)])
def test_heads_of_few_wide_tiles_are_dealt_one_by_one_or_all_together(batch: int, groups: int) -> None:
    from kernels.flash.call import Options, Tensors
    from kernels.flash.hopper import launch as hopper

    q = torch.empty(batch, 4, 512, 256, dtype=torch.bfloat16)
    with mock.patch.object(hopper, "launch") as launch:
        hopper.forward(q, q, q, q, q, q[..., 0].float(), Tensors(), Options(True, 1.0))
    prepare = launch.call_args.args[2]
    _, _, (*_, heads_per_group, _tiles, _left, _right, _b, _h, _width, _scale, spec), _ = prepare()
    assert (heads_per_group, spec.DYNAMIC.value) == (groups, False)


@pytest.mark.parametrize(
    ("head_dim", "causal", "q_len", "kv_len", "dealt"),
    [
        (64, True, 1024, 1024, True), (64, True, 2048, 2048, False), (128, True, 1024, 1024, False),
        (64, False, 2048, 2048, True), (128, False, 2048, 4096, True), (128, False, 4096, 4096, False),
        (256, False, 1024, 1024, True), (256, False, 2048, 2048, False), (208, False, 1024, 1024, False),
        (64, False, 1024, 1000, False),
    ],
)  # fmt: skip
def test_tiles_of_a_window_are_dealt_where_queries_are_few(
    head_dim: int, causal: bool, q_len: int, kv_len: int, dealt: bool
) -> None:
    """A full window over as many keys as queries or more has no tables, so no launch but the forward's."""
    from kernels.flash import masks
    from kernels.flash.call import Options, Tensors
    from kernels.flash.hopper import launch as hopper

    q, k = (torch.empty(4, 4, length, head_dim, dtype=torch.bfloat16) for length in (q_len, kv_len))
    options = Options(causal, 1.0, left=100, right=0 if causal else 50)
    patched = mock.patch.object
    with patched(hopper, "launch") as launch, patched(masks, "launch") as of_tables:
        hopper.forward(q, k, k, q, q, q[..., 0].float(), Tensors(), options)
    prepare = launch.call_args.args[2]
    with patched(hopper, "sm_count", lambda device: 132):
        _, _, (*_, heads_per_group, _tiles, left, right, _b, _h, _width, _scale, spec), _ = prepare()
    tables = not causal and kv_len < q_len
    assert of_tables.called == tables
    apart = kv_len - q_len
    assert (left, right) == ((masks.ANY, None) if tables else (100 - apart, None if causal else 50 + apart))
    assert spec.DYNAMIC.value == (not dealt)
    assert not dealt or heads_per_group == (66 if causal else 4)


@pytest.mark.parametrize(
    ("heads", "documents", "late"), [(99, True, True), (100, True, False), (2, True, True), (2, False, False)]
)
def test_tiles_of_documents_are_claimed_late_up_to_24_a_program(
    heads: int, documents: bool, late: bool
) -> None:
    """4096 queries are 32 tiles a head."""
    from kernels.flash.call import Options, Tensors
    from kernels.flash.hopper import launch as hopper

    q = torch.empty(1, heads, 4096, 64, dtype=torch.bfloat16, device="meta")
    bounds = torch.zeros(1, 4096, dtype=torch.int32, device="meta") if documents else None
    tensors = Tensors(document_starts=bounds, document_ends=bounds)
    patched = mock.patch.object
    with patched(hopper, "launch") as launch, patched(hopper, "sm_count", lambda device: 132):
        hopper.forward(q, q, q, q, q, q[..., 0].float(), tensors, Options(True, 1.0))
        _, _, numbers, _ = launch.call_args.args[2]()
    assert numbers[-1].CLAIMS_LATE.value == late
    assert numbers[-1].DYNAMIC.value


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("head_dim", "launches"), [(64, 4), (256, 3)])
@pytest.mark.parametrize(("q_len", "kv_len", "tables"), [(512, 640, False), (512, 384, True)])
def test_windows_beside_padding_have_tables_where_there_are_fewer_keys_than_queries(
    q_len: int, kv_len: int, tables: bool, head_dim: int, launches: int, causal: bool
) -> None:
    """Else no launch but those of padding alone. Tiles are claimed either way."""
    from kernels.flash import masks
    from kernels.flash.call import Options, Tensors
    from kernels.flash.hopper import launch as hopper

    q, k = (torch.empty(4, 4, length, head_dim, dtype=torch.bfloat16) for length in (q_len, kv_len))
    lse, lengths = q[..., 0].float(), torch.full((4,), 300, dtype=torch.int32)
    given = Tensors(kv_lengths=lengths), Options(causal, 1.0, left=100, right=-1 if causal else 50)
    patched = mock.patch.object
    with patched(hopper, "launch") as launch, patched(masks, "launch") as of_tables:
        hopper.forward(q, k, k, q, q, lse, *given)
        assert of_tables.call_count == int(tables)
        _, _, (*_, spec), _ = launch.call_args.args[2]()
        launch.reset_mock()
        hopper.backward(q, None, q, None, lse, q, k, k, q, k, k, lse, *given)
        assert of_tables.call_count == (3 if tables else 0)
    assert launch.call_count == launches
    assert (spec.BY_QUERY.value, spec.DYNAMIC.value) == (True, True)
