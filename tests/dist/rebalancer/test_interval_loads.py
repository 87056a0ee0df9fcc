"""What the last interval brought: the hottest of each layer, and one layer on request."""

import numpy as np
import pytest

from evenroute.dist.rebalancer.interval_loads import IntervalLoads
from evenroute.dist.wire.control import LayerLoads, LayerRequest
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from support.fake_daemon import ask, make_daemon

PLACEMENT = Placement(np.array([[0, 1, 2, 0], [0, 1, 2, 0], [0, 2, 1, 2]], np.int32), 3, Topology(2))
COUNTS = np.array([[80.0, 10.0, 10.0], [0.0, 0.0, 0.0], [10.0, 60.0, 30.0]])


def test_the_hottest_of_each_layer():
    found = IntervalLoads.of(COUNTS, PLACEMENT)
    assert found.rank_loads.tolist() == [[50, 50], [0, 0], [25, 75]]
    assert found.rank_load == [0.75, 1.25]
    assert found.hottest_rank == [0, -1, 1]
    assert found.hottest_expert == [0, -1, 1]
    assert found.hottest_expert_load == [0.8, 0.0, 0.6]


def test_one_layer():
    found = IntervalLoads.of(COUNTS, PLACEMENT)
    layer = found.of_layer(0)
    assert layer.rank_load == [1.0, 1.0]
    assert layer.layer == 0
    assert [(one.expert, one.load, one.ranks) for one in layer.experts] == [
        (0, 0.8, [0, 1]),
        (1, 0.1, [0]),
        (2, 0.1, [1]),
    ]
    for nothing in (found.of_layer(1), found.of_layer(7), IntervalLoads().of_layer(0)):
        assert (nothing.rank_load, nothing.experts) == ([], [])


@pytest.mark.parametrize("role", ["viewer", "operator", "local"])
def test_who_asks_the_daemon_gets_it(role, tmp_path):
    daemon = make_daemon(tmp_path)
    try:
        daemon.plans.loads = IntervalLoads.of(COUNTS, PLACEMENT)
        found = ask(daemon, LayerRequest(2), role=role)
        assert isinstance(found, LayerLoads)
        assert found.rank_load == [0.5, 1.5]
        assert "may not do this" in ask(daemon, LayerRequest(2), role="rank").reason
    finally:
        daemon._release()
