"""The features experiment: what libraries are asked for, which contenders are timed, and the verdicts. 5 s."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import features
from benchmarks.__main__ import main
from benchmarks.aims import MET, MISSED
from benchmarks.features import FA4, FLEX, OURS, PORTABLE, Inputs, Workload
from kernels import get_attention
from kernels.fa4 import fa4_or_documents
from kernels.naive import naive_attention
from reproduce.experiment import pick
from reproduce.peers import DETERMINISTIC
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
    torch.testing.assert_close(features._flex(inputs, 0), exact(inputs))


@pytest.mark.parametrize("feature", ["softcap", "sinks"])
@pytest.mark.parametrize("repeatable", [True, False])
def test_flash_attention_4_gets_softcap_and_sinks_by_its_own_names(feature, repeatable, monkeypatch):
    """With naive attention behind the package's signature."""
    asked = []

    def flash_attn_func(
        q, k, v, softmax_scale, causal, softcap=0.0, learnable_sink=None, deterministic=False
    ):
        asked.append(deterministic)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = naive_attention(
            q, k, v, causal=causal, scale=softmax_scale, softcap=softcap, sinks=learnable_sink
        )
        return out.transpose(1, 2), None

    fa4 = partial(fa4_or_documents, flash_attn_func=flash_attn_func, flash_attn_varlen_func=None)
    monkeypatch.setattr(features, "get_attention", lambda name: fa4 if name == FA4 else get_attention(name))
    inputs = inputs_of(feature)
    contender = features.contenders()[DETERMINISTIC if repeatable else FA4]
    torch.testing.assert_close(contender(inputs, 0), exact(inputs))
    assert asked == [repeatable]


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


@INTERPRETED
@pytest.mark.parametrize(
    ("feature", "wrong"),
    [("softcap", without_softcap), ("sinks", with_larger_sinks), ("dropout_p", dropping_twice_as_much)],
)
def test_a_contender_with_wrong_results_is_not_timed(feature, wrong, tmp_path, capsys, monkeypatch):
    asked = {OURS: features._registered(OURS), "wrong": wrong, FLEX: features._flex}
    monkeypatch.setattr(features, "contenders", lambda: dict(asked))
    # Two sinks have two gradients, in which naive, whose error is the limit, may be right by chance.
    torch.manual_seed(0)
    results = run(tmp_path, f"features={feature}")
    assert all(set(sample["ms"]) == {OURS} for sample in pick(results, kind="time"))
    said = capsys.readouterr().out
    assert re.search(f"left out: check, wrong, {feature}, 32.*: wrong, so not timed", said)
    assert re.search(f"left out: check, flex, {feature}, 32: attention=flex cannot be used here", said)


def results_of(**ms: float) -> dict:
    """Results with these milliseconds, of three rounds, for contenders with + in place of _."""

    def phases(ms: float) -> dict:
        return {"forward": [ms / 3] * 3, "backward": [2 * ms / 3] * 3}

    milliseconds = {name.replace("_", "+"): phases(each) for name, each in ms.items()}
    shape = {"feature": "softcap", "batch": 4, "heads": 16, "length": 4096, "head_dim": 128, "causal": True}
    sample = {"kind": "time", **shape, "ms": milliseconds | {PORTABLE: phases(2.0)}}
    return {"device": "NVIDIA H200", "samples": in_three(sample)}


def test_aims_are_held_beside_the_fastest_and_the_fastest_that_is_repeatable(tmp_path):
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
