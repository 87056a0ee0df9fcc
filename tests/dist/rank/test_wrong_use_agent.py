"""What an engine gets wrong of the rank's agent: one ValueError of one line; nothing is sent, no step has passed."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenroute.dist.groups import join_job, new_cpu_group
from evenroute.dist.rank import agent as agent_module
from evenroute.dist.rank import start as start_module
from evenroute.dist.rank.agent import AgentConfig, RankAgent
from evenroute.dist.weights.mover import TablesOnly
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.dist_wrong_use import E, L, arguments, one_rank, placement, refused

NOTHING = (None, "x", [1], True, 1.5, math.nan, -1, 0, 10**5000, {}, object(), torch.zeros(2))


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    with one_rank() as found:
        yield found


@pytest.fixture(scope="module")
def agent(group: Any) -> Iterator[RankAgent]:
    with RankAgent.start(**arguments(group)) as found:
        yield found


# -------------------------------------------------------------------------------------- RankAgent.start


@pytest.mark.parametrize("value", NOTHING, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config", "config must be a AgentConfig, found"),
        ("placement", "placement must be a Placement, found"),
        ("tables", "tables must be a DispatchTables, found | without update_layer, load, prepare"),
        ("counters", "counters must be a ExpertCounters, found"),
        ("ep_group", "ep_group must be a process group, found"),
        ("mover", "mover must be a LayerMover, found"),
    ],
)
def test_start_takes_its_own_kinds(
    group: Any, monkeypatch: pytest.MonkeyPatch, name: str, words: str, value: Any
) -> None:
    if name == "mover" and value is None:
        pytest.skip("no mover: tables alone")
    monkeypatch.setattr(start_module, "compare_ranks", lambda *_, **__: pytest.fail("something was sent"))
    monkeypatch.setattr(agent_module, "connect", lambda *_: pytest.fail("a socket was made"))
    refused(words, lambda: RankAgent.start(**arguments(group, **{name: value})))


class Lacking:
    """A mover of an engine's own that lacks something."""

    num_buffers: Any = 2

    def __init__(self, *, without: str = "", num_buffers: Any = 2) -> None:
        self.num_buffers = num_buffers
        for name in (
            "load",
            "open_layer",
            "advance",
            "staged",
            "error",
            "commit_layer",
            "discard",
            "in_flight",
        ):
            if name != without:
                setattr(self, name, lambda *_: None)


