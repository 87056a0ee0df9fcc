"""CURVE keys and roles: key files, the list of known keys, and the ZAP handler that admits only these.

A folder made by `evenroute keygen DIR` holds `rebalancer.toml` (secret), one secret file a role (`rank.toml`,
`operator.toml`, `viewer.toml`: hand each to those who play that role), `known_keys.toml` (public keys and roles) and
`http_token` (secret, for those who look at the live page).
"""

from __future__ import annotations

import os
import secrets
import tomllib
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import zmq
from zmq.utils import z85

from evenroute.eplb._checks import as_path, describe, require_choice, shown
from evenroute.eplb._io import read_input_text

ROLES = ("rank", "operator", "viewer")
KNOWN_KEYS = "known_keys.toml"
SERVER_FILE = "rebalancer.toml"
HTTP_TOKEN = "http_token"  # of the page and its API
LOCAL_ROLE = "local"  # a peer on an address without keys: this host, this user; may do everything

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


@dataclass(frozen=True)
class ClientKeys:
    """What a rank, an operator or a viewer needs: its own pair and the rebalancer's public key (Z85 text)."""

    role: str
    public_key: str
    secret_key: str = field(repr=False)
    server_public_key: str

    def __post_init__(self) -> None:
        require_choice("role", self.role, ROLES)
        for name in ("public_key", "secret_key", "server_public_key"):
            _require_key(name, getattr(self, name))

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` a CURVE client; before connect."""
        socket.curve_publickey = self.public_key.encode()
        socket.curve_secretkey = self.secret_key.encode()
        socket.curve_serverkey = self.server_public_key.encode()


@dataclass(frozen=True)
class ServerKeys:
    """The rebalancer's own pair (Z85 text) and the known public keys (32 raw bytes) with their roles."""

    public_key: str
    secret_key: str = field(repr=False)
    roles: dict[bytes, str]

    def __post_init__(self) -> None:
        for name in ("public_key", "secret_key"):
            _require_key(name, getattr(self, name))
        if not isinstance(self.roles, dict):
            raise ValueError(f"roles must be a dict of keys and their roles, found {describe(self.roles)}")
        for key, role in self.roles.items():
            if not isinstance(key, bytes) or len(key) != 32:
                raise ValueError(f"roles must be of keys of 32 bytes, found {_size_of(key)}")
            require_choice("roles", role, ROLES)

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` a CURVE server; before bind."""
        socket.curve_server = True
        socket.curve_publickey = self.public_key.encode()
        socket.curve_secretkey = self.secret_key.encode()
        socket.zap_domain = b"evenroute"


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def generate_keys(folder: str | PathLike[str]) -> list[Path]:
    """Make keys for the rebalancer and each role; files are new and readable by their owner alone.

    Raises FileExistsError rather than overwrite a key, OSError where nothing can be written, and ValueError for what
    is no path.
    """
    folder = as_path("folder", folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    names = [SERVER_FILE, *(f"{role}.toml" for role in ROLES), KNOWN_KEYS, HTTP_TOKEN]
    for name in names:
        if (folder / name).exists():
            raise FileExistsError(f"keys: {folder / name} exists; keys are never overwritten")
    public, secret = (part.decode() for part in zmq.curve_keypair())
    _write_private(folder / SERVER_FILE, f'public_key = "{public}"\nsecret_key = "{secret}"\n')
    known = ["# Public keys that the rebalancer answers, one [[key]] each; roles: rank, operator, viewer.\n"]
    for role in ROLES:
        role_public, role_secret = (part.decode() for part in zmq.curve_keypair())
        _write_private(
            folder / f"{role}.toml",
            f'role = "{role}"\npublic_key = "{role_public}"\nsecret_key = "{role_secret}"\n'
            f'server_public_key = "{public}"\n',
        )
        known.append(f'[[key]]\nrole = "{role}"\npublic_key = "{role_public}"\n')
    _write_private(folder / KNOWN_KEYS, "\n".join(known))
    _write_private(folder / HTTP_TOKEN, f"{secrets.token_urlsafe(24)}\n")
    return [folder / name for name in names]


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(read_input_text(path))
    except FileNotFoundError:
        raise FileNotFoundError(f"keys: {path}: no such file (made by `evenroute keygen DIR`)") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"keys: {path}: not TOML: {error}") from None
    except ValueError as error:  # no regular file
        raise ValueError(f"keys: {error}") from None


def _key(table: dict[str, object], name: str, path: Path) -> str:
    value = table.get(name)
    if not _is_key(value):
        raise ValueError(f"keys: {path}: {name}: expected 40 characters of Z85")
    return str(value)


def _is_key(value: object) -> bool:
    if not isinstance(value, str) or len(value) != 40:
        return False
    try:
        z85.decode(value)
    except (ValueError, KeyError):
        return False
    return True


def _require_key(name: str, value: object) -> None:
    if not _is_key(value):
        raise ValueError(f"{name} must be 40 characters of Z85, found {_size_of(value)}")


def _size_of(value: object) -> str:
    """What was found in the place of a key, without what may be most of one."""
    if isinstance(value, str | bytes):
        return f"a {type(value).__name__} of {len(value)}"
    return describe(value)


def load_client_keys(path: str | PathLike[str]) -> ClientKeys:
    """Read a role's key file; ValueError or OSError in one line when it is not one."""
    path = as_path("keys", path)
    table = _read(path)
    role = table.get("role")
    if role not in ROLES:
        raise ValueError(f"keys: {path}: role: {shown(role)} found, expected one of {', '.join(ROLES)}")
    public, secret, server = (
        _key(table, f"{name}_key", path) for name in ("public", "secret", "server_public")
    )
    return ClientKeys(str(role), public, secret, server)


