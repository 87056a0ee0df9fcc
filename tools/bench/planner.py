"""`evenroute bench planner`: every figure the planner promises, beside a plain numpy planner, in one run.

Times are medians. A ratio compares CPU time, over all threads, with that of the baseline timed in between in the
same run: other work on the machine does not shift it, and with idle cores wall time is lower still. Every placement is
judged by `bench_planner_check`, which shares no code with the planner.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._checks import require_choice
from evenroute.eplb.files.sglang import read_logical_count
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.full import full_placement, spill_from_nodes
from evenroute.eplb.planner.kernels.pack import full_plan
from evenroute.eplb.planner.layers import normalized, over_layers
from evenroute.eplb.planner.moves import MoveLimits, exact_shares, moved_placement
from evenroute.eplb.planner.warm_up import warm_up
from evenroute.tools.bench.planning.baseline import greedy_plan, greedy_plan_layers_at_once
from evenroute.tools.bench.planning.check import judge, linear_programme, moved
from evenroute.tools.bench.planning.layer_budgets import layer_budgets
from evenroute.tools.bench.planning.next import next_windows, synthetic_loads
from evenroute.tools.bench.planning.peers import Peer, open_peers
from evenroute.tools.bench.planning.rows import Clock, Row, at_least, at_most, note, show
from evenroute.tools.bench.planning.skewed import decision_time, layout, sizes, skewed
from evenroute.tools.bench.planning.time import chains, drift, stationary
from evenroute.tools.flags import FlagParser

Loads = NDArray[np.float64]


def score(placement: Placement, loads: Loads) -> list[float]:
    shares = None if placement.shares is None else placement.shares.tolist()
    rows = placement.physical_to_logical.tolist()
    return judge(rows, shares, loads.tolist(), placement.topology.ep_size)


def full_table(loads: Loads, num_ranks: int, num_slots: int, refine: bool = True) -> NDArray[np.int32]:
    """What the baseline does, by the planner's kernels: loads to table."""
    scaled = normalized(loads)
    table = np.empty((len(loads), num_slots), dtype=np.int32)

    def plan(first: int, last: int) -> None:
        part = slice(first, last)
        full_plan(scaled[part], num_ranks, num_slots, 1, 1, refine, table[part])

    over_layers(plan, len(loads))
    return table


def full_plans(files: list[Loads]) -> Iterator[Row]:
    """Full plans, their quality and their time."""
    base, once, plain, refined = Clock.new(), Clock.new(), Clock.new(), Clock.new()
    results: list[list[float]] = []
    for loads in files:
        for _ in range(3):
            base.time(greedy_plan, loads, 32, 288)
            once.time(greedy_plan_layers_at_once, loads, 32, 288)
            plain.time(full_table, loads, 32, 288, False)
            table = refined.time(full_table, loads, 32, 288)
        results.append(judge(table.tolist(), None, loads.tolist(), 32))
    first = judge(greedy_plan(files[0], 32, 288).tolist(), None, files[0].tolist(), 32)
    yield from base.ms("numpy baseline")
    yield from once.ms("numpy baseline, all layers at once (for information)")
    yield note("numpy baseline: mean (first file)", mean(first))
    yield at_least("global EP32/288: mean", mean(map(mean, results)), 0.9995)
    yield at_least("global EP32/288: worst layer", min(map(min, results)), 0.998)
    yield from refined.ms("global EP32/288")
    yield refined.ratio("global EP32/288", base, 0.35)
    yield plain.ratio("greedy only", base, 0.1)
    wide = [judge(full_table(loads, 72, 288).tolist(), None, loads.tolist(), 72) for loads in files]
    yield at_least("global EP72/288: mean", mean(map(mean, wide)), 0.997)
    large = np.random.default_rng(0).lognormal(0, 1, (92, 896))
    huge = Clock.new()
    for _ in range(5):
        table = huge.time(full_table, large, 128, 1024)
    quality = mean(judge(table.tolist(), None, large.tolist(), 128))
    yield at_least("global 92x896 EP128/1024: mean", quality, 0.9995)
    yield huge.ratio("global 92x896, over the 58x256 plan", refined, 16)
    hierarchical = [mean(score(_hierarchical(loads), loads)) for loads in files]
    yield note("hierarchical, 8 groups on 4 nodes: mean", mean(hierarchical))
    for spill in (0.01, 0.02, 0.04):
        leaving = [mean(score(_hierarchical(loads, spill), loads)) for loads in files[:4]]
        yield note(f"hierarchical, {spill:.0%} of slots may leave (4 files): mean", mean(leaving))


