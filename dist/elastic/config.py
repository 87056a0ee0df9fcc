"""Settings of a job whose ranks come and go, and what its launcher tells a process."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field, replace

from evenroute.dist.config import AgentConfig
from evenroute.eplb._checks import LEAST_S, require_instance, require_int, require_seconds, require_text

IDENTITY = "EVENROUTE_MEMBER"
JOIN = "EVENROUTE_JOIN"
LAUNCHED = "EVENROUTE_LAUNCHED"


@dataclass(frozen=True)
class ElasticConfig:
    """One process's settings; the limits are equal on all. Times in seconds.

    Attributes:
        agent: the rank agent's; a rebalancer is required, and ``agree_every`` is 1 here: a vote each step.
        host: where the other ranks reach this process's store (its pod's address; loopback on one host).
        node: number of its host, for the topology.
        collective_limit_s: a collective that takes longer has failed; longer than ranks' steps ever differ. A stopped
            rank is noticed by it.
        form_limit_s: members that do not come to form a membership's groups within it are missing.
        membership_limit_s: without a rebalancer's record for so long after a halt the process ends.
    """

    agent: AgentConfig = field(default_factory=AgentConfig)
    host: str = "127.0.0.1"
    node: int = 0
    collective_limit_s: float = 2.0
    form_limit_s: float = 30.0
    membership_limit_s: float = 60.0

    def __post_init__(self) -> None:
        require_instance("agent", self.agent, AgentConfig)
        require_text("host", self.host)
        require_int("node", self.node, 0, 65535)
        for name in ("collective_limit_s", "form_limit_s", "membership_limit_s"):
            require_seconds(name, getattr(self, name), LEAST_S)
        if not self.agent.rebalancer:
            raise ValueError(
                'agent.rebalancer: "" found; a job whose ranks come and go needs a rebalancer, which alone decides '
                "who is in it"
            )
        if self.agent.mode == "shadow":
            raise ValueError("agent.mode: 'shadow' found; a job whose ranks come and go is balanced")
        settings = replace(
            self.agent, agree_every=1, require_rebalancer=True, vote_limit_s=self.collective_limit_s
        )
        object.__setattr__(self, "agent", settings)


@dataclass(frozen=True)
class ProcessPlace:
    """What the environment says: torchrun's variables, and those of `evenroute launch`."""

    rank: int
    world_size: int
    address: str
    port: int
    identity: int
    joins: bool
    hosts: bool  # this process hosts the store at which the first ranks meet

    @classmethod
    def from_environment(cls) -> ProcessPlace:
        """Read it. Raises ValueError that names a variable which is missing or no number."""
        joins = os.environ.get(JOIN) == "1"
        rank = 0 if joins else _number("RANK")
        size = 1 if joins else _number("WORLD_SIZE")
        address = "" if joins else os.environ.get("MASTER_ADDR", "")
        if not joins and not address:
            raise ValueError("MASTER_ADDR is not in the environment; expected as `evenroute launch` sets it")
        port = 0 if joins else _number("MASTER_PORT")
        identity = _number(IDENTITY) if IDENTITY in os.environ else secrets.randbits(62)
        return cls(rank, size, address, port, identity, joins, rank == 0 and LAUNCHED not in os.environ)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise ValueError(
            f"{name}: {text!r} found in the environment, expected a number as `evenroute launch` sets it"
        )
    return int(text)