def load_server_keys(folder: str | PathLike[str]) -> ServerKeys:
    """Read the rebalancer's pair and the known keys; ValueError or OSError in one line when they are not."""
    folder = as_path("keys", folder)
    own = _read(folder / SERVER_FILE)
    known = _read(folder / KNOWN_KEYS)
    roles: dict[bytes, str] = {}
    entries = known.get("key", [])
    for entry in entries if isinstance(entries, list) else [None]:
        if not isinstance(entry, dict) or entry.get("role") not in ROLES:
            raise ValueError(f"keys: {folder / KNOWN_KEYS}: each [[key]] needs a role of {', '.join(ROLES)}")
        roles[z85.decode(_key(entry, "public_key", folder / KNOWN_KEYS))] = str(entry["role"])
    public, secret = (_key(own, f"{name}_key", folder / SERVER_FILE) for name in ("public", "secret"))
    return ServerKeys(public, secret, roles)


class ZapHandler:
    """Answers ZeroMQ's own question "may this key in?" (RFC 27) from the list of known keys.

    Served by the owner's poll loop: `socket` is readable -> `serve()`. Counts the peers that it refused.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._roles = keys.roles
        self.refused = 0
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ENDPOINT)

    def serve(self, limit: int = 64) -> None:
        """Answer up to `limit` questions that wait."""
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(frames)

    def _answer(self, frames: list[bytes]) -> None:
        split = frames.index(b"") if b"" in frames else -1
        envelope, request = frames[: split + 1], frames[split + 1 :]
        if split < 0 or len(request) < 6:
            return
        version, request_id, mechanism = request[0], request[1], request[5]
        role = self._roles.get(request[6]) if mechanism == b"CURVE" and len(request) == 7 else None
        if role is None:
            self.refused += 1
            reply = [version, request_id, b"400", b"unknown key", b"", b""]
        else:
            reply = [version, request_id, b"200", b"OK", role.encode(), b""]
        self.socket.send_multipart([*envelope, *reply])

    def close(self) -> None:
        """Stop admitting anybody."""
        self.socket.close()