def _hierarchical(loads: Loads, spill: float = 0.0) -> Placement:
    start = Placement.initial(len(loads), loads.shape[1], 288, Topology(32, 4))
    made = full_placement(loads, start, num_groups=8, hierarchical=True)
    return spill_from_nodes(loads, made, 8, spill) if spill else made


def changes(files: list[Loads], every: int) -> Iterator[Row]:
    """The ordered changes of workload, from the greedy plan of the old one."""
    topology = Topology(32)
    plans = [Placement(full_table(loads, 32, 288, False), loads.shape[1], topology) for loads in files]
    pairs = [(a, b) for a in range(len(files)) for b in range(len(files)) if a != b][::every]
    size = plans[0].physical_to_logical.size
    yield note("changes of workload", len(pairs))
    stay = [mean(score(plans[a], files[b])) for a, b in pairs]
    yield note("stay, even shares: mean", mean(stay))
    yield from _shares(files, plans, pairs)
    wanted = {
        ("incremental", 0.06): (None, None),
        ("incremental", 0.08): (0.985, 1.5),
        ("incremental", 0.10): (0.99, 1.5),
        ("weighted", 0.01): (None, None),
        ("weighted", 0.02): (0.985, 5.0),
        ("weighted", 0.04): (0.995, 5.0),
    }
    for (policy, part), (least, ratio) in wanted.items():
        base, clock = Clock.new(), Clock.new()
        means, worst, used = [], [], []
        for a, b in pairs:
            limits = MoveLimits(max_moves=int(part * size))
            old, loads = plans[a], files[b]
            made = clock.time(moved_placement, loads, old, limits, weighted=policy == "weighted")
            base.time(greedy_plan, loads, 32, 288)
            layers = score(made, loads)
            means.append(mean(layers))
            worst.append(min(layers))
            fetched = moved(old.physical_to_logical.tolist(), made.physical_to_logical.tolist(), 32)
            assert fetched <= part * size, "over budget"
            used.append(fetched / size)
        name = f"{policy} {part:.0%}"
        yield at_least(f"{name}: mean", mean(means), least) if least else note(f"{name}: mean", mean(means))
        yield note(f"{name}: worst layer, mean over changes", mean(worst))
        yield note(f"{name}: moved, % of slots", mean(used) * 100)
        yield from clock.ms(name)
        if ratio:
            yield clock.ratio(name, base, ratio)


def _shares(files: list[Loads], plans: list[Placement], pairs: list[tuple[int, int]]) -> Iterator[Row]:
    base, clock = Clock.new(), Clock.new()
    exact, rounded, gap = [], [], 0.0
    for k, (a, b) in enumerate(pairs):
        loads, table = files[b], plans[a].physical_to_logical.copy()
        base.time(greedy_plan, loads, 32, 288)
        scaled = normalized(loads)
        shares, levels = clock.time(exact_shares, scaled, table, 32)
        exact.append(float((scaled.sum(axis=1) / 32 / levels).mean()))
        rounded.append(mean(judge(table.tolist(), shares.tolist(), loads.tolist(), 32)))
        if k % 12 == 0:
            for layer in range(0, len(loads), 7):
                best = linear_programme(scaled[layer].tolist(), table[layer].tolist(), 32)
                gap = max(gap, abs(levels[layer] / best - 1))
    yield at_least("shares alone: mean after rounding", mean(rounded), 0.87)
    yield at_most("shares alone: largest difference to the LP, relative", gap, 1e-9)
    yield at_most("shares alone: lost by rounding", mean(exact) - mean(rounded), 0.002)
    yield from clock.ms("shares alone")
    yield clock.ratio("shares alone", base, 0.05)


def redundancy(files: list[Loads]) -> Iterator[Row]:
    """Redundant slots that shares save: standing still from a refined plan of another file, EP8."""
    pairs = [(a, (a + 5) % len(files)) for a in range(len(files))]
    for slots in (264, 272, 288, 320):
        even, uneven = [], []
        for a, b in pairs:
            old = Placement(full_table(files[a], 8, slots), files[a].shape[1], Topology(8))
            even.append(mean(score(old, files[b])))
            made = moved_placement(files[b], old, MoveLimits(max_moves=0), weighted=True)
            uneven.append(mean(score(made, files[b])))
        yield note(f"EP8, {slots - 256} redundant, nothing moved: even", mean(even))
        yield note(f"EP8, {slots - 256} redundant, nothing moved: exact shares", mean(uneven))


