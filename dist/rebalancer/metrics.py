"""Prometheus metrics of the rebalancer. All names are here, and nowhere else.

They are made at each scrape from the last `control.RebalancerStatus`, so that the main loop never waits for a scraper.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import BytesIO
from socketserver import TCPServer, ThreadingMixIn
from threading import Lock, Thread
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from evenroute.dist.wire.address import bracketed
from evenroute.dist.wire.control import RebalancerStatus

PREFIX: Final = "evenroute_"
_MAX_PEERS = 16  # scrapers at one time
_MAX_PEER_S = 10.0
_MAX_HEAD_BYTES = 16 * 1024  # of a request

# name -> (help, labels); counters get `_total` appended by Prometheus' own rule.
COUNTERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "windows_received": ("Windows stored, each once.", ()),
    "windows_duplicate": ("Windows that came again and were only acknowledged.", ()),
    "windows_merged": ("Windows that cover several, merged while a rank could not send.", ()),
    "windows_missing": ("Windows that never came: of a dead rank or a lost store.", ()),
    "windows_rejected": ("Windows refused for impossible shapes or counts.", ()),
    "windows_ignored": ("Windows of another run or before the life began.", ()),
    "messages_rejected": ("Frames refused by the decoder or by their content, by kind.", ("kind",)),
    "frames_dropped": ("Frames to peers that left or do not read.", ()),
    "plans": ("Planning cycles by result.", ("result",)),
    "placements": ("Placements by what became of them.", ("result",)),
    "store_errors": ("Writes to the store that failed.", ()),
    "keys_refused": ("Connections turned away for an unknown key.", ()),
}
PLAN_ERRORS: Final = ("exception", "timeout", "crash", "garbage")
PLACEMENT_RESULTS: Final = ("published", "unchanged", "not_worth_it", "refused", "not_kept")
GAUGES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "up": ("1 while serving or after the job's end, 0 while waiting for ranks.", ()),
    "finished": ("1 once every rank of the job has said goodbye; gauges of the job are gone then.", ()),
    "planning": ("1 while plans are made: serving, and not paused by an operator.", ()),
    "degraded": ("Number of reasons for which `evenroute status` says degraded.", ()),
    "epoch": ("Epoch of this life.", ()),
    "version": ("Newest version published in this life.", ()),
    "lag_seconds": ("Oldest frame's wait in the rebalancer's last turn.", ()),
    "ranks": ("Ranks of the job, and those heard lately.", ("state",)),
    "rank_version": ("Newest version that a rank holds.", ("rank",)),
    "rank_silence_seconds": ("Since a rank was last heard.", ("rank",)),
    "rank_last_step": ("Last step whose counts of a rank are stored.", ("rank",)),
    "plan_seconds": ("Duration of the last plan.", ()),
    "until_next_plan": ("Seconds or windows until the next plan, by unit; never negative.", ("unit",)),
    "balancedness": (
        "Mean over max rank load of the last interval, per layer, placement in use.",
        ("layer",),
    ),
    "balancedness_total": ("Sum of means over sum of maxes of the last interval.", ()),
    "balancedness_predicted_total": ("The same as predicted for the newest plan.", ()),
    "saved_gpu_seconds": ("That rebalancing saved this run so far, against its first placement.", ()),
    "moving_gpu_seconds": ("That moving weights took this run so far.", ()),
    "slot_seconds": ("That a moved slot costs its rank, as measured.", ()),
    "step_seconds": ("A step in the last interval, median over ranks.", ()),
    "live_layers_behind": ("Whether some layer is not on the newest version (0 or 1).", ()),
    "recording": ("1 while a recording runs.", ()),
}


def metric_names() -> list[str]:
    """Names as a scrape shows them."""
    return [f"{PREFIX}{name}_total" for name in COUNTERS] + [f"{PREFIX}{name}" for name in GAUGES]


def counter_values(status: RebalancerStatus) -> dict[str, list[tuple[tuple[str, ...], float]]]:
    """Each counter's samples: label values and value."""
    count = status.counters
    plain = {
        "windows_received": "windows_stored",
        "windows_duplicate": "windows_duplicate",
        "windows_merged": "windows_merged",
        "windows_missing": "windows_missing",
        "windows_rejected": "windows_rejected",
        "windows_ignored": "windows_ignored",
        "frames_dropped": "frames_dropped",
        "store_errors": "store_errors",
        "keys_refused": "keys_refused",
    }
    found: dict[str, list[tuple[tuple[str, ...], float]]] = {
        name: [((), float(count.get(source, 0)))] for name, source in plain.items()
    }
    rejected = ("decode", "content", "role", "other_job", "internal")
    found["messages_rejected"] = [((kind,), float(count.get(f"rejected_{kind}", 0))) for kind in rejected]
    plans = {"succeeded": status.plans_succeeded, **_from_zero(PLAN_ERRORS, status.plan_errors)}
    found["plans"] = [((result,), float(number)) for result, number in plans.items()]
    placements = _from_zero(PLACEMENT_RESULTS, status.placements)
    found["placements"] = [((result,), float(number)) for result, number in placements.items()]
    return found


def _from_zero(known: tuple[str, ...], counted: dict[str, int]) -> dict[str, int]:
    """A series that appears at 1 has not increased: Prometheus must have seen its 0, or the first is not alerted."""
    return dict.fromkeys(known, 0) | dict(sorted(counted.items()))


