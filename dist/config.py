"""Settings of the rebalancer and of the rank agent: frozen dataclasses, one strict TOML file, one place for defaults.

A file has the tables [rebalancer], [planner], [security] and [agent]; each key is a field of the dataclass of that
name. Unknown keys are refused with the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike

from evenroute.dist.wire.address import Address, parse_address
from evenroute.eplb._checks import (
    LEAST_S,
    MOST_S,
    describe,
    require_choice,
    require_path,
    require_text,
    shown,
)
from evenroute.eplb._io import read_input_text

LOG_LEVELS = ("debug", "info", "warning", "error")
POLICIES = ("auto", "global", "hierarchical", "incremental", "weighted")
INTERVAL_UNITS = ("seconds", "windows")
DEFAULT_PLANNER = "evenroute.eplb.planner:plan_placement"
_HOST = re.compile(r"[A-Za-z0-9_.:%-]+|\*", re.ASCII)


def _require(section: str, name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"{section}.{name}: {shown(value)} found, expected {allowed}")


def _require_range(
    section: str, settings: typing.Any, names: typing.Iterable[str], low: float, high: float
) -> None:
    for name in names:
        value = getattr(settings, name)
        _require(section, name, value, value is None or low <= value <= high, f"{low:g} to {high:g}")


def _require_types(section: str, settings: typing.Any) -> None:
    """ValueError unless each field holds a value of its type, finite where it is a number, without NUL characters."""
    hints = typing.get_type_hints(type(settings))
    for entry in dataclasses.fields(settings):
        value = getattr(settings, entry.name)
        where = f"{section}.{entry.name}"
        checked = _checked(hints[entry.name], value, where)
        finite = not isinstance(checked, float) or math.isfinite(checked)
        _require(section, entry.name, value, finite, "a finite number")
        if isinstance(value, str):
            _require(section, entry.name, value, value.isprintable(), "text without control characters")
            spaces = value != value.strip()
            _require(section, entry.name, value, not spaces, "no space before or behind")


def _parse_host_port(text: str, *, field: str) -> Address:
    """HOST:PORT, an IPv6 host with or without brackets; ValueError naming `field`."""
    host, _, port = text.rpartition(":")
    number = port.isascii() and port.isdigit() and len(port) < 100 and int(port) < 65536
    if not number or not _HOST.fullmatch(host.strip("[]")):
        raise ValueError(f"{field}: {shown(text)} found, expected HOST:PORT (port 0..65535)")
    return Address(text, None, host.strip("[]"), int(port))


def _parse_endpoint(text: str, *, field: str) -> Address:
    """`parse_address`, and a host that can be one."""
    address = parse_address(text, field=field)
    if address.ipc_path is None and not _HOST.fullmatch(address.host.strip("[]")):
        raise ValueError(f"{field}: {shown(text)} found, expected a host of letters, digits and .:-_ or *")
    return address


@dataclass(frozen=True)
class RebalancerSettings:
    """The process: where it listens, what it keeps, how long things may take. Times in seconds.

    `store` "" means a missing setting (the command line gives it, or `--check-config` tells).
    """

    bind: str = ""
    store: str = ""
    metrics_bind: str = ""  # HOST:PORT of the Prometheus endpoint, "" = none; port 0 is an automatic one
    ready_file: str = ""  # JSON with the bound addresses, the pid and the epoch, written once it serves
    log_level: str = "info"
    keep_windows_s: float = (
        3600.0  # fleet-wide windows stay single for so long, then are summed per roll_up_s
    )
    roll_up_s: float = 3600.0
    max_message_bytes: int = 8 * 1024 * 1024  # the largest window of kimi-k3 has 0.7 MB
    max_rank_silence_s: float = 10.0  # a rank not heard for so long is reported missing
    version_limit_s: float = 30.0  # first time-out of a version that is not taken up; doubles
    listen_s: float = 10.0  # at start: ranks of a known run are waited for so long

    def __post_init__(self) -> None:
        _require_types("rebalancer", self)
        times = ("max_rank_silence_s", "version_limit_s", "listen_s")
        _require_range("rebalancer", self, times, LEAST_S, MOST_S)
        _require_range("rebalancer", self, ("keep_windows_s", "roll_up_s"), 1.0, 100 * MOST_S)
        _require_range("rebalancer", self, ("max_message_bytes",), 65536, 2**30)
        _require(
            "rebalancer", "log_level", self.log_level, self.log_level in LOG_LEVELS, " | ".join(LOG_LEVELS)
        )
        if self.bind:
            _parse_endpoint(self.bind, field="rebalancer.bind")
        if self.metrics_bind:
            address = _parse_host_port(self.metrics_bind, field="rebalancer.metrics_bind")
            # Without the brackets of IPv6: as the server takes it.
            object.__setattr__(self, "metrics_bind", f"{address.host}:{address.port}")


@dataclass(frozen=True)
class PlannerSettings:
    """When and how a placement is planned.

    `interval` counts `interval_unit`s between two plans; loads are those since the last plan. A plan needs at least
    `min_tokens` counted tokens and is published if it predicts at least `min_gain` more balancedness.
    """

    enabled: bool = True
    interval: float = 60.0
    interval_unit: str = "seconds"
    min_tokens: int = 1
    min_gain: float = 0.0
    policy: str = "auto"
    num_groups: int = 1
    target: float | None = None
    max_moves: int | None = None
    time_limit_s: float = 60.0
    degraded_after: int = 3  # intervals without a successful plan
    function: str = DEFAULT_PLANNER  # MODULE:FUNCTION of the same signature

    def __post_init__(self) -> None:
        _require_types("planner", self)
        unit = self.interval_unit
        _require("planner", "interval_unit", unit, unit in INTERVAL_UNITS, "seconds | windows")
        if unit == "windows":
            whole = float(self.interval).is_integer()
            _require("planner", "interval", self.interval, whole, "a whole number of windows")
        least, most = (LEAST_S, MOST_S) if unit == "seconds" else (1, 10**9)
        good = least <= self.interval <= most
        _require("planner", "interval", self.interval, good, f"{least:g} to {most:g} {unit}")
        _require_range("planner", self, ("min_tokens",), 1, 2**62)
        _require_range("planner", self, ("min_gain",), 0, 1)
        _require_range("planner", self, ("num_groups",), 1, 65536)
        _require_range("planner", self, ("max_moves",), 0, 2**31)
        _require_range("planner", self, ("time_limit_s",), LEAST_S, MOST_S)
        _require_range("planner", self, ("degraded_after",), 1, 10**9)
        _require("planner", "policy", self.policy, self.policy in POLICIES, " | ".join(POLICIES))
        if self.target is not None:
            _require("planner", "target", self.target, 0 < self.target <= 1, "a balancedness in (0, 1]")
        module, colon, name = self.function.partition(":")
        _require(
            "planner",
            "function",
            self.function,
            bool(colon) and all(part.isidentifier() for part in (*module.split("."), name)),
            "MODULE:FUNCTION",
        )


@dataclass(frozen=True)
class SecuritySettings:
    """`keys`: folder made by `evenroute keygen`; without keys only ipc and loopback are bound unless `insecure`."""

    keys: str = ""
    insecure: bool = False

    def __post_init__(self) -> None:
        _require_types("security", self)
        _require(
            "security",
            "insecure",
            self.insecure,
            not (self.keys and self.insecure),
            "false when security.keys is given",
        )


AGENT_MODES = ("balance", "shadow")


@dataclass(frozen=True)
class AgentConfig:
    """One rank's agent. The values must be equal on all ranks. Times in seconds.

    `rebalancer` "" = no rebalancer: the start placement stays. `window_steps`: counts are taken every so many steps.
    `top_k`: routed experts a token (counts are checked against it). `shared_counts`: `tokens="shared"`, rank 0 reports.
    `mode`: "balance", or "shadow": count and plan, and change nothing; the job keeps its own placement.
    `record_dir`: where this rank writes recordings of passes (`evenroute record start ADDR --mode per_token`).
    """

    rebalancer: str = ""
    keys: str = ""  # this rank's key file, `rank.toml`
    model: str = ""
    top_k: int = 0  # 0: as the Router that counts into the agent's counters
    mode: str = "balance"
    shared_counts: bool = False
    window_steps: int = 16
    agree_every: int = 4
    heartbeat_s: float = 1.0
    resend_s: float = 1.0
    silence_limit_s: float = 5.0  # a rebalancer that acknowledges nothing for so long is connected to anew
    start_limit_s: float = 10.0
    require_rebalancer: bool = False
    vote_limit_s: float = 60.0  # a rank that does not post its vote for so long ends the job
    close_limit_s: float = 3.0
    record_dir: str = ""  # an existing folder; "" = recordings of passes are refused
    record_buffer_bytes: int = 64 * 1024 * 1024  # host memory of a recording (pinned beside a GPU)
    record_part_bytes: int = 64 * 1024 * 1024  # a file is finished at this size and another one begun
    record_max_bytes: int = 8 * 1024 * 1024 * 1024  # all recordings of this rank in record_dir together

    def __post_init__(self) -> None:
        _require_types("agent", self)
        sizes = ("record_buffer_bytes", "record_part_bytes", "record_max_bytes")
        _require_range("agent", self, sizes, 65536, 2**40)
        _require_range("agent", self, ("top_k",), 0, 65536)
        _require("agent", "mode", self.mode, self.mode in AGENT_MODES, " or ".join(AGENT_MODES))
        _require_range("agent", self, ("window_steps", "agree_every"), 1, 2**31)
        times = (
            "heartbeat_s",
            "resend_s",
            "silence_limit_s",
            "start_limit_s",
            "vote_limit_s",
            "close_limit_s",
        )
        _require_range("agent", self, times, LEAST_S, MOST_S)
        if self.rebalancer:
            address = _parse_endpoint(self.rebalancer, field="agent.rebalancer")
            known = address.ipc_path is not None or (address.port > 0 and address.host != "*")
            _require(
                "agent", "rebalancer", self.rebalancer, known, "an address to connect to: a host and its port"
            )
        at_most = f"at most record_max_bytes ({self.record_max_bytes})"
        fits = self.record_part_bytes <= self.record_max_bytes
        _require("agent", "record_part_bytes", self.record_part_bytes, fits, at_most)
        _require(
            "agent",
            "require_rebalancer",
            self.require_rebalancer,
            bool(self.rebalancer) or not self.require_rebalancer,
            "false when agent.rebalancer is empty",
        )


@dataclass(frozen=True)
class RebalancerConfig:
    """All that `run_rebalancer` needs, checked as a whole."""

    rebalancer: RebalancerSettings = field(default_factory=RebalancerSettings)
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)

    def __post_init__(self) -> None:
        for entry, kind in (
            ("rebalancer", RebalancerSettings),
            ("planner", PlannerSettings),
            ("security", SecuritySettings),
        ):
            found = getattr(self, entry)
            if not isinstance(found, kind):
                raise ValueError(f"{entry}: a {type(found).__name__} found, expected {kind.__name__}")

    def check(self, *, try_planner: bool = False) -> list[str]:
        """ValueError or OSError for what can't work; returns warnings for what works otherwise than it looks.

        Files, folders, keys and a planner of one's own are looked at as they are on this host; no address is bound.
        `try_planner`: such a planner is also run, in a process of its own, on a tiny case (`--check-config`).
        """
        from evenroute.dist.rebalancer.host_checks import check_files, check_own_planner

        settings = self.rebalancer
        for name in ("bind", "store"):
            value = getattr(settings, name)
            _require("rebalancer", name, value, bool(value), f"a value (--{name})")
        warnings = check_files(settings, self.security)
        if self.planner.enabled and self.planner.function != DEFAULT_PLANNER:
            warnings += check_own_planner(self.planner, trial=try_planner)
        return warnings + self._warnings()

    def _warnings(self) -> list[str]:
        found = []
        planner, settings = self.planner, self.rebalancer
        if planner.interval_unit == "seconds" and settings.keep_windows_s < planner.interval:
            found.append(
                f"rebalancer.keep_windows_s {settings.keep_windows_s:g} is shorter than planner.interval "
                f"{planner.interval:g}: the windows of one plan will not be told apart in the store"
            )
        if (
            planner.interval_unit == "seconds"
            and planner.time_limit_s > planner.interval * planner.degraded_after
        ):
            found.append(
                f"planner.time_limit_s {planner.time_limit_s:g} is longer than {planner.degraded_after} intervals of "
                f"{planner.interval:g}: a slow planner shows as degraded before it is stopped"
            )
        if not planner.enabled and dataclasses.replace(planner, enabled=True) != PlannerSettings():
            found.append("planner.enabled is false: the other planner settings have no effect")
        if planner.max_moves == 0 and planner.policy in ("global", "hierarchical", "incremental"):
            found.append(f"planner.max_moves is 0: policy {planner.policy} balances by moves alone")
        if self.security.insecure:
            found.append(
                "security.insecure is true: anybody who reaches the address may send counts and commands"
            )
        return found

    def effective(self) -> str:
        """All settings in one line, for the log."""
        return " ".join(
            f"{section}.{name}={value!r}"
            for section in ("rebalancer", "planner", "security")
            for name, value in dataclasses.asdict(getattr(self, section)).items()
        )


SECTIONS: dict[str, type] = {
    "rebalancer": RebalancerSettings,
    "planner": PlannerSettings,
    "security": SecuritySettings,
    "agent": AgentConfig,
}


def read_toml(path: str | PathLike[str]) -> dict[str, dict[str, object]]:
    """The tables of a settings file, unchecked but for their names; ValueError or OSError in one line."""
    path = require_path("config", path)
    try:
        text = read_input_text(path)
    except OSError as error:
        raise type(error)(f"config {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"config {path}: not text: {error.reason}") from None
    except ValueError as error:
        raise ValueError(f"config {error}") from None
    if not text.strip():
        raise ValueError(f"config {path}: empty; expected at least one of [{'], ['.join(SECTIONS)}]")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"config {path}: {error}") from None
    for name, table in tables.items():
        if name not in SECTIONS:
            raise ValueError(f"config {path}: unknown table {shown(name)}{nearest(name, SECTIONS)}")
        if not isinstance(table, dict):
            raise ValueError(f"config {path}: {name} must be a table [{name}]")
    return tables


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """ ", did you mean ...?" where a known name is close, else the known names."""
    require_text("name", name)
    if isinstance(known, str) or not isinstance(known, typing.Iterable):
        raise ValueError(f"known must be names, found {describe(known)}")
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else f", expected one of {', '.join(known)}"


T = typing.TypeVar("T")


def build_section(kind: type[T], values: dict[str, object], *, where: str) -> T:
    """Make a settings dataclass from plain values; types are checked, unknown keys refused with the nearest known."""
    if kind not in SECTIONS.values():
        names = ", ".join(section.__name__ for section in SECTIONS.values())
        raise ValueError(f"kind must be one of {names}, found {getattr(kind, '__name__', describe(kind))}")
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: {describe(values)} found, expected names and values")
    hints = typing.get_type_hints(kind)
    checked: dict[str, object] = {}
    for name, value in values.items():
        if not isinstance(name, str) or name not in hints:
            known = nearest(name if isinstance(name, str) else "", hints)
            raise ValueError(f"{where}: unknown key {shown(name)} (value {shown(value)}){known}")
        checked[name] = _checked(hints[name], value, f"{where}.{name}")
    return kind(**checked)


def _checked(hint: object, value: object, where: str) -> object:
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(value) in allowed:
        return value
    if float in allowed and type(value) is int and abs(value) < 2**1000:
        return float(value)
    names = " or ".join(kind.__name__ for kind in allowed if kind is not type(None))
    found = shown(value) if type(value) is not int or abs(value) < 2**1000 else "a number of over 300 digits"
    raise ValueError(f"{where}: {found} found, expected {names}")


def load_config(
    path: str | PathLike[str] | None, overrides: dict[str, dict[str, object]] | None = None
) -> RebalancerConfig:
    """The rebalancer's settings: defaults, then the file, then `overrides` (of the command line; None = not given)."""
    _check_overrides(overrides)
    tables = {} if path is None else read_toml(path)
    where = "config" if path is None else f"config {path}"
    sections: dict[str, typing.Any] = {}
    for name in ("rebalancer", "planner", "security"):
        build_section(SECTIONS[name], dict(tables.get(name, {})), where=f"{where}: {name}")
        given = {key: value for key, value in (overrides or {}).get(name, {}).items() if value is not None}
        sections[name] = build_section(
            SECTIONS[name], {**tables.get(name, {}), **given}, where=f"{where}: {name}"
        )
    if "agent" in tables:
        agent = build_section(AgentConfig, tables["agent"], where=f"{where}: agent")
        limit_s = sections["rebalancer"].max_rank_silence_s
        often = agent.heartbeat_s < limit_s or "heartbeat_s" not in tables["agent"]
        _require(
            "agent",
            "heartbeat_s",
            agent.heartbeat_s,
            often,
            f"less than rebalancer.max_rank_silence_s ({limit_s:g})",
        )
    return RebalancerConfig(**sections)