def over_time(files: list[Loads], quick: bool) -> Iterator[Row]:
    """Chains of changes, a drifting trace, and a stationary one."""
    for policy, part in (("incremental", 0.06), ("weighted", 0.02)):
        early, late, fresh = chains(files, policy, part, orders=1 if quick else 5, score=score)
        yield note(f"chains, {policy} {part:.0%}: steps 1-3", early)
        yield Row(
            f"chains, {policy} {part:.0%}: steps 9-11", late, ">= steps 1-3 - 0.002", late >= early - 0.002
        )
        yield note(f"chains, {policy} {part:.0%}: steps 9-11, each from a fresh plan", fresh)
    ours = drift(windows=60 if quick else 500, layers=4, score=score, moved=moved)
    yield note("drift: full plan every window, mean", ours.replanned)
    yield Row("drift: policy, mean", ours.mean, ">= full plan - 0.01", ours.mean >= ours.replanned - 0.01)
    yield at_most("drift: moved slots / full plan's", ours.moves / max(1, ours.replanned_moves), 1 / 20)
    late_moves, least = stationary(files[0][:8], windows=40 if quick else 200, score=score)
    yield at_most("stationary, 1e5 tokens: moves after the first 10 windows", late_moves, 0)
    yield note("stationary: least balancedness on the true loads", least)


Section = Callable[[], Iterator[Row]]


def sections(
    files: list[Loads], every: int, quick: bool, real: bool, peers: dict[str, Callable[[], Peer]]
) -> dict[str, Section]:
    """What the benchmark measures, by the names of `--only`."""
    return {
        "full": lambda: full_plans(files),
        "changes": lambda: changes(files, every),
        "redundancy": lambda: redundancy(files),
        "time": lambda: over_time(files, quick),
        "next": lambda: next_windows(files, peers, real),
        "layout": lambda: layout(files, real),
        "skewed": lambda: skewed(peers),
        "sizes": lambda: sizes(),
        "decision": lambda: decision_time(files),
        "budgets": lambda: layer_budgets(files),
    }


def run(chosen: list[Section], as_json: bool) -> int:
    """Print all figures; 1 if one that was promised is missed."""
    warm_up(
        None
        if as_json
        else lambda done, total, name: print(f"compiling {done}/{total} {name}", file=sys.stderr)
    )
    rows: list[Row] = []
    for section in chosen:
        for row in section():
            rows.append(row)
            if not as_json:
                show(row)
    if as_json:
        print(
            json.dumps(
                {"rows": [asdict(row) for row in rows], "ok": all(row.ok is not False for row in rows)}
            )
        )
    return int(any(row.ok is False for row in rows))


SECTIONS = (
    "full",
    "changes",
    "redundancy",
    "time",
    "next",
    "layout",
    "skewed",
    "sizes",
    "decision",
    "budgets",
)
ON_ANY_LOADS = (
    "next",
    "layout",
    "skewed",
    "sizes",
    "decision",
    "budgets",
)  # the others promise figures of the real ones


def build_parser() -> FlagParser:
    """The flags of the benchmark."""
    parser = FlagParser("evenroute bench planner", __doc__ or "", "bench planner")
    data = Path(__file__).resolve().parents[3] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=data, help="a folder of real loads")
    parser.add_argument("--synthetic", action="store_true", help="loads of our own making instead of --data")
    parser.add_argument("--only", default="", help=f"sections, separated by commas: {', '.join(SECTIONS)}")
    parser.add_argument(
        "--peer", action="append", default=[], help="NAME=PATH: vllm or flashlb, a wheel or a source tree"
    )
    parser.add_argument("--every", type=int, default=1, help="judge every n-th change of workload")
    parser.add_argument("--quick", action="store_true", help="shorter chains and traces")
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="one JSON object on stdout and nothing else"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Command line of the benchmark; exit status 1 if a promised figure is missed, 2 for wrong use."""
    options = build_parser().parse_args(argv)
    try:
        names = (
            options.only.split(",") if options.only else list(ON_ANY_LOADS if options.synthetic else SECTIONS)
        )
        for name in names:
            require_choice("--only", name, SECTIONS)
        files = synthetic_loads() if options.synthetic else _read(options.data)
        if options.every < 1:
            raise ValueError(f"--every {options.every}, expected >= 1")
        peers = open_peers(options.peer)
    except (ValueError, OSError) as error:
        print(f"evenroute: error: {error}", file=sys.stderr)
        return 2
    by_name = sections(files, options.every, options.quick, not options.synthetic, peers)
    return run([by_name[name] for name in names], options.as_json)


def _read(folder: Path) -> list[Loads]:
    paths = sorted(folder.glob("*.json"))
    if len(paths) < 2:
        raise ValueError(
            f"--data {folder}: {len(paths)} load files found, expected at least 2 (or --synthetic)"
        )
    files = []
    for path in paths:
        loads = read_logical_count(path)
        files.append(np.ascontiguousarray(loads[loads.any(axis=1)]))
    return files


if __name__ == "__main__":
    sys.exit(main())