TABLES = DispatchTables(placement(L, E, E), ep_rank=0, device="cpu")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"placement": placement(L + 1, E, E)}, "tables.num_layers: 2 found, the placement has 3"),
        ({"placement": placement(L, E + 1, E + 1)}, "tables.num_logical_experts: 4 found, the placement has 5"),
        ({"placement": placement(L, E, 2 * E, 2)}, "ep_group: 1 ranks found, the placement is for 2"),
        (
            {"tables": DispatchTables(placement(L, E, 2 * E, 2), ep_rank=1, device="cpu")},
            "tables.num_slots: 8 found, the placement has 4",
        ),
        ({"tables": DispatchTables}, "tables must be a DispatchTables, found the class DispatchTables"),
        ({"tables": TablesOnly(TABLES)}, "tables must be a DispatchTables | without update_layer, prepare"),
        ({"counters": ExpertCounters(L + 1, E, device="cpu")}, "counters.num_layers: 3 found, the placement has 2"),
        (
            {"counters": ExpertCounters(L, E + 1, device="cpu")},
            "counters.num_logical_experts: 5 found, the placement has 4",
        ),
        ({"counters": ExpertCounters}, "counters must be a ExpertCounters, found the class ExpertCounters"),
        ({"mover": Lacking(without="in_flight")}, "mover must be a LayerMover | without in_flight"),
        ({"mover": Lacking(num_buffers=0)}, "mover.num_buffers must be in [1, | found 0"),
        ({"mover": Lacking(num_buffers="2")}, "mover.num_buffers must be an integer, found '2'"),
        ({"config": AgentConfig(top_k=1, record_dir="/no/where")}, "agent.record_dir: /no/where is no folder"),
        ({"config": AgentConfig()}, "agent.top_k: 0 found and no Router counts into these counters yet"),
        ({"on_commit": 3}, "on_commit must be callable as on_commit(layer, row), found 3"),
    ],
)  # fmt: skip
def test_what_start_takes_fits_each_other(
    group: Any, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(start_module, "compare_ranks", lambda *_, **__: pytest.fail("something was sent"))
    refused(words, lambda: RankAgent.start(**arguments(group, **changed)))


def test_tables_of_another_rank(group: Any) -> None:
    tables = DispatchTables(placement(L, E, E), ep_rank=0, device="cpu")
    tables.ep_rank = 3
    refused(
        "tables.ep_rank: 3 found, this is rank 0", lambda: RankAgent.start(**arguments(group, tables=tables))
    )


def test_a_group_that_was_destroyed(group: Any) -> None:
    gone = new_cpu_group(group, limit_s=5.0)
    torch.distributed.destroy_process_group(gone)
    refused(
        "ep_group must be a process group in use, found one that was destroyed",
        lambda: RankAgent.start(**arguments(gone)),
    )


def test_a_bad_key_file_is_told_before_a_group_is_made(
    group: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank.toml").write_text("role = 'rank'\n")
    config = AgentConfig(top_k=1, rebalancer=f"ipc://{tmp_path}/r.sock", keys=str(tmp_path / "rank.toml"))
    monkeypatch.setattr(start_module, "compare_ranks", lambda *_, **__: pytest.fail("something was sent"))
    refused(
        "rank.toml: public_key: expected 40 characters",
        lambda: RankAgent.start(**arguments(group, config=config)),
    )


# -------------------------------------------------------------------------------------- step and close


BAD_STEPS = [
    *(((bad,), {}, "num_tokens must be an integer, found") for bad in ("3", [3], True, 2.5, math.nan, 1j)),
    *(((bad,), {}, "num_tokens must be an integer") for bad in (np.int64(3), torch.tensor(3), np.zeros(2))),
    *(((bad,), {}, "num_tokens must be in [0, 2147483647], found") for bad in (-1, 1 << 31, 1 << 80)),
    *(((3,), {"count": bad}, "count must be True or False") for bad in (1, 0, None, "no", np.True_, [True])),
]


@pytest.mark.parametrize(("args", "options", "words"), BAD_STEPS)
def test_a_refused_step_is_no_step(agent: RankAgent, args: Any, options: Any, words: str) -> None:
    before = agent.step(1).step
    counted = agent.unsent()
    refused(words, lambda: agent.step(*args, **options))
    assert agent.unsent() == counted
    assert agent.step(2).step == before + 1


@pytest.mark.parametrize(
    ("args", "options", "words"), [((None,), {}, "num_tokens must be an integer"), *BAD_STEPS]
)
def test_a_refused_pass_is_no_pass(agent: RankAgent, args: Any, options: Any, words: str) -> None:
    agent.step()
    counted = agent.unsent()
    refused(words, lambda: agent.begin_pass(*args, **options))
    assert agent.unsent() == counted


def test_a_pass_belongs_to_a_step(group: Any) -> None:
    with RankAgent.start(**arguments(group)) as mine:
        with pytest.raises(RuntimeError, match="begin_pass: call step first"):
            mine.begin_pass(3)
        mine.step()
        mine.begin_pass(3)
    with pytest.raises(RuntimeError, match="begin_pass: the agent is closed"):
        mine.begin_pass(3)


def test_the_router_s_experts_a_token(group: Any) -> None:
    """K comes from the router; another number is refused by name, before anything is sent."""
    given = arguments(group)
    Router(RouterConfig(E, 3), given["tables"], given["counters"])
    refused(
        "agent.top_k: 1 found, the router chooses 3 experts a token",
        lambda: RankAgent.start(**given),
    )
    with RankAgent.start(**{**given, "config": AgentConfig(vote_limit_s=5.0)}) as mine:
        assert mine._core.job.top_k == 3


def test_steps_that_are_right(agent: RankAgent) -> None:
    first = agent.step(0).step
    assert agent.step((1 << 31) - 1, count=False).step == first + 1
    assert not agent.step(5, count=False).counted
    assert agent.step(5, count=True).counted


@pytest.mark.parametrize("bad", ["3", [1.0], True, math.nan, math.inf, -1.0, 1e9, 10**400, torch.ones(1), {}])
def test_close_takes_a_time_and_stays_open_without(agent: RankAgent, bad: Any) -> None:
    refused("limit_s must be", lambda: agent.close(bad))
    agent.step(1)


def test_no_step_after_close(group: Any) -> None:
    with RankAgent.start(**arguments(group)) as mine:
        mine.step(1)
        assert mine.close(2) is True
        refused("limit_s must be a finite number, found 'x'", lambda: mine.close("x"))  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="the agent is closed"):
            mine.step(1)
        assert mine.close() is True
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("evenroute-votes") <= 1  # of the other agent here


# -------------------------------------------------------------------------------------- configuration

BAD = {
    str: (None, 3, True, 1.5, ["x"], b"x", torch.zeros(2), "a\nb", "x\0", "\ud800", " x"),
    bool: (None, 0, 1, "true", 1.0, [True], np.True_),
    int: (None, "3", True, 3.0, math.nan, [3], -1, 0, 10**5000, np.int64(3), torch.tensor(3)),
    float: (
        None,
        "3",
        True,
        math.nan,
        math.inf,
        -math.inf,
        [3.0],
        -1,
        0,
        1e30,
        10**400,
        10**5000,
        torch.ones(1),
    ),
}


@pytest.mark.parametrize("field", fields(AgentConfig), ids=lambda field: field.name)
def test_each_field_of_the_config(field: Any) -> None:
    kind = type(field.default)
    for bad in BAD[kind]:
        if field.name == "top_k" and bad == 0 and type(bad) is int:
            continue  # as the router says
        refused(f"agent.{field.name}: | found, expected", lambda b=bad: AgentConfig(**{field.name: b}))


def test_long_texts_stay_one_short_line() -> None:
    for name, bad in (
        ("rebalancer", "x" * 5000),
        ("rebalancer", f"ipc://{'x' * 5000}"),
        ("rebalancer", "tcp://h:" + "9" * 5000),
    ):
        refused(f"agent.{name}: ", lambda n=name, b=bad: AgentConfig(**{n: b}))


# -------------------------------------------------------------------------------------- process groups


@pytest.mark.parametrize("bad", ["", "glo", "x" * 999])
def test_join_job_needs_a_backend_that_torch_has(bad: str) -> None:
    refused("backend= | is not one that this torch has", lambda: join_job(backend=bad, limit_s=5.0))


ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *((name, None, f"{name} is not in the environment") for name in ENVIRONMENT),
        *(("RANK", bad, "RANK: | found in the environment, expected 0 to 0") for bad in ("x", "", "-1", "1", "9" * 99)),
        *(("WORLD_SIZE", bad, "WORLD_SIZE: | expected 1 to") for bad in ("0", "1.5", "²")),
        *(("MASTER_PORT", bad, "MASTER_PORT: | expected 1 to 65535") for bad in ("0", "65536", "http")),
    ],
)  # fmt: skip
def test_join_job_reads_torchruns_environment(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, words: str
) -> None:
    for other, text in ENVIRONMENT.items():
        monkeypatch.setenv(other, text)
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    refused(words, lambda: join_job(backend="gloo", limit_s=5.0))


def test_a_second_close_tells_what_the_first_did(group: Any) -> None:
    """Counts that no rebalancer took are not stored because one asks twice."""
    config = AgentConfig(
        top_k=1,
        rebalancer="tcp://127.0.0.1:1",
        start_limit_s=0.2,
        close_limit_s=0.2,
        window_steps=1,
        agree_every=1,
    )
    agent = RankAgent.start(**arguments(group, config=config))
    for _ in range(3):
        agent.step(5)
    assert agent.close() is False
    assert agent.close() is False
    assert agent.unsent().open_tokens + agent.unsent().in_flight_tokens == 15
