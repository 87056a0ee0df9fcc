"""Prometheus metrics of the rebalancer. All names are here, and nowhere else.

They are made at each scrape from the last `control.RebalancerStatus`, so that the main loop never waits for a scraper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from evenroute.dist.wire.control import RebalancerStatus

PREFIX: Final = "evenroute_"
MAX_SERIES: Final = 1024  # of one metric; of more ranks or layers the worst are shown

Samples = list[tuple[tuple[str, ...], float]]

# name -> (help, labels); counters get `_total` appended by Prometheus' own rule.
COUNTERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "windows_received": ("Windows stored, each once.", ()),
    "windows_duplicate": ("Windows that came again and were only acknowledged.", ()),
    "windows_merged": ("Windows that cover several, merged while a rank could not send.", ()),
    "windows_missing": ("Windows that never came: of a dead rank or a lost store.", ()),
    "windows_rejected": ("Windows refused for impossible shapes or counts.", ()),
    "windows_ignored": ("Windows of another run or before the life began.", ()),
    "messages_rejected": ("Frames refused by the decoder or by their content, by kind.", ("kind",)),
    "frames_dropped": ("Frames to peers that left or do not read.", ()),
    "plans": ("Planning cycles by result.", ("result",)),
    "placements": ("Placements by what became of them.", ("result",)),
    "store_errors": ("Writes to the store that failed.", ()),
    "keys_refused": ("Connections refused for an unknown key.", ()),
    "ranks_lost": ("Ranks that a job whose ranks come and go went on without.", ()),
}
PLAN_ERRORS: Final = ("exception", "timeout", "crash", "garbage")
PLACEMENT_RESULTS: Final = ("published", "unchanged", "not_worth_it", "refused", "not_kept")
GAUGES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "up": ("1 while serving or after the job's end, 0 while waiting for ranks.", ()),
    "finished": ("1 once every rank of the job has said goodbye; gauges of the job are gone then.", ()),
    "planning": ("1 while plans are made: serving, and not paused by an operator.", ()),
    "degraded": ("Number of reasons for which `evenroute status` says degraded.", ()),
    "epoch": ("Epoch of this life.", ()),
    "version": ("Newest version published in this life.", ()),
    "lag_seconds": ("Oldest frame's wait in the rebalancer's last turn.", ()),
    "ranks": ("Ranks of the job, and those heard lately.", ("state",)),
    "rank_version": ("Newest version that a rank holds.", ("rank",)),
    "rank_silence_seconds": ("Since a rank was last heard.", ("rank",)),
    "rank_last_step": ("Last step whose counts of a rank are stored.", ("rank",)),
    "plan_seconds": ("Duration of the last plan.", ()),
    "until_next_plan": ("Seconds or windows until the next plan, by unit; never negative.", ("unit",)),
    "balancedness": (
        "Mean over max rank load of the last interval, per layer, placement in use.",
        ("layer",),
    ),
    "balancedness_all_layers": ("Sum of means over sum of maxes of the last interval.", ()),
    "balancedness_predicted_all_layers": ("The same as predicted for the newest plan.", ()),
    "rank_load": ("Load of a rank over the mean of ranks, all layers, last interval.", ("rank",)),
    "layer_hottest_expert_load": (
        "Part of a layer's load that its hottest expert has, last interval.",
        ("layer",),
    ),
    "series_left_out": ("Ranks or layers of which some metric shows the worst 1,024 only.", ()),
    "saved_gpu_seconds": ("That rebalancing saved this run so far, against its first placement.", ()),
    "moving_gpu_seconds": ("That moving weights took this run so far.", ()),
    "slot_seconds": ("That a moved slot costs its rank, as measured.", ()),
    "step_seconds": ("A step in the last interval, median over ranks.", ()),
    "live_layers_behind": ("Whether some layer is not on the newest version (0 or 1).", ()),
    "membership": (
        "Number of the membership that serves; without samples where ranks don't come and go.",
        (),
    ),
    "membership_halted_seconds": ("Since the ranks have halted for want of one, 0 while they serve.", ()),
    "recording": ("1 while a recording runs.", ()),
}


def metric_names() -> list[str]:
    """Names as a scrape shows them."""
    return [f"{PREFIX}{name}_total" for name in COUNTERS] + [f"{PREFIX}{name}" for name in GAUGES]


def counter_values(status: RebalancerStatus) -> dict[str, list[tuple[tuple[str, ...], float]]]:
    """Each counter's samples: label values and value."""
    count = status.counters
    plain = [name for name, (_, labels) in COUNTERS.items() if not labels]
    names = {"windows_received": "windows_stored"}  # where the core counts under another name
    found: dict[str, list[tuple[tuple[str, ...], float]]] = {
        name: [((), float(count.get(names.get(name, name), 0)))] for name in plain
    }
    rejected = ("decode", "content", "role", "other_job", "internal")
    found["ranks_lost"] = [((), float(status.membership.lost))]
    found["messages_rejected"] = [((kind,), float(count.get(f"rejected_{kind}", 0))) for kind in rejected]
    plans = {"succeeded": status.plans_succeeded, **_from_zero(PLAN_ERRORS, status.plan_errors)}
    found["plans"] = [((result,), float(number)) for result, number in plans.items()]
    placements = _from_zero(PLACEMENT_RESULTS, status.placements)
    found["placements"] = [((result,), float(number)) for result, number in placements.items()]
    return found


