"""SGLang ends its ranks by SIGKILL. Before, they are asked to end: each stores its last window and says goodbye."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

from evenroute.dist.rank.agent import RankAgent

logger = logging.getLogger("evenroute.sglang")

TITLE = "sglang::scheduler"  # the title of a rank's process
EXTRA_S = 2.0  # beyond the agent's own limit


def end_at_signal(agent: RankAgent) -> None:
    """Have SIGTERM close the agent, then do what it did before."""
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)

    def end(number: int, frame: Any) -> None:
        stored = agent.close()
        logger.info("evenroute: rank %d: closed, last window %s", agent.rank, "stored" if stored else "lost")
        if callable(before):
            before(number, frame)
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


def before_kill(parent_pid: int | None, *_: Any, **__: Any) -> None:
    """Before SGLang kills a tree of processes: its ranks get SIGTERM and as long as closing may take."""
    import psutil

    from evenroute.dist.engines.plugin import read_settings

    settings = read_settings("SGLang")
    if settings is None:
        return
    try:
        children = psutil.Process(parent_pid or os.getpid()).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    ranks = [child for child in children if any(TITLE in part for part in _title(child))]
    for rank in ranks:
        try:
            rank.terminate()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(ranks, timeout=settings.agent.close_limit_s + EXTRA_S)


def _title(process: Any) -> list[str]:
    import psutil

    try:
        return list(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return []
