"""Network namespaces as nodes: two hosts joined by two links of their own, which can be cut and healed. No traffic
leaves them."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType

import pytest


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done


def require_namespaces() -> None:
    """Skip where this user may not make network namespaces."""
    if shutil.which("ip") is None:
        pytest.skip("ip (iproute2) is not installed")
    name = f"evr{os.getpid()}t"
    done = _ip("netns", "add", name, check=False)
    if done.returncode:
        pytest.skip(f"network namespaces are not permitted here: {done.stderr.strip()}")
    _ip("netns", "del", name, check=False)


NETWORKS = {"data": "192.0.2", "control": "198.51.100"}  # both are reserved for documentation and tests


class TwoNodes:
    """Namespaces "a" and "b" with a data link (192.0.2.1, .2) and a control link (198.51.100.1, .2)."""

    def __init__(self) -> None:
        self._prefix = f"evr{os.getpid() % 100000}"
        self.names = {node: f"{self._prefix}{node}" for node in ("a", "b")}

    def __enter__(self) -> TwoNodes:
        try:
            for name in self.names.values():
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            for link, network in NETWORKS.items():
                ends = [self.interface(node, link) for node in self.names]
                _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
                for number, (node, name) in enumerate(self.names.items(), 1):
                    end = self.interface(node, link)
                    _ip("link", "set", end, "netns", name)
                    _ip("-n", name, "addr", "add", f"{network}.{number}/24", "dev", end)
                    _ip("-n", name, "link", "set", end, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in self.names.values():
            _ip("netns", "del", name, check=False)

    def interface(self, node: str, link: str) -> str:
        """Name of a link's end in a node."""
        return f"{self._prefix}{node}{link[0]}"

    def address(self, node: str, link: str) -> str:
        return f"{NETWORKS[link]}.{1 if node == 'a' else 2}"

    def inside(self, node: str, command: list[str]) -> list[str]:
        """`command` run in a node."""
        return ["ip", "netns", "exec", self.names[node], *command]

    def cut(self, link: str) -> None:
        """Node b's end goes down: nothing passes in either direction."""
        _ip("-n", self.names["b"], "link", "set", self.interface("b", link), "down")

    def heal(self, link: str) -> None:
        _ip("-n", self.names["b"], "link", "set", self.interface("b", link), "up")