def _from_zero(known: tuple[str, ...], counted: dict[str, int]) -> dict[str, int]:
    """A series that appears at 1 has not increased: Prometheus must have seen its 0, or the first is not alerted."""
    return dict.fromkeys(known, 0) | dict(sorted(counted.items()))


def gauge_values(
    status: RebalancerStatus, max_rank_silence_s: float
) -> dict[str, list[tuple[tuple[str, ...], float]]]:
    """Each gauge's samples: label values and value; a gauge without data has none.

    A rank counts as heard if it sent something in the last `max_rank_silence_s` seconds, as for `degraded`.
    """

    def one(value: float | None) -> list[tuple[tuple[str, ...], float]]:
        return [] if value is None else [((), float(value))]

    finished = status.state == "finished"
    daemon = {
        "up": one(status.state in ("serving", "finished")),
        "finished": one(finished),
        "planning": one(status.state == "serving" and not status.paused),
        "degraded": one(len(status.degraded)),
        "epoch": one(status.epoch),
        "version": one(status.version),
        "lag_seconds": one(status.lag_s),
        "recording": one(status.recording),
    }
    view = status.membership
    if view.state:
        halted = view.since_s if view.state in ("halted", "ended") else 0.0
        daemon |= {"membership": one(view.number), "membership_halted_seconds": one(halted)}
    if finished:
        return daemon
    expected = [rank for rank in status.ranks if not rank.ended]
    heard = [rank for rank in expected if rank.heard_s_ago is not None]
    lately = [rank for rank in heard if (rank.heard_s_ago or 0.0) <= max_rank_silence_s]
    return daemon | {
        "ranks": [(("expected",), float(len(expected))), (("heard",), float(len(lately)))],
        "rank_version": _least([((str(rank.rank),), float(rank.held[1])) for rank in heard]),
        "rank_silence_seconds": _most(
            [((str(rank.rank),), float(rank.heard_s_ago or 0.0)) for rank in heard]
        ),
        "rank_last_step": _least(
            [((str(r.rank),), float(r.last_step)) for r in status.ranks if r.last_step is not None]
        ),
        "rank_load": _most([((str(rank),), load) for rank, load in enumerate(status.rank_load)]),
        "layer_hottest_expert_load": _most(
            [
                ((str(layer),), load)
                for layer, load in enumerate(status.hottest_expert_load)
                if status.hottest_expert[layer] >= 0
            ]
        ),
        "series_left_out": one(max(0, len(status.ranks) - MAX_SERIES, status.num_layers - MAX_SERIES)),
        "plan_seconds": one(status.plan_seconds),
        "until_next_plan": [((status.interval_unit,), status.until_next_plan)],
        "balancedness": _least(
            [
                ((str(layer),), value)
                for layer, value in enumerate(status.balancedness_per_layer)
                if value is not None
            ]
        ),
        "balancedness_all_layers": one(status.balancedness_total),
        "balancedness_predicted_all_layers": one(status.balancedness_predicted),
        "saved_gpu_seconds": one(status.saved_gpu_seconds),
        "moving_gpu_seconds": one(status.cost_gpu_seconds),
        "slot_seconds": one(status.slot_seconds),
        "step_seconds": one(status.step_seconds),
        "live_layers_behind": one(status.live_lowest != status.newest),
    }


def _most(samples: Samples) -> Samples:
    """All, or the largest where there are more than `MAX_SERIES`."""
    return samples if len(samples) <= MAX_SERIES else sorted(samples, key=lambda one: -one[1])[:MAX_SERIES]


def _least(samples: Samples) -> Samples:
    return samples if len(samples) <= MAX_SERIES else sorted(samples, key=lambda one: one[1])[:MAX_SERIES]


class StatusCollector(Collector):
    """Turns the last status into metric families at each scrape."""

    def __init__(self, last_status: Callable[[], RebalancerStatus | None], max_rank_silence_s: float) -> None:
        self._last_status = last_status
        self._max_rank_silence_s = max_rank_silence_s

    def collect(self) -> Iterable[Metric]:
        """All families; those without data yet have no sample."""
        status = self._last_status()
        counters = {} if status is None else counter_values(status)
        for name, (text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            for values, value in counters.get(name, []):
                counter.add_metric(values, value)
            yield counter
        gauges = {} if status is None else gauge_values(status, self._max_rank_silence_s)
        for name, (text, labels) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            for values, value in gauges.get(name, []):
                gauge.add_metric(values, value)
            yield gauge
