"""`evenroute top ADDR`: watch a rebalancer and its ranks live."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenroute.tools.options import Address

if TYPE_CHECKING:
    from evenroute.dist.client import ControlClient
    from evenroute.tools.report.top import Screen

Keys = Annotated[Path | None, typer.Option(help="viewer.toml or operator.toml.")]
Interval = Annotated[float, typer.Option(help="Seconds between two looks.")]
Frames = Annotated[int | None, typer.Option(min=1, help="Looks before it ends; 1 if stdout is no terminal.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.")]


def top(
    address: Address,
    keys: Keys = None,
    interval: Interval = 1.0,
    frames: Frames = None,
    timeout: Timeout = 5.0,
) -> None:
    """Balancedness, the hottest layers and ranks, versions and lag, live; ends with q or Ctrl-C.

    Exit status as `status`: 0 healthy, 1 degraded, 2 unreachable; 130 for Ctrl-C before the first answer.
    """
    from rich.console import Console

    if not interval > 0 or not timeout > 0:
        raise ValueError(f"--interval {interval:g} and --timeout {timeout:g} must be above 0")
    console = Console(highlight=False, markup=False)  # names come from peers
    limit = frames if frames is not None else (None if console.is_terminal else 1)
    raise typer.Exit(watch(address, keys, interval, limit, timeout, console))


def watch(
    address: str,
    keys: Path | None,
    interval: float,
    frames: int | None,
    timeout: float,
    console: object,
) -> int:
    """Look until the frames are used up or Ctrl-C; the exit status: 0 healthy, 1 degraded, 2 unreachable.

    Ctrl-C before the first answer raises KeyboardInterrupt (exit status 130): nothing is known yet.
    A rebalancer that does not answer is shown as lost and asked again; only a failed first look ends the command.
    """
    from rich.console import Console
    from rich.live import Live

    from evenroute.dist.client import ControlClient, UnreachableError
    from evenroute.tools.report.keys import single_keys
    from evenroute.tools.report.top import Screen

    assert isinstance(console, Console)
    screen, status, looks = Screen(takes_keys=console.is_terminal), 2, 0
    with (
        ControlClient(address, keys=keys, timeout_s=timeout) as client,
        single_keys(console.is_terminal) as typed,
        Live(console=console, screen=console.is_terminal, auto_refresh=False, transient=False) as live,
    ):

        def draw() -> None:
            drawn = screen.render(console.width, console.height)
            live.update(drawn, refresh=True) if console.is_terminal else console.print(drawn)

        try:
            while frames is None or looks < frames:
                began = time.monotonic()
                try:
                    _look(client, screen)
                    status = 0 if screen.healthy else 1
                except UnreachableError as error:
                    if not looks:
                        raise
                    screen.lost(str(error), time.time())
                    status = 2
                looks += 1
                draw()
                while frames is None or looks < frames:
                    pressed = typed.pressed(interval - (time.monotonic() - began))
                    if not all(map(screen.key, pressed)):
                        return status
                    if not pressed:
                        break
                    draw()
                    if screen.asks:
                        break
        except KeyboardInterrupt:
            if not looks:
                raise
    return status


def _look(client: ControlClient, screen: Screen) -> None:
    """Ask for the status, and for the layer that is shown; RefusedError with the rebalancer's reason."""
    from evenroute.dist.wire.control import LayerLoads, LayerRequest

    screen.feed(client.status(), time.time())
    if screen.layer is not None:
        detail = client.ask(LayerRequest(screen.layer))
        screen.detail = detail if isinstance(detail, LayerLoads) else None
