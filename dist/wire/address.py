"""Addresses of the control plane: what may be bound, and what is wrong with one that may not."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

from evenroute.eplb._checks import as_path, require_text, shown

IPC_PATH_LIMIT = 107  # bytes; sun_path of Linux


@dataclass(frozen=True)
class Address:
    """`ipc://PATH` or `tcp://HOST:PORT`; port 0 (or `*`) means an automatic one, published once it is bound."""

    text: str
    ipc_path: Path | None
    host: str = ""
    port: int = 0

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it."""
        if self.ipc_path is not None:
            return True
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def endpoint(self) -> str:
        """The form that ZeroMQ takes."""
        if self.ipc_path is not None:
            return f"ipc://{self.ipc_path}"
        return f"tcp://{bracketed(self.host)}:{self.port or '*'}"

    @property
    def needs_ipv6(self) -> bool:
        """Whether a socket for it must take IPv6: a literal of it, or a name that has no IPv4 address."""
        if self.ipc_path is not None or self.host in ("*", "localhost"):
            return False
        if ":" in self.host:
            return True
        try:
            return all(found[0] == socket.AF_INET6 for found in socket.getaddrinfo(self.host, None))
        except OSError:
            return False


def bracketed(host: str) -> str:
    """A host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def parse_address(text: str, *, field: str) -> Address:
    """Check and split an address; ValueError naming `field`, what was found and what is allowed."""
    require_text(field, text)
    scheme, _, rest = text.partition("://")
    if scheme == "ipc" and rest:
        as_path(field, rest)
        size = len(rest.encode())
        if size > IPC_PATH_LIMIT:
            raise ValueError(
                f"{field}: path of {size} bytes found, at most {IPC_PATH_LIMIT} allowed: {shown(rest)[1:-1]}"
            )
        return Address(text, Path(rest))
    host, colon, port = rest.rpartition(":")
    if scheme == "tcp" and colon and host:
        if port == "*":
            return Address(text, None, host, 0)
        if port.isascii() and port.isdigit() and len(port) < 100 and int(port) < 65536:
            return Address(text, None, host, int(port))
    raise ValueError(f"{field}: {shown(text)} found, expected ipc://PATH or tcp://HOST:PORT (port 0..65535)")


def check_bind(address: Address, *, field: str, has_keys: bool, insecure: bool) -> None:
    """ValueError when strangers could reach the address without keys, or a file that is no socket lies at its path."""
    path = address.ipc_path
    if path is not None and path.exists() and not path.is_socket():
        raise ValueError(f"{field}: {path} exists and is not a socket; expected a free path")
    if not (address.is_local or has_keys or insecure):
        raise ValueError(
            f"{field}: {address.text} is not a loopback address and there are no keys; "
            "give keys (`evenroute keygen DIR`), an ipc:// or loopback address, or --insecure"
        )
