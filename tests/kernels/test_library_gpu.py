"""Every attention on a GPU against float64: the classes of shapes that it does not refuse, and random calls."""

import itertools

import pytest
import torch

from kernels import ATTENTION, AttentionError, get_attention
from tests.kernels.accuracy import inputs
from tests.kernels.differential import Call, assert_matches_float64, draw
from tests.random_cases import random_cases

pytestmark = pytest.mark.gpu

ALL = ["naive", "flash", "sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "flex", "fa4"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# (q_len, kv_len): equal, more keys, more queries; one tile, a part of one, several.
LENGTHS = [(128, 128), (200, 200), (130, 200), (1, 200), (60, 1000), (200, 130), (200, 1), (1000, 60), (1, 1)]
HEADS = [(4, 4), (4, 2), (4, 1)]
KINDS = [(64, torch.bfloat16), *itertools.product((16, 20, 80, 128, 256), DTYPES)]


def may_lack_a_kernel(name: str, call: Call) -> bool:
    """Whether the backend may refuse the call only when it is called, as its error then says."""
    if name == "sdpa_flash":  # it takes no mask
        return call.causal and 1 < call.q_len < call.kv_len
    return name == "sdpa_cudnn" and 1 in (
        call.q_len,
        call.kv_len,
    )  # which of these, depends on cuDNN's version


def check(name: str, call: Call, seed: int = 0) -> None:
    try:
        assert_matches_float64(name, call, "cuda", seed)
    except AttentionError as error:
        if not may_lack_a_kernel(name, call) or not str(error).startswith(f"attention={name} "):
            raise


def classes(name: str, head_dim: int, dtype: torch.dtype) -> list[Call]:
    """All lengths and masks, of the first kind with all HEADS too; for flex, which compiles for each, fewer."""
    if (head_dim, dtype) != KINDS[0]:
        return [Call(1, 2, 2, *each, head_dim, dtype, causal) for each in LENGTHS for causal in (True, False)]
    ranges = itertools.product(LENGTHS, HEADS, (True, False))
    calls = [Call(2, *heads, *lengths, head_dim, dtype, causal) for lengths, heads, causal in ranges]
    return calls[::5] if name == "flex" else calls


@pytest.mark.parametrize(
    ("name", "head_dim", "dtype"),
    [(name, *kind) for name in ALL for kind in (KINDS[:1] if name == "flex" else KINDS)],
)
def test_every_class_of_shapes_that_is_not_refused_matches_float64(
    name: str, head_dim: int, dtype: torch.dtype
) -> None:
    calls = [each for each in classes(name, head_dim, dtype) if not each.is_refused(name, "cuda")]
    if not calls:
        pytest.skip(f"{name} refuses all of these")
    wrong = []
    for call in calls:
        try:
            check(name, call)
        except Exception as error:  # all are reported, not the first
            wrong.append(f"{call}: {type(error).__name__}: {str(error)[:200]}")
    assert not wrong, f"{len(wrong)} of {name}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("number", random_cases(20))
@pytest.mark.parametrize("name", [each for each in ALL if each != "flex"])
def test_random_calls_match_float64(name: str, number: int) -> None:
    call = draw(number, DTYPES, longest=600)
    if not call.is_refused(name, "cuda"):
        check(name, call, number)


@pytest.mark.parametrize("name", [each for each in ALL if each in ATTENTION])
@pytest.mark.parametrize("lengths", [(5, 0), (0, 5), (0, 0)])
def test_calls_without_queries_or_keys_give_zeros(name: str, lengths: tuple[int, int]) -> None:
    call = Call(2, 2, 2, *lengths, 64, torch.bfloat16, True)
    if name not in ("flex", "fa4"):  # which take none
        assert_matches_float64(name, call, "cuda")


@pytest.mark.parametrize(("q_len", "options"), [(1000, {}), (700, {"window": (100, 0), "softcap": 2.0})])
def test_flex_inside_a_compiled_graph_computes_what_it_does_alone(q_len: int, options: dict) -> None:
    """There Inductor also lays out the lists of blocks that the kernels, forward and backward, read."""
    flex = get_attention("flex")
    *tensors, d_out = inputs(q_len, 1000, 64, torch.bfloat16, batch=2, heads=4, kv_heads=2, device="cuda")
    results = []
    for attention in (flex, torch.compile(flex)):
        out = attention(*tensors, **options)
        results.append((out, *torch.autograd.grad(out, tensors, d_out)))
    torch.testing.assert_close(*results)
