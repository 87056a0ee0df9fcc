"""The rows that a membership begins with."""

import numpy as np
import pytest

from evenroute.dist.membership.rows import covers, joiner_columns, kept_rows, refilled, rows_digest

ROWS = np.array([[0, 1, 1, 2, 2, 3], [3, 2, 1, 0, 0, 1]], np.int32)  # three ranks of two slots


def test_kept_rows_takes_the_columns_of_those_who_stay_in_their_new_order() -> None:
    found = kept_rows(ROWS, (4, 7, 9), (7, 9))
    assert found.tolist() == [[1, 2, 2, 3], [1, 0, 0, 1]]


def test_joiners_columns_come_behind() -> None:
    added = np.array([[[5, 6], [7, 8]]], np.int32)
    found = kept_rows(ROWS, (4, 7, 9), (4, 7, 9, 12), added)
    assert found[:, 6:].tolist() == [[5, 6], [7, 8]]
    assert np.array_equal(found[:, :6], ROWS)


@pytest.mark.parametrize("seed", range(30))
def test_refilled_rows_cover_all_experts_and_keep_what_they_can(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, local = int(rng.integers(2, 5)), int(rng.integers(2, 5))
    experts = int(rng.integers(local, ranks * local + 1))
    rows = np.stack(
        [np.concatenate([rng.permutation(experts)[:local] for _ in range(ranks)]) for _ in range(3)]
    ).astype(np.int32)
    found = refilled(rows, experts, ranks)
    assert covers(found, experts)
    for before, after in zip(rows, found, strict=True):
        lost = experts - len(set(before.tolist()))
        assert int((before != after).sum()) == lost, "no more slots change than experts were lost"
        assert all(len(set(rank.tolist())) == local for rank in after.reshape(ranks, local))


def test_refilled_takes_from_the_expert_with_most_replicas_the_lowest_first() -> None:
    rows = np.array([[0, 1, 0, 1, 0, 2]], np.int32)
    assert refilled(rows, 4, 3).tolist() == [[3, 1, 0, 1, 0, 2]]


def test_joiners_get_the_heavy_experts_and_none_twice() -> None:
    loads = np.array([[100.0, 1.0, 50.0, 1.0]])
    found = joiner_columns(loads, np.array([[0, 1, 2, 3]], np.int32), 2, 2)
    assert found.shape == (2, 1, 2)
    assert {found[0, 0, 0], found[1, 0, 0]} == {0, 2} or found[0, 0, 0] == 0
    assert all(len(set(column.tolist())) == 2 for column in found[:, 0])


def test_the_digest_sees_number_key_step_and_rows() -> None:
    base = rows_digest(1, (1, 2), 3, ROWS)
    others = [
        rows_digest(2, (1, 2), 3, ROWS),
        rows_digest(1, (1, 3), 3, ROWS),
        rows_digest(1, (1, 2), 4, ROWS),
        rows_digest(1, (1, 2), 3, ROWS[:, ::-1]),
    ]
    assert base not in others
    assert 0 <= base < 2**62
