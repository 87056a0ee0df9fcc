"""Loads over time, out of a store that is being written: nothing twice or lost, each window on its placement."""

from __future__ import annotations

import time

import numpy as np
import pytest

from evenroute.dist.web.bins import MAX_BINS, TimeBin, TimeBins, point_of
from evenroute.dist.web.history import LoadHistory
from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.planner.plan import plan_placement
from support.live_page import EPOCH, Story


@pytest.fixture
def story(tmp_path):
    return Story(tmp_path / "run.db", layers=2, experts=8, slots=12, ranks=4)


def window(tokens=10, load=1.0):
    loads = np.full((1, 2), load, np.float32)
    return TimeBin(0.0, 1.0, loads, loads, loads, tokens, 0, 0)


def tokens(found):
    return sum(one.tokens for one in found.bins)


def test_windows_are_summed_once_however_often_it_is_read(story):
    story.use(1000.0)
    history = LoadHistory(story.path)
    start = time.time() - 300
    for number in range(120):
        story.window(start + 2 * number, 0, tokens=100)
        if number % 7 == 0:
            history.advance()
            assert tokens(history.snapshot) == 100 * (number + 1)
    history.advance()
    version = history.snapshot.version
    history.advance()
    assert history.snapshot.version == version, "nothing new, nothing changed"
    assert len(history.snapshot.bins) <= MAX_BINS
    assert tokens(history.snapshot) == 12_000
    times = [one.start for one in history.snapshot.bins]
    assert times == sorted(times)


def test_a_row_that_other_ranks_still_add_to_is_read_again(story):
    history = LoadHistory(story.path)
    now = time.time()
    story.window(now - 4, 0, tokens=100)
    history.advance()
    story.store._connection.execute("UPDATE windows SET tokens = 250, time = ?", (now,))
    history.advance()
    assert tokens(history.snapshot) == 250


def test_each_window_lies_on_the_placement_of_its_time(story):
    now = time.time()
    story.use(now - 100)
    story.window(now - 90, 0)
    before = story.live
    story.live = plan_placement(
        story.kinds[0] * 1e6, topology=story.topology, num_slots=12, current=before, policy="global"
    ).placement
    story.version = 1
    story.use(now - 50)
    story.window(now - 10, 0)
    history = LoadHistory(story.path)
    history.advance()
    first, *_, last = history.snapshot.bins
    counts = [row.counts for row in story.store.windows()]
    for found, placement, count in ((first, before, counts[0]), (last, story.live, counts[1])):
        assert found.loads == pytest.approx(rank_loads(count, placement), rel=1e-5)
        assert found.without == pytest.approx(rank_loads(count, before), rel=1e-5)
    assert point_of(last).balancedness == pytest.approx(balancedness(last.loads).total)
    assert point_of(last).balancedness > point_of(first).balancedness + 0.05
    assert history.snapshot.in_use[-1][1] == (EPOCH, 1)
    assert np.array_equal(history.snapshot.placement.physical_to_logical, story.live.physical_to_logical)


def test_what_the_store_has_summed_up_is_one_point_an_hour(story):
    now = 3600.0 * 500_000 + 1800  # the middle of an hour
    for hours in (30, 30, 29, 12):
        for number in range(3):
            story.window(now - 3600 * hours + number, 0, tokens=100)
    story.window(now - 3600 * 20, 0, tokens=100)  # alone in its hour: nothing to sum up
    story.store.roll_up(before=now - 7200, span_s=3600.0, epoch=EPOCH)
    while story.store.roll_up(before=now - 7200, span_s=3600.0, epoch=EPOCH):
        pass
    story.window(now, 0, tokens=100)
    history = LoadHistory(story.path)
    history.advance()
    points = history.snapshot.points
    assert sum(point.tokens for point in points) == 1400
    assert len(points) == 5
    assert points[-1].tokens == 100


def test_bins_double_their_width_and_then_retire():
    bins = TimeBins()
    for second in range(2 * 3600):
        bins.add(1e9 + second, window())
    assert len(bins.in_order()) <= MAX_BINS
    assert bins.width == 64.0
    assert sum(one.tokens for one in bins.in_order()) + sum(one.tokens for one in bins.older) == 20 * 3600
    now = bins.now()
    assert 64 <= now.seconds <= 128
    assert now.counts is not None
    assert bins.in_order()[0].counts is None, "counts are kept for the newest alone"


def test_a_store_that_is_not_there_is_told_and_read_once_it_is(tmp_path):
    history = LoadHistory(tmp_path / "run.db")
    history.advance()
    assert "no such file" in history.snapshot.problem
    story = Story(tmp_path / "run.db", layers=2, experts=8, slots=12, ranks=4)
    story.window(time.time(), 0)
    history.advance()
    assert history.snapshot.problem == ""
    assert tokens(history.snapshot) == 40_000


def test_a_job_of_another_shape_begins_anew(tmp_path):
    story = Story(tmp_path / "run.db", layers=2, experts=8, slots=12, ranks=4)
    story.window(time.time(), 0)
    history = LoadHistory(story.path)
    history.advance()
    job = story.store.job()
    other = type(job)(**{**vars(job), "num_slots": 16})
    story.store.set_job(7, other, epoch=EPOCH, now=time.time())
    history.advance()
    assert history.snapshot.bins == ()
    assert history.snapshot.job == other
