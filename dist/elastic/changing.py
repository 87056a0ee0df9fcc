"""Announced changes: groups formed beside those in use, the switch at one step, and how a new process joins."""

from __future__ import annotations

import threading
import time

from evenroute.dist.elastic.groups import FormError, MemberGroups
from evenroute.dist.elastic.process import MemberProcess, logger
from evenroute.dist.elastic.state import decode_state, encode_state
from evenroute.dist.membership.rows import columns_of, rows_digest
from evenroute.dist.membership.types import columns_array, joiners_of
from evenroute.dist.wire.membership import MembershipRecord


class ChangingProcess(MemberProcess):
    """See `ElasticAgent`."""

    def _prepare_beside(self, record: MembershipRecord) -> None:
        """Member's thread: form a change's groups beside those in use, in a thread of its own."""
        if self._core.record is not None:
            threading.Thread(
                target=self._prepare, args=(record,), name="evenroute-prepare", daemon=True
            ).start()

    def _prepare(self, record: MembershipRecord) -> None:
        core = self._core

        def off() -> bool:
            return core.halted or core.offered is None or core.offered.run != record.run

        try:
            if self._me.number in record.numbers:
                self._prepared = MemberGroups(
                    record,
                    self._me.number,
                    device=self._builder.device,
                    limit_s=self.config.collective_limit_s,
                    form_limit_s=self.config.form_limit_s,
                    halted=off,
                )
            with self._lock:
                core.formed(record.number)
        except RuntimeError as error:
            logger.warning("member %d: %s", self._me.number, error)
            with self._lock:
                core.form_failed(record.number)
        self._thread.wake()

    def _change(self) -> None:
        """All switch to an announced change at this step."""
        self._paused_at = self._paused_at or time.monotonic()
        self._leave_membership()
        record, rows, groups = self._core.record, self._switched, self._prepared
        assert record is not None
        assert rows is not None
        self._thread.wake()
        if self._core.left:
            self._thread.wait(
                lambda: self._core.ended is not None or self._core.pending, self.config.membership_limit_s
            )
            if self._core.ended is None and not self._core.pending:
                self._end(f"nobody came to serve in membership {record.number}")
            return
        assert groups is not None
        self._prepared = None
        self._rows = rows
        try:
            if groups.rank == 0:
                groups.store.set("state", encode_state(rows, self._core.completed))  # type: ignore[arg-type]
            self._enter(record, rows, groups)
        except RuntimeError as error:
            if not self._is_failure(error):
                raise
            self._fail(error)

    def _join(self) -> None:
        """Until this process serves."""
        deadline = time.monotonic() + self.config.membership_limit_s
        core = self._core
        while self._agent is None:
            left = deadline - time.monotonic()
            if left <= 0 or not self._thread.wait(
                lambda: core.offered is not None or core.ended is not None, left
            ):
                self._end(f"nobody took this process up within {self.config.membership_limit_s:g} s")
            if core.ended is not None:
                self._end(core.ended)
            record = core.offered
            if record is None:
                continue
            self._me = core.me
            try:
                self._join_with(record)
            except (RuntimeError, ValueError, OSError) as error:
                logger.warning("joining membership %d: %s", record.number, error)
                with self._lock:
                    core.form_failed(record.number)
                    core.give_up()
                self._drop_groups()
                time.sleep(0.1)

    def _join_with(self, record: MembershipRecord) -> None:
        core, number = self._core, self._me.number
        columns = columns_array(record)[[one.number for one in joiners_of(record)].index(number)]

        def off() -> bool:
            return core.offered is None or core.offered.run != record.run or core.ended is not None

        self._builder.fill_columns(columns)
        groups = self._forming = MemberGroups(
            record,
            number,
            device=self._builder.device,
            limit_s=self.config.collective_limit_s,
            form_limit_s=self.config.form_limit_s,
            halted=off,
        )
        with self._lock:
            core.formed(record.number)
        self._thread.wake()
        while not groups.store.check(["state"]):
            if off():
                raise FormError(f"membership {record.number} came to nothing")
            time.sleep(0.01)
        rows, completed = decode_state(groups.store.get("state"))
        own = columns_of(rows, len(record.members))[:, groups.rank]
        self._builder.fill_columns(own)
        self._paused_at = None
        digest = rows_digest(record.number, record.key, completed, rows)
        groups.agree([record.number, digest, completed, self._builder.digest])
        with self._lock:
            core.joined(record, completed)
            core.served()
        self._groups, self._forming, self._rows = groups, None, rows
        self._first_step = completed + 1
        self._agent, self.seat = self._builder.seat(
            record, number, rows, groups, core.fence, completed + 1, None, self._lock, self, self._rewire
        )
        self._thread.wake()
        self.changes.append((record.number, 0.0))
        logger.info(
            "member %d joins as rank %d of %d in membership %d",
            number,
            groups.rank,
            groups.size,
            record.number,
        )
