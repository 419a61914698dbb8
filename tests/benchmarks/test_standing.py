"""README's map: which points it has, what it compares there, and what it frames. 2 s."""

from pathlib import Path

import pytest

from benchmarks import standing
from benchmarks.standing import Place

pytest.importorskip("matplotlib")
DEVICE = "NVIDIA H200"


def document(experiment: str, *samples: dict) -> dict:
    return {"experiment": experiment, "device": DEVICE, "samples": list(samples)}


def sample(where: dict, **ms: tuple[float, ...]) -> list[dict]:
    """As of three processes; ms: of each contender by process, a pass."""
    return [
        {"kind": "time", "process": process, **where}
        | {"ms": {name: {"forward": [ms[process]], "backward": [2.0]} for name, ms in ms.items()}}
        for process in range(3)
    ]


SHAPE = {"batch": 4, "heads": 32, "length": 4096, "head_dim": 64}
PLAIN = {"figure": "fa2", "mask": "plain", "causal": True, **SHAPE}
SINKS = {"feature": "sinks", "causal": False, **SHAPE}
WINDOW = {"bound": "window", "size": 256, "share": 0.1, **SHAPE}


def test_a_cell_is_our_time_over_the_fastest_librarys_and_behind_where_ours_takes_longer():
    times = {"fa4": (0.8, 0.9, 0.9), "sdpa": (1.5, 1.5, 1.5), "naive": (0.1, 0.1, 0.1)}
    found = standing.cells([document("attention", *sample(PLAIN, flash=(1.0, 1.0, 1.2), **times))])
    place = Place(False, "64 causal", (4096,))
    assert found[place, "forward"] == (pytest.approx(1.25), True)  # naive is ours
    assert found[place, "backward"] == (1.0, False)


def test_where_ours_takes_no_longer_in_a_process_it_is_not_behind():
    samples = sample(PLAIN, flash=(1.0, 1.1, 1.1), fa4=(1.0, 1.0, 1.05))
    ((place, cell), _) = standing.cells([document("attention", *samples)]).items()
    assert cell == (pytest.approx(1.1 / 1.05), False), place


def test_features_and_documents_have_rows_of_their_own_and_a_waiting_contender_does_not_count():
    late = [
        each | {"late": {"fa4": 1}}
        for each in sample(SINKS, flash=(1.0,) * 3, fa4=(0.1,) * 3, flex=(2.0,) * 3)
    ]
    windows = sample(WINDOW, flash=(1.0,) * 3, varlen=(2.0,) * 3)
    found = standing.cells([document("features", *late), document("documents", *windows)])
    assert {place: cell.ratio for (place, phase), cell in found.items() if phase == "forward"} == {
        Place(True, "sinks, full", (64, 4096)): 0.5,
        Place(True, "window of 256", (64, 4096)): 0.5,
    }


def test_the_picture_has_a_number_for_each_cell_and_a_frame_where_ours_is_behind(tmp_path: Path):
    plain = sample(PLAIN, flash=(1.3,) * 3, fa4=(1.0,) * 3)
    sinks = sample(SINKS, flash=(0.7,) * 3, fa4=(1.0,) * 3)
    path = tmp_path / "standing.svg"
    standing.draw([document("attention", *plain), document("features", *sinks)], DEVICE, path)
    text = path.read_text()
    assert DEVICE in text
    for words in ("1.30", "0.70", "64 causal", "sinks, full", "head_dim 64", "4k"):
        assert f">{words}<" in text, words
    assert text.count("stroke: #b2182b") == 1  # 1.30 in the forward; the backward's 1.00 is level
    standing.draw([document("attention")], DEVICE, tmp_path / "nothing.svg")
    assert not (tmp_path / "nothing.svg").exists()
