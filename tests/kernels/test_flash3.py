"""FlashAttention-3's forward with one of its schedules undone: emulated on a CPU, and on a Hopper GPU."""

import os

import pytest
import torch

from kernels import AttentionError
from kernels.history import flash3
from tests.kernels.accuracy import assert_as_accurate, inputs
from tests.kernels.emulator import emulate
from tests.kernels.hopper import ON_HOPPER

FORM = pytest.mark.parametrize("form", flash3.FORMS)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU runs the kernels itself")
@FORM
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(200, 600), (130, 100), pytest.param(300, 700, marks=pytest.mark.slow)]
)
def test_exact_and_the_same_in_any_order_of_events(monkeypatch, form: str, q_len: int, kv_len: int) -> None:
    """The emulator has one warp for all that are alike: it does not see the barriers between those."""
    seed, programs = 0, 3

    def launch(pointers, _key, prepare, moved, describe) -> None:
        kernel, grid, numbers, _ = prepare()
        emulate(kernel, grid, (*describe(*moved), *pointers, *numbers), seed)

    monkeypatch.setattr(flash3, "launch", launch)
    monkeypatch.setattr(flash3, "sm_count", lambda device: programs)
    *tensors, d_out = inputs(q_len, kv_len, 128, torch.float16, heads=2, kv_heads=2)
    q, k, v = (x.detach() for x in tensors)
    out = flash3.flash3_forward(q, k, v, form)
    assert_as_accurate({"out": out}, tensors, d_out, causal=False)
    for seed, programs in ((1, 1), (2, 2), (3, 3)):  # noqa: B007  (`launch` reads them)
        assert torch.equal(flash3.flash3_forward(q, k, v, form), out)


@pytest.mark.gpu
@ON_HOPPER
@FORM
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (64, 129), (1000, 1024), (4096, 1), (2111, 2112)])
def test_exact_on_a_gpu(form: str, dtype: torch.dtype, q_len: int, kv_len: int) -> None:
    *tensors, d_out = inputs(q_len, kv_len, 128, dtype, batch=2, heads=3, kv_heads=3, device="cuda")
    out = flash3.flash3_forward(*(x.detach() for x in tensors), form)
    assert_as_accurate({"out": out}, tensors, d_out, causal=False)


def test_other_shapes_are_refused() -> None:
    q, k = torch.zeros(1, 4, 8, 128, dtype=torch.float16), torch.zeros(1, 2, 8, 128, dtype=torch.float16)
    for tensors in ((q, k, k), [q[..., :64]] * 3, [q.float()] * 3, [q[:, :, :0]] * 3):
        with pytest.raises(AttentionError, match="flash3 takes float16 and bfloat16 that TMA can address"):
            flash3.flash3_forward(*tensors, "in turn")
    with pytest.raises(AttentionError, match="flash3 has the forms in turn and unspecialised, not both"):
        flash3.flash3_forward(q, q, q, "both")
