"""`evenroute advise LOADS...`: is EPLB worth it here?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenroute.tools.options import AsJson, ExpertBytes, Layout, NumExperts, WeightBytes

if TYPE_CHECKING:
    from evenroute.eplb.analysis.measures import AdviceSettings, Workload
    from evenroute.eplb.loads.balance import RankLoadMap
    from evenroute.eplb.loads.source import LoadSource

Loads = Annotated[
    list[Path], typer.Argument(metavar="LOADS...", help="Stores, dumps, folders or files, or -.")
]
EpSize = Annotated[int | None, typer.Option(min=1, help="Ranks; by default as recorded, else assumed.")]
NumNodes = Annotated[int, typer.Option(min=1, help="Nodes that hold the ranks.")]
Redundant = Annotated[
    int | None, typer.Option(min=0, help="Redundant experts; by default the fewest that pay.")
]
OnPlacement = Annotated[
    Path | None, typer.Option("--placement", help="Placement in use now (any known form).")
]
HardwareName = Annotated[str | None, typer.Option(help="h20, h100, h200, b200, gb200 or mi300x.")]
Hidden = Annotated[int | None, typer.Option(min=1, help="Hidden size, for the size of an expert.")]
Intermediate = Annotated[int | None, typer.Option(min=1, help="Experts' intermediate size.")]
Model = Annotated[str | None, typer.Option(help="Model whose sizes to use: dsv3, qwen3, kimi-k2, kimi-k3.")]
ExpertUs = Annotated[
    float | None, typer.Option(help="Microseconds of an expert touched (default: an H200's roofline).")
]
TokenUs = Annotated[float | None, typer.Option(help="Of a token, where they take longer.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Experts a token, where the loads do not state it.")]
Share = Annotated[float | None, typer.Option(min=0, max=1, help="Part of a step that experts take today.")]
BatchTokens = Annotated[int | None, typer.Option(min=1, help="Tokens of one step over all ranks.")]
ReplanMinutes = Annotated[float | None, typer.Option(help="Minutes between two plans.")]
MinGain = Annotated[float, typer.Option(min=0, max=1, help="Least shortening of a step that is worth it.")]


def advise(
    loads: Loads,
    ep_size: EpSize = None,
    num_nodes: NumNodes = 1,
    redundant: Redundant = None,
    placement: OnPlacement = None,
    hardware: HardwareName = None,
    hidden: Hidden = None,
    intermediate: Intermediate = None,
    weight_bytes: WeightBytes = 1.0,
    expert_bytes: ExpertBytes = None,
    model: Model = None,
    top_k: TopK = None,
    experts_share: Share = None,
    batch_tokens: BatchTokens = None,
    replan_minutes: ReplanMinutes = None,
    min_gain: MinGain = 0.02,
    expert_us: ExpertUs = None,
    token_us: TokenUs = None,
    num_experts: NumExperts = None,
    layout: Layout = None,
    as_json: AsJson = False,
) -> None:
    """A verdict a person can act on: recommend, not now, or not enough evidence, with the reasons as numbers."""
    from rich.console import Console

    from evenroute.eplb.analysis.advice import advise as make_advice
    from evenroute.eplb.analysis.history import default_ep_size
    from evenroute.eplb.analysis.measures import HARDWARE, AdviceSettings
    from evenroute.eplb.loads.whole import require_whole
    from evenroute.eplb.planner.classes.times import given_times
    from evenroute.tools.in_use import recorded_redundancy
    from evenroute.tools.inputs import expert_size, known_model, open_loads

    if hardware is not None and hardware not in HARDWARE:
        raise ValueError(f"--hardware {hardware!r}, expected one of {', '.join(HARDWARE)}")
    if replan_minutes is not None and replan_minutes <= 0:
        raise ValueError(f"--replan-minutes {replan_minutes:g}, expected above 0")
    sources = open_loads(loads, num_experts=num_experts, layout=layout)
    first = sources[0]
    ranks = ep_size or next((s.ep_size for s in sources if s.ep_size), None)
    if ranks is not None:
        require_whole(sources, ranks)
    shape, assumed = known_model(model, first)
    size = expert_size(
        given=expert_bytes,
        hidden=hidden,
        intermediate=intermediate,
        weight_bytes=weight_bytes,
        model=shape,
        assumed=assumed,
    )
    known_top_k = top_k or next((s.top_k for s in sources if s.top_k), None)
    settings = AdviceSettings(
        ep_size=ranks or default_ep_size(first.num_logical_experts),
        num_nodes=num_nodes,
        num_redundant_experts=recorded_redundancy(first, ranks) if redundant is None and ranks else redundant,
        top_k=known_top_k or (shape.top_k if shape is not None else None),
        top_k_known=known_top_k is not None or model is not None,
        experts_share=0.4 if experts_share is None else experts_share,
        share_given=experts_share is not None,
        expert_bytes=size.num_bytes,
        hardware=None if hardware is None else HARDWARE[hardware],
        batch_tokens=batch_tokens,
        replan_seconds=None if replan_minutes is None else 60.0 * replan_minutes,
        min_gain=min_gain,
        times=given_times(expert_us, token_us),
    )
    workloads, recorded = gather(sources, settings.ep_size)
    before, now = _now(placement, sources, settings)
    with Console(stderr=True).status("planning (the first run on a machine compiles the planners)"):
        facts = make_advice(workloads, settings, before_map=before)
    facts |= {
        "ep_size_is": "given" if ep_size else ("recorded" if ranks else "assumed"),
        "balancedness_recorded": recorded,
        "expert_bytes": size.num_bytes,
        "expert_bytes_origin": size.origin,
        "hardware": hardware,
        "placement_now": now,
    }
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        from evenroute.tools.report.advice import show

        show(facts, size)


def _now(
    path: Path | None, sources: Sequence[LoadSource], settings: AdviceSettings
) -> tuple[RankLoadMap | None, str]:
    """Rank loads under the placement to compare with, and which it is: given, else in use last, else in order."""
    from evenroute.eplb.analysis.history import choose_placement
    from evenroute.eplb.loads.balance import RankLoadMap
    from evenroute.eplb.placement.topology import Topology
    from evenroute.tools.in_use import placement_in_use
    from evenroute.tools.inputs import open_placement

    if path is not None:
        known = open_placement(path)
        return choose_placement(sources[0], ep_size=settings.ep_size, override=known).load_map, str(path)
    found = placement_in_use(sources, Topology(settings.ep_size, settings.num_nodes), None, newest=True)
    if found is None:
        return None, "experts in order, no redundancy"
    return RankLoadMap.of(found[0]), found[1]


def gather(sources: Sequence[LoadSource], ep_size: int) -> tuple[list[Workload], float | None]:
    """A workload per source, at most 64 stretches of history each, and the balancedness recorded in use.

    The latter is None without recorded placements.
    """
    import numpy as np

    from evenroute.eplb.analysis.history import choose_placement, read_history
    from evenroute.eplb.analysis.measures import Workload

    workloads = []
    recorded = []
    for source in sources:
        history = read_history(source, choose_placement(source, ep_size=ep_size))
        seconds = None
        if history.first_time is not None and history.last_time is not None and len(history.bins) > 1:
            seconds = (history.last_time - history.first_time) / (len(history.bins) - 1) or None
        workloads.append(
            Workload(
                name=source.path.name,
                windows=[found.counts.astype(np.float64) for found in history.bins],
                phase=source.phase,
                window_seconds=seconds,
                tokens=history.tokens,
            )
        )
        recorded += [found.mean for found in history.achieved if found.mean is not None]
    return workloads, sum(recorded) / len(recorded) if recorded else None
