"""The features experiment: what libraries are asked for, which contenders are timed, and the verdicts. 10 s."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import flex_attention

from benchmarks import feature_contenders, features
from benchmarks.__main__ import main
from benchmarks.aims import MET, MISSED, NO_AIM
from benchmarks.feature_contenders import HEAD_DIM, PADDING, PRECISE, WINDOW, WITHOUT, Workload
from benchmarks.features import FA4, FLEX, OURS, PORTABLE, Inputs
from kernels import AttentionRequest, get_attention
from kernels.fa4 import fa4_or_documents
from kernels.flash import dispatch
from kernels.naive import naive_attention
from reproduce import peers
from reproduce.experiment import Options, pick
from reproduce.peers import CUDNN_MASK, DETERMINISTIC, EFFICIENT_MASK
from tests.conftest import INTERPRETED
from tests.processes import in_three

CPU = torch.device("cpu")


def inputs_of(feature: str, causal: bool = True) -> Inputs:
    return Inputs(Workload(feature, 2, 4, 50, 32, causal), torch.float32, CPU)


def exact(inputs: Inputs) -> Tensor:
    options = {"causal": inputs.workload.causal, **inputs.features(0)}
    return naive_attention(*inputs.by_head(), **options).transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False])
def test_flex_attention_gets_its_sinks_from_the_log_sum_exp(causal, monkeypatch):
    """With what torch.compile traces run as it is."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    inputs = inputs_of("sinks", causal)
    inputs.qkv = [x.detach() for x in inputs.qkv]  # on a CPU it has no backward
    torch.testing.assert_close(feature_contenders._flex(inputs, 0), exact(inputs))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_and_sdpa_get_key_padding_as_a_mask(monkeypatch):
    """FlexAttention uncompiled, and SDPA's math in the place of a kernel for GPUs."""
    monkeypatch.setattr(peers, "compiled_flex_attention", lambda: flex_attention)
    monkeypatch.setitem(peers.MAKE, EFFICIENT_MASK, partial(peers.sdpa_with_mask, SDPBackend.MATH))
    feature_contenders._made.cache_clear()
    inputs = inputs_of(PADDING, causal=False)
    inputs.qkv = [x.detach() for x in inputs.qkv]  # on a CPU FlexAttention has no backward
    assert 25 <= inputs.kv_lengths.min() < inputs.kv_lengths.max() <= 50
    contenders = features.contenders(PADDING)
    for name in (FLEX, EFFICIENT_MASK):
        torch.testing.assert_close(contenders[name](inputs, 0), exact(inputs))
    feature_contenders._made.cache_clear()


def the_packages(asked: list[bool]) -> partial:
    """FlashAttention-4 with naive attention behind the package's signature; asked: whether to be deterministic."""

    def attend(q, k, v, softmax_scale, causal, deterministic=False, **features):
        asked.append(deterministic)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return naive_attention(q, k, v, causal=causal, scale=softmax_scale, **features).transpose(1, 2), None

    def flash_attn_func(*qkv, softcap=0.0, learnable_sink=None, window_size=(None, None), **how):
        window = tuple(-1 if each is None else each for each in window_size)
        return attend(*qkv, softcap=softcap, sinks=learnable_sink, window=window, **how)

    def flash_attn_varlen_func(*qkv, seqused_k, **how):
        return attend(*qkv, kv_lengths=seqused_k, **how)

    return partial(
        fa4_or_documents, flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
    )


@pytest.mark.parametrize("feature", ["softcap", "sinks", WINDOW, PADDING, HEAD_DIM])
@pytest.mark.parametrize("repeatable", [True, False])
def test_flash_attention_4_gets_features_by_its_own_names(feature, repeatable, monkeypatch):
    asked = []
    found = {FA4: the_packages(asked)}
    monkeypatch.setattr(feature_contenders, "WIDTH", 20)
    monkeypatch.setattr(
        feature_contenders, "get_attention", lambda name: found.get(name) or get_attention(name)
    )
    inputs = inputs_of(feature, causal=feature != PADDING)
    contender = features.contenders(feature)[DETERMINISTIC if repeatable else FA4]
    torch.testing.assert_close(contender(inputs, 0), exact(inputs))
    assert asked == [repeatable]


