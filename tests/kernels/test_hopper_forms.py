"""What attention.tier=hopper accepts is compiled by compile_report: every combination of features, under the causal
mask and of as many keys as queries. Under 1 s."""

import itertools

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
    compiled = {frozenset(job.feature.split()).difference(APART) for job in jobs if job.head_dim == head_dim}
    accepted = set()
    for count in range(len(FEATURES) + 1):
        for features in map(frozenset, itertools.combinations(FEATURES, count)):
            device, dtype = torch.device("cuda"), torch.bfloat16
            request = AttentionRequest(device, dtype, head_dim, features, tier="hopper", causal=True)
            if dispatch.choose(which, request).kernels == "hopper":
                form = features - dispatch.NO_FORM[which]
                # Documents and a window are one form: its left side is a number.
                accepted.add(form - {"window"} if "cu_seqlens" in form else form)
    dispatch.choose.cache_clear()
    assert frozenset() in accepted
    assert accepted <= compiled, sorted(map(sorted, accepted - compiled))
