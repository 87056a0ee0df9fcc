"""`evenroute replay LOADS...`: what another policy, interval or redundancy would have done on this history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenroute.tools.options import AsJson, ExpertBytes, Layout, NumExperts, WeightBytes

if TYPE_CHECKING:
    from evenroute.eplb.analysis.replay import Replay, ReplayResult
    from evenroute.eplb.loads.source import LoadSource
    from evenroute.tools.inputs import ExpertSize

Loads = Annotated[
    list[Path], typer.Argument(metavar="LOADS...", help="Stores, dumps, folders or files, in order, or -.")
]
Interval = Annotated[str, typer.Option(help="Windows between plans; a list N,N,... compares.")]
Policy = Annotated[str, typer.Option(help="Policies; a list compares (`none`: never move).")]
Redundant = Annotated[str | None, typer.Option(help="Redundant experts; a list N,N,... compares.")]
EpSize = Annotated[str | None, typer.Option(help="Ranks; a list N,N,... compares.")]
NumSlots = Annotated[int | None, typer.Option(min=1, help="Slots over all ranks, instead of --redundant.")]
NumNodes = Annotated[int, typer.Option(min=1, help="Nodes that hold the ranks.")]
NumGroups = Annotated[int, typer.Option(min=1, help="Expert groups, for the policy hierarchical.")]
Predictor = Annotated[str, typer.Option(help="last, mean (of --history windows) or decay.")]
HistoryWindows = Annotated[int, typer.Option("--history", help="Windows of the predictor.")]
Delay = Annotated[int, typer.Option(help="Windows between a plan and its use.")]
Dispatch = Annotated[
    str, typer.Option(help="dynamic (replicas evenly or in shares) or static (the nearest).")
]
DeadBand = Annotated[
    float, typer.Option(help="Least predicted gain in balancedness for which a plan is used.")
]
MaxMoves = Annotated[int | None, typer.Option(help="Most slots a plan may move.")]
Target = Annotated[float | None, typer.Option(help="Balancedness at which a plan may stop.")]
Start = Annotated[Path | None, typer.Option(help="Placement in use at the start (any known form).")]
Share = Annotated[float, typer.Option(min=0, max=1, help="Part of a step that experts take without EPLB.")]
Model = Annotated[str | None, typer.Option(help="Model whose expert size to use.")]


def replay(
    loads: Loads,
    interval: Interval = "1",
    policy: Policy = "none,global,rebalancer",
    redundant: Redundant = None,
    ep_size: EpSize = None,
    num_slots: NumSlots = None,
    num_nodes: NumNodes = 1,
    num_groups: NumGroups = 1,
    predictor: Predictor = "last",
    history: HistoryWindows = 4,
    delay: Delay = 0,
    dispatch: Dispatch = "dynamic",
    dead_band: DeadBand = 0.0,
    max_moves: MaxMoves = None,
    target: Target = None,
    start: Start = None,
    experts_share: Share = 0.4,
    expert_bytes: ExpertBytes = None,
    model: Model = None,
    weight_bytes: WeightBytes = 1.0,
    num_experts: NumExperts = None,
    layout: Layout = None,
    as_json: AsJson = False,
) -> None:
    """Replay a history: balancedness over time, moves, bytes and step time, for one or many settings."""
    from evenroute.eplb.analysis.history import default_ep_size
    from evenroute.eplb.loads.whole import require_whole
    from evenroute.tools.inputs import expert_size, known_model, number_list, open_loads

    sources = open_loads(loads, num_experts=num_experts, layout=layout)
    first = sources[0]
    common = {
        "num_nodes": num_nodes,
        "num_groups": num_groups,
        "predictor": predictor,
        "history": history,
        "delay": delay,
        "dispatch": dispatch,
        "dead_band": dead_band,
        "max_moves": max_moves,
        "target": target,
    }
    if num_slots is not None and redundant is not None:
        raise ValueError("--num-slots and --redundant say the same: give one of them")
    sizes = (
        number_list("--ep-size", ep_size)
        if ep_size
        else [first.ep_size or default_ep_size(first.num_logical_experts)]
    )
    if ep_size or first.ep_size:
        for ranks in sizes:
            require_whole(sources, ranks)
    spare = number_list("--redundant", redundant) if redundant else None
    if num_slots is not None:
        spare = [num_slots - first.num_logical_experts]
    replays, begins = build(
        first,
        ep_sizes=sizes,
        redundant=spare,
        policies=policy.split(","),
        intervals=number_list("--interval", interval),
        common=common,
        start=start,
    )
    results = run(sources, replays)
    shape, assumed = known_model(model, first)
    size = expert_size(
        given=expert_bytes,
        weight_bytes=weight_bytes,
        model=shape,
        assumed=assumed,
    )
    _show(sources, results, begins, size, experts_share, as_json)


def build(
    source: LoadSource,
    *,
    ep_sizes: Sequence[int],
    redundant: Sequence[int] | None,
    policies: Sequence[str],
    intervals: Sequence[int],
    common: dict[str, Any],
    start: Path | None = None,
) -> tuple[list[Replay], list[str]]:
    """All combinations; `none` once, whatever the interval.

    By default with the redundancy that the source states, else one redundant expert a rank; each run begins with the
    given placement, else with the first one in use that fits, else with experts in order.
    """
    from evenroute.eplb.analysis.replay import Replay, ReplaySettings
    from evenroute.eplb.placement.topology import Topology, automatic_redundant_experts
    from evenroute.tools.in_use import measured_costs, placement_in_use, recorded_redundancy
    from evenroute.tools.inputs import open_placement

    known = None if start is None else open_placement(start)
    replays, begins = [], []
    for ranks in ep_sizes:
        topology = Topology(ranks, common["num_nodes"])
        placement = None if known is None else known.to_placement(ranks, common["num_nodes"])
        fill = automatic_redundant_experts(source.num_logical_experts, ranks)
        stated = recorded_redundancy(source, ranks)
        costs = measured_costs(source, ranks)
        spares = redundant if redundant is not None else [fill + ranks if stated is None else stated]
        for spare, policy, interval in product(spares, policies, intervals):
            if policy == "none" and interval != intervals[0]:
                continue
            settings = ReplaySettings(
                ep_size=ranks,
                num_redundant_experts=spare,
                policy=policy,
                interval=interval,
                costs=costs,
                **common,
            )
            begin, origin = placement, str(start)
            if begin is None:
                slots = source.num_logical_experts + spare
                found = placement_in_use([source], topology, slots, newest=False)
                begin, origin = found or (None, "experts in order, redundant slots round-robin")
            replays.append(Replay(source.num_layers, source.num_logical_experts, settings, begin))
            begins.append(origin)
    return replays, begins


def run(sources: Sequence[LoadSource], replays: Sequence[Replay]) -> list[ReplayResult]:
    """Feed the history once, with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    from evenroute.tools.compiling import says_compiling
    from evenroute.tools.inputs import all_windows

    counts = [source.num_windows for source in sources]
    known = None if None in counts else sum(count or 0 for count in counts)
    number = 0
    with says_compiling(), Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"replaying {len(replays)} settings", total=known)
        for window in all_windows(sources):
            for one in replays:
                one.feed(window)
            number += 1
            progress.advance(task)
    if not number:
        raise ValueError(f"{sources[0].path}: holds no window of loads")
    return [one.result for one in replays]


