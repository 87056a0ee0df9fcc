"""`inspect`, `replay`, `advise` and `convert` on the rebalancer's store, also while it is written to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement, row_digest
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.cost import TimeCosts
from evenroute.eplb.planner.plan import plan_placement
from evenroute.eplb.planner.price.measured import MeasuredCosts, RankTimes
from evenroute.eplb.store.schema import IN_USE_EVENT, PublishedPlacement, encode_in_use
from evenroute.eplb.store.writer import HistoryStore, JobRow, RankWindowRow
from support.command import assert_one_line_error, evenroute, evenroute_without
from support.foreign_files import random_counts

LAYERS, EXPERTS, RANKS, SLOTS, TOP_K = 3, 16, 4, 20, 2
JOB = JobRow("toy", "decode", LAYERS, EXPERTS, SLOTS, RANKS, 1, TOP_K, False)
EPOCH = 5 << 20


def add_window(store: HistoryStore, seq: int, counts: np.ndarray, *, now: float, ranks: int = RANKS) -> None:
    """One window of every rank, each with a quarter of the counts (the remainder on rank 0)."""
    part = counts // RANKS
    for rank in range(ranks):
        own = counts - part * (RANKS - 1) if rank == 0 else part
        window = RankWindowRow(7, rank, seq, 10 * (seq - 1), 10 * seq - 1, int(own[0].sum()) // TOP_K, own)
        store.add_windows([window], epoch=EPOCH, now=now)


@pytest.fixture
def counts() -> np.ndarray:
    return random_counts(1, LAYERS, EXPERTS)[0] * 40


@pytest.fixture
def store(tmp_path: Path, counts: np.ndarray) -> HistoryStore:
    """Four windows on the start placement, a plan, four windows on it; the writer stays open."""
    made = HistoryStore(tmp_path / "run.db")
    made.begin_epoch(EPOCH, pid=1, now=0.0)
    made.set_job(7, JOB, epoch=EPOCH, now=0.0)
    for seq in range(1, 5):
        add_window(made, seq, counts, now=1000.0 + seq)
    plan = plan_placement(counts, topology=Topology(RANKS), num_slots=SLOTS)
    made.add_placement(
        PublishedPlacement(
            1004.5,
            EPOCH,
            1,
            plan.placement,
            plan.moves,
            plan.policy,
            plan.reason,
            balancedness_before=plan.before.mean,
            balancedness_predicted=plan.predicted.mean,
        )
    )
    for seq in range(5, 9):
        add_window(made, seq, counts, now=1000.0 + seq)
    return made


def test_before_predicted_achieved(store: HistoryStore, counts: np.ndarray, tmp_path: Path) -> None:
    facts = evenroute("inspect", tmp_path / "run.db", "--json").json["sources"][0]
    assert (facts["model"], facts["phase"], facts["ep_size"]) == ("toy", "decode", RANKS)
    assert facts["ranks"] == [0, 1, 2, 3]
    assert facts["num_windows"] == 8
    assert facts["routed"] == 8 * int(counts.sum())
    assert (facts["first_step"], facts["last_step"]) == (0, 79)
    start = Placement.initial(LAYERS, EXPERTS, SLOTS, Topology(RANKS))
    before = balancedness(rank_loads(counts, start)).mean
    means = [point["mean"] for point in facts["balancedness_over_time"]]
    assert means[:4] == pytest.approx([before] * 4)
    (placement,) = facts["placements"]
    assert placement["achieved"] == pytest.approx(placement["predicted"])
    assert placement["achieved"] > before
    text = evenroute("inspect", tmp_path / "run.db")
    assert "Placements and their effect" in text.out
    assert f"{EPOCH:x}/1" in text.out


def test_windows_lie_on_the_placement_in_use_at_their_time(tmp_path: Path, counts: np.ndarray) -> None:
    """A job that began with a placement of its own, and switched to a published one three windows after that."""
    rng = np.random.default_rng(5)
    rows = np.stack(
        [np.r_[rng.permutation(EXPERTS), rng.permutation(EXPERTS)[: SLOTS - EXPERTS]] for _ in range(LAYERS)]
    )
    rows = np.take_along_axis(rows, np.argsort(rng.random(rows.shape), axis=1), axis=1)
    for row in rows:  # no expert twice on a rank
        while any(len(set(part)) < SLOTS // RANKS for part in row.reshape(RANKS, -1)):
            rng.shuffle(row)
    start = Placement(rows.astype(np.int32), EXPERTS, Topology(RANKS))
    planned = plan_placement(counts, topology=Topology(RANKS), num_slots=SLOTS, current=start)
    half = Placement.from_rows(
        [planned.placement.row(0), start.row(1), start.row(2)], EXPERTS, Topology(RANKS)
    )
    with HistoryStore(tmp_path / "run.db") as made:
        made.begin_epoch(EPOCH, pid=1, now=0.0)
        made.set_job(7, JOB, epoch=EPOCH, now=0.0)
        add_window(made, 1, counts, now=1001.0)  # before anything was told

        def in_use(placement: Placement, key: tuple[int, int], now: float) -> None:
            for layer in range(LAYERS):
                row = placement.row(layer)
                made.keep_row(row_digest(*row), row, epoch=EPOCH)
            text = encode_in_use(7, key, placement.row_digests().astype("<i8").tobytes())
            made.add_event(IN_USE_EVENT, text, epoch=EPOCH, now=now)

        in_use(start, (0, 0), 1001.5)
        add_window(made, 2, counts, now=1002.0)
        made.add_placement(
            PublishedPlacement(
                1002.5,
                EPOCH,
                1,
                planned.placement,
                planned.moves,
                planned.policy,
                planned.reason,
                balancedness_before=planned.before.mean,
                balancedness_predicted=planned.predicted.mean,
            )
        )
        for seq in (3, 4):  # published, and not in use
            add_window(made, seq, counts, now=1000.0 + seq)
        in_use(half, (0, 0), 1004.5)
        add_window(made, 5, counts, now=1005.0)
        in_use(planned.placement, (EPOCH, 1), 1005.5)
        for seq in (6, 7):
            add_window(made, seq, counts, now=1000.0 + seq)
    facts = evenroute("inspect", tmp_path / "run.db", "--json").json["sources"][0]
    plain = Placement.initial(LAYERS, EXPERTS, SLOTS, Topology(RANKS))
    used = [plain, start, start, start, half, planned.placement, planned.placement]
    assert [point["mean"] for point in facts["balancedness_over_time"]] == pytest.approx(
        [balancedness(rank_loads(counts, placement)).mean for placement in used]
    )
    assert facts["placements_are"] == "in use"
    assert facts["num_windows_without_placement"] == 1
    assert [(p["epoch"], p["version"]) for p in facts["placements"]] == [(0, 0), (0, 0), (EPOCH, 1)]
    assert facts["placements"][2]["achieved"] == pytest.approx(planned.predicted.mean)
    assert facts["placements"][0]["reason"] == "the job's start placement"
    text = " ".join(evenroute("inspect", tmp_path / "run.db").out.split())
    assert "with the placements in use, as recorded" in text
    assert "the first window is put on experts in order: what was in use then is not recorded" in text


def test_a_store_that_lacks_what_was_in_use_says_so(
    store: HistoryStore, counts: np.ndarray, tmp_path: Path
) -> None:
    text = " ".join(evenroute("inspect", tmp_path / "run.db").out.split())
    assert "the placements as published (when they came into use is not recorded)" in text
    assert "the first 4 windows are put on experts in order: what was in use then is not recorded" in text
    with HistoryStore(tmp_path / "bare.db") as made:
        made.begin_epoch(EPOCH, pid=1, now=0.0)
        made.set_job(7, JOB, epoch=EPOCH, now=0.0)
        add_window(made, 1, counts, now=1001.0)
    facts = evenroute("inspect", tmp_path / "bare.db", "--json").json["sources"][0]
    assert facts["placement"] == "experts in order over 4 ranks (the placement in use is not recorded)"


def test_readable_while_written(store: HistoryStore, counts: np.ndarray, tmp_path: Path) -> None:
    for seq in range(9, 13):
        add_window(store, seq, counts, now=1000.0 + seq)
        facts = evenroute("inspect", tmp_path / "run.db", "--json").json["sources"][0]
        assert facts["num_windows"] == seq


def test_a_window_that_lacks_ranks_is_incomplete(
    store: HistoryStore, counts: np.ndarray, tmp_path: Path
) -> None:
    add_window(store, 9, counts, now=1010.0, ranks=2)
    facts = evenroute("inspect", tmp_path / "run.db", "--json").json["sources"][0]
    assert facts["num_incomplete_windows"] == 1
    assert "1 incomplete" in evenroute("inspect", tmp_path / "run.db").out


def test_replay_advise_convert(store: HistoryStore, tmp_path: Path) -> None:
    store.close()
    path = tmp_path / "run.db"
    runs = evenroute("replay", path, "--json").json["runs"]
    assert runs[0]["settings"]["ep_size"] == RANKS
    assert len(runs[0]["points"]) == 8
    facts = evenroute("advise", path, "--json").json
    assert facts["top_k"] == TOP_K
    assert facts["ep_size_is"] == "recorded"
    assert facts["balancedness_recorded"] > 0.8
    out = tmp_path / "out.json"
    assert evenroute("convert", path, out, "--to", "sglang", "--what", "placement").status == 0
    assert len(json.loads(out.read_text())["physical_to_logical_map"]) == LAYERS
    assert evenroute("convert", path, tmp_path / "d.evd", "--to", "evenroute", "--what", "loads").status == 0
    again = evenroute("inspect", tmp_path / "d.evd", "--json").json["sources"][0]
    assert again["placements"][0]["achieved"] == pytest.approx(runs[1]["points"][-1]["mean"], abs=0.05)


def test_page_of_a_store(store: HistoryStore, tmp_path: Path) -> None:
    outcome = evenroute("inspect", tmp_path / "run.db", "--html", tmp_path / "page.html")
    assert outcome.status == 0, outcome.err
    assert '"version":1' in (tmp_path / "page.html").read_text()


def test_without_torch(store: HistoryStore, tmp_path: Path) -> None:
    store.close()
    outcome = evenroute_without("torch", "inspect", tmp_path / "run.db", "--json")
    assert outcome.status == 0, outcome.err


def test_a_store_without_a_job_and_a_damaged_one(store: HistoryStore, tmp_path: Path) -> None:
    HistoryStore(tmp_path / "new.db").close()
    assert_one_line_error(evenroute("inspect", tmp_path / "new.db"), "new.db", "no job yet")
    store.close()
    data = (tmp_path / "run.db").read_bytes()
    for size in (0, 1, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.db").write_bytes(data[:size])
        assert_one_line_error(evenroute("inspect", tmp_path / "cut.db"), str(tmp_path / "cut.db"))
    other = bytearray(data)
    other[68:72] = b"nope"  # application_id
    (tmp_path / "other.db").write_bytes(bytes(other))
    assert_one_line_error(evenroute("inspect", tmp_path / "other.db"), "other.db", "not an evenroute store")


def test_advise_replay_and_plan_use_the_slots_and_the_placement_in_use(
    store: HistoryStore, counts: np.ndarray, tmp_path: Path
) -> None:
    path = tmp_path / "run.db"
    newest = next(iter(store.placements(newest_first=True))).placement
    now = balancedness(rank_loads(counts.astype(float), newest))

    advice = evenroute("advise", path, "--json").json
    assert advice["placement_now"] == f"the newest placement published in run.db ({SLOTS} slots)"
    assert advice["balancedness_now"] == pytest.approx(now.mean)
    assert advice["num_redundant_experts"] == SLOTS - EXPERTS

    runs = evenroute("replay", path, "--policy", "none,rebalancer", "--json").json["runs"]
    assert {run["num_slots"] for run in runs} == {SLOTS}
    # The only placement came into use after the first windows, so runs cannot begin with it.
    assert {run["begins_with"] for run in runs} == {"experts in order, redundant slots round-robin"}

    size = ("--ep-size", RANKS, "--num-slots", SLOTS)
    plan = evenroute("plan", path, *size, "--policy", "stay", "--json").json
    assert plan["baseline"] == f"the newest placement published in run.db ({SLOTS} slots)"
    assert plan["balancedness_before"]["mean"] == pytest.approx(now.mean)
    assert f"before: {plan['baseline']}" in evenroute("plan", path, *size, "--policy", "stay").out
    other = evenroute("plan", path, "--ep-size", RANKS, "--num-slots", SLOTS + RANKS, "--json").json
    assert other["baseline"] == "experts in order, redundant slots round-robin"


def test_a_replay_begins_with_the_placement_in_use_at_the_first_window(
    counts: np.ndarray, tmp_path: Path
) -> None:
    made = HistoryStore(tmp_path / "run.db")
    made.begin_epoch(EPOCH, pid=1, now=0.0)
    made.set_job(7, JOB, epoch=EPOCH, now=0.0)
    plan = plan_placement(counts, topology=Topology(RANKS), num_slots=SLOTS)
    made.add_placement(PublishedPlacement(999.0, EPOCH, 1, plan.placement, plan.moves, 'taken-up', ''))  # fmt: skip
    for seq in (1, 2):
        add_window(made, seq, counts, now=1000.0 + seq)
    (run,) = evenroute("replay", tmp_path / "run.db", "--policy", "none", "--json").json["runs"]
    assert run["begins_with"] == f"the first placement published in run.db ({SLOTS} slots)"
    assert run["points"][0]["mean"] == pytest.approx(
        balancedness(rank_loads(counts.astype(float), plan.placement)).mean
    )


def test_a_replay_prices_moves_with_what_the_ranks_measured(store: HistoryStore, tmp_path: Path) -> None:
    measured = MeasuredCosts()
    for rank in range(RANKS):
        measured.add(7, rank, RankTimes(10, 0.02, lost_seconds=2.0, transfer_seconds=4.0, slots=8))
    shape = [LAYERS, EXPERTS, SLOTS, RANKS]
    call = ("replay", tmp_path / "run.db", "--policy", "rebalancer")
    for price, source in (
        ({"shape": shape, "measured": measured.state, "worth": {}}, "measured"),
        ({"shape": [*shape[:-1], RANKS + 1], "measured": measured.state}, "default"),
        ({"shape": shape, "measured": {"moved": {"slots": "many"}}}, "default"),
        ([1], "default"),
    ):
        store.set_setting("price", json.dumps(price), epoch=EPOCH)
        (run,) = evenroute(*call, "--json").json["runs"]
        costs = TimeCosts(**run["settings"]["costs"])
        assert costs.source == source
        assert run["priced"] == costs.told()
        if source == "measured":
            assert costs.moving(8, RANKS) == pytest.approx(2.0)
    assert (
        "The rebalancer's moves are priced: a slot costs its rank 1.76 ms (default)" in evenroute(*call).out
    )
