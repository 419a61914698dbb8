"""Attention in chunks with checkpointing, against float64. About 3 s."""

import pytest
import torch

import kernels
from kernels.history import chunked
from tests.kernels.accuracy import assert_as_accurate, inputs

LENGTHS = [(1, 1), (31, 31), (64, 64), (97, 97), (1, 128), (64, 200), (130, 60), (97, 1)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "QUERIES", 32)
    monkeypatch.setattr(chunked, "KEYS", 48)


def run(tensors: list[torch.Tensor], d_out: torch.Tensor, **options: object) -> dict[str, torch.Tensor]:
    out = kernels.get_attention("chunked")(*tensors, **options)
    gradients = torch.autograd.grad(out, tensors, d_out)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_exact_at_every_length(causal: bool) -> None:
    for q_len, kv_len in LENGTHS:
        *tensors, d_out = inputs(q_len, kv_len, 16, torch.float32, heads=4, kv_heads=2, seed=q_len)
        options = {"causal": causal, "scale": 0.3}
        assert_as_accurate(run(tensors, d_out, **options), tensors, d_out, **options)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0)])
def test_lengths_of_zero(q_len: int, kv_len: int) -> None:
    q, k, v, _ = inputs(q_len, kv_len, 16, torch.float32)
    out = kernels.get_attention("chunked")(q, k, v)
    assert out.shape == q.shape
    assert (out == 0).all()


def test_scores_are_computed_for_one_pair_of_chunks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    summary = chunked._summary

    def noted(q: torch.Tensor, k: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append((q.shape[2], k.shape[2]))
        return summary(q, k, *rest)

    monkeypatch.setattr(chunked, "_summary", noted)
    *tensors, d_out = inputs(100, 100, 16, torch.float32)
    run(tensors, d_out)
    assert max(sizes) == (32, 48)
    pairs = 1 + 2 + 2 + 3  # of chunks, with causal masking
    assert len(sizes) == 3 * pairs  # forward, recomputed for its chunk of queries, and for its own backward
