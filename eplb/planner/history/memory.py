"""What the policy remembers of past windows, and which of it the next window will be like.

A *kind* of traffic is one or more windows that look alike: their counts are added up, so that sampling noise averages
out. Memory is bounded by the number of kinds: when a new one does not fit, the two that are most alike become one, so a
rhythm of hours is still there when it returns. Each kind has its visits (fading) and how often each other kind came
after it, and from those the weight of every kind in the next window is forecast. No I/O: memory is a function of the
windows it was shown, in order, so it is rebuilt from a store by showing them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.planner.history.windows import frequencies

Counts = NDArray[np.float64]

MAX_KINDS = 8  # one search costs time in proportion; 12 gained .001 on a random walk, nothing elsewhere
ALIKE = 0.5  # squared difference beyond what sampling explains (1): below, two windows are one kind ...
CERTAIN = 4.0  # ... or below this many standard deviations of that figure itself, where experts are few
FADING = 0.9  # of visits and successions, a window
PERSISTENCES = (
    0.3,
    0.9,
)  # parts of the forecast that say: as it is now; the second where traffic drifts, ...
DRIFTS = 0.5  # ... that is, where it has foreseen with so small a part of the first one's squared error
PRIOR = 1.0  # observed successions that weigh as much as the forecast without them


@dataclass(eq=False)
class Kind:
    """Windows of one kind: summed counts ``[L, E]``, fading visits, fading successions by kind."""

    counts: Counts
    visits: float = 1.0
    followers: dict[int, float] = field(default_factory=dict)


class WindowMemory:
    """At most ``max_kinds`` kinds of traffic, and a forecast of the next window."""

    def __init__(self, max_kinds: int = MAX_KINDS) -> None:
        self.max_kinds = max_kinds
        self.kinds: dict[int, Kind] = {}
        self.current: int | None = None
        self._errors = np.zeros(len(PERSISTENCES))  # fading, of the forecasts with each persistence
        self._next_id = 0

    def remember(self, counts: Counts) -> None:
        """Add a window ``[L, E]`` with load: it joins the kind it looks like, or becomes a new one."""
        for kind in self.kinds.values():
            kind.visits *= FADING
            kind.followers = {name: value * FADING for name, value in kind.followers.items()}
        before = self.current
        if before is not None:
            self._judge_forecasts(counts)
        name = self._alike(counts)
        if name is None:
            name = self._next_id
            self._next_id += 1
            self.kinds[name] = Kind(counts.copy())
        else:
            self.kinds[name].counts = self.kinds[name].counts + counts
            self.kinds[name].visits += 1.0
        self.current = name
        if before is not None:
            followers = self.kinds[before].followers
            followers[name] = followers.get(name, 0.0) + 1.0
        if len(self.kinds) > self.max_kinds:
            self._merge_closest()

    def _alike(self, counts: Counts) -> int | None:
        best, least = None, max(ALIKE, CERTAIN * (2.0 / counts.size) ** 0.5)
        for name, kind in self.kinds.items():
            found = _difference(kind.counts, counts) - 1.0
            if found < least:
                best, least = name, found
        return best

    def _merge_closest(self) -> None:
        """The two kinds that are most alike become one, under the name of the newer; the current one stays apart.

        Where traffic drifts the newest windows are the most alike: merged, they would lag behind.
        """
        names = [name for name in self.kinds if name != self.current]
        shares = [frequencies(self.kinds[name].counts).astype(np.float32) for name in names]
        pairs = [(a, b) for b in range(len(names)) for a in range(b)]
        apart = [float(((shares[a] - shares[b]) ** 2).sum()) for a, b in pairs]
        a, b = pairs[int(np.argmin(apart))]
        old, new = names[a], names[b]
        gone, kept = self.kinds.pop(old), self.kinds[new]
        kept.counts = kept.counts + gone.counts
        kept.visits += gone.visits
        for name, value in gone.followers.items():
            kept.followers[name] = kept.followers.get(name, 0.0) + value
        for kind in self.kinds.values():
            if old in kind.followers:
                kind.followers[new] = kind.followers.get(new, 0.0) + kind.followers.pop(old)

    def forecast(self) -> tuple[Counts, NDArray[np.float64]]:
        """Loads ``[K, L, E]`` of all kinds and their weights ``[K]`` in the next window, summing to 1."""
        drifts = self._errors[1] < DRIFTS * self._errors[0]
        weights = self._weights(PERSISTENCES[int(drifts)])
        return np.stack([kind.counts for kind in self.kinds.values()]), weights

    def _weights(self, persistence: float) -> NDArray[np.float64]:
        assert self.current is not None
        names = list(self.kinds)
        visits = np.array([self.kinds[name].visits for name in names])
        now = np.array([float(name == self.current) for name in names])
        prior = persistence * now + (1 - persistence) * visits / visits.sum()
        followers = self.kinds[self.current].followers
        seen = np.array([followers.get(name, 0.0) for name in names])
        weights = (seen + PRIOR * prior) / (seen.sum() + PRIOR)
        return np.asarray(weights / weights.sum())

    def _judge_forecasts(self, counts: Counts) -> None:
        """How far each persistence's mean load was from the window that came."""
        kinds = np.stack([frequencies(kind.counts) for kind in self.kinds.values()])
        came = frequencies(counts)
        for k, persistence in enumerate(PERSISTENCES):
            foreseen = np.einsum("k,kle->le", self._weights(persistence), kinds)
            self._errors[k] = FADING * self._errors[k] + float(((foreseen - came) ** 2).sum())


def _difference(known: Counts, counts: Counts) -> float:
    """Mean squared difference of two windows over what sampling explains (1 if they are draws of one load).

    Counts are Poisson: with n and N counted, ``x - n / N * X`` has variance ``x (1 + n / N)``, x expected.
    """
    n, total = counts.sum(axis=1, keepdims=True), known.sum(axis=1, keepdims=True)
    ratio = np.divide(n, total, out=np.zeros_like(n), where=total > 0)
    expected = (known + counts) * np.divide(n, n + total, out=np.zeros_like(n), where=n + total > 0)
    certain = expected > 1.0
    if not certain.any():
        return 1.0
    variance = expected * (1.0 + ratio)
    return float(((counts - known * ratio)[certain] ** 2 / variance[certain]).mean())
