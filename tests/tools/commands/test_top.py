"""`evenroute top`: what it shows, what it says changed, and that it keeps up with 1,024 ranks."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from evenroute.dist.wire.control import ExpertLoad, LayerLoads, RebalancerStatus
from evenroute.dist.wire.membership import MembershipView
from evenroute.tools.report.keys import names_of
from evenroute.tools.report.top import Screen, changes
from support.command import assert_one_line_error, evenroute, evenroute_without
from support.control_plane import patience, wait_for
from support.fake_control import FakeControl, status


def shown(*statuses: RebalancerStatus, width: int = 120, height: int = 40) -> str:
    screen = Screen()
    for index, one in enumerate(statuses):
        screen.feed(one, 1000.0 + index)
    out = io.StringIO()
    Console(file=out, width=width, height=height, color_system=None).print(screen.render(width, height))
    return out.getvalue()


def with_rank(base: RebalancerStatus, number: int, **changes: object) -> RebalancerStatus:
    ranks = list(base.ranks)
    ranks[number] = msgspec.structs.replace(ranks[number], **changes)
    return msgspec.structs.replace(base, ranks=ranks)


class TestScreen:
    def test_the_ranks_of_a_job_whose_ranks_come_and_go(self) -> None:
        assert "members" not in shown(status())
        seen = MembershipView("serving", 4, [0, 2, 5], 4, 1, 2, 1, 8.0, "3 ranks")
        before = msgspec.structs.replace(status(), membership=seen)
        assert "membership 4, serving for 8 s: 3 ranks, 2 lost, 1 ask to join, 4 wanted" in shown(before)
        leaves = "membership 5: member 2 leave"
        after = msgspec.structs.replace(seen, state="changing", number=5, members=[0, 5], text=leaves)
        text = shown(before, msgspec.structs.replace(before, membership=after))
        assert (
            text.count(f"membership 5, changing for 8 s: {leaves}, 2 ranks") == 2
        )  # a line, and what changed

    def test_what_matters_is_on_it(self) -> None:
        text = shown(status())
        for words in (
            "healthy serving",
            "dsv3: 58 layers x 256 experts, 288 slots on 4 ranks",
            "newest 500000/3, in use 500000/3",
            "4 made, 0 failed, next in 12s, last took 0.25 s",
            "0.9300, newest plan predicts 0.9900",
            "worst 1: 0.5000",
            "Ranks: 4, 0 on an older version, 0 silent",
            "nothing changed yet",
        ):
            assert words in text, words

    def test_degraded_names_its_reasons(self) -> None:
        text = shown(status(degraded=["not heard for 15 s: rank 3"]))
        assert "DEGRADED" in text
        assert "not heard for 15 s: rank 3" in text

    def test_ranks_that_lag_are_marked(self) -> None:
        base = status(8)
        base = with_rank(base, 2, behind=True)
        base = with_rank(base, 4, heard_s_ago=30.0)
        base = with_rank(base, 6, heard_s_ago=None)
        base = with_rank(base, 7, last_step=40)
        text = shown(base)
        row = next(line for line in text.splitlines() if line.strip().startswith("0  "))
        assert row.split()[1] == "■■v■x■?■"
        assert "1 on an older version, 2 silent, counts at most 60 steps apart" in text

    def test_versions_that_ranks_hold(self) -> None:
        base = status(6)
        for rank, version in ((1, 2), (2, 2), (3, 1), (4, 0)):
            base = with_rank(base, rank, held=(5 << 20, version))
        base = with_rank(base, 5, heard_s_ago=None)
        assert "500000/3 on 1, 500000/2 on 2, 500000/1 on 1, older ones on 1" in shown(base)

    def test_more_ranks_than_cells_show_the_worst(self) -> None:
        base = with_rank(status(1024), 777, behind=True)
        text = shown(base, width=80, height=24)
        rows = re.findall(r"^ *\d+  ([■vx?]+)$", text, re.M)
        assert "".join(rows).count("v") == 1
        assert "".join(rows).count("■") == -(-1024 // int(re.search(r"(\d+) a cell", text)[1])) - 1  # type: ignore[index]
        assert "a cell" in text
        assert max(map(len, text.splitlines())) <= 80

    @pytest.mark.parametrize("width", [40, 80, 200])
    def test_fits_the_terminal(self, width: int) -> None:
        assert max(map(len, shown(status(64), width=width).splitlines())) <= width


class TestChanges:
    def test_words_for_what_happened(self) -> None:
        before = status(settled=False, live_lowest=(5 << 20, 2))
        after = status(
            newest=(5 << 20, 4),
            live_lowest=(5 << 20, 4),
            plan_errors={"timeout": 1},
            last_plan_error="took too long",
            placements={"published": 4, "withdrawn": 1},
        )
        after = with_rank(after, 1, heard_s_ago=60.0)
        assert changes(before, after) == [
            "version 500000/4 published, predicts 0.9900",
            "version 500000/4 is in use on all ranks",
            "a plan failed (timeout): took too long",
            "1 placement: withdrawn",
            "silent: rank 1",
        ]
        assert changes(after, status(newest=(5 << 20, 4), run=100, epoch=6 << 20))[:2] == [
            "the rebalancer began a new life, epoch 600000",
            "another run of the job: 64",
        ]
        assert changes(before, before) == []


class TestCommand:
    def test_one_look_when_stdout_is_no_terminal(self, tmp_path: Path) -> None:
        with FakeControl(tmp_path, [status()]) as fake:
            outcome = evenroute("top", fake.address)
            assert (outcome.status, fake.requests) == (0, 1)
        assert "288 slots on 4 ranks" in outcome.out

    def test_exit_status_tells_degraded(self, tmp_path: Path) -> None:
        with FakeControl(tmp_path, [status(degraded=["why"])]) as fake:
            assert evenroute("top", fake.address).status == 1

    def test_several_looks_see_changes(self, tmp_path: Path) -> None:
        with FakeControl(tmp_path, [status(), status(newest=(5 << 20, 4))]) as fake:
            outcome = evenroute("top", fake.address, "--frames", 3, "--interval", 0.05)
        assert "version 500000/4 published" in outcome.out

    def test_a_lost_rebalancer_is_told_and_asked_again(self, tmp_path: Path) -> None:
        with FakeControl(tmp_path, [status(), None, status()]) as fake:
            # The third answer has as long as the second is waited for.
            call = ("top", fake.address, "--frames", 3, "--interval", 0.05, "--timeout", 3)
            outcome = evenroute(*call)
            assert (outcome.status, fake.requests) == (0, 3)
        assert "no answer" in outcome.out

    def test_nobody_there(self, tmp_path: Path) -> None:
        outcome = evenroute("top", f"ipc://{tmp_path}/absent.sock", "--timeout", 0.3)
        assert_one_line_error(outcome, "no answer within 0.3 s")

    def test_refused(self, tmp_path: Path) -> None:
        with FakeControl(tmp_path, ["this key may not"]) as fake:
            assert_one_line_error(evenroute("top", fake.address), "this key may not")

    @pytest.mark.parametrize("arguments", [("--interval", 0), ("--timeout", -1)])
    def test_wrong_use(self, arguments: tuple[object, ...]) -> None:
        assert_one_line_error(evenroute("top", "ipc:///tmp/x", *arguments), "above 0")

    def test_follows_1024_ranks_at_1_hz(self, tmp_path: Path) -> None:
        """A look costs far less than the second it may take, asking and drawing included."""
        with FakeControl(tmp_path, [status(1024)]) as fake:
            began, work = time.monotonic(), time.process_time()
            outcome = evenroute("top", fake.address, "--frames", 5, "--interval", 0.001)
            spent, work = (time.monotonic() - began) / 5, (time.process_time() - work) / 5
        assert outcome.status == 0
        assert "Ranks: 1024" in outcome.out
        assert work < 0.5, "of this process, the stand-in's answers included"
        assert spent < 0.5 * patience()

    @staticmethod
    def interrupted(fake: FakeControl, requests: int) -> tuple[int, str]:
        """Exit status and stderr of a `top` that gets Ctrl-C when it has asked so many times."""
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "evenroute.tools.cli",
                "top",
                fake.address,
                "--frames",
                "999",
                "--interval",
                "0.1",
                "--timeout",
                "60",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A runner in the background of a shell ignores the signal, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            wait_for(lambda: fake.requests >= requests or process.poll() is not None, 60, "a question")
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
        return process.returncode, err

    def test_ends_with_ctrl_c(self, tmp_path: Path) -> None:
        """The second question is asked only after the first answer was shown: healthy, so 0."""
        with FakeControl(tmp_path, [status()]) as fake:
            code, err = self.interrupted(fake, requests=2)
        assert code == 0
        assert "Traceback" not in err

    def test_ctrl_c_before_any_answer_tells_nothing_about_the_rebalancer(self, tmp_path: Path) -> None:
        with FakeControl(tmp_path, [None]) as fake:
            code, err = self.interrupted(fake, requests=1)
        assert code == 130  # neither healthy nor unreachable: the shell's status of an interrupted command
        assert "Traceback" not in err

    def test_runs_without_torch(self, tmp_path: Path) -> None:
        with FakeControl(tmp_path, [status()]) as fake:
            outcome = evenroute_without("torch", "top", fake.address)
        assert outcome.status == 0, outcome.err


def lines_of(screen: Screen, width: int, height: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=height, color_system=None).print(screen.render(width, height))
    return out.getvalue().splitlines()


def hot(ranks: int = 16) -> RebalancerStatus:
    """Layer 7 and rank 5 are the hottest; rank 9 is the most silent."""
    base = status(
        ranks,
        balancedness_per_layer=[0.5 if layer == 7 else 0.95 for layer in range(58)],
        rank_load=[1.9 if rank == 5 else 0.94 for rank in range(ranks)],
        hottest_rank=[5] * 58,
        hottest_expert=[layer + 100 for layer in range(58)],
        hottest_expert_load=[0.07] * 58,
    )
    return with_rank(base, 9, heard_s_ago=4.0)


class TestKeys:
    @pytest.fixture
    def screen(self) -> Screen:
        screen = Screen()
        screen.feed(hot(), 1000.0)
        return screen

    @pytest.mark.parametrize(("width", "height"), [(200, 50), (120, 40), (80, 24), (60, 20)])
    def test_the_terminal_is_used_and_never_overrun(self, screen: Screen, width: int, height: int) -> None:
        for keys in ([], ["tab"], ["tab", "enter"]):
            for key in keys:
                screen.key(key)
            found = lines_of(screen, width, height)
            assert len(found) <= height
            assert max(map(len, found)) <= width
        screen.key("escape")
        layers = sum(line.startswith("layer ") for line in lines_of(screen, width, height))
        assert layers >= (20 if height >= 50 else 4 if height >= 24 else 3)

    def test_the_hottest_come_first_by_name(self, screen: Screen) -> None:
        text = "\n".join(lines_of(screen, 200, 50))
        assert re.search(r"layer by balance.*rank by load", text)
        first = next(line for line in text.splitlines() if line.startswith("layer 7 "))
        assert re.search(r"layer 7 +0\.5000 .* rank 5 +107 \(7\.0%\) +rank 5 +1\.90x", first)

    def test_sort_and_the_ranks_table(self, screen: Screen) -> None:
        screen.key("s")
        found = [line for line in lines_of(screen, 80, 24) if line.startswith("layer ")]
        assert found[0].startswith("layer by number")
        assert found[1].startswith("layer 0 ")
        screen.key("tab")
        screen.key("s")
        found = [line for line in lines_of(screen, 80, 24) if line.startswith("rank ")]
        assert found[0].startswith("rank by silence")
        assert found[1].startswith("rank 9 ")

    def test_down_to_a_layer_and_back(self, screen: Screen) -> None:
        screen.key("enter")
        assert screen.layer == 7
        assert screen.asks
        assert "Layer 7: balancedness 0.5000" in "\n".join(lines_of(screen, 80, 24))
        loads = [0.9] * 15 + [2.5]
        screen.detail = LayerLoads(7, loads, [ExpertLoad(107, 0.07, [5, 15])])
        text = "\n".join(lines_of(screen, 80, 24))
        assert not screen.asks
        assert re.search(r"rank 15 +2\.50x", text)
        assert re.search(r"expert 107 +7\.0% +5, 15", text)
        screen.key("down")
        assert screen.layer == 8
        assert screen.asks
        screen.key("escape")
        assert screen.layer is None
        assert screen.key("down")
        assert not screen.key("q")

    def test_before_a_job(self) -> None:
        text = shown(status(0, ep_size=0, state="waiting", balancedness_per_layer=[], newest=(0, 0)))
        assert "waiting for a job" in text
        assert "0 layers" not in text

    def test_bytes_of_a_terminal(self) -> None:
        assert names_of(b"\x1b[A\x1bOBq\x1b[5~\r\t\x1b[200;1Rs\x1b") == [
            "up", "down", "q", "page-up", "enter", "tab", "s", "escape",
        ]  # fmt: skip


def test_in_a_terminal(tmp_path: Path) -> None:
    """Keys are taken one by one: Enter asks for the layer, q ends with the status; the terminal is left as it was."""
    detail = LayerLoads(7, [1.0] * 16, [ExpertLoad(107, 0.07, [5])])
    with FakeControl(tmp_path, [hot()], layer=detail) as fake:
        main, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        before = termios.tcgetattr(child)
        command = [sys.executable, "-m", "evenroute.tools.cli", "top", fake.address, "--interval", "60"]
        process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env={**os.environ, "TERM": "xterm"}
        )
        seen = bytearray()

        def found(words: bytes) -> bool:
            if select.select([main], [], [], 0.1)[0]:
                seen.extend(os.read(main, 65536))
            return words in seen

        try:
            wait_for(lambda: found(b"layer by balance"), 60, "the screen")
            os.write(main, b"\r")
            wait_for(lambda: found(b"expert 107"), 60, "the layer")
            os.write(main, b"\x1bq")
            wait_for(lambda: found(b"\0") or process.poll() is not None, 60, "the end")
            assert process.wait(60) == 0
            assert termios.tcgetattr(child) == before
        finally:
            process.kill()
            process.wait(60)
            os.close(main)
            os.close(child)
