"""What callers of the planner's Python API get wrong: one ValueError of one line: the field, what was found, what is
allowed. Nothing is planned or written by a refused call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenroute.eplb.analysis.replay import Replay, ReplaySettings
from evenroute.eplb.dump.reader import DumpReader
from evenroute.eplb.files.open import open_source, open_sources
from evenroute.eplb.files.sglang import read_logical_count
from evenroute.eplb.loads.balance import (
    balancedness,
    placement_balancedness,
    rank_loads,
    slot_loads,
    validate_loads,
)
from evenroute.eplb.placement.file import (
    load_placement,
    load_placement_set,
    save_placement,
    update_placement_set,
)
from evenroute.eplb.placement.models import MODEL_SHAPES, ModelShape
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.shares import even_shares
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner import deepseek
from evenroute.eplb.planner.history.windows import validate_windows
from evenroute.eplb.planner.moves import MoveCost, MoveLimits
from evenroute.eplb.planner.plan import figure, plan_placement
from evenroute.eplb.planner.policy import PolicySettings, RebalancePolicy
from support.refusals import refused

L, E, P, R = 2, 8, 12, 4
LOADS = np.arange(1.0, L * E + 1).reshape(L, E)
TOPOLOGY = Topology(R)
PLACEMENT = Placement.initial(L, E, P, TOPOLOGY)
ROW = PLACEMENT.row(0)
UNEVEN = even_shares(ROW.slots)
HUGE = 10**400  # no float, and too long for a message

Call = Callable[[], Any]
NOT_INTEGERS = ("8", None, 1.5, 8.0, float("nan"), True, [8], np.ones(2, np.int64), 1j, HUGE, -HUGE)
NOT_NUMBERS = ("1", True, [0.5], float("nan"), float("inf"), HUGE, 1j, np.ones(2))
NOT_PATHS = (None, 3, True, ["a"], b"a", "a\0b", np.ones(2))
# array-likes that are no loads, and what of them the message names
NOT_LOADS = [
    (None, "found None"),
    ("loads", "found dtype <U5"),
    ([["1", "2"]], "found dtype <U1"),
    (b"12", "found dtype |S2"),
    (LOADS.astype(complex), "found dtype complex128"),
    (np.zeros((L, E), "datetime64[s]"), "found dtype datetime64[s]"),
    ([[1.0, 2.0], [3.0]], "inhomogeneous"),
    (object(), "found a object"),
    ({"loads": LOADS}, "found a dict"),
    ([[HUGE] * E], "too large"),
    (np.array([[1j] * E], dtype=object), "complex"),
]
NO_PLACEMENTS = (np.zeros((L, P), np.int32), "placement", 3, [], ROW)


def plan(loads: Any = LOADS, **change: Any) -> Any:
    return plan_placement(loads, **{"topology": TOPOLOGY, "num_slots": P, **change})


# ----------------------------------------------------------------------------------- integers

INTEGERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "Topology.ep_size": ("ep_size", lambda n: Topology(n)),
    "Topology.num_nodes": ("num_nodes", lambda n: Topology(4, n)),
    "node_of_rank": ("rank", lambda n: TOPOLOGY.node_of_rank(n)),
    "Placement.E": ("num_logical_experts", lambda n: Placement(PLACEMENT.physical_to_logical, n, TOPOLOGY)),
    "initial.L": ("num_layers", lambda n: Placement.initial(n, E, P, TOPOLOGY)),
    "initial.E": ("num_logical_experts", lambda n: Placement.initial(L, n, P, TOPOLOGY)),
    "initial.P": ("num_slots", lambda n: Placement.initial(L, E, n, TOPOLOGY)),
    "from_rows.E": ("num_logical_experts", lambda n: Placement.from_rows([ROW], n, TOPOLOGY)),
    "row": ("layer", lambda n: PLACEMENT.row(n)),
    "with_row": ("layer", lambda n: PLACEMENT.with_row(n, ROW)),
    "plan.num_slots": ("num_slots", lambda n: plan(num_slots=n)),
    "plan.num_groups": ("num_groups", lambda n: plan(num_groups=n)),
    "deepseek.P": ("num_replicas", lambda n: deepseek.rebalance_experts(LOADS, n, 1, 1, 4)),
    "deepseek.G": ("num_groups", lambda n: deepseek.rebalance_experts(LOADS, 12, n, 1, 4)),
    "deepseek.N": ("num_nodes", lambda n: deepseek.rebalance_experts(LOADS, 12, 1, n, 4)),
    "deepseek.R": ("num_gpus", lambda n: deepseek.rebalance_experts(LOADS, 12, 1, 1, n)),
    "policy": ("num_slots", lambda n: RebalancePolicy(TOPOLOGY, n)),
    "replay.interval": ("interval", lambda n: ReplaySettings(4, 0, interval=n)),
    "replay.redundant": ("num_redundant_experts", lambda n: ReplaySettings(4, n)),
}  # fmt: skip
# those that may be left out
OPTIONAL_INTEGERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "validate_loads.L": ("num_layers", lambda n: validate_loads(LOADS, num_layers=n)),
    "validate_loads.E": ("num_logical_experts", lambda n: validate_loads(LOADS, num_logical_experts=n)),
    **{
        f"plan.{name}": (name, lambda n, name=name: plan(current=PLACEMENT, policy="weighted", **{name: n}))
        for name in ("max_moves", "max_moves_per_rank", "num_threads")
    },
    "plan.num_threads, stay": ("num_threads", lambda n: plan(policy="stay", num_threads=n)),
    "limits": ("max_moves", lambda n: MoveLimits(max_moves=n)),
}
HERE = [(name, *case, True) for name, case in INTEGERS.items()]
HERE += [(name, *case, False) for name, case in OPTIONAL_INTEGERS.items()]


@pytest.mark.parametrize(("field", "call", "needed"), [case[1:] for case in HERE], ids=[c[0] for c in HERE])
def test_integers(field: str, call: Callable[[Any], Any], needed: bool) -> None:
    for bad in NOT_INTEGERS:
        if bad is not None or needed:
            refused(f"{field} must be ", lambda bad=bad: call(bad))  # type: ignore[misc]


LIMITS: list[tuple[str, Call]] = [
    ("ep_size must be >= 1, found 0", lambda: Topology(0)),
    ("ep_size must be <= 65536, found 1099511627776", lambda: Topology(1 << 40)),
    ("num_nodes=3 does not divide ep_size=4", lambda: Topology(4, 3)),
    ("rank=4 is outside [0, ep_size=4)", lambda: TOPOLOGY.node_of_rank(4)),
    ("num_layers must be >= 0, found -1", lambda: Placement.initial(-1, E, P, TOPOLOGY)),
    ("a placement has at most 268435456 entries", lambda: Placement.initial(1 << 40, E, P, TOPOLOGY)),
    ("layer=2 is outside [0, num_layers=2)", lambda: PLACEMENT.row(2)),
    ("layer=-1 is outside [0, num_layers=2)", lambda: PLACEMENT.row(-1)),
    ("layer=2 is outside [0, num_layers=2)", lambda: PLACEMENT.with_row(2, ROW)),
    ("num_threads must be >= 1, found 0", lambda: plan(policy="stay", num_threads=0)),
    ("max_moves must be >= 0, found -1", lambda: plan(max_moves=-1)),
]  # fmt: skip


@pytest.mark.parametrize(("words", "call"), LIMITS)
def test_limits(words: str, call: Call) -> None:
    refused(words, call)


def test_numpy_integers_are_integers_everywhere(tmp_path: Path) -> None:
    for kind in (np.int64, np.uint8, np.int32):
        where = Topology(kind(R), kind(2))
        made = Placement.initial(kind(L), kind(E), kind(P), where)
        assert type(where.ep_size) is type(made.num_logical_experts) is int
        save_placement(tmp_path / "p.json", made, epoch=kind(3), version=kind(4))
        assert load_placement(tmp_path / "p.json")[0].digest() == made.digest()
        planned = plan(
            topology=where, num_slots=kind(P), num_groups=kind(1), current=made, policy="weighted",
            max_moves=kind(3), num_threads=kind(1), target=np.float32(0.9),
        )  # fmt: skip
        same = plan(
            topology=where,
            num_slots=P,
            current=made,
            policy="weighted",
            max_moves=3,
            target=float(np.float32(0.9)),
        )
        assert planned.placement.digest() == same.placement.digest()
        assert made.row(kind(1)).slots.tolist() == made.row(1).slots.tolist()
        maps = deepseek.rebalance_experts(LOADS, kind(P), kind(1), kind(1), kind(R))
        assert maps[0].tolist() == deepseek.rebalance_experts(LOADS, P, 1, 1, R)[0].tolist()
        assert made.with_row(kind(1), made.row(0)).digest() == made.digest()


# ------------------------------------------------------------------------- numbers, names, flags


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("spill", lambda x: plan(spill=x)),
        ("share_gain", lambda x: plan(share_gain=x)),
        ("target", lambda x: plan(target=x, current=PLACEMENT, policy="weighted")),
        ("bytes_per_expert", lambda x: MoveCost(x, 1, 1, 1)),
        ("seconds_in_use", lambda x: MoveCost(1, 1, 1, x)),
        ("move_price", lambda x: PolicySettings(move_price=x)),
        ("target", lambda x: PolicySettings(target=x)),
        ("dead_band", lambda x: ReplaySettings(4, 0, dead_band=x)),
    ],
)
def test_numbers(field: str, call: Callable[[Any], Any]) -> None:
    for bad in (*NOT_NUMBERS, -0.5):
        refused(field, lambda bad=bad: call(bad))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("policy", lambda x: plan(policy=x)),
        ("windows", lambda x: plan(windows=x)),
        ("predictor", lambda x: ReplaySettings(4, 0, predictor=x)),
        ("scoring", lambda x: ModelShape(**{**vars(MODEL_SHAPES["dsv3"]), "scoring": x})),
    ],
)
def test_names(field: str, call: Callable[[Any], Any]) -> None:
    for bad in (None, 3, ["global"], np.zeros(2), "GLOBAL", "x" * 5000):
        refused(f"{field}= | is not one of", lambda bad=bad: call(bad))  # type: ignore[misc]


# ---------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize(("bad", "found"), NOT_LOADS, ids=[found for _, found in NOT_LOADS])
@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("loads", validate_loads),
        ("loads", validate_windows),
        ("loads", plan),
        ("loads", lambda x: slot_loads(x, PLACEMENT)),
        ("loads", lambda x: rank_loads(x, PLACEMENT)),
        ("loads", lambda x: placement_balancedness(x, PLACEMENT)),
        ("loads", lambda x: deepseek.rebalance_experts(x, 12, 1, 1, 4)),
        ("rank loads", balancedness),
        ("source_loads", lambda x: plan(source_loads="" if x is None else x)),
    ],
)
def test_loads(field: str, call: Callable[[Any], Any], bad: Any, found: str) -> None:
    refused(f"{field} must be numbers [", lambda: call(bad))
    if not (field == "source_loads" and bad is None):
        refused(found, lambda: call(bad))


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("physical_to_logical", lambda x: Placement(x, E, TOPOLOGY)),
        ("shares", lambda x: Placement(ROW.slots[None], E, TOPOLOGY, x if x is not None else "")),
        ("rows: layer 0: slots", lambda x: Placement.from_rows([PlacementRow(x, None)], E, TOPOLOGY)),
        ("row: slots", lambda x: PLACEMENT.with_row(1, PlacementRow(x, None))),
        ("row: shares", lambda x: PLACEMENT.with_row(1, PlacementRow(ROW.slots, "" if x is None else x))),
    ],
)
def test_slots_and_shares(field: str, call: Callable[[Any], Any]) -> None:
    arrays = (ROW.slots.astype(float), ROW.slots > 3, ROW.slots.astype(object), ROW.slots.astype(complex))
    for bad in (
        None,
        "slots",
        object(),
        3.5,
        [["a"]],
        [[1, 2], [3]],
        [1 << 80],
        ROW.slots[None, None],
        *arrays,
    ):
        refused(f"{field} ", lambda bad=bad: call(bad))  # type: ignore[misc]


ROWS: list[tuple[str, Call]] = [
    ("rows must be a list of PlacementRow, found None", lambda: Placement.from_rows(None, E, TOPOLOGY)),
    ("rows: layer 1 must be a PlacementRow, found None", lambda: Placement.from_rows([ROW, None], E, TOPOLOGY)),
    ("row must be a PlacementRow, found a numpy.ndarray", lambda: PLACEMENT.with_row(0, ROW.slots)),
    ("row must have num_slots=12 slots, found 8", lambda: PLACEMENT.with_row(0, PlacementRow(np.arange(8), None))),
    ("layer 1 slot 0 holds expert 100", lambda: PLACEMENT.with_row(1, PlacementRow(ROW.slots + 100, None))),
    ("source_loads must be [ranks, layers, experts] (4, 2, 8)", lambda: plan(source_loads=LOADS)),
    ("counts must be an array of numbers [2, 8], found None",
     lambda: Replay(L, E, ReplaySettings(4, 4)).feed(None)),
]  # fmt: skip


@pytest.mark.parametrize(("words", "call"), ROWS)
def test_rows(words: str, call: Call) -> None:
    refused(words, call)


# ----------------------------------------------------------------------------- objects and files


@pytest.mark.parametrize(
    ("words", "call", "bad"),
    [
        *((f"{name} must be a Placement", call, NO_PLACEMENTS) for name, call in (
            ("placement", lambda x: slot_loads(LOADS, x)),
            ("placement", lambda x: rank_loads(LOADS, x)),
            ("placement", lambda x: placement_balancedness(LOADS, x)),
            ("placement", lambda x: RebalancePolicy(TOPOLOGY, P).decide(LOADS, x)),
            ("placement", lambda x: save_placement("/nowhere/p.json", x)),
            ("current", lambda x: plan(current=x)),
            ("target", PLACEMENT.moved_slots),
            ("start", lambda x: Replay(L, E, ReplaySettings(4, 4), x)),
        )),
        *((f"{name} must be a Topology", call, (None, 4, "4", {"ep_size": 4})) for name, call in (
            ("topology", lambda x: plan(topology=x)),
            ("topology", lambda x: Placement(PLACEMENT.physical_to_logical, E, x)),
            ("topology", lambda x: Placement.initial(L, E, P, x)),
            ("topology", lambda x: RebalancePolicy(x, P)),
        )),
        ("cost must be a MoveCost", lambda x: plan(cost=x), (1.0, "cheap", {}, PLACEMENT)),
        ("costs must be a TimeCosts", lambda x: PolicySettings(costs=x), (1.0, "cheap")),
        ("settings must be a PolicySettings", lambda x: RebalancePolicy(TOPOLOGY, P, x), (0, {}, "")),
        ("value must be a number or None", figure, ("x", [1], 1j)),
        ("use_bias must be True or False", lambda x: ModelShape(**{**vars(MODEL_SHAPES["dsv3"]), "use_bias": x}), (1,)),
        ("num_layers must be", lambda x: ModelShape(**{**vars(MODEL_SHAPES["dsv3"]), "num_layers": x}), ("58", 0)),
    ],
)  # fmt: skip
def test_objects(words: str, call: Callable[[Any], Any], bad: tuple[Any, ...]) -> None:
    for each in bad:
        refused(words, lambda each=each: call(each))  # type: ignore[misc]


@pytest.mark.parametrize(
    "call",
    [
        load_placement,
        read_logical_count,
        DumpReader,
        open_source,
        load_placement_set,
        lambda path: open_sources([path]),
        lambda path: save_placement(path, PLACEMENT),
        lambda path: update_placement_set(path, "", PLACEMENT),
    ],
)
def test_paths(call: Callable[[Any], Any]) -> None:
    for bad in NOT_PATHS:
        refused("path must be a path, found ", lambda bad=bad: call(bad))  # type: ignore[misc]


def test_nothing_is_written_for_a_wrong_name(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    for field, bad in (
        ("model", None), ("model", b"x"), ("model", "\ud800"), ("phase", 3), ("epoch", "1"), ("epoch", -1),
        ("version", 1.0), ("version", True), ("version", HUGE),
    ):  # fmt: skip
        refused(f"{field} must be", lambda: save_placement(path, PLACEMENT, **{field: bad}))  # noqa: B023
    refused("paths must be a list of paths", lambda: open_sources(str(path)))
    refused("key must be text", lambda: update_placement_set(path, 3, PLACEMENT))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