def gauge_values(
    status: RebalancerStatus, max_rank_silence_s: float
) -> dict[str, list[tuple[tuple[str, ...], float]]]:
    """Each gauge's samples: label values and value; a gauge without data has none.

    A rank counts as heard if it sent something in the last `max_rank_silence_s` seconds, as for `degraded`.
    """

    def one(value: float | None) -> list[tuple[tuple[str, ...], float]]:
        return [] if value is None else [((), float(value))]

    finished = status.state == "finished"
    daemon = {
        "up": one(status.state in ("serving", "finished")),
        "finished": one(finished),
        "planning": one(status.state == "serving" and not status.paused),
        "degraded": one(len(status.degraded)),
        "epoch": one(status.epoch),
        "version": one(status.version),
        "lag_seconds": one(status.lag_s),
        "recording": one(status.recording),
    }
    if finished:
        return daemon
    expected = [rank for rank in status.ranks if not rank.ended]
    heard = [rank for rank in expected if rank.heard_s_ago is not None]
    lately = [rank for rank in heard if (rank.heard_s_ago or 0.0) <= max_rank_silence_s]
    return daemon | {
        "ranks": [(("expected",), float(len(expected))), (("heard",), float(len(lately)))],
        "rank_version": [((str(rank.rank),), float(rank.held[1])) for rank in heard],
        "rank_silence_seconds": [((str(rank.rank),), float(rank.heard_s_ago or 0.0)) for rank in heard],
        "rank_last_step": [
            ((str(r.rank),), float(r.last_step)) for r in status.ranks if r.last_step is not None
        ],
        "plan_seconds": one(status.plan_seconds),
        "until_next_plan": [((status.interval_unit,), status.until_next_plan)],
        "balancedness": [
            ((str(layer),), value)
            for layer, value in enumerate(status.balancedness_per_layer)
            if value is not None
        ],
        "balancedness_total": one(status.balancedness_total),
        "balancedness_predicted_total": one(status.balancedness_predicted),
        "saved_gpu_seconds": one(status.saved_gpu_seconds),
        "moving_gpu_seconds": one(status.cost_gpu_seconds),
        "slot_seconds": one(status.slot_seconds),
        "step_seconds": one(status.step_seconds),
        "live_layers_behind": one(status.live_lowest != status.newest),
    }


class StatusCollector(Collector):
    """Turns the last status into metric families at each scrape."""

    def __init__(self, last_status: Callable[[], RebalancerStatus | None], max_rank_silence_s: float) -> None:
        self._last_status = last_status
        self._max_rank_silence_s = max_rank_silence_s

    def collect(self) -> Iterable[Metric]:
        """All families; those without data yet have no sample."""
        status = self._last_status()
        counters = {} if status is None else counter_values(status)
        for name, (text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            for values, value in counters.get(name, []):
                counter.add_metric(values, value)
            yield counter
        gauges = {} if status is None else gauge_values(status, self._max_rank_silence_s)
        for name, (text, labels) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            for values, value in gauges.get(name, []):
                gauge.add_metric(values, value)
            yield gauge


class _Handler(WSGIRequestHandler):
    """One request of bounded size; the connection's time is bounded by the server."""

    def handle(self) -> None:
        """Read the head of a request, answer, close."""
        head = b""
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            part = self.request.recv(_MAX_HEAD_BYTES - len(head))
            if not part or len(head) + len(part) >= _MAX_HEAD_BYTES:
                return
            head += part
        self.rfile = BytesIO(head)  # type: ignore[assignment]
        with suppress(OSError):  # the scraper left
            super().handle()

    def log_message(self, *_: object) -> None:
        """Scrapes are not logged."""


class _Server(ThreadingMixIn, WSGIServer):
    """At most `_MAX_PEERS` connections, each for `_MAX_PEER_S`; a new one takes the place of the oldest."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, app: Callable[..., Iterable[bytes]]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open: dict[socket.socket, float] = {}
        self._lock = Lock()
        super().__init__((host, port), _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Bind without looking up the host's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin with a connection."""
        now = time.monotonic()
        with self._lock:
            self._open[request] = now
            self._cut(now, room=True)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Every half second: end connections that take too long."""
        with self._lock:
            self._cut(time.monotonic(), room=False)

    def _cut(self, now: float, *, room: bool) -> None:
        excess = len(self._open) - _MAX_PEERS if room else 0
        for number, (request, since) in enumerate(list(self._open.items())):  # oldest first
            if number < excess or now - since > _MAX_PEER_S:
                del self._open[request]
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)  # its thread's recv or send returns

    def shutdown_request(self, request: Any) -> None:
        """End of a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that left or was cut is nothing to report."""


class MetricsServer:
    """The scrape endpoint, bounded in peers, bytes and time. OSError in one line when it cannot be bound."""

    def __init__(
        self,
        host: str,
        port: int,
        last_status: Callable[[], RebalancerStatus | None],
        max_rank_silence_s: float,
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(StatusCollector(last_status, max_rank_silence_s))
        try:
            self._server = _Server(host, port, make_wsgi_app(registry))
        except OSError as error:
            reason = error.strerror or error
            raise OSError(
                f"rebalancer.metrics_bind (--metrics-bind): {bracketed(host)}:{port} cannot be bound: {reason}"
            ) from None
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.address = f"{bracketed(host)}:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)
