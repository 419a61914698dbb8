"""The documents experiment: the share of visible pairs, which contenders are timed, and the verdicts. 5 s."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from benchmarks import documents
from benchmarks.__main__ import main
from benchmarks.aims import MET, MISSED
from benchmarks.documents import (
    DOCUMENTS,
    FLEX,
    OURS,
    PORTABLE,
    WHOLE,
    WINDOW,
    Inputs,
    Workload,
    document_offsets,
)
from kernels.naive import naive_attention
from reproduce.experiment import pick
from tests.conftest import INTERPRETED
from tests.processes import in_three

BOUNDS = [(DOCUMENTS, 20), (DOCUMENTS, 500), (WINDOW, 0), (WINDOW, 20), (WINDOW, 500)]
CPU = torch.device("cpu")

# On a machine with a GPU, the tests have Triton compile, not interpret.


def test_documents_have_the_mean_length_and_never_cross_a_row():
    offsets = document_offsets(batch=8, length=4096, mean=256)
    assert offsets.dtype == torch.int32
    assert set(range(0, 8 * 4096 + 1, 4096)) <= set(offsets.tolist())
    widths = offsets.diff()
    assert widths.min() >= 1
    # The ends of rows cut 7 of some 130 documents in two.
    assert 200 < widths.float().mean() < 300
    assert torch.equal(offsets, document_offsets(batch=8, length=4096, mean=256))


@pytest.mark.parametrize(("bound", "size"), BOUNDS)
def test_share_is_the_fraction_of_causal_pairs_that_are_visible(bound, size):
    inputs = Inputs(Workload(bound, size, 2, 1, 100, 16), torch.float64, CPU)
    q, k, v = (torch.zeros_like(x.transpose(1, 2)) for x in inputs.qkv)
    features = {"cu_seqlens": inputs.offsets} if bound == DOCUMENTS else {"window": (size, 0)}
    # If all scores are 0, exp(lse) is the number of keys that a row sees.
    _, lse = naive_attention(q, k, v, return_lse=True, **features)
    assert inputs.share() == pytest.approx(lse.double().exp().sum().item() / (2 * 100 * 101 / 2), rel=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("size", [20, 500])
def test_flex_attention_gets_the_same_documents(size, monkeypatch):
    """With FlexAttention uncompiled."""
    monkeypatch.setattr(documents, "compiled_flex_attention", lambda: flex_attention)
    inputs = Inputs(Workload(DOCUMENTS, size, 2, 2, 100, 16), torch.float32, CPU)
    inputs.qkv = [x.detach() for x in inputs.qkv]
    q, k, v = (x.transpose(1, 2) for x in inputs.qkv)
    want = naive_attention(q, k, v, cu_seqlens=inputs.offsets).transpose(1, 2)
    torch.testing.assert_close(documents._flex(inputs, 0), want)


@pytest.mark.parametrize(("bound", "size"), BOUNDS)
def test_flash_attention_4_itself_gets_the_same_documents_or_window(bound, size, monkeypatch):
    """With naive attention behind the signatures of the package's functions."""
    inputs = Inputs(Workload(bound, size, 2, 2, 100, 16), torch.float32, CPU)

    def flash_attn_func(q, k, v, causal, window_size):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return naive_attention(q, k, v, causal=causal, window=window_size).transpose(1, 2), None

    def flash_attn_varlen_func(q, k, v, causal, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        assert q.shape == (200, 2, 16)  # (tokens, heads, head_dim)
        assert cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
        ends = zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_k[1:].tolist(), strict=True)
        rows = [slice(*each) for each in ends]
        outs = [flash_attn_func(*(x[None, each] for x in (q, k, v)), causal, None)[0][0] for each in rows]
        return torch.cat(outs), None

    functions = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    found = {"naive": naive_attention, "fa4": partial(naive_attention, **functions)}
    monkeypatch.setattr(documents, "get_attention", found.get)
    out, *grads = documents.gradients(documents._fa4_itself, inputs)
    want, *exact = documents.gradients(documents._registered("naive"), inputs)
    torch.testing.assert_close([out, *grads], [want, *exact])


def run(folder: Path) -> dict:
    assert main(["documents", "--tiny", "--device", "cpu", "--results", str(folder)]) == 0
    return json.loads((folder / "cpu" / "documents.json").read_text())


