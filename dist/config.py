"""Settings of the rebalancer and of the rank agent: frozen dataclasses, one strict TOML file, one place for defaults.

A file has the tables [rebalancer], [planner], [security] and [agent]; each key is a field of the dataclass of that
name. Unknown keys are refused with the nearest known one. What a field may hold stands beside it, as `Rule`s in its
annotation; `_check_fields` reads them.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from typing import Annotated, Any, NamedTuple

from evenroute.dist.wire.address import Address, bracketed, parse_address
from evenroute.eplb._checks import LEAST_S, MOST_S, as_path, nearest, shown
from evenroute.eplb._io import read_input_text

_HOST = re.compile(r"[A-Za-z0-9_.:%-]+|\*", re.ASCII)


class Rule(NamedTuple):
    """A condition on a value (None and "" excepted), and its message: "X found, expected `expected`"."""

    good: Callable[[Any], bool]
    expected: str


def _range(low: float, high: float) -> Rule:
    return Rule(lambda value: low <= value <= high, f"{low:g} to {high:g}")


def _one_of(*words: str) -> Rule:
    return Rule(lambda value: value in words, " | ".join(words))


def _is_function(text: str) -> bool:
    module, colon, name = text.partition(":")
    return not text or (bool(colon) and all(part.isidentifier() for part in (*module.split("."), name)))


Seconds = Annotated[float, _range(LEAST_S, MOST_S)]
LongSeconds = Annotated[float, _range(1.0, 100 * MOST_S)]
Bytes = Annotated[int, _range(65536, 2**40)]
Steps = Annotated[int, _range(1, 2**31)]


def _require(section: str, name: str, value: object, good: bool, expected: str) -> None:
    if not good:
        raise ValueError(f"{section}.{name}: {shown(value)} found, expected {expected}")


def _check_fields(section: str, settings: Any) -> None:
    """ValueError unless each field holds a value of its type, plain and finite, that fulfils the field's rules."""
    for name, hint in typing.get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        checked = _checked(hint, value, f"{section}.{name}")
        finite = not isinstance(checked, float) or math.isfinite(checked)
        _require(section, name, value, finite, "a finite number")
        if isinstance(value, str):
            _require(section, name, value, value.isprintable(), "text without control characters")
            _require(section, name, value, value == value.strip(), "no space before or behind")
        for rule in () if value is None else getattr(hint, "__metadata__", ()):
            _require(section, name, value, rule.good(value), rule.expected)


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

    `bind` and `store` "" mean a missing setting, which the command line may give."""

    bind: str = ""
    store: str = ""
    http_bind: str = ""  # HOST:PORT of the page, its API and metrics, "" = none; port 0 is an automatic one
    ready_file: str = ""  # JSON with the bound addresses and the pid, written once it serves
    log_level: Annotated[str, _one_of("debug", "info", "warning", "error")] = "info"
    log_format: Annotated[str, _one_of("text", "json")] = "text"
    keep_windows_s: LongSeconds = 3600.0  # fleet-wide windows stay single for this long, then ...
    roll_up_s: LongSeconds = 3600.0  # ... they are summed in spans of this length
    max_message_bytes: Annotated[int, _range(65536, 2**30)] = 8 * 1024 * 1024  # kimi-k3's window: 0.7 MB
    max_rank_silence_s: Seconds = 10.0  # a rank not heard for this long is reported missing
    version_limit_s: Seconds = 30.0  # first time-out of a version that is not taken up; doubles
    listen_s: Seconds = 10.0  # at start: how long to wait for ranks of a known run
    member_silence_s: Seconds = 1.0  # after a rank halted: one that says nothing for so long is dead

    def __post_init__(self) -> None:
        _check_fields("rebalancer", self)
        if self.bind:
            _parse_endpoint(self.bind, field="rebalancer.bind")
        if self.http_bind:
            address = _parse_host_port(self.http_bind, field="rebalancer.http_bind")
            object.__setattr__(self, "http_bind", f"{bracketed(address.host)}:{address.port}")


@dataclass(frozen=True)
class PlannerSettings:
    """When and how a placement is planned.

    `interval` counts `interval_unit`s between two decisions; loads are those since the last one. A decision needs at
    least `min_tokens` counted tokens; a plan is published if it predicts at least `min_gain` more balancedness.

    `RebalancePolicy` decides, as in `evenroute replay --policy rebalancer`. `policy`: auto (a full plan at the start,
    then shares and few moves), weighted (without the full plan), incremental (few moves, even shares), global or
    hierarchical (a full plan at every interval). `target`, `max_moves` (of one plan; no full plan is made) and
    `num_groups` (above 1: groups stay on their node) limit it. Moves must save more than they cost in `life_s`; until
    ranks have measured it, `slot_s` (a rank's fetch of one) and `load_fraction` (of a step, that follows the hottest
    rank) are taken, else defaults. With `small_batches` uneven shares come with sets for small and medium batches,
    planned by `expert_us` and `token_us` (`evenroute bench experts`), else by a roofline. A `function`, called as
    `plan_placement` is, decides in place of the policy.
    """

    enabled: bool = True
    interval: float = 60.0
    interval_unit: Annotated[str, _one_of("seconds", "windows")] = "seconds"
    min_tokens: Annotated[int, _range(1, 2**62)] = 1
    min_gain: Annotated[float, _range(0, 1)] = 0.0
    policy: Annotated[str, _one_of("auto", "global", "hierarchical", "incremental", "weighted")] = "auto"
    num_groups: Annotated[int, _range(1, 65536)] = 1
    target: Annotated[float | None, Rule(lambda value: 0 < value <= 1, "a balancedness in (0, 1]")] = None
    max_moves: Annotated[int | None, _range(0, 2**31)] = None
    life_s: Seconds = 300.0  # how long a plan is expected to serve
    slot_s: Annotated[float | None, _range(1e-9, 3600)] = None
    load_fraction: Annotated[float | None, Rule(lambda value: 0 < value <= 1, "a part in (0, 1]")] = None
    small_batches: bool = True
    expert_us: Annotated[float | None, _range(1e-6, 1e9)] = None  # microseconds of an expert touched
    token_us: Annotated[float | None, _range(1e-6, 1e9)] = None  # of a token, beyond that
    time_limit_s: Seconds = 60.0
    degraded_after: Annotated[int, _range(1, 10**9)] = 3  # intervals without a successful plan
    function: Annotated[str, Rule(_is_function, "MODULE:FUNCTION")] = ""

    def __post_init__(self) -> None:
        _check_fields("planner", self)
        full = not self.function and self.policy in ("global", "hierarchical")
        expected = f"none with planner.policy {self.policy}: a full plan moves what it needs"
        both = (self.expert_us is None) == (self.token_us is None)
        _require(
            "planner", "token_us", self.token_us, both, "a number exactly where planner.expert_us is one"
        )
        for name in ("max_moves", "target"):
            _require("planner", name, getattr(self, name), not full or getattr(self, name) is None, expected)
        low, high = LEAST_S, MOST_S
        if self.interval_unit == "windows":
            whole = float(self.interval).is_integer()
            _require("planner", "interval", self.interval, whole, "a whole number of windows")
            low, high = 1, 10**9
        good = low <= self.interval <= high
        _require("planner", "interval", self.interval, good, f"{low:g} to {high:g} {self.interval_unit}")


@dataclass(frozen=True)
class SecuritySettings:
    """`keys`: folder made by `evenroute keygen`; without keys only ipc and loopback are bound unless `insecure`.

    `http_token`: a file with the page's token; "" = the one in the folder of keys, if there is one."""

    keys: str = ""
    insecure: bool = False
    http_token: str = ""

    def __post_init__(self) -> None:
        _check_fields("security", self)
        good = not (self.keys and self.insecure)
        _require("security", "insecure", self.insecure, good, "false when security.keys is given")


