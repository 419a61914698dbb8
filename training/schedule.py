"""Learning-rate schedules: a pure function of the step, so a resumed run needs no scheduler state."""

import math
from dataclasses import dataclass
from enum import Enum


class Decay(Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"


@dataclass
class ScheduleConfig:
    """How the learning rate moves: linear warm-up from 0, then a decay to `final_fraction` of the peak."""

    # From the end of warm-up to the end of the run.
    decay: Decay = Decay.cosine
    # Part of the run that warms up, so that a shorter run stays the same recipe. 0.01 in the FlashAttention recipe.
    warmup_fraction: float = 0.05
    # The last step's rate as a fraction of optimizer.lr, unless warm-up leaves no step to decay in. null: the decay's
    # usual one, 0.1 with cosine, 0 with linear. Constant takes none.
    final_fraction: float | None = None

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

    @property
    def resolved_final_fraction(self) -> float | None:
        if self.final_fraction is None:
            return {Decay.cosine: 0.1, Decay.linear: 0.0}.get(self.decay)
        return self.final_fraction


def learning_rate(config: ScheduleConfig, peak: float, step: int, steps: int) -> float:
    """The rate of step `step` (0-based) of `steps`.

    The last step gets the final fraction of `peak`, unless warm-up leaves no step to decay in.
    """
    warmup = round(config.warmup_fraction * steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if config.decay is Decay.constant:
        return peak
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    remaining = {
        Decay.linear: 1 - progress,
        Decay.cosine: 0.5 * (1 + math.cos(math.pi * progress)),
    }[config.decay]
    final = config.resolved_final_fraction
    return peak * (final + (1 - final) * remaining)
