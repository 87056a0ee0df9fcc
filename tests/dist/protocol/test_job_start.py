"""Job start: one request by rank 0, one broadcast, everybody live with the same."""

import numpy as np
import pytest

from evenroute.dist.protocol.job_start import (
    JobStartConfig,
    JobStartCore,
    decode_started,
    encode_started,
)
from evenroute.dist.protocol.rank import RankConfig, RankCore
from evenroute.dist.wire.messages import MessageError, Snapshot, SnapshotRequest
from evenroute.dist.wire.placement import pack_placement
from support.protocol_helpers import JOB, minimum, placement_of, replace, version_of

V7 = version_of((5, 7), seed=3)


def starting(**config: object) -> tuple[JobStartCore, SnapshotRequest]:
    """A starting job and its first request, at time 0."""
    drawn = iter([111, 222])
    core = JobStartCore(
        JOB,
        placement_of(),
        JobStartConfig(**config),
        lambda bits: next(drawn),  # type: ignore[arg-type]
    )
    (request,) = core.begin(0.0)
    assert isinstance(request, SnapshotRequest)
    return core, request


def snapshot(**fields: object) -> Snapshot:
    """The right answer, or with other fields."""
    answer = Snapshot(0, 9, 222, V7.key, V7.digest, pack_placement(V7.placement))
    changed: Snapshot = replace(answer, **fields)
    return changed


def test_the_newest_placement_is_live_everywhere_before_the_first_token() -> None:
    core, request = starting()
    assert (request.run, request.nonce) == (0, 222)
    assert core.result(0.5) is None
    core.receive(snapshot())
    started = core.result(0.5)
    assert started is not None
    ranks = [
        RankCore(decode_started(encode_started(started)), rank=rank, config=RankConfig()) for rank in range(2)
    ]
    for rank in ranks:
        assert (rank.run, rank.fence, rank.newest.key) == (111, 9, (5, 7))
        assert rank.live_placement().digest() == V7.digest
        assert rank.state.last_target == (5, 7)
    reduced = minimum(*[rank.vote() for rank in ranks])
    assert [rank.decide(0, reduced) for rank in ranks] == [[], []]


def test_the_request_is_repeated_until_it_is_answered() -> None:
    core, request = starting(resend_s=0.5)
    assert core.tick(0.4) == []
    assert core.tick(0.5) == [request]
    core.receive(snapshot())
    assert core.tick(9.0) == []


@pytest.mark.parametrize("fields", [{"nonce": 221}, {"run": 111}, {"epoch": 0}])
def test_answers_to_somebody_else_are_ignored(fields: dict[str, object]) -> None:
    core, _ = starting()
    core.receive(snapshot(**fields))
    assert core.result(0.5) is None


def test_without_a_rebalancer_the_job_starts_with_its_own_placement_after_the_limit() -> None:
    core, _ = starting(time_limit_s=2.0)
    assert core.result(1.9) is None
    started = core.result(2.0)
    assert started is not None
    assert (started.run, started.epoch, started.key) == (111, 0, (0, 0))
    assert started.version().digest == placement_of().digest()
    core.receive(snapshot())
    assert core.result(2.1) is started


def test_a_rebalancer_that_is_required_and_does_not_answer_is_an_error_with_the_limit() -> None:
    core, _ = starting(time_limit_s=2.0, required=True)
    with pytest.raises(TimeoutError, match="within 2 s"):
        core.result(2.0)


def test_an_empty_store_leaves_the_jobs_own_placement_under_the_rebalancers_fence() -> None:
    core, _ = starting()
    core.receive(Snapshot(0, 9, 222))
    started = core.result(0.1)
    assert started is not None
    assert (started.epoch, started.key) == (9, (0, 0))


def test_a_damaged_snapshot_is_refused_and_said() -> None:
    core, _ = starting()
    core.receive(snapshot(digest=V7.digest ^ 1))
    started = core.result(0.1)
    assert started is not None
    assert started.key == (0, 0)
    assert core.refused is not None
    assert core.refused.startswith("snapshot of version (5, 7) refused: digest")


def test_a_broadcast_that_is_not_one_is_refused() -> None:
    with pytest.raises(MessageError, match="job start"):
        decode_started(np.zeros(10, np.uint8).tobytes())
