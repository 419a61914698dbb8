"""What a change of code has made of older figures, beside the code."""

import itertools
import json

import pytest
import triton

from kernels.versions import OLDEST_GLUON, numbers_of
from reproduce import older_code
from reproduce.depends import ROOT

LENGTHS = (1, 128, 129, 256, 257, 512, 513, 2047, 2048, 4095, 4096, 65536)


@pytest.mark.skipif(numbers_of(triton.__version__) < OLDEST_GLUON, reason="the Hopper kernels do not compile")
def test_what_the_forward_has_outrun_is_what_has_another_form_now() -> None:
    from kernels.flash.hopper.spec import has_few_tiles, specify

    plain = {"ms": {"flash": {}}}
    for head_dim, causal, length in itertools.product((40, 64, 72, 128, 136, 256), (True, False), LENGTHS):
        other = specify(head_dim, causal, length, length).OUT_BY_TMA.value
        other |= head_dim <= 128 and causal and has_few_tiles(head_dim, length, 1) and length > 128
        sample = {**plain, "head_dim": head_dim, "causal": causal, "length": length}
        assert older_code._is_stored_by_tma(sample) == other, sample
    for more in ({"bound": "window"}, {"mask": "dropout"}, {"feature": "softcap"}, {"ms": {"sdpa": {}}}):
        assert not older_code._is_stored_by_tma(
            {**plain, "head_dim": 128, "causal": True, "length": 4096, **more}
        )


def test_every_old_hash_is_of_a_result() -> None:
    """An entry that no result was recorded with explains nothing: it goes."""
    recorded: set[str] = set()
    for path in (ROOT / "results").rglob("*.json"):
        document = json.loads(path.read_text())
        for hashes in (document.get("depends", {}), *document.get("again", {}).values()):
            recorded |= set(hashes.values())
    assert (older_code.UNTOUCHED | older_code.FASTER_SINCE).keys() <= recorded
