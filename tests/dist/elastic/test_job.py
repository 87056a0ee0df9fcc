"""Real processes: a real MoE on gloo, every output checked with one process, while ranks die, stop, join and leave."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from evenroute.dist.membership.ledger import MEMBERSHIP_EVENT
from evenroute.dist.wire.membership import record_from_text
from evenroute.eplb.store.reader import StoreReader
from evenroute.tools.elastic.drive import ElasticRun
from support.control_plane import patience

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KILL_S, STOP_S = 2.0, 5.0
"""From a kill (a stop) to correct outputs on every survivor, with a collective's limit of 2 s and a silence of 1 s, on
a host with cores to spare; `patience` stretches them elsewhere."""
HANGS_S = 120.0
"""What takes so long hangs."""


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes find the tests' support, too."""
    here = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))


def check_ends(run: ElasticRun, *, living: int) -> None:
    """All who lived ended as they should, every batch once, and their counts are in the store to the row."""
    ends = run.stop()
    assert len(ends) == living
    for end in ends:
        assert end["finished"], end
        assert end["stored"], end
        assert end["twice"] == 0
        assert end["worst"] < 1e-5
    with StoreReader(run.store()) as store:
        records = [record_from_text(e.text) for e in store.events() if e.kind == MEMBERSHIP_EVENT]
        stored: Counter[int] = Counter()
        for record in records:
            for rank, number in enumerate(record.numbers):
                states = [state for state in store.rank_states(record.run) if state.rank == rank]
                stored[number] += sum(state.tokens for state in states)
    for end in ends:
        assert stored[end["member"]] == end["announced"]


def test_a_kill_of_each_rank_then_of_two_one_after_the_other() -> None:
    with ElasticRun(4, quiet=True) as run:
        for place in range(4):
            run.go_on(20)
            number = run.newest()[0]
            member = next(event["member"] for event in run.serving(number) if event["rank"] == place)
            victim = run.members()[member]
            at = run.kill(victim)
            assert run.recovered([victim], at, HANGS_S).seconds < KILL_S * patience()
            run.launcher.join()
            run.grown(4, time.monotonic(), HANGS_S)
        for left in (3, 2):
            run.go_on(5)
            victim = random.Random(left).choice(list(run.members().values()))
            at = run.kill(victim)
            back = run.recovered([victim], at, HANGS_S)
            assert back.ranks == left
            assert back.seconds < KILL_S * patience()
        run.go_on(30)
        check_ends(run, living=2)


@pytest.mark.parametrize("place", ["forward", "decided", "commit", "transfer"])
def test_a_death_in_the_middle_of_a_step_of_a_migration_and_between_vote_and_commit(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENROUTE_DIE", f"{place}@2@40")
    planner = {"interval": 0.5, "policy": "global"}
    with ElasticRun(4, quiet=True, module="support.elastic_rank", planner=planner) as run:
        victim = run.members()[2]
        run.until(lambda: victim.process.poll() is not None, HANGS_S, f"a death in {place}")
        at = time.monotonic()
        assert run.recovered([victim], at - 0.1, HANGS_S).seconds < KILL_S * patience()
        run.go_on(40)
        check_ends(run, living=3)


def test_a_stop_and_a_late_ghost() -> None:
    with ElasticRun(4, quiet=True) as run:
        run.go_on(20)
        victim = run.members()[1]
        at = run.kill(victim, signal.SIGSTOP)
        assert run.recovered([victim], at, HANGS_S).seconds < STOP_S * patience()
        run.until(lambda: time.monotonic() > at + 60.0, 90.0, "a minute")
        steps = run.last_step()
        os.kill(victim.pid, signal.SIGCONT)
        assert victim.process.wait(10.0) == 3
        lines = [line for line in run.log() if "evenroute: " in line]
        assert len(lines) == 1
        assert "is not in membership 2" in lines[0]
        run.until(lambda: run.last_step() > steps + 20, 30.0, "the others to go on")
        assert run.newest()[0] == 2, "the ghost changed nothing"
        check_ends(run, living=3)


def test_two_four_three_five_ranks_under_traffic() -> None:
    with ElasticRun(2, quiet=True, planner={"interval": 1.0}) as run:
        longest = 0.0
        for ranks in (4, 3, 5):
            run.go_on(20)
            before = run.newest()[1]
            run.scale(ranks)
            while run.newest()[1] != ranks or len(run.serving(run.newest()[0])) != ranks:
                run.until(lambda before=before: run.newest()[1] != before, HANGS_S, f"{ranks} ranks")
                before = run.newest()[1]
                run.until(
                    lambda: len(run.serving(run.newest()[0])) == run.newest()[1], HANGS_S, "all to serve"
                )
            longest = max(longest, *(event["paused"] for event in run.serving(run.newest()[0])))
        print(f"longest pause {longest:.2f} s")
        assert longest < KILL_S * patience()
        assert not [event for event in run.events if event["kind"] == "not-done"], (
            "announced: nothing is repeated"
        )
        published = run.status_field("placements").get("published", 0)
        run.until(
            lambda: (
                run.status_field("placements").get("published", 0) >= published + 2
                or run.status_field("last_action") == "stay"
            ),
            60.0,
            "two plans",
        )
        assert run.status_field("balancedness_total") > 0.8
        check_ends(run, living=5)


def test_fifty_random_kills() -> None:
    rng = random.Random(11)
    with ElasticRun(4, quiet=True) as run:
        slowest = 0.0
        for _ in range(50):
            time.sleep(rng.uniform(0.0, 0.3))
            victim = rng.choice(list(run.members().values()))
            at = run.kill(victim)
            back = run.recovered([victim], at, HANGS_S)
            slowest = max(slowest, back.seconds)
            run.launcher.join()
            run.grown(back.ranks + 1, time.monotonic(), HANGS_S)
        print(f"slowest of 50: {slowest:.2f} s")
        assert slowest < KILL_S * patience()
        run.go_on(20)
        check_ends(run, living=4)