def test_what_flash_attention_4_leaves_in_the_gradients_of_padded_keys_is_not_compared(monkeypatch):
    class LikeIt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, padded):
            ctx.padded = padded
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.masked_fill(ctx.padded, float("nan")), None

    def attend(inputs: Inputs, number: int) -> Tensor:
        q, k, v = inputs.by_head()
        padded = (torch.arange(k.shape[2]) >= inputs.kv_lengths[:, None])[:, None, :, None]
        k, v = LikeIt.apply(k, padded), LikeIt.apply(v, padded)
        return naive_attention(q, k, v, causal=False, kv_lengths=inputs.kv_lengths).transpose(1, 2)

    monkeypatch.setattr(features, "resolve_attention", lambda *name, **request: None)
    options = Options(CPU, True, features.TINY, None)
    workload = Workload(PADDING, 2, 2, 64, 32, False)
    passed = {
        name: features.check(name, {name: attend}, workload, options)["passed"] for name in (FA4, "mine")
    }
    assert passed == {FA4: True, "mine": False}


def test_what_is_checked_takes_the_kernels_that_are_timed(monkeypatch):
    """Of an H200; the portable ones, where they are timed, are checked as a contender of their own."""
    monkeypatch.setattr(dispatch, "machine_lacks", lambda device: None)
    dispatch.choose.cache_clear()

    def chosen(which: str, w: Workload) -> str:
        used = frozenset() if w.feature == HEAD_DIM else frozenset({w.feature})
        call = w.length, w.keys, w.causal, frozenset(), w.batch * w.heads
        request = AttentionRequest(torch.device("cuda"), torch.bfloat16, w.head_dim, used, "auto", *call)
        return dispatch.choose(which, request).kernels

    settings = features.Settings()
    passes = [(which, w) for w in features.workloads(settings) for which in ("forward", "backward")]
    small = {(which, w): chosen(which, features.checked(w, settings, on_gpu=True)) for which, w in passes}
    unlike = [(which, w) for which, w in passes if "hopper" == chosen(which, w) != small[which, w]]
    dispatch.choose.cache_clear()
    assert not unlike
    assert len(passes) == 2 * (4 * 12 + 9 + 9 + 15 + 12)


def run(folder: Path, *settings: str) -> dict:
    command = ["features", "--tiny", "--device", "cpu", "--results", str(folder), *settings]
    assert main(command) == 0
    return json.loads((folder / "cpu" / "features.json").read_text())


def without_softcap(inputs: Inputs, number: int) -> Tensor:
    return naive_attention(*inputs.by_head()).transpose(1, 2)


def with_larger_sinks(inputs: Inputs, number: int) -> Tensor:
    return naive_attention(*inputs.by_head(), sinks=inputs.qkv[3] + 1).transpose(1, 2)


def dropping_twice_as_much(inputs: Inputs, number: int) -> Tensor:
    """What is left is scaled as for what was asked for; without dropout it is right."""
    asked = inputs.dropout_p
    out = naive_attention(*inputs.by_head(), dropout_p=2 * asked, dropout_seed=number).transpose(1, 2)
    return out * (1 - 2 * asked) / (1 - asked)


def aligned_at_the_top(inputs: Inputs, number: int) -> Tensor:
    """The causal mask as if the keys began with the queries'."""
    q, k, v = (x[:, :, : inputs.workload.length] for x in inputs.by_head())
    return naive_attention(q, k, v).transpose(1, 2)


def without_padding(inputs: Inputs, number: int) -> Tensor:
    return naive_attention(*inputs.by_head(), causal=False).transpose(1, 2)


WRONG = {"softcap": without_softcap, "sinks": with_larger_sinks, "dropout_p": dropping_twice_as_much}
WRONG |= {WINDOW: aligned_at_the_top, PADDING: without_padding}


@INTERPRETED
@pytest.mark.parametrize(("feature", "wrong"), WRONG.items())
def test_a_contender_with_wrong_results_is_not_timed(feature, wrong, tmp_path, capsys, monkeypatch):
    asked = {OURS: features.registered(OURS), "wrong": wrong, FLEX: feature_contenders._flex}
    monkeypatch.setattr(features, "contenders", lambda feature: dict(asked))
    # Two sinks have two gradients, in which naive, whose error is the limit, may be right by chance.
    torch.manual_seed(0)
    results = run(tmp_path, f"features={feature}")
    assert all(set(sample["ms"]) == {OURS} for sample in pick(results, kind="time"))
    said = capsys.readouterr().out
    assert re.search(f"left out: check, wrong, {feature}, 32.*: wrong, so not timed", said)
    assert re.search(f"left out: check, flex, {feature}, 32: attention=flex cannot be used here", said)


