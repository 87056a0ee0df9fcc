"""How weights move: limits and the verifying mode."""

from __future__ import annotations

from dataclasses import dataclass

from evenroute.dist.weights.expert_weights import ALIGN
from evenroute.eplb._checks import LEAST_S, MAX_INTEGER, require_bool, require_int, require_seconds


@dataclass(frozen=True)
class MigrationConfig:
    """How a rank moves weights; equal on all ranks.

    Attributes:
        staging_bytes: bound on the memory of all staging buffers of this rank.
        chunk_bytes: most bytes that a rank sends, and receives, in one step (and at most 8 experts: each costs the
            host a few calls).
        max_peers: most ranks that a rank exchanges with in one chunk (2 where one round already has two).
        transfer_limit_s: a chunk that takes longer ends the job (on CUDA 5 s later, counted while it runs).
        verify: compare a checksum of every moved expert when it is staged and again after each commit.
    """

    staging_bytes: int = 2 << 30
    chunk_bytes: int = 64 << 20
    max_peers: int = 4
    transfer_limit_s: float = 30.0
    verify: bool = False

    def __post_init__(self) -> None:
        for name, low in (("staging_bytes", 1), ("chunk_bytes", ALIGN), ("max_peers", 1)):
            require_int(name, getattr(self, name), low, MAX_INTEGER)
        require_seconds("transfer_limit_s", self.transfer_limit_s, LEAST_S)
        require_bool("verify", self.verify)
