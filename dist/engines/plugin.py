"""What the plug-ins of engines share: settings, refusals, the window of known versions, the start placement.

Engines log and swallow a plug-in's errors and would then serve with a balancer of their own. So whatever can't be done
ends the process here: one line on standard error, exit status 2.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from evenroute.dist.config import AgentConfig, build_section
from evenroute.dist.weights.weight_mover import MigrationConfig
from evenroute.eplb._checks import nearest, one_line, require_choice, shown
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology

PREFIX = "EVENROUTE_"  # of a setting's environment variable: EVENROUTE_REBALANCER, EVENROUTE_MODE, ...
_FROM_ENGINE = ("top_k", "shared_counts")  # settings of the agent that only the engine's own can be
CHOICES = ("auto", "engine")
_SWITCHES = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def refuse(engine: str, problem: str) -> NoReturn:
    """End the process: ``evenroute in ENGINE: PROBLEM`` in one line on standard error, exit status 2."""
    print(f"evenroute in {engine}: {' '.join(problem.split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)


@contextmanager
def refusing(engine: str) -> typing.Iterator[None]:
    """A ValueError or OSError inside ends the process by `refuse`."""
    try:
        yield
    except (ValueError, OSError) as error:
        refuse(engine, one_line(error))


@dataclass(frozen=True)
class PluginSettings:
    """Settings of a plug-in, all of them in one flat table: those of `AgentConfig` and `MigrationConfig`, and:

    num_nodes   nodes of the EP group, 0: as many as the engine says
    choice      "auto": experts are chosen by evenroute's router wherever it answers like the engine's, in one launch
                with all the rest; "engine": always by the engine's, and evenroute picks replicas and counts
    """

    agent: AgentConfig
    migration: MigrationConfig = field(default_factory=MigrationConfig)
    num_nodes: int = 0
    choice: str = "auto"

    def table(self) -> dict[str, Any]:
        """All values by name, as `read_settings` takes them: for the engine's other processes."""
        values = {
            **vars(self.agent),
            **vars(self.migration),
            "num_nodes": self.num_nodes,
            "choice": self.choice,
        }
        return {name: values[name] for name in known_settings()}

    def agent_config(self, *, model: str, top_k: int, shared_counts: bool) -> AgentConfig:
        """The agent's settings with what the engine knows; a model's name that was given stays."""
        known: dict[str, Any] = {
            "model": self.agent.model or model,
            "top_k": top_k,
            "shared_counts": shared_counts,
        }
        return dataclasses.replace(self.agent, **known)


def known_settings() -> dict[str, Any]:
    """Type by name of every setting, in the order of the documents."""
    found: dict[str, Any] = {}
    for kind in (AgentConfig, MigrationConfig):
        hints = typing.get_type_hints(kind)
        found |= {name: hint for name, hint in hints.items() if name not in _FROM_ENGINE}
    return found | {"num_nodes": int, "choice": str}


def read_settings(
    engine: str, given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> PluginSettings | None:
    """Settings that the engine was given, and from the environment those that it was not; None without any.

    Args:
        engine: its name, for refusals.
        given: a table of `known_settings`, from the engine's own configuration; None where it has none.
        environ: default: the process's.

    Ends the process by `refuse` for an unknown or misspelt name, a value of another kind or out of range, and for
    settings without ``rebalancer``.
    """
    if given is not None and not isinstance(given, Mapping):
        refuse(engine, f"settings: {shown(given)} found, expected a table of names and values")
    with refusing(engine):
        found = {**_from_environment(os.environ if environ is None else environ), **(given or {})}
        if not found and given is None:
            return None
        return _build(found)


def _build(values: dict[str, Any]) -> PluginSettings:
    known = known_settings()
    for name in values:
        if name not in known:
            raise ValueError(f"settings: unknown name {shown(name)}{nearest(str(name), known)}")
    if not values.get("rebalancer"):
        raise ValueError(
            f"settings: rebalancer is missing, expected its address (tcp://HOST:PORT or ipc://PATH; {PREFIX}REBALANCER)"
        )

    def part(kind: Callable[..., Any]) -> Any:
        names = {item.name for item in dataclasses.fields(typing.cast(Any, kind))}
        chosen = {name: value for name, value in values.items() if name in names}
        return build_section(typing.cast(type, kind), chosen, where="settings")

    nodes = values.get("num_nodes", 0)
    if type(nodes) is not int or not 0 <= nodes <= 1 << 16:
        raise ValueError(f"settings.num_nodes: {shown(nodes)} found, expected an integer from 0 to 65536")
    choice = values.get("choice", "auto")
    require_choice("settings.choice", choice, CHOICES)
    return PluginSettings(part(AgentConfig), part(MigrationConfig), nodes, choice)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings among the variables; one that nearly has a setting's name is refused, others are ignored."""
    known = known_settings()
    found: dict[str, Any] = {}
    if environ.get("EVENROUTE_MEMBER"):
        raise ValueError(
            "ranks that come and go (`evenroute launch`) are not supported inside an engine yet, which has to join its "
            "own way of losing ranks first: start it as it is documented"
        )
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or not text:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in known:
            found[name] = _parsed(variable, text, known[name])
        elif close := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
            raise ValueError(f"{variable}: unknown, did you mean {PREFIX}{close[0].upper()}?")
    return found


def _parsed(variable: str, text: str, kind: Any) -> object:
    try:
        if kind is bool:
            return _SWITCHES[text.lower()]
        if kind in (int, float):
            return kind(text)
    except (KeyError, ValueError):
        expected = "1, true, yes, 0, false or no" if kind is bool else f"a number ({kind.__name__})"
        raise ValueError(f"{variable}: {shown(text)} found, expected {expected}") from None
    return text


def version_numbers(version: str) -> tuple[int, ...]:
    """``0.32.1rc2+cpu`` -> (0, 32, 1): the numbers in front."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def check_version(engine: str, version: str, first: str, last: str) -> None:
    """End the process unless ``first <= version <= last``, compared as far as either bound goes: 0.33.1 is a 0.33."""
    found = version_numbers(version)
    low, high = version_numbers(first), version_numbers(last)
    if not (low <= found[: len(low)] and found[: len(high)] <= high):
        refuse(engine, f"version {version or 'unknown'} found, evenroute knows {first} to {last}")


def start_placement(
    engine: str, physical_to_logical: Any, num_experts: int, ep_size: int, num_nodes: int
) -> Placement:
    """The placement of an engine's own map ``[L, P]`` (a tensor on any device, or an array of integers).

    Ends the process where it breaks our rules: an expert without a slot, or twice on a rank; numbers that do not
    divide.
    """
    rows = physical_to_logical
    if hasattr(rows, "detach"):
        rows = rows.detach().cpu().numpy()
    with refusing(engine):
        return Placement(rows, num_experts, Topology(ep_size, num_nodes))
