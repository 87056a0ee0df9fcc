"""Settings against this host: files, folders, keys, a planner of one's own. No torch, no ranks, nothing is bound."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path

import numpy as np

from evenroute.dist.config import (
    PlannerSettings,
    RebalancerConfig,
    RebalancerSettings,
    SecuritySettings,
)
from evenroute.dist.rebalancer.planner import (
    PlannerError,
    PlannerProcess,
    check_planner,
    plan_now,
    plan_request,
)
from evenroute.dist.rebalancer.planner_child import PlanRequest
from evenroute.dist.wire.address import Address, check_bind, parse_address
from evenroute.dist.wire.keys import HTTP_TOKEN, KNOWN_KEYS, ROLES, SERVER_FILE, load_server_keys
from evenroute.eplb._io import read_input_text
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.store.schema import APPLICATION_ID

MAX_TRIAL_GROUPS = 512
_TRIAL_RANKS = 2
STORE_FIELD = "rebalancer.store (--store)"


def check_host(config: RebalancerConfig, *, try_planner: bool = False) -> list[str]:
    """ValueError or OSError for what can't work here; returns warnings for what works otherwise than it looks.

    Files, folders, keys and a planner of one's own are looked at as they are on this host; no address is bound.
    `try_planner`: such a planner is also run, in a process of its own, on a tiny case (`--check-config`).
    """
    for name, expected in (("bind", "ipc://PATH or tcp://HOST:PORT"), ("store", "a file's name")):
        if not getattr(config.rebalancer, name):
            raise ValueError(f"rebalancer.{name}: not given, expected {expected} (--{name})")
    warnings = check_files(config.rebalancer, config.security)
    if config.planner.enabled and config.planner.function:
        warnings += check_own_planner(config.planner, trial=try_planner)
    return warnings + _odd_settings(config)


def _odd_settings(config: RebalancerConfig) -> list[str]:
    found = []
    planner, settings = config.planner, config.rebalancer
    by_time = planner.interval_unit == "seconds"
    if by_time and settings.keep_windows_s < planner.interval:
        found.append(
            f"rebalancer.keep_windows_s {settings.keep_windows_s:g} is shorter than planner.interval "
            f"{planner.interval:g}: the store will not keep the windows of one plan apart"
        )
    if by_time and planner.time_limit_s > planner.interval * planner.degraded_after:
        found.append(
            f"planner.time_limit_s {planner.time_limit_s:g} is longer than {planner.degraded_after} intervals of "
            f"{planner.interval:g}: a slow planner shows as degraded before it is stopped"
        )
    if not planner.enabled and dataclasses.replace(planner, enabled=True) != PlannerSettings():
        found.append("planner.enabled is false: the other planner settings have no effect")
    if planner.max_moves == 0 and planner.policy == "incremental":
        found.append(f"planner.max_moves is 0: policy {planner.policy} balances by moves alone")
    if config.security.insecure:
        found.append(
            "security.insecure is true: anybody who reaches the address may send counts and commands"
        )
    return found


def check_files(settings: RebalancerSettings, security: SecuritySettings) -> list[str]:
    """ValueError or OSError where an address, a file or a key cannot serve; warnings about the keys' files."""
    address = parse_address(settings.bind, field="rebalancer.bind (--bind)")
    check_bind(
        address,
        field="rebalancer.bind (--bind)",
        has_keys=bool(security.keys),
        insecure=security.insecure,
    )
    names = {"rebalancer.store": Path(settings.store)}
    _check_store(names["rebalancer.store"])
    if address.ipc_path is not None:
        _check_folder("rebalancer.bind", address.ipc_path)
        names["rebalancer.bind"] = address.ipc_path
    if settings.ready_file:
        ready = names["rebalancer.ready_file"] = Path(settings.ready_file)
        _check_folder("rebalancer.ready_file", ready)
        if ready.is_dir():
            raise ValueError(f"rebalancer.ready_file: {ready} is a folder, expected a file's name")
        if ready.exists() and not ready.is_file():
            raise ValueError(f"rebalancer.ready_file: {ready} is not a regular file")
    _check_apart(names)
    if settings.http_bind and address.port and address.endpoint == f"tcp://{settings.http_bind}":
        raise ValueError(f"rebalancer.http_bind: {settings.http_bind} is the address of rebalancer.bind too")
    warnings = _check_keys(Path(security.keys)) if security.keys else []
    store = Path(settings.store)
    if store.exists() and (mode := stat.S_IMODE(store.stat().st_mode)) & 0o077:
        warnings.append(
            f"rebalancer.store: {store} has mode {mode:03o}: other users can read or write what it holds"
        )
    if settings.http_bind:
        address = parse_address(f"tcp://{settings.http_bind}", field="rebalancer.http_bind")
        if not read_http_token(security) and not address.is_local:
            warnings.append(
                f"rebalancer.http_bind: {settings.http_bind} is not a loopback address: anybody who reaches it "
                "can read the metrics; the page and its API are off without a token (--http-token)"
            )
    return warnings


