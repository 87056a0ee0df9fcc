"""Step times: a median without pauses, and what moving costs beside it."""

import pytest

from evenroute.dist.rank import clock
from evenroute.dist.rank.clock import StepTimer
from evenroute.dist.weights.mover import MoveTotals


class Mover:
    def __init__(self) -> None:
        self.totals = MoveTotals()


@pytest.fixture
def run(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])

    def steps(made, times, *, chunks=lambda step: False, mover=None):
        for number, seconds in enumerate(times):
            made.begin()
            if chunks(number):
                mover.totals.chunks += 1
                mover.totals.slots += 2
                mover.totals.seconds += 0.01
            made.enqueued(())
            now[0] += seconds
        made.begin()

    return steps


def test_pauses_between_requests_are_no_step_time(run) -> None:
    sent = []
    run(StepTimer(sent.append, 7, 3, object(), every_s=1.0), [0.02] * 60 + [90.0] + [0.02] * 60)
    assert [(one.run, one.rank, one.step_s) for one in sent] == [(7, 3, pytest.approx(0.02))] * len(sent)
    assert sum(one.steps for one in sent) <= 121
    assert 2 <= len(sent) <= 4, "at most one in every_s seconds"
    assert sent[-1].lost_s == sent[-1].slots == 0


def test_steps_in_which_weights_moved_are_left_out_and_their_loss_is_counted(run) -> None:
    sent, mover = [], Mover()
    made = StepTimer(sent.append, 1, 0, mover, every_s=1.0)
    times = [0.05 if 20 <= k < 30 else 0.02 for k in range(200)]
    run(made, times, chunks=lambda k: 20 <= k < 30, mover=mover)
    assert [one.step_s for one in sent] == [pytest.approx(0.02)] * len(sent)
    assert sent[-1].lost_s == pytest.approx(10 * 0.03)
    assert (sent[-1].slots, sent[-1].transfer_s) == (20, pytest.approx(0.1))
    assert [one.lost_s for one in sent] == sorted(one.lost_s for one in sent), "since the run began"


def test_moving_that_makes_steps_no_longer_costs_nothing(run) -> None:
    sent, mover = [], Mover()
    run(StepTimer(sent.append, 1, 0, mover, every_s=1.0), [0.02] * 100, chunks=lambda k: k % 2, mover=mover)
    assert sent[-1].slots > 0
    assert sent[-1].lost_s == pytest.approx(0.0, abs=1e-6)
