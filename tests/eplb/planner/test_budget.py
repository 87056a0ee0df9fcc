"""A budget of moves over layers: steepest segments first, within every limit."""

import numpy as np
import pytest

from evenroute.eplb.planner.budget import Hulls, Limits, Paths, choose_points, spend_leftover


def hulls(*layers: list[tuple[int, float]]) -> Hulls:
    """One list of (cost, value) a layer."""
    width = max(map(len, layers))
    cost, value = np.zeros((len(layers), width), np.int64), np.zeros((len(layers), width))
    for layer, points in enumerate(layers):
        for at, (moves, worth) in enumerate(points):
            cost[layer, at], value[layer, at] = moves, worth
    nothing = np.zeros_like(cost)
    return Hulls(cost, value, nothing, nothing, np.array([len(points) for points in layers]))


STEEP = [(0, 0.5), (1, 0.7), (3, 0.8)]
FLAT = [(0, 0.6), (2, 0.7), (3, 0.71)]


@pytest.mark.parametrize(
    ("limits", "points"),
    [
        (Limits(), [2, 2]),
        (Limits(max_moves=0), [0, 0]),
        (Limits(max_moves=1), [1, 0]),
        (Limits(max_moves=3), [2, 0]),
        (Limits(max_moves=5), [2, 1]),
        (Limits(target=1.1), [0, 0]),  # where it begins
        (Limits(target=1.25), [1, 0]),
        (Limits(target=1.4), [2, 0]),
        (Limits(price=0.02), [2, 1]),
        (Limits(price=0.06), [1, 0]),
        (Limits(price=1.0), [0, 0]),
    ],
)
def test_where_it_stops(limits: Limits, points: list[int]) -> None:
    assert choose_points(hulls(STEEP, FLAT), limits).tolist() == points


def test_a_layer_whose_next_segment_does_not_fit_leaves_the_budget_to_the_others() -> None:
    wide, small = [(0, 0.0), (4, 0.8)], [(0, 0.0), (1, 0.1), (2, 0.15)]
    assert choose_points(hulls(wide, small), Limits(max_moves=3)).tolist() == [0, 2]
    refused = choose_points(hulls(wide, small), Limits(max_moves=6), lambda layer, point: layer != 0)
    assert refused.tolist() == [0, 2]
    asked: list[tuple[int, int]] = []
    choose_points(hulls(STEEP), Limits(), lambda *at: not asked.append(at))
    assert asked == [(0, 1), (0, 2)]


def test_of_equal_slopes_the_lower_layer_goes_first() -> None:
    assert choose_points(hulls(STEEP, STEEP), Limits(max_moves=1)).tolist() == [1, 0]


def test_what_is_left_goes_to_the_largest_rise_that_it_can_pay() -> None:
    # Two layers, one way each: layer 0 stands at 2 of its 3 moves, layer 1 at none.
    paths = Paths.empty(1, 2, 3)
    paths.costs[0] = [[0, 1, 2, 3], [0, 1, 2, 3]]
    paths.lengths[0] = [3, 2]
    values = np.array([[[0.0, 0.1, 0.5, 0.55], [0.2, 0.3, 0.6, 9.0]]])  # the last is beyond its length

    def spent(max_moves: int) -> list[int]:
        path, step = np.zeros(2, np.int64), np.array([2, 0])
        spend_leftover(paths, values, path, step, max_moves)
        return step.tolist()

    assert spent(2) == [2, 0]
    assert spent(3) == [2, 1]
    assert spent(4) == [2, 2]
    assert spent(5) == [3, 2]
    assert spent(50) == [3, 2]


def test_of_equal_rises_the_cheapest_is_taken() -> None:
    paths = Paths.empty(2, 1, 2)
    paths.costs[:] = [[[0, 2, 3]], [[0, 1, 2]]]
    paths.lengths[:] = [[2], [2]]
    values = np.array([[[0.0, 0.5, 0.5]], [[0.0, 0.5, 0.4]]])
    path, step = np.zeros(1, np.int64), np.zeros(1, np.int64)
    spend_leftover(paths, values, path, step, 3)
    assert (path.tolist(), step.tolist()) == ([1], [1])