@dataclass(frozen=True)
class AgentConfig:
    """One rank's agent. The values must be equal on all ranks. Times in seconds.

    `rebalancer` "" = no rebalancer: the start placement stays. `window_steps`: steps between two takes of the counts.
    `top_k`: routed experts a token (counts are checked against it). `shared_counts`: `tokens="shared"`, rank 0 reports.
    `mode`: "balance", or "shadow": count and plan, and change nothing; the job keeps its own placement.
    `record_dir`: where this rank writes recordings of passes (`evenroute record start ADDR --mode per_token`).
    """

    rebalancer: str = ""
    keys: str = ""  # this rank's key file, `rank.toml`
    model: str = ""
    top_k: Annotated[int, _range(0, 65536)] = 0  # 0: as the Router that counts into the agent's counters
    mode: Annotated[str, _one_of("balance", "shadow")] = "balance"
    shared_counts: bool = False
    window_steps: Steps = 16
    agree_every: Steps = 4
    heartbeat_s: Seconds = 1.0
    resend_s: Seconds = 1.0
    silence_limit_s: Seconds = 5.0  # a rebalancer that acknowledges nothing for this long is reconnected to
    start_limit_s: Seconds = 10.0
    require_rebalancer: bool = False
    vote_limit_s: Seconds = 60.0  # a rank that does not post its vote for this long ends the job
    close_limit_s: Seconds = 3.0
    record_dir: str = ""  # an existing folder; "" = recordings of passes are refused
    record_buffer_bytes: Bytes = 64 * 1024 * 1024  # host memory of a recording (pinned beside a GPU)
    record_part_bytes: Bytes = 64 * 1024 * 1024  # a file is finished at this size and another one begun
    record_max_bytes: Bytes = 8 * 1024 * 1024 * 1024  # all recordings of this rank in record_dir together

    def __post_init__(self) -> None:
        _check_fields("agent", self)
        if self.rebalancer:
            address = _parse_endpoint(self.rebalancer, field="agent.rebalancer")
            known = address.ipc_path is not None or (address.port > 0 and address.host != "*")
            expected = "an address to connect to: a host and its port"
            _require("agent", "rebalancer", self.rebalancer, known, expected)
        fits = self.record_part_bytes <= self.record_max_bytes
        at_most = f"at most record_max_bytes ({self.record_max_bytes})"
        _require("agent", "record_part_bytes", self.record_part_bytes, fits, at_most)
        good = bool(self.rebalancer) or not self.require_rebalancer
        expected = "false when agent.rebalancer is empty"
        _require("agent", "require_rebalancer", self.require_rebalancer, good, expected)


