"""The process of the HTTP port: statuses come from stdin, the history from the store. It ends with the rebalancer."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from evenroute.dist.log import set_up_logging
from evenroute.dist.web.history import LoadHistory
from evenroute.dist.web.process import WebSettings, read_frame
from evenroute.dist.web.routes import LiveState, Routes
from evenroute.dist.web.server import BoundedServer
from evenroute.dist.wire.control import RebalancerStatus

_NICE = 5  # the rebalancer comes first


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the rebalancer's
    descriptor = sys.stdin.fileno()
    settings = msgspec.msgpack.decode(read_frame(descriptor), type=WebSettings)
    set_up_logging(settings.log_level, settings.log_format)
    with suppress(OSError):
        os.nice(_NICE)
    state = LiveState(LoadHistory(Path(settings.store)), settings.max_rank_silence_s)
    routes = Routes(state, token=settings.token, is_local=settings.is_local)
    server = BoundedServer(socket.socket(fileno=settings.descriptor), routes.respond)
    for work in (state.follow, server.serve_forever):
        threading.Thread(target=work, daemon=True).start()
    statuses = msgspec.msgpack.Decoder(RebalancerStatus)
    while True:
        state.feed(statuses.decode(read_frame(descriptor)))


if __name__ == "__main__":
    with suppress(EOFError):
        main()
    os._exit(0)  # threads that serve are not waited for