@INTERPRETED
def test_backends_without_documents_are_listed_in_one_line(tmp_path, capsys):
    results = run(tmp_path)
    able = {OURS, PORTABLE, WHOLE, "sdpa", "sdpa_flash", "sdpa_math"}
    assert set(pick(results, kind="time", bound=documents.DOCUMENTS)[0]["ms"]) == able
    lines = [each for each in capsys.readouterr().out.splitlines() if each.startswith("left out")]
    for name in ("chunked", "varlen"):  # each once, though it is asked for every shape
        assert len([each for each in lines if each.startswith(f"left out: check, {name}, documents")]) == 1


@INTERPRETED
def test_a_contender_with_wrong_results_is_not_timed(tmp_path, capsys, monkeypatch):
    """With an attention that ignores documents and windows."""
    asked = {OURS: documents._registered(OURS), "blind": documents._unbounded("naive")}
    monkeypatch.setattr(documents, "contenders", lambda: asked)
    assert all(set(sample["ms"]) == {OURS} for sample in pick(run(tmp_path), kind="time"))
    assert re.search(
        "left out: check, blind, window, 20.*: wrong, so not timed: errors", capsys.readouterr().out
    )


@INTERPRETED
def test_each_window_is_checked_for_correctness_at_its_own_size(tmp_path, monkeypatch):
    """With an attention that cuts windows to 20."""
    naive = documents.get_attention("naive")

    def narrow(inputs, number):
        left = min(inputs.workload.size, 20)
        return naive(*documents._by_head(inputs), window=(left, 0)).transpose(1, 2)

    monkeypatch.setattr(
        documents, "contenders", lambda: {OURS: documents._registered(OURS), "narrow": narrow}
    )
    settings = ["documents=", "windows=20,30", "check_length=64"]
    command = ["documents", "--tiny", "--device", "cpu", "--results", str(tmp_path), *settings]
    assert main(command) == 0
    results = json.loads((tmp_path / "cpu" / "documents.json").read_text())
    timed = {sample["size"]: set(sample["ms"]) for sample in pick(results, kind="time")}
    assert timed == {20: {OURS, "narrow"}, 30: {OURS}}


def results_of(ours: float, share: float, **sample: object) -> dict:
    """Results with `ours` ms for flash, 4 ms for FlexAttention, and 6 ms for flash without documents or window."""

    def phases(ms: float) -> dict:
        return {"forward": [ms / 3] * 3, "backward": [2 * ms / 3] * 3}

    milliseconds = {OURS: phases(ours), FLEX: phases(4.0), WHOLE: phases(6.0)}
    shape = {"bound": WINDOW, "size": 256, "batch": 4, "heads": 16, "length": 4096, "head_dim": 128}
    return {
        "device": "NVIDIA H200",
        "samples": in_three({"kind": "time", **shape, "ms": milliseconds, "share": share, **sample}),
    }


def test_aims_depend_on_time_and_share_of_visible_pairs():
    saved, fastest = documents.aims(results_of(ours=3.0, share=0.12))
    assert (saved.ours, saved.status) == ("0.50x", MET)
    assert (fastest.ours, fastest.status) == ("0.75x", MET)
    assert "12% of the pairs are seen" in saved.why
    assert "the fastest other is flex" in fastest.why
    saved, fastest = documents.aims(results_of(ours=6.1, share=0.12))
    assert saved.status == fastest.status == MISSED
    (fastest,) = documents.aims(results_of(ours=3.0, share=0.9))
    assert "fastest other" in fastest.what


def test_contenders_that_waited_for_the_host_are_not_compared(tmp_path):
    """Known from the run's count of late rounds, here of three."""
    results = results_of(ours=3.0, share=0.12, late={FLEX: 1})
    assert len(documents.aims(results)) == 1
    documents.draw(results, tmp_path / "documents.svg")
    assert f"not shown where it waited for the host: {FLEX}<" in (tmp_path / "documents.svg").read_text()
    assert len(documents.aims(results_of(ours=3.0, share=0.12, late={}))) == 2
    assert documents.aims(results_of(ours=3.0, share=0.12, late={OURS: 1})) == []
    (against_peers,) = documents.aims(results_of(ours=3.0, share=0.12, late={WHOLE: 1}))
    assert "fastest other" in against_peers.what
