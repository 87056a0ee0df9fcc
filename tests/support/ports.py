"""Ports for processes that cannot bind port 0 themselves and bind later: nobody else gets one of them meanwhile."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 20000
_claims: list[socket.socket] = []


def free_port() -> int:
    """A port that nobody uses, and that neither the kernel nor another test process gives away while this one lives.

    A port that was bound to 0 and closed is given to the next one who binds 0, ranks' gloo sockets among them, long
    before a process that still imports torch binds it. So it comes from below the range that the kernel picks from,
    and is claimed among test processes by an abstract socket of its number, which ends with this process.
    """
    number = _kernels_lowest() - LOWEST
    first = random.SystemRandom().randrange(number)  # not the seeded one, which two processes may share
    for port in (LOWEST + (first + more) % number for more in range(number)):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0evenroute-test-port-{port}")
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        return port
    raise AssertionError(f"no free port from {LOWEST} on")


def _kernels_lowest() -> int:
    """The first port that the kernel picks itself; 32768 where it does not say or leaves no room below."""
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        lowest = 0
    return lowest if lowest > LOWEST + 1000 else 32768
