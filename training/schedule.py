"""Learning-rate schedules: a pure function of the step, so a resumed run needs no scheduler state."""

import math
from dataclasses import dataclass
from enum import Enum


class Decay(Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"
    wsd = "wsd"  # warm-up, stable, decay: constant until the last part of the run


# What a decay uses where its setting is null.
_FINAL_FRACTION = {Decay.cosine: 0.1, Decay.linear: 0.0, Decay.wsd: 0.0}
_DECAY_FRACTION = 0.2


@dataclass
class ScheduleConfig:
    """How the learning rate moves: linear warm-up from 0, then a decay to `final_fraction` of the peak."""

    # The decay's shape, from the end of warm-up to the end of the run; with wsd, over the run's last part.
    decay: Decay = Decay.cosine
    # Part of the run that warms up, so that a shorter run stays the same recipe. 0.01 in the FlashAttention recipe.
    warmup_fraction: float = 0.05
    # The last step's rate as a fraction of optimizer.lr, unless warm-up leaves no step to decay in. null: the decay's
    # usual one, 0.1 with cosine, 0 with linear and wsd. Constant takes none.
    final_fraction: float | None = None
    # wsd: the part of the run that decays, at its end. null: 0.2 with wsd. The others take none.
    decay_fraction: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_fraction < 1:
            raise ValueError(f"schedule.warmup_fraction is {self.warmup_fraction}; it must be in [0, 1).")
        if self.decay is Decay.constant:
            if self.final_fraction is not None:
                raise ValueError(
                    f"schedule.final_fraction is {self.final_fraction}, but with schedule=constant nothing decays: "
                    "leave it out, or use schedule=cosine or linear."
                )
        elif not 0 <= self.resolved_final_fraction <= 1:
            raise ValueError(f"schedule.final_fraction is {self.final_fraction}; it must be between 0 and 1.")
        if self.decay is not Decay.wsd:
            if self.decay_fraction is not None:
                raise ValueError(
                    f"schedule.decay_fraction is {self.decay_fraction}, but only schedule=wsd has a part of the run "
                    f"that decays: leave it out, or use schedule=wsd, not {self.decay.value}."
                )
        elif not 0 < self.resolved_decay_fraction <= 1 - self.warmup_fraction:
            raise ValueError(
                f"schedule.decay_fraction is {self.decay_fraction}; it must be above 0, and with "
                f"schedule.warmup_fraction={self.warmup_fraction} at most {1 - self.warmup_fraction:g}."
            )

    @property
    def resolved_final_fraction(self) -> float | None:
        return _FINAL_FRACTION.get(self.decay) if self.final_fraction is None else self.final_fraction

    @property
    def resolved_decay_fraction(self) -> float | None:
        if self.decay is Decay.wsd and self.decay_fraction is None:
            return _DECAY_FRACTION
        return self.decay_fraction


def learning_rate(config: ScheduleConfig, peak: float, step: int, steps: int) -> float:
    """The rate of step `step` (0-based) of `steps`.

    The last step gets the final fraction of `peak`, unless warm-up leaves no step to decay in. wsd (Hu et al. 2024,
    arXiv 2404.06395) holds the peak and then falls by 1 - sqrt(progress) over the last `decay_fraction` of the steps,
    a fifth: shape and length of Hägele et al. 2024, arXiv 2405.18392.
    """
    warmup = round(config.warmup_fraction * steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if config.decay is Decay.constant:
        return peak
    held = warmup  # the last step at the peak
    if config.decay is Decay.wsd:
        held = max(warmup, steps - 1 - round(config.resolved_decay_fraction * steps))
    progress = max(0, step - held) / max(1, steps - 1 - held)
    remaining = {
        Decay.linear: 1 - progress,
        Decay.cosine: 0.5 * (1 + math.cos(math.pi * progress)),
        Decay.wsd: 1 - math.sqrt(progress),
    }[config.decay]
    final = config.resolved_final_fraction
    return peak * (final + (1 - final) * remaining)