@INTERPRETED
def test_a_run_goes_on_from_one_that_had_fewer_features(tmp_path, monkeypatch):
    """Its document has neither their names nor their setting; what it measured stays as it is."""
    asked = {OURS: features.registered(OURS)}
    monkeypatch.setattr(features, "contenders", lambda feature: dict(asked))
    before = run(tmp_path, "features=softcap")
    del before["settings"]["other_head_dims"]
    (tmp_path / "cpu" / "features.json").write_text(json.dumps(before))
    after = run(tmp_path, f"features=softcap,{HEAD_DIM}")
    assert after["samples"][:2] == before["samples"]
    assert [(sample["feature"], sample["head_dim"]) for sample in after["samples"][2:]] == [
        (HEAD_DIM, 16)
    ] * 2
    assert "another head_dim" not in features.unmeasured(after["samples"])
    assert "another head_dim" in features.unmeasured(before["samples"])


def results_of(feature: str = "softcap", causal: bool = True, **ms: float) -> dict:
    """Results with these milliseconds, of three rounds, for contenders with + in place of _."""

    def phases(ms: float) -> dict:
        return {"forward": [ms / 3] * 3, "backward": [2 * ms / 3] * 3}

    milliseconds = {name.replace("_", "+"): phases(each) for name, each in ms.items()}
    shape = {"feature": feature, "batch": 4, "heads": 16, "length": 4096, "head_dim": 128, "causal": causal}
    sample = {"kind": "time", **shape, "ms": milliseconds | {PORTABLE: phases(2.0)}}
    return {"device": "NVIDIA H200", "samples": in_three(sample)}


def test_aims_are_held_against_the_fastest_and_the_fastest_that_is_repeatable(tmp_path):
    results = results_of(flash=3.0, fa4=2.5, fa4_deterministic=3.2, flex=4.0)
    fastest, repeatable = features.aims(results)
    assert fastest.what == "4 x 16 x 4096 x 128, softcap (causal): time over the fastest other's"
    assert (fastest.ours, fastest.status, fastest.why) == ("1.20x", MISSED, "the fastest other is fa4")
    assert (repeatable.ours, repeatable.status) == ("0.94x", MET)
    assert repeatable.why == f"the fastest repeatable other is {DETERMINISTIC}"
    (only,) = features.aims(results_of(flash=3.0, flex=4.0))
    assert (only.ours, only.status) == ("0.75x", MET)
    assert features.aims(results_of(flash=3.0)) == []
    for sample in results["samples"]:
        sample["late"] = {FA4: 1, DETERMINISTIC: 1}
    fastest, _ = features.aims(results)
    assert (
        fastest.why == f"the fastest other is flex, without {FA4}, {DETERMINISTIC}, which waited for the host"
    )
    features.draw(results, tmp_path / "features.svg")
    assert ">flex<" in (tmp_path / "features.svg").read_text()
    assert f">{FA4}<" not in (tmp_path / "features.svg").read_text()


def test_what_no_library_has_is_shown_against_ours_without_it():
    (cost,) = features.aims(results_of(PRECISE, flash=3.0, **{WITHOUT: 2.9}))
    assert cost.what == "4 x 16 x 4096 x 128, precise_delta (causal): time over ours without it"
    assert (cost.ours, cost.status, cost.why) == ("1.03x", NO_AIM, "no library has it")


def test_key_padding_is_held_to_the_fastest_and_drawn_without_the_causal_mask(tmp_path):
    results = results_of(PADDING, causal=False, flash=3.0, **{CUDNN_MASK.replace("+", "_"): 2.0})
    (missed, *_) = features.aims(results)
    assert missed.what.startswith("4 x 16 x 4096 x 128, key padding (full): time over the fastest other's")
    assert missed.status == MISSED
    features.draw(results, tmp_path / "features.svg")
    assert "key padding, head_dim 128, full" in (tmp_path / "features.svg").read_text()
