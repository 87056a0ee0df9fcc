"""Several windows of loads: put together into the loads to plan for, and how many tokens they need."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenroute.eplb._checks import as_numbers
from evenroute.eplb.loads.balance import validate_loads
from evenroute.eplb.placement.topology import Topology

COMBINATIONS = ("mean", "last", "ewma", "robust")
EWMA_WEIGHT = 0.5
NOISE_LIMIT = 0.01  # balancedness that a plan may lose to sampling without a word


def validate_windows(windows: ArrayLike) -> NDArray[np.float64]:
    """Windows ``[W, L, E]`` (or one, ``[L, E]``) as float64 ``[W, L, E]``, W >= 1.

    Raises:
        ValueError: another shape, or a bad load, named with window, layer and expert.
    """
    array = as_numbers("loads", windows, "[layers, experts] or [windows, layers, experts]")
    if array.ndim == 2:
        return validate_loads(array)[None]
    if array.ndim != 3 or len(array) == 0:
        raise ValueError(
            f"loads must be [layers, experts] or [windows >= 1, layers, experts], found shape {list(array.shape)}"
        )
    for window, loads in enumerate(array):
        try:
            validate_loads(loads)
        except ValueError as error:
            raise ValueError(f"window {window}: {error}") from None
    return array


def frequencies(windows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Loads of each window and layer divided by their sum (0 without load), ``[..., L, E]``."""
    largest = windows.max(axis=-1, keepdims=True)
    scaled = windows / np.where(largest > 0, largest, 1.0)
    total = scaled.sum(axis=-1, keepdims=True)
    return np.asarray(scaled / np.where(total > 0, total, 1.0))


def combine_windows(windows: NDArray[np.float64], how: str) -> NDArray[np.float64]:
    """One ``[L, E]`` to plan for out of ``[W, L, E]``.

    ``mean`` adds the counts up; ``last`` takes the newest window; ``ewma`` weighs frequencies, the newest by
    `EWMA_WEIGHT` and each older one by ``1 - EWMA_WEIGHT`` of the next. ``robust`` starts from the mean of
    the frequencies (the planner then looks for the worst window itself).
    """
    if len(windows) == 1 or how == "last":
        return np.array(windows[-1])
    if how == "mean":
        largest = windows.max()
        return np.asarray((windows / largest if largest > 1e300 / len(windows) else windows).sum(axis=0))
    if how == "robust":
        return np.asarray(frequencies(windows).mean(axis=0))
    weights = EWMA_WEIGHT * (1 - EWMA_WEIGHT) ** np.arange(len(windows) - 1, -1, -1.0)
    weights[0] = (1 - EWMA_WEIGHT) ** (len(windows) - 1)
    # A layer that was idle in a window says nothing there.
    known = (windows > 0).any(axis=-1, keepdims=True)
    weighed = weights[:, None, None] * known
    total = weighed.sum(axis=0)
    return np.asarray((frequencies(windows) * weighed).sum(axis=0) / np.where(total > 0, total, 1.0))


def sampling_loss(loads: NDArray[np.float64], topology: Topology, num_slots: int) -> NDArray[np.float64]:
    """Balancedness ``[L]`` that a plan made from these counts loses on the true loads; 0 without load.

    Counts are Poisson: a rank's load is off by the root of the sum of its slots' counts over replicas squared,
    relative to its load; the hottest of R ranks by the expected largest of R normal numbers (Blom's formula).
    """
    share = frequencies(loads)
    ranks = topology.ep_size
    # Replicas go to the largest; at the optimum each costs about its load per replica.
    replicas = 1.0 + (num_slots - loads.shape[1]) * share
    variance = (share / replicas).sum(axis=1) / ranks
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
    error = largest * ranks * np.sqrt(variance)
    counted = loads.sum(axis=1)
    return np.where(counted > 0, error / np.sqrt(np.where(counted > 0, counted, 1.0)), 0.0)


def counting_noise(counted: NDArray[np.float64], topology: Topology, num_slots: int) -> float:
    """Balancedness that a plan from these loads loses to sampling; 0 unless they are counts (whole numbers)."""
    if not counted.any() or counted.max() > 2.0**53 or (counted != np.rint(counted)).any():
        return 0.0
    busy = counted[counted.any(axis=1)]
    return float(sampling_loss(busy, topology, num_slots).mean())


def noise_notice(windows: NDArray[np.float64], how: str, topology: Topology, num_slots: int) -> list[str]:
    """A line if these counts are too few to plan from."""
    if windows.size == 0 or windows.max() > 2.0**53:
        return []
    counted = windows[-1] if how == "last" else windows.sum(axis=0)
    loss = counting_noise(counted, topology, num_slots)
    if loss <= NOISE_LIMIT:
        return []
    per_layer = float(counted[counted.any(axis=1)].sum(axis=1).mean())
    needed = per_layer * (loss / NOISE_LIMIT) ** 2
    return [
        f"too few tokens: {per_layer:.4g} counted assignments a layer lose about {loss:.3f} of balancedness "
        f"to sampling noise; {needed:.4g} are needed for {NOISE_LIMIT}"
    ]


def planning_noise(
    windows: NDArray[np.float64], weights: NDArray[np.float64], topology: Topology, num_slots: int
) -> float:
    """Balancedness that sampling costs a plan for these windows: as a window of their effective count loses."""
    counted = np.array([float(loads.sum(axis=1)[loads.any(axis=1)].mean()) for loads in windows])
    effective = 1.0 / float((weights**2 / counted).sum())
    mixed = np.asarray(np.einsum("k,kle->le", weights, frequencies(windows)))
    busy = mixed.any(axis=1)
    scaled = mixed[busy] / mixed[busy].sum(axis=1, keepdims=True)
    return float(sampling_loss(scaled * effective, topology, num_slots).mean())
