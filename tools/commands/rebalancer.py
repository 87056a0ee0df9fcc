"""`evenroute rebalancer`: the process that keeps counts, plans placements and publishes them."""

from __future__ import annotations

from typing import Annotated

import typer

from evenroute.tools.options import parse_interval, setting


def rebalancer(
    bind: Annotated[
        str | None, setting("rebalancer.bind", "ipc://PATH or tcp://HOST:PORT; port 0 is an automatic one.")
    ] = None,
    store: Annotated[
        str | None, setting("rebalancer.store", "History file (SQLite); made if absent.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="TOML settings (`evenroute init` writes one); flags win over it.")
    ] = None,
    check_config: Annotated[bool, typer.Option("--check-config", help="Check all settings and end.")] = False,
    ready_file: Annotated[
        str | None, setting("rebalancer.ready_file", "JSON with the bound addresses, once serving.")
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="End the rebalancer that holds the store or the address.")
    ] = False,
    interval: Annotated[
        str | None,
        setting("planner.interval", "Between plans: 30s, 5m, 2h (a bare number: seconds) or windows (4w)."),
    ] = None,
    min_tokens: Annotated[
        int | None, setting("planner.min_tokens", "Counted tokens that a plan needs.")
    ] = None,
    policy: Annotated[
        str | None, setting("planner.policy", "auto, weighted, incremental, global or hierarchical.")
    ] = None,
    planner: Annotated[
        str | None,
        setting("planner.function", "MODULE:FUNCTION, called as plan_placement is, in place of the policy."),
    ] = None,
    num_groups: Annotated[
        int | None, setting("planner.num_groups", "Expert groups; above 1 they stay on their node.")
    ] = None,
    http_bind: Annotated[
        str | None,
        setting(
            "rebalancer.http_bind",
            "HOST:PORT of the live page, its API and the metrics.",
            "--http-bind",
            "--metrics-bind",
        ),
    ] = None,
    http_token: Annotated[
        str | None,
        setting("security.http_token", "File with the token of the page, where others can reach it."),
    ] = None,
    log_level: Annotated[
        str | None, setting("rebalancer.log_level", "debug, info, warning or error.")
    ] = None,
    log_format: Annotated[
        str | None, setting("rebalancer.log_format", "text, or json: one object a line, with fields.")
    ] = None,
    keys: Annotated[str | None, setting("security.keys", "Folder made by `evenroute keygen`.")] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Allow an address that others can reach without keys.",
            rich_help_panel="Security",
        ),
    ] = False,
) -> None:
    """Serve a job: collect counts, plan, publish. Ends on SIGTERM or SIGINT; status 1: another has taken over."""
    from pathlib import Path

    from evenroute.dist.config import load_config

    given = {
        "bind": (bind, "ipc://PATH or tcp://HOST:PORT"),
        "store": (store, "a file's name, in a folder that exists"),
        "config": (config, "a TOML file"),
        "keys": (keys, "a folder of `evenroute keygen`"),
        "http-bind": (http_bind, "HOST:PORT"),
        "http-token": (http_token, "a file's name"),
        "ready-file": (ready_file, "a file's name"),
        "planner": (planner, "MODULE:FUNCTION"),
    }
    fields = {
        "config": "",
        "keys": "security.keys: ",
        "http-token": "security.http_token: ",
        "planner": "planner.function: ",
    }
    for flag, (value, expected) in given.items():
        if value == "":  # an empty setting would mean none
            field = fields.get(flag, f"rebalancer.{flag.replace('-', '_')}: ")
            raise ValueError(f"{field}--{flag} '' found, expected {expected}")
    seconds_or_windows = (None, None) if interval is None else parse_interval(interval)
    settings = load_config(
        None if config is None else Path(config),
        {
            "rebalancer": {
                "bind": bind,
                "store": store,
                "http_bind": http_bind,
                "ready_file": ready_file,
                "log_level": log_level,
                "log_format": log_format,
            },
            "planner": {
                "interval": seconds_or_windows[0],
                "interval_unit": seconds_or_windows[1],
                "min_tokens": min_tokens,
                "policy": policy,
                "function": planner,
                "num_groups": num_groups,
            },
            "security": {
                "keys": keys,
                "http_token": http_token,
                "insecure": True if insecure else None,
            },
        },
    )
    if check_config:
        from evenroute.dist.rebalancer.host_checks import check_host

        for warning in check_host(settings, try_planner=True):
            typer.echo(f"warning: {warning}", err=True)
        typer.echo(f"settings are good: {settings.effective()}")
        return
    from evenroute.dist.rebalancer.process import run_rebalancer

    raise SystemExit(run_rebalancer(settings, take_over=take_over))