def _check_apart(names: dict[str, Path]) -> None:
    seen: dict[str, str] = {}
    for field, path in names.items():
        place = os.path.realpath(path)
        if place in seen:
            raise ValueError(f"{field}: {path} is the file of {seen[place]} too")
        seen[place] = field


def _check_folder(field: str, path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{field}: folder {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{field}: folder {folder} cannot be written")


def _check_store(path: Path) -> None:
    """ValueError unless there is a store at `path` or one can be made there."""
    field = "rebalancer.store"
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except OSError as error:  # a loop of links, a name that is too long, a folder that is a file
        raise ValueError(f"{field}: {path}: {error.strerror}") from None
    _check_folder(field, path)
    if path.is_dir():
        raise ValueError(f"{field}: {path} is a folder, expected a file's name")
    if path.exists() and not path.is_file():
        raise ValueError(f"{field}: {path} is not a regular file")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise ValueError(f"{field}: {path} cannot be read and written")
    if path.exists() and path.stat().st_size:
        # Not through SQLite, which would put its own files beside one of the names of a store that is in use.
        with path.open("rb") as file:
            header = file.read(72)
        if header[:16] != b"SQLite format 3\0" or int.from_bytes(header[68:72], "big") != APPLICATION_ID:
            raise ValueError(
                f"{field}: {path} exists and is not an evenroute store; expected one, or a free path"
            )


def read_http_token(security: SecuritySettings) -> str:
    """The token of the page and its API, "" without one; ValueError or OSError for a file that holds none."""
    path = Path(security.http_token or Path(security.keys) / HTTP_TOKEN)
    if not security.http_token and not (security.keys and path.exists()):
        return ""
    try:
        token = read_input_text(path).strip()
    except OSError as error:
        raise type(error)(f"security.http_token (--http-token): {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"security.http_token (--http-token): {error}") from None
    if not 16 <= len(token) <= 512 or not token.isascii() or not token.isprintable():
        raise ValueError(
            f"security.http_token (--http-token): {path} holds no token: expected 16 to 512 ASCII signs"
        )
    return token


def _check_keys(folder: Path) -> list[str]:
    """ValueError or OSError unless the rebalancer can use the folder; warnings where others can."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"security.keys (--keys): {folder} is a file, expected a folder of `evenroute keygen`"
        )
    for name in (SERVER_FILE, KNOWN_KEYS):
        if (folder / name).exists() and not os.access(folder / name, os.R_OK):
            raise ValueError(f"security.keys (--keys): {folder / name} cannot be read by this user")
    load_server_keys(folder)
    warnings = []
    for name, refused, whom in (
        (SERVER_FILE, stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP, "read or written"),
        (HTTP_TOKEN, stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP, "read or written"),
        (KNOWN_KEYS, stat.S_IWOTH | stat.S_IWGRP, "written"),
        *((f"{role}.toml", stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP, "read or written") for role in ROLES),
    ):
        if not (folder / name).exists():
            continue
        mode = stat.S_IMODE((folder / name).stat().st_mode)
        if mode & refused:
            warnings.append(
                f"security.keys: {folder / name} has mode {mode:03o}: it can be {whom} by other users"
            )
    return warnings


def check_own_planner(planner: PlannerSettings, *, trial: bool) -> list[str]:
    """ValueError unless `planner.function` imports and takes a planner's arguments; with `trial` also unless it plans.

    The trial is one layer of a few experts on two ranks. A ValueError there may be about this case alone: a warning.
    """
    check_planner(planner.function)
    if not trial or planner.num_groups > MAX_TRIAL_GROUPS:
        return []
    field = f"planner.function (--planner): {planner.function!r}"
    process = PlannerProcess(planner.time_limit_s, planner.function)
    try:
        reply = plan_now(process, _trial_request(planner))
    except PlannerError as error:
        if str(error).startswith("ValueError: "):
            return [f"{field} refuses a tiny case: {str(error).partition(': ')[2]}"]
        raise ValueError(f"{field} failed on a tiny case: {error}; expected a plan") from None
    finally:
        process.close()
    assert reply.placement is not None
    experts = 4 * planner.num_groups
    found = reply.placement
    shape = (found.num_layers, found.num_logical_experts, found.num_slots, found.ep_size)
    if shape != (1, experts, experts + _TRIAL_RANKS, _TRIAL_RANKS):
        raise ValueError(f"{field} answered a tiny case with a placement of another shape")
    return []


def _trial_request(planner: PlannerSettings) -> PlanRequest:
    experts = 4 * planner.num_groups
    current = Placement.initial(1, experts, experts + _TRIAL_RANKS, Topology(_TRIAL_RANKS))
    return plan_request(planner, 1, np.arange(1.0, experts + 1.0)[None], current)


def lock_paths(store: str, address: Address) -> list[tuple[str, Path]]:
    """What one rebalancer alone may use, each with its setting: the store, and the socket's file if it has one."""
    paths = [(STORE_FIELD, Path(store))]
    if address.ipc_path is not None:
        paths.append(("rebalancer.bind (--bind)", address.ipc_path))
    return paths
