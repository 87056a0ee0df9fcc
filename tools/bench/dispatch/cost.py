"""What a deal costs on this device, by batch size: the launch's side of `evenroute bench dispatch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from evenroute.tools.bench.router import Job, prepare, time_call

DEALS = ("hash", "exact", "weighted", "batch")  # names of `settings.modes.MODES`


def deal_costs(
    model: str, rows: Sequence[int], device: torch.device, deals: Sequence[str] = DEALS
) -> dict[int, dict[str, float]]:
    """Microseconds of a layer's routing by rows and deal: graph replays on CUDA, single calls on CPU."""
    jobs = {number: {deal: replace(Job(model, number), form=deal) for deal in deals} for number in rows}
    return {
        number: {deal: time_call(prepare(job, device), device) for deal, job in by_deal.items()}
        for number, by_deal in jobs.items()
    }


def least_rows(costs: dict[int, dict[str, float]], deal: str, saved_us: dict[int, float]) -> int | None:
    """The smallest batch from which on `deal` costs less beyond the exact deal than it saves, in every larger one too.

    saved_us: by rows, what its better balance saves of the hottest rank's time in a layer; None if it never pays.
    """
    least = None
    for number in sorted(costs, reverse=True):
        if costs[number][deal] - costs[number]["weighted"] >= saved_us[number]:
            break
        least = number
    return least
