"""Starts the processes of a job whose ranks come and go, on one host. No torch.

Unlike torchrun's agent it lets the others live when one dies, tells the rebalancer at once that a process is gone, and
starts more when an operator wants them (`evenroute scale`).
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from evenroute.dist.client import query_status
from evenroute.dist.wire.address import parse_address
from evenroute.dist.wire.keys import load_client_keys
from evenroute.dist.wire.link import DealerLink
from evenroute.dist.wire.membership import MEMBER_TAG, Gone, encode_member
from evenroute.tools.run.folder import end_with_parent

_LEFT_IN_S = 20.0


@dataclass(eq=False)
class Child:
    """A process that was started. ``joined``: after the job's start."""

    process: subprocess.Popen[bytes]
    identity: int
    number: int
    joined: bool
    reported: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid


def free_port() -> int:
    """A port that is free now on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Launcher:
    """``children``: all that were ever started. `poll` has to be called often."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        rebalancer: str,
        keys: Path | None = None,
        say: Callable[[str], None] = print,
        log: Path | None = None,
    ) -> None:
        """``log``: where the processes' output goes, None = where this one's goes."""
        self.command = list(command)
        self.children: list[Child] = []
        self._say = say
        self._log = log
        self._port = free_port()
        loaded = None if keys is None else load_client_keys(keys)
        self._link = DealerLink(
            parse_address(rebalancer, field="--rebalancer"),
            keys=loaded,
            max_message_bytes=1 << 20,
            queues=True,
        )

    def start(self, ranks: int) -> None:
        """The first ranks; the first of them hosts the store at which they meet."""
        for rank in range(ranks):
            self._spawn(rank, {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)})

    def join(self) -> Child:
        """One process more, which asks to join."""
        return self._spawn(len(self.children), {"EVENROUTE_JOIN": "1"})

    def _spawn(self, number: int, more: dict[str, str]) -> Child:
        identity = secrets.randbits(62) or 1
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "EVENROUTE_JOIN")
        }
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "LOCAL_RANK": str(number),
            "EVENROUTE_MEMBER": str(identity),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # a collective that fails must not end the process
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **more,
        }
        with ExitStack() as stack:
            out = None if self._log is None else stack.enter_context(self._log.open("ab"))
            process = subprocess.Popen(
                self.command, env=environment, preexec_fn=end_with_parent, stdout=out, stderr=out
            )
        child = Child(process, identity, number, "EVENROUTE_JOIN" in more)
        self.children.append(child)
        return child

    def living(self) -> list[Child]:
        """Those that have not ended."""
        return [child for child in self.children if child.process.poll() is None]

    def poll(self) -> list[Child]:
        """Those that ended since the last call; the rebalancer is told of each."""
        ended = [one for one in self.children if not one.reported and one.process.poll() is not None]
        for child in ended:
            child.reported = True
            self._link.send(MEMBER_TAG, encode_member(Gone(child.identity)))
            status = child.process.returncode
            if status:
                how = (
                    f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"status {status}"
                )
                self._say(f"process {child.pid} (started as number {child.number}) ended with {how}")
        return ended

    def lacking(self, rebalancer: str, keys: Path | None) -> int:
        """How many more processes an operator wants than live; 0 where the rebalancer does not answer."""
        try:
            status = query_status(rebalancer, keys=keys, timeout_s=1.0)
        except (OSError, ValueError, TimeoutError):
            return 0
        view = status.membership
        if view.wanted is None:
            return 0
        own = len(self.living())
        others = max(0, len(view.members) - own)  # another host's launcher has them
        return max(0, view.wanted - others - own)

    def status(self) -> int:
        """Exit status of the run: 0 if some process ended as it should and none that still counted did otherwise."""
        return 0 if any(child.process.poll() == 0 for child in self.children) else 1

    def close(self) -> None:
        """End what is left: SIGTERM, then SIGKILL."""
        for child in self.living():
            child.process.send_signal(signal.SIGCONT)
            child.process.terminate()
        deadline = time.monotonic() + _LEFT_IN_S
        for child in self.living():
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self._link.close(linger_ms=100)


def rank_command(module: str, arguments: Sequence[str]) -> list[str]:
    """The command line of a python module's process."""
    return [sys.executable, "-m", module, *arguments]
