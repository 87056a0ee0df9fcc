"""What the policy remembers: bounded, without noise, and with an eye for rhythm."""

import numpy as np

from evenroute.eplb.planner.history.memory import WindowMemory


def loads(seed: int) -> np.ndarray:
    found = np.random.default_rng(seed).lognormal(0, 1, (2, 32))
    return found / found.sum(axis=1, keepdims=True)


def draw(random: np.random.Generator, truth: np.ndarray) -> np.ndarray:
    return random.multinomial(50_000, truth).astype(float)


def test_windows_of_one_load_become_one_kind_whose_noise_averages_out() -> None:
    random, truth = np.random.default_rng(0), loads(1)
    memory = WindowMemory()
    for _ in range(30):
        memory.remember(draw(random, truth))
    windows, weights = memory.forecast()
    assert weights.tolist() == [1.0]
    assert windows[0].sum(axis=1).tolist() == [30 * 50_000] * 2


def test_a_rhythm_is_foreseen_and_an_old_kind_not_forgotten() -> None:
    random = np.random.default_rng(1)
    kinds = [loads(2), loads(3)]
    memory = WindowMemory()
    for window in range(12):
        memory.remember(draw(random, kinds[window % 2]))
    windows, weights = memory.forecast()
    nearest = [int(np.abs(w / w.sum(axis=1, keepdims=True) - kinds[0]).sum() < 0.1) for w in windows]
    assert sorted(nearest) == [0, 1]
    assert weights[nearest.index(1)] > 0.8, "after the second kind comes the first"
    for _ in range(20):
        memory.remember(draw(random, loads(4)))
    _, weights = memory.forecast()
    assert len(weights) == 3
    assert 0 < weights.min() < 0.1


def test_memory_is_bounded_and_merges_what_is_most_alike() -> None:
    random = np.random.default_rng(2)
    memory = WindowMemory(max_kinds=3)
    a, b, c = loads(5), loads(6), loads(7)
    for truth in (a, b, c, 0.9 * a + 0.1 * b):
        memory.remember(draw(random, truth))
    windows, weights = memory.forecast()
    assert len(windows) == len(weights) == 3
    assert sorted(w.sum() for w in windows) == [100_000, 100_000, 200_000]
    for seed in range(20):
        memory.remember(draw(random, loads(100 + seed)))
        windows, weights = memory.forecast()
        assert len(windows) <= 3
        assert abs(weights.sum() - 1) < 1e-12


def test_the_same_windows_give_the_same_memory() -> None:
    random = np.random.default_rng(3)
    seen = [draw(random, loads(8 + k % 5)) for k in range(20)]
    one, two = WindowMemory(3), WindowMemory(3)
    for window in seen:
        one.remember(window)
    for window in seen:
        two.remember(window)
    assert all(np.array_equal(x, y) for x, y in zip(one.forecast(), two.forecast(), strict=True))


def test_where_traffic_drifts_the_newest_window_counts_most() -> None:
    random = np.random.default_rng(4)
    logs = random.normal(0, 1, (2, 32))
    memory = WindowMemory(4)
    for _ in range(25):
        logs = 0.995 * logs + 0.1 * random.normal(0, 1, logs.shape)
        truth = np.exp(logs) / np.exp(logs).sum(axis=1, keepdims=True)
        newest = random.multinomial(10**6, truth).astype(float)
        memory.remember(newest)
    windows, weights = memory.forecast()
    at = int(weights.argmax())
    assert weights[at] > 0.85
    assert np.array_equal(windows[at], newest), "not averaged with what went before"
