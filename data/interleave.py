"""The order in which a mixture takes from its corpora, computed on demand."""

import numpy as np

from .permutation import Permutation

PERIOD = 10_000


class Interleave:
    """Which source the n-th item of a mixture is from, and which item of that source it is.

    Every PERIOD items hold as many of each source as its share says, to the nearest item, in an order keyed by (seed,
    number of the period). So shares are exact over a period and nearly so over a batch, and no state is kept.
    """

    def __init__(self, shares: list[float], seed: int):
        """shares: of the sources; they add up to 1."""
        exact = np.array(shares) * PERIOD
        self._counts = exact.astype(np.int64)
        # what rounding down left goes to those that lost most
        short = PERIOD - self._counts.sum()
        self._counts[np.argsort(self._counts - exact, kind="stable")[:short]] += 1
        self._seed = seed

    def __call__(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each item, and its number among the items of that source; int64, like `numbers`."""
        if len(self._counts) == 1:
            return np.zeros_like(numbers), numbers
        sources, items = np.empty_like(numbers), np.empty_like(numbers)
        periods, places = np.divmod(numbers, PERIOD)
        for period in np.unique(periods):
            inside = periods == period
            order = np.repeat(np.arange(len(self._counts)), self._counts)
            order = order[Permutation(PERIOD, self._seed, int(period))(np.arange(PERIOD))]
            before = np.empty_like(order)  # of the same source, in this period
            before[np.argsort(order, kind="stable")] = np.concatenate([np.arange(c) for c in self._counts])
            sources[inside] = order[places[inside]]
            items[inside] = period * self._counts[sources[inside]] + before[places[inside]]
        return sources, items