@dataclass(frozen=True)
class RebalancerConfig:
    """All that `run_rebalancer` needs, checked as a whole."""

    rebalancer: RebalancerSettings = field(default_factory=RebalancerSettings)
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)

    def __post_init__(self) -> None:
        for name in ("rebalancer", "planner", "security"):
            found, kind = getattr(self, name), SECTIONS[name]
            if not isinstance(found, kind):
                raise ValueError(f"{name}: a {type(found).__name__} found, expected {kind.__name__}")

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
    path = as_path("config", path)
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


T = typing.TypeVar("T")
_FORMER = {"metrics_bind": "http_bind"}  # keys of 0.1.0


def build_section(kind: type[T], values: dict[str, object], *, where: str) -> T:
    """Make a settings dataclass from plain values; types are checked, unknown keys refused with the nearest known."""
    hints = typing.get_type_hints(kind, include_extras=True)
    checked: dict[str, object] = {}
    for name, value in values.items():
        name = _FORMER.get(name, name)
        if name in checked:
            raise ValueError(f"{where}: {name} is given under its former name too")
        if name not in hints:
            raise ValueError(
                f"{where}: unknown key {shown(name)} (value {shown(value)}){nearest(name, hints)}"
            )
        checked[name] = _checked(hints[name], value, f"{where}.{name}")
    return kind(**checked)


def _checked(hint: Any, value: object, where: str) -> object:
    """The value as its type; an int serves for a float. ValueError naming `where`."""
    plain = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    allowed = typing.get_args(plain) if isinstance(plain, types.UnionType) else (plain,)
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
    tables = {} if path is None else read_toml(path)
    where = "config" if path is None else f"config {path}"
    sections: dict[str, Any] = {}
    for name in ("rebalancer", "planner", "security"):
        kind, table = SECTIONS[name], tables.get(name, {})
        build_section(kind, dict(table), where=f"{where}: {name}")
        given = {key: value for key, value in (overrides or {}).get(name, {}).items() if value is not None}
        sections[name] = build_section(kind, {**table, **given}, where=f"{where}: {name}")
    if "agent" in tables:
        agent = build_section(AgentConfig, tables["agent"], where=f"{where}: agent")
        limit_s = sections["rebalancer"].max_rank_silence_s
        often = agent.heartbeat_s < limit_s or "heartbeat_s" not in tables["agent"]
        expected = f"less than rebalancer.max_rank_silence_s ({limit_s:g})"
        _require("agent", "heartbeat_s", agent.heartbeat_s, often, expected)
    return RebalancerConfig(**sections)
