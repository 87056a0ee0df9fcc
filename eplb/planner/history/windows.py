"""Several windows of loads: put together into the loads to plan for, and how many tokens they need."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenroute.eplb._checks import as_numbers, describe, is_number, require_instance, require_one_of
from evenroute.eplb.loads.balance import validate_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.shares import count_replicas
from evenroute.eplb.placement.topology import Topology, require_positive

COMBINATIONS = ("mean", "last", "ewma", "robust")
EWMA_WEIGHT = 0.5


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


def combine_windows(
    windows: NDArray[np.float64], how: str, *, ewma_weight: float = EWMA_WEIGHT
) -> NDArray[np.float64]:
    """One ``[L, E]`` to plan for out of ``[W, L, E]``.

    ``mean`` adds the counts up; ``last`` takes the newest window; ``ewma`` weighs frequencies, the newest by
    ``ewma_weight`` and each older one by ``1 - ewma_weight`` of the next. ``robust`` starts from the mean of
    the frequencies (the planner then looks for the worst window itself).
    """
    require_one_of("windows", how, COMBINATIONS)
    if len(windows) == 1 or how == "last":
        return np.array(windows[-1])
    if how == "mean":
        largest = windows.max()
        return np.asarray((windows / largest if largest > 1e300 / len(windows) else windows).sum(axis=0))
    if how == "robust":
        return np.asarray(frequencies(windows).mean(axis=0))
    if not is_number(ewma_weight) or not 0 < ewma_weight <= 1:
        raise ValueError(f"ewma_weight={describe(ewma_weight)}, expected a number in (0, 1]")
    weights = ewma_weight * (1 - ewma_weight) ** np.arange(len(windows) - 1, -1, -1.0)
    weights[0] = (1 - ewma_weight) ** (len(windows) - 1)
    # A layer that was idle in a window says nothing there.
    known = (windows > 0).any(axis=-1, keepdims=True)
    weighed = weights[:, None, None] * known
    total = weighed.sum(axis=0)
    return np.asarray((frequencies(windows) * weighed).sum(axis=0) / np.where(total > 0, total, 1.0))


def by_phase(windows: NDArray[np.float64], phases: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    """Windows ``[W, L, E]`` of each phase (prefill, decode, ...), in order of first appearance."""
    if len(phases) != len(windows):
        raise ValueError(f"phases name {len(phases)} windows, expected {len(windows)}")
    names = list(dict.fromkeys(phases))
    chosen = np.asarray(phases)
    return {name: windows[chosen == name] for name in names}


def _error_per_assignment(
    loads: NDArray[np.float64], topology: Topology, num_slots: int, placement: Placement | None
) -> NDArray[np.float64]:
    """``[L]``: balancedness lost, times the square root of the assignments counted.

    Counts are Poisson: a rank's load is off by the root of the sum of its slots' counts over replicas squared,
    relative to its load; the hottest of R ranks by the expected largest of R normal numbers (Blom's formula).
    """
    share = frequencies(loads)
    ranks = topology.ep_size
    if placement is None:
        # Replicas go to the largest; at the optimum each costs about its load per replica.
        extra = num_slots - loads.shape[1]
        replicas = 1.0 + extra * share
    else:
        replicas = count_replicas(placement.physical_to_logical, loads.shape[1]).astype(np.float64)
    variance = (share / replicas).sum(axis=1) / ranks
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
    return np.asarray(largest * ranks * np.sqrt(variance))


def sampling_loss(
    loads: NDArray[np.float64], topology: Topology, num_slots: int, placement: Placement | None = None
) -> NDArray[np.float64]:
    """Balancedness ``[L]`` that a plan made from these counts loses on the true loads; 0 without load."""
    counted = loads.sum(axis=1)
    error = _error_per_assignment(loads, topology, num_slots, placement)
    return np.where(counted > 0, error / np.sqrt(np.where(counted > 0, counted, 1.0)), 0.0)


def tokens_needed(
    loads: ArrayLike, *, topology: Topology, num_slots: int, top_k: int, loss: float = 0.01
) -> int:
    """Tokens a window needs at this skew, so that a plan from it loses at most ``loss`` of balancedness.

    Independent tokens are assumed; real ones are correlated, so this is a minimum.
    """
    require_positive("top_k", top_k)
    require_instance("topology", topology, Topology)
    require_positive("num_slots", num_slots)
    if not is_number(loss) or not 0 < loss < 1:
        raise ValueError(f"loss={describe(loss)}, expected a number in (0, 1)")
    array = validate_loads(loads)
    error = _error_per_assignment(array, topology, num_slots, None)
    known = error[array.any(axis=1)]
    return int(np.ceil((known.mean() / loss) ** 2 / top_k)) if len(known) else 0
