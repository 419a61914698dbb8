import pytest

from training.schedule import Decay, ScheduleConfig, learning_rate


def rates(steps: int, **config) -> list[float]:
    schedule = ScheduleConfig(**config)
    return [learning_rate(schedule, 1.0, step, steps) for step in range(steps)]


def test_warmup_is_linear_from_just_above_zero_and_ends_at_the_peak():
    warmed = rates(100, warmup_fraction=0.04, decay=Decay.constant)
    assert warmed[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(warmed[4:]) == {1.0}


@pytest.mark.parametrize("decay", [Decay.cosine, Decay.linear])
def test_decay_starts_at_the_peak_and_ends_at_the_final_fraction(decay):
    decayed = rates(101, warmup_fraction=0, decay=decay, final_fraction=0.1)
    assert decayed[0] == 1.0
    assert decayed[50] == pytest.approx(0.55)  # both pass the middle half-way
    assert decayed[100] == pytest.approx(0.1)
    assert decayed == sorted(decayed, reverse=True)


def test_each_decay_has_its_own_default_final_fraction():
    for decay, final in (Decay.cosine, 0.1), (Decay.linear, 0.0), (Decay.constant, 1.0), (Decay.wsd, 0.0):
        assert rates(101, decay=decay)[100] == pytest.approx(final)


def test_cosine_decay_is_above_linear_decay_after_a_quarter_of_the_steps():
    assert (
        rates(101, warmup_fraction=0, decay=Decay.cosine)[25]
        > rates(101, warmup_fraction=0, decay=Decay.linear)[25]
    )


def test_wsd_holds_the_peak_and_falls_by_the_root_of_the_progress_in_the_last_part_of_the_run():
    wsd = rates(200, warmup_fraction=0.05, decay=Decay.wsd, decay_fraction=0.08)
    assert wsd[9] < 1.0
    assert set(wsd[10:184]) == {1.0}  # 16 steps decay
    assert wsd[184] == pytest.approx(1 - 0.25)  # sqrt(1 / 16)
    assert wsd[187] == pytest.approx(0.5)
    assert wsd[199] == 0.0
    default = rates(100, decay=Decay.wsd)
    assert default[79] == 1.0 > default[80]
    assert rates(100, decay=Decay.wsd, final_fraction=0.5)[99] == 0.5


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_wsd_has_a_rate_for_every_step_of_the_shortest_runs(steps):
    assert all(0.0 <= rate <= 1.0 for rate in rates(steps, decay=Decay.wsd))
    assert all(
        0.0 <= rate <= 1.0 for rate in rates(steps, decay=Decay.wsd, warmup_fraction=0.5, decay_fraction=0.5)
    )


@pytest.mark.parametrize(
    "bad",
    [
        {"warmup_fraction": -1},
        {"final_fraction": 1.5},
        {"final_fraction": 0.5, "decay": Decay.constant},
        {"decay_fraction": 0.2},
        {"decay_fraction": 0.0, "decay": Decay.wsd},
        {"decay_fraction": 0.96, "decay": Decay.wsd},
    ],
)
def test_impossible_values_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        ScheduleConfig(**bad)
