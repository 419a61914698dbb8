"""Which of flash's kernels run, and why, as on a Hopper GPU. Under 1 s."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import AttentionError, AttentionRequest, attention_tier, resolve_attention, why_portable
from kernels.flash import dispatch
from kernels.flash.call import Options, Tensors

LIST = torch.zeros(1, dtype=torch.int32)
WIDE = {"head_dim": 256, "length": 1024, "heads": 16}  # 128 tiles of 128 queries
FEW_WIDE = WIDE | {"heads": 15}


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def forget() -> None:
        dispatch.choose.cache_clear()
        dispatch._choose_for_call.cache_clear()

    monkeypatch.setattr(dispatch, "machine_lacks", lambda device: None)
    forget()
    yield
    forget()


@pytest.mark.parametrize(
    ("features", "rest", "forward", "backward", "why"),
    [
        ("", {}, "hopper", "hopper", None),
        ("softcap", {}, "hopper", "hopper", None),
        (
            "softcap",
            {"head_dim": 80, "length": 512},
            "triton",
            "triton",
            "1024 queries or more with softcap, not 512",
        ),
        ("softcap window", {}, "hopper", "hopper", None),
        (
            "softcap kv_lengths",
            {},
            "triton",
            "hopper",
            "head_dim 128 or 136 to 256 with softcap and kv_lengths, not 64",
        ),
        (
            "softcap precise_delta",
            {"length": 4096},
            "triton",
            "hopper",
            "8192 queries or more with softcap and precise_delta, not 4096",
        ),
        ("softcap precise_delta", {"length": 4096, "head_dim": 128}, "hopper", "hopper", None),
        ("softcap precise_delta window", {"length": 4096, "head_dim": 128}, "hopper", "hopper", None),
        (
            "softcap cu_seqlens",
            {"length": 1024, "heads": 64, "head_dim": 128},
            "triton",
            "hopper",
            "2048 tiles of 128 queries or more with softcap and cu_seqlens",
        ),
        ("alibi_slopes cu_seqlens", {"length": 1024, "heads": 64}, "hopper", "hopper", None),
        ("alibi_slopes window", {}, "hopper", "hopper", None),
        (
            "alibi_slopes precise_delta",  # of which the backward sees delta alone
            {"length": 1024, "heads": 64},
            "triton",
            "hopper",
            "2048 tiles of 128 queries or more with alibi_slopes and precise_delta",
        ),
        ("sinks", {}, "hopper", "hopper", None),
        ("sinks window", {}, "hopper", "hopper", None),
        ("block_mask sinks", {}, "triton", "hopper", "attention without sinks combined with block_mask"),
        *(("precise_delta", {"head_dim": each}, "hopper", "hopper", None) for each in (48, 64, 80, 256)),
        *(
            (f"precise_delta {others}", {"head_dim": head_dim}, "hopper", "hopper", None)
            for others in ("cu_seqlens window", "kv_lengths", "sinks", "sinks window")
            for head_dim in (64, 128)
        ),
        ("precise_delta dropout_p", {"head_dim": 128}, "hopper", "hopper", None),
        ("alibi_slopes cu_seqlens", {"tier": "hopper"}, "hopper", "hopper", None),
        ("alibi_slopes kv_lengths", {"tier": "hopper"}, "hopper", "hopper", None),
        (
            "alibi_slopes softcap",
            {"tier": "hopper"},
            "triton",
            "triton",
            "attention without softcap combined with alibi_slopes",
        ),
        (
            "softcap sinks",
            {"tier": "hopper"},
            "triton",
            "triton",
            "attention without sinks combined with softcap",
        ),
        ("softcap", {"tier": "hopper", "head_dim": 256}, "hopper", "hopper", None),
        ("softcap window", {"tier": "hopper", "head_dim": 256}, "hopper", "hopper", None),
        ("alibi_slopes cu_seqlens", {"tier": "hopper", "head_dim": 192}, "hopper", "hopper", None),
        (
            "dropout_p",
            {},
            "triton",
            "hopper",
            "head_dim 72 to 120 or 128 or 136 to 256 with dropout_p, not 64",
        ),
        ("dropout_p", {"head_dim": 128}, "hopper", "hopper", None),
        ("dropout_p window", {}, "triton", "triton", "attention without dropout_p combined with window"),
        ("window", {}, "hopper", "hopper", None),
        ("window", {"causal": False}, "hopper", "hopper", None),
        ("window", {"causal": False, "length": 4096, "heads": 32}, "hopper", "hopper", None),
        (
            "window",
            {"causal": False, "length": 1024, "heads": 32},
            "triton",
            "triton",
            "512 tiles of 128 queries or more with window",
        ),
        (
            "cu_seqlens",
            {"causal": False, "length": 1024, "heads": 64},
            "triton",
            "hopper",
            "2048 queries or more with cu_seqlens and causal=False, not 1024, or "
            "2048 tiles of 128 queries or more with cu_seqlens and causal=False",
        ),
        ("window", {"length": 512, "kv_len": 700}, "hopper", "hopper", None),
        ("cu_seqlens", {"length": 512, "kv_len": 512}, "hopper", "hopper", None),
        (
            "cu_seqlens block_mask",
            {},
            "triton",
            "triton",
            "attention without cu_seqlens combined with block_mask",
        ),
        ("window", {"causal": False, "tier": "hopper"}, "hopper", "hopper", None),
        (
            "window softcap",
            {"causal": False, "tier": "hopper"},
            "triton",
            "triton",
            "attention without softcap combined with window and causal=False",
        ),
        ("cu_seqlens cu_seqlens_k", {"length": 4096}, "hopper", "hopper", None),
        (
            "cu_seqlens cu_seqlens_k",
            {"length": 2048},
            "triton",
            "hopper",
            "4096 queries or more with cu_seqlens and cu_seqlens_k, not 2048",
        ),
        ("cu_seqlens cu_seqlens_k window", {"length": 4096, "heads": 8}, "hopper", "hopper", None),
        ("cu_seqlens", {"causal": False, "head_dim": 128}, "hopper", "hopper", None),
        (
            "window kv_lengths",
            {"causal": False},
            "triton",
            "hopper",
            "head_dim 72 to 120 or 128 or 136 to 256 with window and kv_lengths, not 64",
        ),
        ("window kv_lengths", {"head_dim": 128, "length": 4096, "heads": 64}, "hopper", "hopper", None),
        (
            "window kv_lengths",
            {"head_dim": 128, "length": 1024, "kv_len": 1024, "heads": 64},
            "triton",
            "hopper",
            "2048 tiles of 128 queries or more with window and kv_lengths",
        ),
        *(
            (f"{bound} kv_lengths", {"head_dim": 96, "length": 4096, "heads": 80}, "hopper", "hopper", None)
            for bound in ("window", "cu_seqlens")
        ),
        ("cu_seqlens window", {"causal": False, "head_dim": 128}, "hopper", "hopper", None),
        (
            "cu_seqlens cu_seqlens_k kv_lengths",
            {"head_dim": 128, "length": 1024, "heads": 512},
            "triton",
            "hopper",
            "2048 queries or more with cu_seqlens and cu_seqlens_k, not 1024",
        ),
        (
            "window precise_delta",
            {"causal": False, "head_dim": 248, "tier": "hopper"},
            "triton",
            "hopper",
            "a head_dim that 16 divides with window and causal=False and precise_delta above 192, not 248",
        ),
        ("cu_seqlens", {"causal": False, "head_dim": 128, "tier": "hopper"}, "hopper", "hopper", None),
        (
            "window kv_lengths",
            {"tier": "hopper", "head_dim": 200},
            "triton",
            "hopper",
            "a head_dim that 16 divides with window and kv_lengths above 192, not 200",
        ),
        *(
            (
                f"cu_seqlens {others}",
                {"tier": "hopper", "head_dim": head_dim} | rest,
                "hopper",
                "hopper",
                None,
            )
            for others in ("cu_seqlens_k", "kv_lengths", "cu_seqlens_k kv_lengths sinks window precise_delta")
            for head_dim in (64, 96, 128, 256)
            for rest in ({"causal": True, "length": 512, "kv_len": 513}, {"causal": False})
        ),
        *(
            (
                f"cu_seqlens {others} {name}",
                {"tier": "hopper"},
                "triton",
                "triton",
                f"attention without {name} combined with cu_seqlens and {others.split()[-1]}",
            )
            for others in ("cu_seqlens_k", "kv_lengths", "cu_seqlens_k kv_lengths")
            for name in ("alibi_slopes", "block_mask", "dropout_p", "softcap")
        ),
        ("cu_seqlens cu_seqlens_k", {"tier": "hopper", "head_dim": 200}, "hopper", "hopper", None),
        (
            "cu_seqlens cu_seqlens_k kv_lengths",
            {"tier": "hopper", "head_dim": 200},
            "triton",
            "hopper",
            "a head_dim that 16 divides with cu_seqlens and kv_lengths above 192, not 200",
        ),
        (
            "cu_seqlens kv_lengths",
            {},
            "triton",
            "hopper",
            "head_dim 72 to 120 or 128 or 136 to 256 with cu_seqlens and kv_lengths, not 64",
        ),
        (
            "cu_seqlens kv_lengths",
            {"length": 1024, "heads": 64, "head_dim": 128},
            "triton",
            "hopper",
            "2048 tiles of 128 queries or more with cu_seqlens and kv_lengths",
        ),
        ("", {"length": 100}, "triton", "triton", "128 queries or more, not 100"),
        ("", {"length": 100, "tier": "hopper"}, "hopper", "hopper", None),
        ("dropout_p", {"tier": "hopper"}, "hopper", "hopper", None),
        (
            "dropout_p kv_lengths",
            {"tier": "hopper", "head_dim": 128},
            "triton",
            "hopper",
            "head_dim 64, or dropout_p alone and lengths that differ by a multiple of 64",
        ),
        ("kv_lengths", {}, "hopper", "hopper", None),
        (
            "kv_lengths",
            {"length": 1024},
            "triton",
            "hopper",
            "2048 queries or more with kv_lengths, not 1024",
        ),
        (
            "kv_lengths",
            {"head_dim": 80, "length": 512},
            "triton",
            "hopper",
            "1024 queries or more with kv_lengths, not 512",
        ),
        (
            "sinks",
            {"head_dim": 48},
            "triton",
            "hopper",
            "head_dim 64 or 72 to 120 or 128 or 136 to 256 with sinks, not 48",
        ),
        (
            "dropout_p",
            {"head_dim": 80, "length": 1024, "heads": 32},
            "triton",
            "hopper",
            "512 tiles of 128 queries or more",
        ),
        ("kv_lengths", WIDE, "hopper", "hopper", None),
        ("kv_lengths", FEW_WIDE, "triton", "triton", "128 tiles of 128 queries or more with kv_lengths"),
        ("kv_lengths", FEW_WIDE | {"tier": "hopper"}, "hopper", "hopper", None),
        (
            "kv_lengths",
            WIDE | {"causal": True, "kv_len": 1025},
            "triton",
            "hopper",
            "lengths that differ by a multiple of 64 with a causal kv_lengths",
        ),
        ("sinks kv_lengths", WIDE, "hopper", "hopper", None),
        (
            "softcap kv_lengths",
            WIDE | {"head_dim": 136, "heads": 64},
            "triton",
            "triton",
            "1024 tiles of 128 queries or more with softcap and kv_lengths",
        ),
        ("softcap kv_lengths", {"head_dim": 136, "tier": "hopper"}, "hopper", "hopper", None),
        ("sinks", WIDE, "hopper", "hopper", None),
        ("sinks", FEW_WIDE, "triton", "hopper", "128 tiles of 128 queries or more with sinks"),
        ("sinks", FEW_WIDE | {"tier": "hopper"}, "hopper", "hopper", None),
        ("sinks window", FEW_WIDE | {"head_dim": 192, "tier": "hopper"}, "hopper", "hopper", None),
        ("dropout_p", WIDE, "hopper", "hopper", None),
        ("dropout_p", FEW_WIDE, "triton", "triton", "128 tiles of 128 queries or more with dropout_p"),
        ("dropout_p", FEW_WIDE | {"tier": "hopper"}, "hopper", "hopper", None),
        (
            "dropout_p kv_lengths",
            WIDE,
            "triton",
            "hopper",
            "head_dim 64, or dropout_p alone and lengths that differ by a multiple of 64",
        ),
        (
            "dropout_p precise_delta",
            {"head_dim": 256, "tier": "hopper"},
            "triton",
            "hopper",
            "head_dim 64, or dropout_p alone and lengths that differ by a multiple of 64",
        ),
        *(
            (
                "dropout_p",
                WIDE | {"head_dim": head_dim, "tier": tier},
                "triton",
                "triton",
                f"a head_dim that 16 divides with dropout_p above 192, not {head_dim}",
            )
            for head_dim, tier in ((200, "hopper"), (248, "auto"))
        ),
        *(
            (names, WIDE | {"head_dim": head_dim}, "hopper", "hopper", None)
            for names in ("dropout_p", "dropout_p precise_delta")
            for head_dim in (136, 160, 184, 192)
        ),
        *(
            (names, {"head_dim": head_dim, "tier": "hopper"}, "hopper", "hopper", None)
            for names in ("alibi_slopes kv_lengths", "alibi_slopes kv_lengths precise_delta")
            for head_dim in (136, 160, 192)
        ),
        (
            "alibi_slopes kv_lengths",
            WIDE | {"head_dim": 160, "heads": 32},
            "triton",
            "triton",
            "512 tiles of 128 queries or more with alibi_slopes and kv_lengths",
        ),
        ("alibi_slopes kv_lengths", WIDE | {"head_dim": 160, "heads": 64}, "hopper", "hopper", None),
        (
            "alibi_slopes kv_lengths",
            {"head_dim": 200, "tier": "hopper"},
            "triton",
            "triton",
            "head_dim 192 or less with alibi_slopes and kv_lengths, not 200",
        ),
        ("kv_lengths", {"tier": "hopper"}, "hopper", "hopper", None),
        (
            "kv_lengths",
            {"tier": "hopper", "causal": True, "length": 512, "kv_len": 513},
            "triton",
            "hopper",
            "lengths that differ by a multiple of 64 with a causal kv_lengths",
        ),
        ("kv_lengths window", {"tier": "hopper"}, "hopper", "hopper", None),
        ("", {"tier": "triton"}, "triton", "triton", None),
        ("", {"head_dim": 80}, "hopper", "hopper", None),
        (
            "",
            {"head_dim": 80, "length": 256},
            "triton",
            "hopper",
            "512 queries or more, not 256",
        ),
        ("", {"head_dim": 16}, "triton", "triton", "head_dim 40 to 120 or 128 or 136 to 256, not 16"),
        (
            "",
            {"head_dim": 32, "length": 512},
            "triton",
            "triton",
            "head_dim 40 to 120 or 128 or 136 to 256, not 32",
        ),
        (
            "",
            {"head_dim": 32, "length": 4096},
            "triton",
            "hopper",
            "head_dim 40 to 120 or 128 or 136 to 256, not 32",
        ),
        ("return_lse", {"head_dim": 256}, "hopper", "hopper", None),
        ("", {"head_dim": 256, "length": 128, "heads": 1024}, "hopper", "hopper", None),
        ("", {"head_dim": 256, "length": 128}, "hopper", "hopper", None),  # what is open is assumed to suit
        ("", {"head_dim": 256, "length": 128, "heads": 512}, "hopper", "triton", None),
        ("", {"head_dim": 192, "length": 128, "heads": 1024}, "hopper", "triton", None),
        (
            "window",
            {"head_dim": 32, "length": 4096},
            "triton",
            "triton",
            "head_dim 40 to 120 or 128 or 136 to 256, not 32",
        ),
        ("window", {"head_dim": 80}, "hopper", "hopper", None),
        ("window", {"head_dim": 96, "causal": False}, "hopper", "hopper", None),
        ("", {"head_dim": 32, "tier": "hopper"}, "hopper", "hopper", None),
        ("", {"head_dim": 256, "tier": "hopper"}, "hopper", "hopper", None),
        ("window", {"head_dim": 136, "tier": "hopper"}, "hopper", "hopper", None),
        ("", {"head_dim": 84, "tier": "hopper"}, "triton", "triton", "a head_dim that 8 divides, not 84"),
        (
            "block_mask",
            {"head_dim": 256, "tier": "hopper"},
            "triton",
            "triton",
            "head_dim 128 or less with block_mask, not 256",
        ),
        ("", {"dtype": torch.float32}, "triton", "triton", "float16 or bfloat16, not torch.float32"),
    ],
)
def test_a_request_gets_its_kernels_and_the_reason_why_not_others(
    features: str, rest: dict[str, object], forward: str, backward: str, why: str | None
) -> None:
    asked = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64} | rest
    request = AttentionRequest(features=frozenset(features.split()), **asked)
    assert dispatch.choose("forward", request) == (forward, why)
    assert dispatch.choose("backward", request).kernels == backward
    assert dispatch.tier_of(request) == (forward if forward == backward else f"{forward} and {backward}")


def test_a_call_that_no_row_takes_is_told_what_each_would_need() -> None:
    asked = {
        "device": torch.device("cuda"),
        "dtype": torch.bfloat16,
        "head_dim": 256,
        "features": frozenset(),
    }
    needed = dispatch.hopper_needs("backward", AttentionRequest(**asked, length=128, heads=512))
    assert needed == "256 queries or more, not 128, or 1024 tiles of 128 queries or more"


def test_users_are_told_why_a_hopper_gpu_runs_portable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64}
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: True)
    assert why_portable("flash", **asked) is None
    assert why_portable("flash", **asked, softcap=5.0) is None
    few = why_portable("flash", **asked, kv_lengths=True, length=512, heads=63)
    assert few == "those for Hopper need 256 tiles of 128 queries or more"
    few = why_portable("flash", **asked | {"head_dim": 128}, kv_lengths=True, length=512, heads=63)
    assert few == (
        "the forward for Hopper needs 512 tiles of 128 queries or more with kv_lengths; "
        "the backward for Hopper needs 256 tiles of 128 queries or more with kv_lengths"
    )
    few = why_portable("flash", **asked | FEW_WIDE, dropout_p=0.1)
    assert few == "those for Hopper need 128 tiles of 128 queries or more with dropout_p"
    few = why_portable("flash", **asked | FEW_WIDE, sinks=True)
    assert few == "the forward for Hopper needs 128 tiles of 128 queries or more with sinks"
    one = why_portable("flash", **asked, dropout_p=0.1)
    assert (
        one == "the forward for Hopper needs head_dim 72 to 120 or 128 or 136 to 256 with dropout_p, not 64"
    )
    assert why_portable("flash", **asked, dropout_p=0.1, tier="triton") is None  # as asked for
    assert why_portable("sdpa", **asked) is None
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: False)
    assert why_portable("flash", **asked, dropout_p=0.1) is None


@pytest.mark.parametrize(
    ("features", "head_dim"),
    [
        *itertools.product(("window", "cu_seqlens", "softcap", "alibi_slopes"), (136, 160, 192, 256)),
        *itertools.product(("softcap window", "sinks window", "sinks", "kv_lengths"), (136, 160, 192, 256)),
        *itertools.product(("dropout_p",), (136, 144, 160, 192, 208, 256)),  # above 192 16 divides them
    ],
)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_auto_takes_features_above_128_with_many_tiles(which: str, features: str, head_dim: int) -> None:
    few = "hopper" if (which, features) == ("backward", "sinks") else "triton"  # it has no form for sinks
    asked = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": head_dim, "length": 1024}
    asked |= {"features": frozenset(features.split()), "causal": True}
    assert dispatch.choose(which, AttentionRequest(**asked, heads=16)).kernels == "hopper"
    assert dispatch.choose(which, AttentionRequest(**asked, heads=15)).kernels == few
    assert dispatch.choose(which, AttentionRequest(**asked, heads=15, tier="hopper")).kernels == "hopper"


def test_a_run_that_only_its_backward_could_not_serve_is_refused_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(dispatch.WIDE_LACKS, "backward", frozenset({"window"}))
    asked = torch.device("cuda"), torch.float16, 136, frozenset({"window"})
    refused = dispatch.refuses(AttentionRequest(*asked, tier="hopper"))
    assert refused is not None
    assert "head_dim 128 or less with window, not 136" in refused
    assert dispatch.refuses(AttentionRequest(*asked)) is None


def test_a_softcap_that_the_hopper_kernels_lack_is_refused_before_the_run() -> None:
    asked = {"device": torch.device("cuda"), "dtype": torch.float16, "head_dim": 64, "tier": "hopper"}
    assert resolve_attention("flash", **asked, softcap=64.0)[0] == "flash"
    with pytest.raises(AttentionError, match="needs a softcap up to 64, not 65"):
        resolve_attention("flash", **asked, softcap=65.0)


def chosen(
    tensors: Tensors, options: Options, q_len=512, kv_len=512, forced=False, fits=True, batch=64
) -> tuple[str, str]:
    q, k = (torch.empty(batch, 2, length, 64, dtype=torch.float16) for length in (q_len, kv_len))
    passes = ("forward", "backward")
    return tuple(
        dispatch.kernels_for_call(each, q, k, tensors, options, forced, lambda: fits)[0] for each in passes
    )


@pytest.mark.parametrize(
    ("tensors", "options", "kernels"),
    [
        (Tensors(), Options(True, 1.0), ("hopper", "hopper")),
        (Tensors(), Options(True, 1.0, left=64, right=0), ("hopper", "hopper")),
        (Tensors(), Options(False, 1.0, left=64, right=0), ("hopper", "hopper")),
        (Tensors(), Options(False, 1.0, left=600, right=512), ("hopper", "hopper")),  # masks nothing
        (Tensors(), Options(True, 1.0, softcap=5.0), ("hopper", "hopper")),
        (Tensors(), Options(True, 1.0, softcap=65.0), ("triton", "triton")),
        (Tensors(), Options(True, 1.0, precise_delta=True), ("hopper", "hopper")),
        (Tensors(seed=LIST), Options(True, 1.0, dropout_p=0.1), ("triton", "hopper")),
        (Tensors(sinks=LIST), Options(True, 1.0), ("hopper", "hopper")),
        (Tensors(alibi_slopes=LIST), Options(True, 1.0), ("hopper", "hopper")),
        (Tensors(kv_lengths=LIST), Options(True, 1.0), ("triton", "hopper")),
        (Tensors(document_starts=LIST, document_ends=LIST), Options(True, 1.0), ("hopper", "hopper")),
        (Tensors(document_starts=LIST, document_ends=LIST), Options(False, 1.0), ("triton", "hopper")),
        (Tensors(None, None, None, LIST, LIST), Options(False, 1.0, ragged=True), ("triton", "hopper")),
        (
            Tensors(None, None, None, LIST, LIST),
            Options(False, 1.0, tier="hopper", ragged=True),
            ("hopper",) * 2,
        ),
        (Tensors(None, None, None, LIST, LIST, LIST), Options(True, 1.0), ("triton",) * 2),
        (Tensors(None, None, None, LIST, LIST, LIST), Options(True, 1.0, tier="hopper"), ("hopper",) * 2),
        (Tensors(None, None, None, LIST, LIST, LIST), Options(False, 1.0, tier="hopper"), ("hopper",) * 2),
        (Tensors(key_blocks=LIST, query_blocks=LIST), Options(True, 1.0), ("hopper", "hopper")),
    ],
)
def test_a_call_gets_what_its_arguments_ask_for(
    tensors: Tensors, options: Options, kernels: tuple[str, str]
) -> None:
    assert chosen(tensors, options) == kernels


@pytest.mark.parametrize("batch", [31, 32, 63, 64])
def test_calls_that_fill_the_gpu_take_the_hopper_kernels(batch: int) -> None:
    plain = "hopper" if batch >= 32 else "triton"  # 256 tiles
    assert chosen(Tensors(), Options(True, 1.0), batch=batch) == (plain, plain)
    forward, backward = chosen(Tensors(), Options(True, 1.0, left=64, right=0), batch=batch)
    assert forward == ("hopper" if batch >= 64 else "triton")
    assert backward == plain
    asked = {"device": torch.device("cuda"), "dtype": torch.float16, "head_dim": 64, "length": 512}
    told = attention_tier("flash", **asked, heads=2 * batch, window=(64, 0))  # as of the call itself
    assert told == " and ".join(dict.fromkeys((forward, backward)))


def test_what_only_a_call_knows_sends_it_to_the_portable_kernels_or_is_named() -> None:
    plain, blocks = Options(True, 1.0), Tensors(key_blocks=LIST, query_blocks=LIST)
    portable = ("triton", "triton")
    assert chosen(Tensors(), plain, fits=False) == chosen(Tensors(), plain, forced=True) == portable
    assert chosen(Tensors(), plain, q_len=100) == portable
    assert chosen(blocks, plain, kv_len=500) == portable
    assert chosen(blocks, plain, kv_len=640) == ("hopper", "hopper")
    hopper = plain._replace(tier="hopper")
    for case, reason in (
        ({"fits": False}, "TMA"),
        ({"forced": True}, "no prescribed tile"),
        (
            {"tensors": blocks, "kv_len": 500},
            "lengths that differ by a multiple of 128 with a causal block_mask",
        ),
        (
            {"options": hopper._replace(left=3, right=0, causal=False, softcap=9.0)},
            "attention without softcap combined with window and causal=False",
        ),
        ({"options": hopper._replace(softcap=65.0)}, "a softcap up to 64"),
    ):
        with pytest.raises(AttentionError, match=f"tier=hopper cannot run this call: it needs .*{reason}"):
            chosen(**{"tensors": Tensors(), "options": hopper} | case)
    with pytest.raises(AttentionError, match="tier=hoper is none of auto, triton, hopper"):
        chosen(Tensors(), plain._replace(tier="hoper"))


def rows_of_the_docs() -> list[tuple[set[str], set[str], bool, int, bool, tuple[str, ...]]]:
    """Arguments, what they are beside, whether not by query, above which head_dim, whether odd ones alone, passes."""
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    text = page.partition("\n## What the Hopper kernels do not combine\n")[2].partition("\n## ")[0]
    rows = []
    for line in [line for line in text.splitlines() if line.startswith("| `")]:
        argument, beside, head_dim, passes, _ = (cell.strip() for cell in line.strip("|").split("|"))
        beside, unless, _ = beside.replace("`", "").partition(", not by query")
        least, odd = re.fullmatch(r"(?:all|above (\d+))(, no multiple of 16)?", head_dim).groups()
        which = ("forward", "backward") if passes == "both" else (passes,)
        arguments = set(argument.replace("`", "").split(", "))
        rows.append((arguments, set(beside.split(", ")), bool(unless), int(least or 0), bool(odd), which))
    return rows


def test_the_docs_table_has_just_what_the_hopper_kernels_do_not_combine() -> None:
    """Up to three features beside each other: each row refuses a call that no other does, and the rows all calls."""
    rows, decisive = rows_of_the_docs(), set()
    names = sorted(dispatch.FEATURES.keys() - {"return_lse"})
    sets = [frozenset(each) for count in range(4) for each in itertools.combinations(names, count)]
    sets = [each for each in sets if "cu_seqlens" in each or "cu_seqlens_k" not in each]
    head_dims = 64, 72, 128, 136, 192, 200, 208
    for features, head_dim, causal, apart in itertools.product(sets, head_dims, (True, False), (0, 32, 64)):
        asked = {"length": 1024, "kv_len": 1024 + apart, "causal": causal, "tier": "hopper"}
        request = AttentionRequest(torch.device("cuda"), torch.bfloat16, head_dim, features, **asked)
        by_query = bool(dispatch._by_query(request))
        there = {"nothing", *features} | ({"by query"} if by_query else set())
        for multiple in (64, 128):
            if apart % multiple:
                words = f"apart by no multiple of {multiple}"
                there |= {words, f"causal and {words}"} if causal else {words}
        found = [
            (number, which)
            for number, (arguments, beside, unless, least, odd, passes) in enumerate(rows)
            if arguments & features and beside & there and head_dim > least and (head_dim % 16 or not odd)
            if not (unless and by_query)
            for which in passes
        ]
        for which in ("forward", "backward"):
            its = [number for number, one in found if one == which]
            assert bool(dispatch.hopper_needs(which, request)) == bool(its), (which, request)
            decisive |= set(its) if len(its) == 1 else set()
    assert decisive == set(range(len(rows)))
