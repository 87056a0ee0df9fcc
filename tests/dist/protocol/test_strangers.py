"""What a stranger says ends no life, takes no job over, and is printed escaped."""

from __future__ import annotations

import logging
from collections import Counter

import msgspec
import pytest

from evenroute.dist.log import LimitedLog, set_up_logging
from evenroute.dist.protocol.types import EPOCH_RANDOM_BITS, Phase
from evenroute.dist.rebalancer.guards import JobGate
from evenroute.dist.rebalancer.traffic import RankTraffic
from evenroute.dist.wire.keys import LOCAL_ROLE
from evenroute.dist.wire.link import Received
from evenroute.dist.wire.messages import MessageError, Token, encode
from evenroute.dist.wire.received import decode_up
from support.protocol_helpers import JOB, RUN, rank_core, replace, status_of, window_of
from support.protocol_loop import running

NAME = "\x1b[31mevil\nERROR forged"
OTHER = RUN + 1


def test_another_run_of_a_later_epoch_gets_no_token_and_takes_nothing_over_while_this_one_is_heard() -> None:
    loop = running()
    later = loop.core.epoch + (3 << EPOCH_RANDOM_BITS)
    for token in (0, loop.core._token):  # also with the token of a status that was answered before
        stranger = status_of(rank_core(1), run=OTHER, fence=later, token=token)
        assert loop.core.receive("s", stranger, loop.now) == []
    assert loop.core.view is not None
    assert (loop.core.phase, loop.core.view.run) == (Phase.SERVING, RUN)
    # Nobody of this run is heard any more: the other rebalancer has really taken over.
    loop.core.receive("s", stranger, loop.now + loop.core.config.live_s + 1)
    assert loop.core.phase is Phase.ENDED


def test_a_decoder_error_quotes_what_was_sent_escaped() -> None:
    frame = msgspec.msgpack.encode({**msgspec.to_builtins(window_of(1), builtin_types=(bytes,)), NAME: 1})
    with pytest.raises(MessageError) as error:
        decode_up(frame)
    assert str(error.value).isprintable()
    assert "evil" in str(error.value)
    assert decode_up(encode(window_of(1)))


def test_a_log_line_is_one_line_whatever_it_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("evenroute")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        set_up_logging("info")
        LimitedLog(logger).log(logging.WARNING, "decode", f"refused: {NAME}")
    finally:
        logger.handlers[:], logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert line.endswith(r"decode: refused: \x1b[31mevil\nERROR forged")


def test_a_strangers_windows_are_not_measured_against_those_of_the_ranks() -> None:
    loop = running()
    log = LimitedLog(logging.getLogger("evenroute"))
    traffic = RankTraffic(  # type: ignore[arg-type]
        loop.core, None, JobGate(loop.core, log), Counter(), log, 1 << 20, lambda costs: None
    )

    def take(peer: int | str, seq: int, last: int) -> int:
        frame = encode(window_of(seq, first=0, last=last))
        traffic.take(Received(peer, LOCAL_ROLE, False, frame), 0.0)  # type: ignore[arg-type]
        return traffic.merged

    assert take("stranger", 1, 3) == 0
    assert [take(0, 1, 7), take(0, 2, 7)] == [0, 0], "as long as the shortest of the ranks"
    assert take("stranger", 3, 15) == 0
    assert take(0, 3, 15) == 1


def test_the_name_of_a_job_that_is_turned_away_is_escaped() -> None:
    loop = running()
    gate = JobGate(loop.core, LimitedLog(logging.getLogger("evenroute")))
    job = replace(JOB, model=NAME)
    assert gate.refuses(status_of(rank_core(1), run=OTHER, job=job, fence=0), loop.now)
    (text,) = gate.problems(loop.now)
    assert text.isprintable()
    assert "evil" in text


def test_a_restarted_job_is_not_told_as_turned_away_once_it_is_the_current_one() -> None:
    loop = running()
    gate = JobGate(loop.core, LimitedLog(logging.getLogger("evenroute")))
    again = replace(loop.ranks[0].status(), run=RUN + 1)
    assert gate.refuses(again, loop.now)  # the old ranks were heard a moment ago
    (told,) = gate.problems(loop.now)
    assert f"job {RUN + 1:x}" in told
    later = loop.now + 10.0
    assert not gate.refuses(again, later)
    (answer,) = loop.core.receive("x", again, later)
    assert isinstance(answer.message, Token)
    loop.core.receive("x", replace(again, token=answer.message.token), later)
    assert not gate.refuses(again, later)  # its next heartbeat
    assert gate.problems(later) == []
