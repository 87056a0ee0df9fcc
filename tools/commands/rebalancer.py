"""`evenroute rebalancer`: the process that keeps counts, plans placements and publishes them."""

from __future__ import annotations

from typing import Annotated

import typer


def rebalancer(
    bind: Annotated[
        str | None, typer.Option(help="ipc://PATH or tcp://HOST:PORT; port 0 is an automatic one.")
    ] = None,
    store: Annotated[str | None, typer.Option(help="History file (SQLite); made if absent.")] = None,
    config: Annotated[str | None, typer.Option(help="TOML settings; flags win over it.")] = None,
    check_config: Annotated[bool, typer.Option("--check-config", help="Check all settings and end.")] = False,
    keys: Annotated[str | None, typer.Option(help="Folder made by `evenroute keygen`.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that others can reach without keys.")
    ] = False,
    interval: Annotated[
        str | None, typer.Option(help="Between plans: seconds (60, 1.5s) or windows (4w).")
    ] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Counted tokens that a plan needs.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="auto, weighted, incremental, global or hierarchical.")
    ] = None,
    planner: Annotated[
        str | None,
        typer.Option(help="MODULE:FUNCTION, called as plan_placement is, in place of the policy."),
    ] = None,
    num_groups: Annotated[
        int | None, typer.Option(help="Expert groups; above 1 they stay on their node.")
    ] = None,
    metrics_bind: Annotated[str | None, typer.Option(help="HOST:PORT for Prometheus.")] = None,
    ready_file: Annotated[str | None, typer.Option(help="JSON with the bound address, once serving.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="End the rebalancer that holds the store or the address.")
    ] = False,
) -> None:
    """Serve a job: collect counts, plan, publish. Ends on SIGTERM or SIGINT; status 1: another has taken over."""
    from pathlib import Path

    from evenroute.dist.config import load_config, parse_interval

    given = {
        "bind": (bind, "ipc://PATH or tcp://HOST:PORT"),
        "store": (store, "a file's name, in a folder that exists"),
        "config": (config, "a TOML file"),
        "keys": (keys, "a folder of `evenroute keygen`"),
        "metrics-bind": (metrics_bind, "HOST:PORT"),
        "ready-file": (ready_file, "a file's name"),
        "planner": (planner, "MODULE:FUNCTION"),
    }
    for flag, (value, expected) in given.items():
        if value == "":  # an empty setting would mean none
            section = {"config": "", "keys": "security.keys: ", "planner": "planner.function: "}
            field = section.get(flag, f"rebalancer.{flag.replace('-', '_')}: ")
            raise ValueError(f"{field}--{flag} '' found, expected {expected}")
    seconds_or_windows = (None, None) if interval is None else parse_interval(interval)
    settings = load_config(
        None if config is None else Path(config),
        {
            "rebalancer": {
                "bind": bind,
                "store": store,
                "metrics_bind": metrics_bind,
                "ready_file": ready_file,
                "log_level": log_level,
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