def _check_overrides(overrides: object) -> None:
    if overrides is None:
        return
    if not isinstance(overrides, Mapping):
        raise ValueError(f"overrides must be a dict of settings by table, found {describe(overrides)}")
    for name, values in overrides.items():
        if name not in SECTIONS or not isinstance(values, Mapping):
            raise ValueError(
                f"overrides: {shown(name)} with {describe(values)} found, expected a dict of settings for one of "
                f"{', '.join(SECTIONS)}"
            )


def parse_interval(text: str) -> tuple[float, str]:
    """`60` or `1.5s` -> seconds, `4w` -> windows; ValueError naming --interval."""
    require_text("--interval", text)
    found = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([sw]?)", text, re.ASCII)
    value = math.nan if found is None else float(found[1])
    if found is None or not math.isfinite(value):
        raise ValueError(f"--interval: {shown(text)} found, expected seconds (60, 1.5s) or windows (4w)")
    return value, "windows" if found[2] == "w" else "seconds"


def load_agent_config(path: str | PathLike[str]) -> AgentConfig:
    """The [agent] table of a settings file."""
    return build_section(AgentConfig, read_toml(path).get("agent", {}), where=f"config {path}: agent")


def set_up_logging(level: str) -> None:
    """One line a message on stderr, with UTC time; for the processes of this package only."""
    require_choice("level", level, LOG_LEVELS)
    handler = logging.StreamHandler()
    formatter = logging.Formatter("%(asctime)sZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = __import__("time").gmtime
    handler.setFormatter(formatter)
    logger = logging.getLogger("evenroute")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
