"""The entry point `vllm.general_plugins`: each of vLLM's processes learns here whether evenroute is on.

Settings come by `--additional-config '{"evenroute": {"rebalancer": "tcp://HOST:PORT"}}'` or by environment
(`EVENROUTE_REBALANCER=...`); those of the environment are put into the additional configuration where vLLM makes its
own, so that they reach workers on other hosts and are part of the key of its compile cache.
"""

from __future__ import annotations

import functools
import logging
import sys
from importlib.metadata import version
from typing import Any

from evenroute.dist.engines.plugin import PluginSettings, check_version, read_settings, refuse
from evenroute.dist.engines.vllm.limits import check_config
from evenroute.dist.engines.vllm.seams import ENGINE, FIRST, LAST, check_seams

KEY = "evenroute"
VERSION_KEY = "evenroute_version"  # a graph that an older evenroute compiled is not taken

_installed = False


def register() -> None:
    """Called by vLLM in each of its processes, once."""
    settings = read_settings(ENGINE)
    if settings is not None:
        _check_engine()
    try:
        from vllm.v1.worker.worker_base import WorkerBase
    except ImportError as error:
        if settings is not None:
            refuse(ENGINE, f"{error}; evenroute knows {FIRST} to {LAST}")
        return
    _after(WorkerBase, "__init__", _worker_made)
    front = sys.modules.get("vllm.engine.arg_utils")  # not in workers
    if front is not None:
        _after(front.EngineArgs, "create_engine_config", _config_made)


def _after(owner: type, name: str, call: Any) -> None:
    """Behind each call of a method: ``call(result, self, *args, **kwargs)``."""
    original = getattr(owner, name)
    if hasattr(original, "_evenroute"):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        call(result, self)
        return result

    wrapper._evenroute = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def _settings_of(config: Any) -> PluginSettings | None:
    """Settings of a `VllmConfig` and the environment."""
    table = config.additional_config
    return read_settings(ENGINE, table.get(KEY) if isinstance(table, dict) else None)


def _config_made(config: Any, arguments: Any) -> None:
    """vLLM's first process has made its configuration: refuse what can't be before anything is loaded."""
    settings = _settings_of(config)
    if settings is None:
        return
    _check_engine()
    check_config(config)
    if not isinstance(config.additional_config, dict):
        refuse(
            ENGINE, f"--additional-config is a {type(config.additional_config).__name__}, expected a table"
        )
    config.additional_config[KEY] = settings.table()
    config.additional_config[VERSION_KEY] = version("evenroute")


def _worker_made(result: None, worker: Any) -> None:
    """A process that runs a model: wrap what has to be."""
    global _installed
    config = worker.vllm_config
    settings = _settings_of(config)
    if settings is None or _installed:
        return
    _check_engine()
    check_config(config)
    from evenroute.dist.engines.vllm.hooks import Hooks

    Hooks(settings, config).install()
    _installed = True
    _show_logs()


def _show_logs() -> None:
    """evenroute's loggers write where vLLM's do, unless they are configured already."""
    ours, theirs = logging.getLogger("evenroute"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def _check_engine() -> None:
    from vllm import __version__

    check_version(ENGINE, __version__, FIRST, LAST)
    check_seams(__version__)
