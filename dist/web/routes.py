"""The paths of the HTTP port. Whatever fails in an answer is that answer's status 500, and no more."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from evenroute.dist.web.access import refusal
from evenroute.dist.web.answers import (
    history_answer,
    layer_answer,
    loads_answer,
    placements_answer,
    status_answer,
)
from evenroute.dist.web.history import LoadHistory
from evenroute.dist.web.metrics import StatusCollector
from evenroute.dist.web.server import HttpAnswer, HttpRequest, plain
from evenroute.dist.wire.control import RebalancerStatus

logger = logging.getLogger("evenroute.dist.web")

SILENT_LOOP_S = 10.0  # without a status from the main loop: not alive
_WATCHED_S = 60.0  # the store is read for so long after somebody asked

API = {
    "/api": "this list",
    "/api/status": "the rebalancer's state, as `evenroute status --json`",
    "/api/loads": "rank loads of every layer over the layer's mean, now or around ?at=SECONDS",
    "/api/history": "balancedness over time, with and without evenroute; ?detail=layers or ranks",
    "/api/placements": "the newest placements: when, why, moved slots, before, predicted, achieved",
    "/api/layers/N": "one layer now: its ranks' loads, its hottest experts and where they lie",
    "/api/events": "server-sent events: status every second, changed when there is more to fetch",
}
PATHS = ("/", "/healthz", "/readyz", "/metrics", *API)


def load_page() -> tuple[bytes, str]:
    """The page and its Content-Security-Policy: its own script alone, nothing from elsewhere."""
    text = files("evenroute.dist.web").joinpath("page.html").read_text(encoding="utf-8")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; connect-src 'self'"
    return text.encode(), f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class LiveState:
    """What the answers are made from: the last status, and the history once somebody looks."""

    def __init__(self, history: LoadHistory, max_rank_silence_s: float) -> None:
        self.status: RebalancerStatus | None = None
        self.max_rank_silence_s = max_rank_silence_s
        self.history = history
        self._heard_at = time.monotonic()
        self._watched = threading.Event()
        self._watched_at = float("-inf")
        self._news = threading.Condition()
        self._number = 0

    def feed(self, status: RebalancerStatus) -> None:
        """The next status of the main loop."""
        with self._news:
            self.status, self._heard_at = status, time.monotonic()
            self._number += 1
            self._news.notify_all()

    def silent_s(self) -> float:
        """Since when the main loop said nothing."""
        return time.monotonic() - self._heard_at

    def watch(self) -> None:
        """Somebody looks: the store is read from now on."""
        self._watched_at = time.monotonic()
        self._watched.set()

    def follow(self) -> None:
        """Read the store while somebody looks, once a second and at most a fifth of the time; never returns."""
        while True:
            self._watched.wait()
            if time.monotonic() - self._watched_at > _WATCHED_S:
                self._watched.clear()
                continue
            began = time.monotonic()
            self.history.advance()
            time.sleep(max(1.0, 4 * (time.monotonic() - began)))

    def next_status(self, number: int, limit_s: float) -> tuple[int, RebalancerStatus | None]:
        """Wait for a status after ``number``; the number of the last one, and it."""
        with self._news:
            self._news.wait_for(lambda: self._number > number, limit_s)
            return self._number, self.status


class Routes:
    """`respond` answers one request."""

    def __init__(self, state: LiveState, *, token: str, is_local: bool) -> None:
        self._state = state
        self._token = token
        self._is_local = is_local
        self._page, self._policy = load_page()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(StatusCollector(lambda: state.status, state.max_rank_silence_s))
        self._open: dict[str, Callable[[HttpRequest], HttpAnswer]] = {
            "/healthz": self._health,
            "/readyz": self._ready,
            "/metrics": self._metrics,
        }
        self._guarded: dict[str, Callable[[HttpRequest], HttpAnswer]] = {
            "/": lambda _: HttpAnswer(
                self._page, "text/html; charset=utf-8", headers={"Content-Security-Policy": self._policy}
            ),
            "/api": lambda _: _json({"paths": API}),
            "/api/status": self._status,
            "/api/loads": self._loads,
            "/api/history": self._history,
            "/api/placements": lambda _: _json(placements_answer(state.history.snapshot)),
            "/api/events": lambda _: HttpAnswer(content_type="text/event-stream", stream=self._events()),
        }

    def respond(self, request: HttpRequest) -> HttpAnswer:
        """The answer to a GET."""
        try:
            return self._respond(request)
        except Exception:
            logger.exception("answer to %r", request.path[:100])
            return plain(500, "this answer failed; the rebalancer's log says why")

    def _respond(self, request: HttpRequest) -> HttpAnswer:
        path = request.path
        if path in self._open:
            return self._open[path](request)
        layer = re.fullmatch(r"/api/layers/([0-9]{1,6})", path)
        if path not in self._guarded and layer is None:
            return plain(404, f"nothing here; there is {', '.join(PATHS)}")
        refused = refusal(request, token=self._token, is_local=self._is_local)
        if refused is not None:
            return refused
        self._state.watch()
        if layer is not None:
            found = layer_answer(self._state.history.snapshot, int(layer[1]))
            return _json({"nothing": "no such layer, or no loads yet"} if found is None else found)
        return self._guarded[path](request)

    def _health(self, _: HttpRequest) -> HttpAnswer:
        silent = self._state.silent_s()
        if self._state.status is None and silent <= SILENT_LOOP_S:
            return plain(503, "starting")
        if silent > SILENT_LOOP_S:
            return plain(503, f"the main loop has not been heard for {silent:.0f} s")
        return plain(200, "alive")

    def _ready(self, _: HttpRequest) -> HttpAnswer:
        status = self._state.status
        if status is None or self._state.silent_s() > SILENT_LOOP_S:
            return plain(503, "not alive")
        if status.state != "serving":
            return plain(503, f"{status.state}: no job is served")
        if status.plans_overdue:
            return plain(503, "plans are overdue")
        if status.paused:
            return plain(503, "plans are paused by an operator")
        return plain(200, "ready: a job is served and plans flow")

    def _metrics(self, request: HttpRequest) -> HttpAnswer:
        encode, content_type = choose_encoder(request.headers.get("Accept") or "")
        return HttpAnswer(encode(self._registry), content_type)

    def _status(self, _: HttpRequest) -> HttpAnswer:
        status = self._state.status
        return plain(503, "starting") if status is None else _json(status_answer(status))

    def _loads(self, request: HttpRequest) -> HttpAnswer:
        moment = request.query.get("at")
        try:
            at = None if moment is None else float(moment)
        except ValueError:
            return plain(400, "at: expected seconds since 1970")
        found = loads_answer(self._state.history.snapshot, at)
        return _json(
            {"nothing": "no loads yet" if at is None else "no loads then"} if found is None else found
        )

    def _history(self, request: HttpRequest) -> HttpAnswer:
        detail = request.query.get("detail", "")
        if detail not in ("", "layers", "ranks"):
            return plain(400, "detail: expected layers or ranks")
        return _json(history_answer(self._state.history.snapshot, detail))

    def _events(self) -> Iterator[bytes]:
        number, version = 0, -1
        yield b"retry: 3000\n\n"
        while True:
            self._state.watch()
            number, status = self._state.next_status(number, 5.0)
            snapshot = self._state.history.snapshot
            if status is not None:
                yield b"event: status\ndata: " + msgspec.json.encode(status_answer(status)) + b"\n\n"
            if snapshot.version != version:
                version = snapshot.version
                told = {"version": version, "reading": snapshot.reading, "problem": snapshot.problem}
                yield b"event: changed\ndata: " + msgspec.json.encode(told) + b"\n\n"


def _json(value: dict[str, Any]) -> HttpAnswer:
    return HttpAnswer(msgspec.json.encode(value), "application/json")
