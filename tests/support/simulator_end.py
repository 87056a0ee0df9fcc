"""What has to hold once the faults of a schedule have stopped, and a message in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenroute.dist.wire.messages import (
    Down,
    PlacementMessage,
    RankStatus,
    RankWindow,
    Up,
)
from support.simulator_history import (
    counts_are_accounted_for,
)

if TYPE_CHECKING:
    from support.simulator_world import World


def all_acknowledged(world: World) -> bool:
    # A store sees from the next window what an earlier one had: each rank needs one after the faults.
    reporting = world.job.ranks[:1] if world.knobs.shared_counts else world.job.ranks
    return bool(reporting) and all(
        rank.core.stream.windows_acknowledged > world.sealed.get(rank, 0) for rank in reporting
    )


def unfinished(world: World) -> list[str]:
    """What has not converged yet."""
    master, job = world.master, world.job
    if not world.final_is_out() or world.counting:
        return ["the last version is not published"]
    if master is None or not master.alive or master.core.newest is None or not job.ranks:
        return ["no master or no job"]
    found = []
    core = master.core
    newest = master.core.newest
    if core.view is None or core.view.run != job.run:
        return ["the rebalancer does not know the run"]
    for rank in job.ranks:
        if any(key != newest.key for key in rank.keys):
            found.append(f"rank {rank.rank} routes with {rank.keys}, newest is {newest.key}")
        if rank.window_tokens or rank.core.unsent().in_flight_steps or rank.core.unsent().open_steps:
            found.append(f"rank {rank.rank} has counts that are not stored")
    live = core.live_placement()
    if live is None or live.digest() != newest.digest or core.view.live_range() != (newest.key, newest.key):
        found.append("the rebalancer's view differs")
    return found


def check_counts(world: World) -> list[str]:
    run = world.job.run
    sealed = {rank.rank: rank.core.stream.windows_acknowledged for rank in world.job.ranks}
    stored: dict[int, list[int]] = {rank: [] for rank in sealed}
    elsewhere: dict[int, set[int]] = {rank: set() for rank in sealed}
    for store in world.stores:
        for its_run, rank, seq in store.contents:
            if its_run == run and store is world.store:
                stored[rank].append(seq)
            elif its_run == run:
                elsewhere[rank].add(seq)
    missing = {rank: world.store.missing.get((run, rank), 0) for rank in sealed}
    return counts_are_accounted_for(sealed=sealed, stored=stored, missing=missing, held_elsewhere=elsewhere)


def short(message: Up | Down) -> str:
    match message:
        case RankStatus():
            return f"status vote {message.vote} held {message.held} fence {message.fence} failed {message.failed}"
        case RankWindow():
            return f"window {message.seq} steps {message.first_step}..{message.last_step}"
        case PlacementMessage():
            return f"placement {message.key} of epoch {message.epoch}"
        case _:
            return str(message)[:120]
