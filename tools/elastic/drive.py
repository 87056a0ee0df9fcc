"""A run of a job whose ranks come and go: started, disturbed, stopped, and judged by what its processes wrote down."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from evenroute.eplb.planner.warm_up import warm_up
from evenroute.tools.elastic.events import EventReader
from evenroute.tools.elastic.launcher import Child, Launcher, rank_command
from evenroute.tools.run.folder import RunFolder
from evenroute.tools.run.rebalancer import ChildRebalancer

RANK_MODULE = "evenroute.tools.elastic.rank"


class HangError(RuntimeError):
    """What should have happened did not, in its time."""


@dataclass
class Recovered:
    """Ranks serve again. ``seconds``: from the disturbance to the last one's first collective; ``ranks``: then."""

    membership: int
    ranks: int
    seconds: float
    paused: list[float] = field(default_factory=list)


class ElasticRun:
    """A rebalancer of its own, a launcher, and the events; use it in a ``with`` block."""

    def __init__(
        self,
        ranks: int,
        *,
        flags: Sequence[str] = (),
        planner: dict[str, str | float] | None = None,
        say: Callable[[str], None] = print,
        quiet: bool = False,
        module: str = RANK_MODULE,
    ) -> None:
        """``quiet``: what the processes say goes into the folder's file "log". ``module``: what each runs."""
        self.ranks = ranks
        self.events: list[dict[str, Any]] = []
        self._folder = RunFolder()
        self.folder = self._folder.path
        self.rebalancer = ChildRebalancer({"interval": 1.0, **(planner or {})})
        self._reader = EventReader(self.folder)
        self._flags = list(flags)
        self._say = say
        self._quiet = quiet
        self._module = module
        self.launcher: Launcher

    def __enter__(self) -> Self:
        try:
            with Console(stderr=True).status("compiling the planner (once, then it comes from the cache)"):
                warm_up()  # else the first plan of a short run waits for it
            self.rebalancer.wait_ready()
            arguments = ["--rebalancer", self.rebalancer.address, "--folder", str(self.folder), *self._flags]
            self.launcher = Launcher(
                rank_command(self._module, arguments),
                rebalancer=self.rebalancer.address,
                say=self._say,
                log=self.folder / "log" if self._quiet else None,
            )
            self.launcher.start(self.ranks)
            self.until(lambda: len(self.serving(1)) == self.ranks, 120.0, "the job's start")
            self.until(
                lambda: self.status_field("membership").number >= 1, 30.0, "the rebalancer to take the job up"
            )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "launcher"):
            for child in self.launcher.living():
                child.process.kill()
            self.launcher.close()
        self.rebalancer.close()
        self._folder.remove()

    # -------------------------------------------------------------------------------------- looking

    def look(self) -> list[dict[str, Any]]:
        """New events."""
        found = self._reader.new()
        self.events += found
        self.launcher.poll()
        return found

    def until(self, ready: Callable[[], object], limit_s: float, what: str) -> None:
        """Wait; HangError that says what for. A wrong output ends the wait at once."""
        deadline = time.monotonic() + limit_s
        while True:
            self.look()
            wrong = [event for event in self.events if event["kind"] == "wrong"]
            if wrong:
                raise HangError(f"wrong output: {wrong[0]}")
            if ready():
                return
            if time.monotonic() > deadline:
                said = self.log()[-30:]
                lines = "\n".join(
                    [f"waited {limit_s:g} s for {what}; last events: {self.events[-6:]}", *said]
                )
                raise HangError(lines)
            time.sleep(0.01)

    def log(self) -> list[str]:
        """Lines that the processes have said, with ``quiet``."""
        path = self.folder / "log"
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    def serving(self, membership: int) -> list[dict[str, Any]]:
        """Who came to serve in a membership."""
        return [e for e in self.events if e["kind"] == "serving" and e["membership"] == membership]

    def newest(self) -> tuple[int, int]:
        """Highest membership that a process came to serve in, and its ranks."""
        found = [(e["membership"], e["ranks"]) for e in self.events if e["kind"] == "serving"]
        return max(found) if found else (0, 0)

    def last_step(self) -> int:
        """The last step that a process wrote down."""
        return max([int(event["step"]) for event in self.events if event["kind"] == "step"], default=0)

    def status_field(self, name: str) -> Any:
        """A field of the rebalancer's status."""
        from evenroute.dist.client import query_status

        return getattr(query_status(self.rebalancer.address), name)

    def member_of(self, child: Child) -> int | None:
        """The member number of a process; None before it serves."""
        found = [e["member"] for e in self.events if e["pid"] == child.pid and e["kind"] == "serving"]
        return found[-1] if found else None

    def members(self) -> dict[int, Child]:
        """Living processes that have served, by member number."""
        pairs = [(self.member_of(child), child) for child in self.launcher.living()]
        return {number: child for number, child in pairs if number is not None}

    # ----------------------------------------------------------------------------------- disturbing

    def kill(self, child: Child, how: signal.Signals = signal.SIGKILL) -> float:
        """Send the signal; when."""
        at = time.monotonic()
        os.kill(child.pid, how)
        return at

    def recovered(self, gone: Sequence[Child], at: float, limit_s: float) -> Recovered:
        """Until all but ``gone`` serve in a membership without them."""
        pids = {child.pid for child in gone}
        expected = {event["pid"] for event in self.serving(self.newest()[0])} - pids

        def serve() -> list[dict[str, Any]]:
            number, ranks = self.newest()
            events = self.serving(number)
            fits = ranks == len(expected) and {event["pid"] for event in events} == expected
            return events if fits and min(event["at"] for event in events) > at else []

        self.until(serve, limit_s, f"{len(expected)} survivors to serve again")
        events = serve()
        seconds = max(event["at"] for event in events) - at
        return Recovered(events[0]["membership"], len(events), seconds, [e["paused"] for e in events])

    def grown(self, ranks: int, at: float, limit_s: float) -> Recovered:
        """Until so many ranks serve together."""

        def serve() -> list[dict[str, Any]]:
            number, found = self.newest()
            events = self.serving(number)
            return events if found == ranks == len(events) else []

        self.until(serve, limit_s, f"{ranks} ranks to serve")
        events = serve()
        paused = [event["paused"] for event in events]
        return Recovered(events[0]["membership"], ranks, max(e["at"] for e in events) - at, paused)

    def go_on(self, steps: int, limit_s: float = 60.0) -> None:
        """Until so many more steps are done."""
        goal = self.last_step() + steps
        self.until(lambda: self.last_step() >= goal, limit_s, f"step {goal}")

    def scale(self, ranks: int) -> str:
        """`evenroute scale`; processes that are wanted more are started."""
        from evenroute.dist.client import command
        from evenroute.dist.wire.membership import ScaleOrder

        text = command(self.rebalancer.address, ScaleOrder(ranks))
        for _ in range(ranks - len(self.launcher.living())):
            self.launcher.join()
        return text

    def stop(self, limit_s: float = 60.0) -> list[dict[str, Any]]:
        """All stop at one step; what each process that lived says at its end."""
        part = self.folder / "stop.partial"
        part.write_text(str(self.last_step() + 60))
        part.rename(self.folder / "stop")
        living = {child.pid for child in self.launcher.living()}

        def ended() -> list[dict[str, Any]]:
            return [event for event in self.events if event["kind"] == "ended" and event["pid"] in living]

        self.until(lambda: len(ended()) == len(living), limit_s, "the end")
        return ended()

    def store(self) -> Path:
        """The rebalancer's store."""
        return self.rebalancer.store
