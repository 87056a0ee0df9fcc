"""`evenroute status`: how many ranks are silent now; `evenroute top --help`: what its exit status means."""

from __future__ import annotations

import msgspec
import pytest

from evenroute.tools.commands import status as status_command
from evenroute.tools.commands.status import status_lines
from evenroute.tools.report import top as report_top
from support.command import evenroute
from support.fake_control import status


def line_of_ranks(*heard_s_ago: float | None) -> str:
    base = status(len(heard_s_ago))
    ranks = [
        msgspec.structs.replace(rank, heard_s_ago=seconds)
        for rank, seconds in zip(base.ranks, heard_s_ago, strict=True)
    ]
    lines = status_lines(msgspec.structs.replace(base, ranks=ranks))
    return next(line for line in lines if line.startswith("ranks "))


@pytest.mark.parametrize(
    ("heard_s_ago", "words"),
    [
        ((0.1, 0.2, 1.0), "3/3 heard, the quietest 1.0 s ago"),
        ((0.1, 5.0, 0.0), "3/3 heard, the quietest 5.0 s ago"),
        ((0.1, 31.0, 5.1), "3/3 heard, 2 silent, the quietest 31.0 s ago"),
        ((None, 31.0, 0.1), "2/3 heard, 1 silent, the quietest 31.0 s ago"),
        ((None, None, None), "0/3 heard, the quietest 0.0 s ago"),
    ],
)
def test_ranks_that_are_silent_now(heard_s_ago: tuple[float | None, ...], words: str) -> None:
    assert line_of_ranks(*heard_s_ago) == f"ranks      {words}"


def test_status_and_top_call_the_same_ranks_silent() -> None:
    assert status_command.SILENT_S == report_top.SILENT_S


def test_of_a_large_job_only_odd_ranks_have_a_line() -> None:
    base = status(20)
    ranks = [msgspec.structs.replace(rank, heard_s_ago=0.0) for rank in base.ranks]
    ranks[7] = msgspec.structs.replace(ranks[7], heard_s_ago=9.0)
    lines = status_lines(msgspec.structs.replace(base, ranks=ranks))
    assert [line.split(":")[0] for line in lines if line.startswith("  rank ")] == ["  rank 7"]


def test_help_of_top_tells_its_exit_status() -> None:
    text = " ".join(evenroute("top", "--help").out.split())
    assert "0 healthy, 1 degraded, 2 unreachable; 130 for Ctrl-C before the first answer" in text
