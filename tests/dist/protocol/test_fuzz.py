"""Damaged frames against the decoders and the cores behind them: refused or harmless, never an exception.

cd tests && python dist/test_fuzz_protocol.py 1000000      # the long run
"""

import random
import sys

import numpy as np
import pytest

from evenroute.dist.protocol.rank import RankCore
from evenroute.dist.protocol.types import Phase
from evenroute.dist.wire.messages import MessageError, Refusal, SnapshotRequest, Up, decode_down, encode
from evenroute.dist.wire.received import LARGEST_COUNT, decode_up
from support.protocol_helpers import JOB, RUN, placement_of, rank_core, replace, status_of, window_of
from support.protocol_loop import INFO, Loop, running


def damage(rng: random.Random, frame: bytes, others: list[bytes]) -> bytes:
    """Flip, overwrite, delete, repeat or splice a few bytes."""
    data = bytearray(frame)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if data:
                data[place % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[place % len(data)] = rng.choice([0, 1, 0x7F, 0x80, 0xC0, 0xCF, 0xD3, 0xFF])
            case 2:
                del data[place : place + rng.choice([1, 2, 8, 1000])]
            case 3:
                data[place:place] = data[place : place + rng.randrange(1, 30)]
            case 4:
                other = rng.choice(others)
                start = rng.randrange(len(other))
                data[place : place + rng.randrange(0, 9)] = other[start : start + rng.randrange(1, 40)]
            case _:
                data[place:place] = rng.randbytes(rng.randrange(1, 9))
    return bytes(data)


def ups(loop: Loop) -> list[bytes]:
    """Frames of each kind, as a running job sends them."""
    messages: list[Up] = [rank.status() for rank in loop.ranks]
    messages += [window_of(1), window_of(7, rank=1, first=3, last=9), loop.ranks[0].rows()]
    messages += [SnapshotRequest(run=0, nonce=4, job=JOB), status_of(loop.ranks[0], run=RUN + 1)]
    return [encode(message) for message in messages]


def fuzz_rebalancer(number: int, seed: int) -> tuple[int, int]:
    """Feed damaged frames to a serving core; returns how many decoded, and how many lives it took."""
    rng = random.Random(seed)
    loop = running()
    frames = ups(loop)
    decoded, lives = 0, 1
    for _ in range(number):
        try:
            message = decode_up(damage(rng, rng.choice(frames), frames))
        except MessageError:
            continue
        decoded += 1
        loop.core.receive(rng.randrange(2), message, loop.now)
        if loop.core.phase is Phase.ENDED:  # a damaged fence can end a life, as a true one does
            loop, lives = running(), lives + 1
    check_store(loop)
    return decoded, lives


def check_store(loop: Loop) -> None:
    """Whatever came in, what is kept is possible."""
    for window in loop.store.windows:
        assert window.counts.shape == (JOB.num_layers, JOB.num_logical_experts)
        assert window.counts.min() >= 0
        assert window.counts.max() < LARGEST_COUNT
        assert window.rank < JOB.ep_size
        assert window.first_step <= window.last_step
    for row in loop.store.placements:
        assert row.placement.num_slots == JOB.num_slots
    assert loop.core.version < 50


def fuzz_rank(number: int, seed: int) -> int:
    """Feed damaged frames to a rank; returns how many decoded."""
    rng = random.Random(seed)
    loop = running()
    core = loop.ranks[0]
    out = loop.core.receive(0, window_of(1), loop.now)
    out += loop.core.receive(0, status_of(core, run=RUN + 1), loop.now)
    out += loop.core.publish(placement_of(seed=3), INFO, loop.now)
    messages = [item.message for item in out]
    assert len({type(message) for message in messages}) == 3
    frames = [encode(message) for message in messages]
    decoded = 0
    for _ in range(number):
        try:
            message = decode_down(damage(rng, rng.choice(frames), frames))
        except MessageError:
            continue
        decoded += 1
        before = core.live_placement().digest()
        core.receive(core.prepare(message), loop.now)
        assert core.live_placement().digest() == before
        if decoded % 50 == 0:
            core = fresh_rank(loop)
    return decoded


def fresh_rank(loop: Loop) -> RankCore:
    """A rank of the same run that has heard nothing yet."""
    return rank_core(0, epoch=loop.core.epoch)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_frames_neither_stop_the_rebalancer_nor_reach_its_numbers(seed: int) -> None:
    decoded, lives = fuzz_rebalancer(5000, seed)
    assert decoded > 100
    assert lives < 5000


def test_damaged_frames_neither_stop_a_rank_nor_change_what_it_routes_with() -> None:
    assert fuzz_rank(3000, 1) > 100


def test_a_status_can_not_have_a_version_that_was_never_published() -> None:
    loop = running()
    assert loop.core.newest is not None
    epoch, version = loop.core.newest.key
    status = status_of(loop.ranks[0], held=(epoch, version + 1))
    (item,) = loop.core.receive(0, status, loop.now)
    assert isinstance(item.message, Refusal)
    assert loop.core.newest.key == (epoch, version)
    assert "never published" in loop.core.notices[-1].text


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"fence": 0}, r"status\.fence"),
        ({"live_keys": np.full(6, -1, "<i8").tobytes()}, r"status\.live"),
        ({"live_digests": np.full(3, -1, "<i8").tobytes()}, r"status\.live"),
    ],
)
def test_a_status_whose_keys_contradict_its_fence_is_refused(fields: dict[str, object], name: str) -> None:
    status = running().ranks[0].status()
    assert decode_up(encode(status)) == status
    with pytest.raises(MessageError, match=name):
        decode_up(encode(replace(status, **fields)))


def test_a_placement_under_a_key_of_a_later_epoch_than_its_senders_is_refused() -> None:
    loop = running()
    message = loop.core._published.message(loop.core.view.run, loop.core.epoch)
    assert message is not None
    assert decode_down(encode(message)) == message
    with pytest.raises(MessageError, match=r"placement\.key"):
        decode_down(encode(replace(message, key=(message.epoch + 1, 1))))


if __name__ == "__main__":
    count = int(sys.argv[1])
    print("rebalancer: decoded, lives", fuzz_rebalancer(count, 99))
    print("rank: decoded", fuzz_rank(count // 4, 99))
