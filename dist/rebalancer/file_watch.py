"""Files that somebody removes or replaces under a running rebalancer: noticed, told once, shown by `status`."""

from __future__ import annotations

import logging

from evenroute.dist.rebalancer.job_lock import JobLock
from evenroute.dist.rebalancer.log import LimitedLog
from evenroute.dist.wire.link import RouterLink
from evenroute.eplb.store.writer import HistoryStore


class FileWatch:
    """`problems`: one line for each file that is not in its place any more."""

    def __init__(self, lock: JobLock, link: RouterLink, store: HistoryStore, log: LimitedLog) -> None:
        self.problems: list[str] = []
        self._lock = lock
        self._link = link
        self._store = store
        self._log = log
        self._told: set[str] = set()
        self._log_file: tuple[int, int] | None = None

    def look(self) -> int:
        """Look after them; returns how many errors of the store are new."""
        found, new = [], 0
        store, log_file = self._lock.store, self._store.log_file()
        self._log_file = self._log_file or log_file
        if log_file != self._log_file or (store is not None and not store.in_place()):
            found.append(
                f"store {self._store.path}: its file was removed or replaced while in use; counts still go to the old "
                "one and are lost at the end: start the rebalancer again"
            )
        if not self._link.in_place():
            found.append(
                f"address {self._link.endpoint}: its socket file was removed or replaced; no rank can connect anew: "
                "start the rebalancer again"
            )
        for text in found:
            if text not in self._told:
                self._told.add(text)
                new += text.startswith("store")
                self._log.tell(logging.ERROR, "file", text)
        self.problems = found
        return new