def _show(
    sources: Sequence[LoadSource],
    results: Sequence[ReplayResult],
    begins: Sequence[str],
    size: ExpertSize,
    experts_share: float,
    as_json: bool,
) -> None:
    facts = [
        result.as_dict(experts_share=experts_share, expert_bytes=size.num_bytes)
        | {"begins_with": begin}
        | {"priced": result.settings.costs.told() if result.settings.policy == "rebalancer" else None}
        for result, begin in zip(results, begins, strict=True)
    ]
    worth = _worthwhile(results)
    if as_json:
        content = {
            "loads": [str(source.path) for source in sources],
            "num_windows": len(results[0].points),
            "expert_bytes": size.num_bytes,
            "expert_bytes_origin": size.origin,
            "experts_share": experts_share,
            "runs": facts,
            "worthwhile_redundancy": worth,
        }
        typer.echo(json.dumps(content))
        return
    from evenroute.tools.report import replay as report_replay

    report_replay.show(facts, worth, size, experts_share)


def _worthwhile(results: Sequence[ReplayResult]) -> list[dict[str, Any]]:
    """How many redundant experts are worth it, for each group of runs that differ in nothing else."""
    from evenroute.eplb.analysis.replay import worthwhile_redundancy

    groups: dict[tuple[int, str, int], list[ReplayResult]] = {}
    for result in results:
        settings = result.settings
        groups.setdefault((settings.ep_size, settings.policy, settings.interval), []).append(result)
    found = []
    for (ranks, policy, interval), members in groups.items():
        worth = worthwhile_redundancy(members) if policy != "none" else None
        if worth is not None:
            found.append({"ep_size": ranks, "policy": policy, "interval": interval, **worth})
    return found
