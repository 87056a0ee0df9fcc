"""A stand-in of SGLang's server, written from its documented behaviour: the recorder's three endpoints, its dump in
`stat` mode, and what `--init-expert-location` accepts."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch


class SglangStandIn:
    """Serves on a loopback port of its own; `loads [L, E]` come in for every second of recording."""

    def __init__(
        self, recorder_dir: Path, loads: torch.Tensor, *, mode: str | None = "stat", api_key: str = ""
    ) -> None:
        self.recorder_dir, self.loads, self.mode, self.api_key = recorder_dir, loads, mode, api_key
        self.calls: list[str] = []
        self.recording_since: float | None = None
        self.steps = 0
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> SglangStandIn:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                name = self.path.strip("/").removesuffix("_expert_distribution_record")
                outer.calls.append(name)
                if outer.api_key and self.headers.get("Authorization") != f"Bearer {outer.api_key}":
                    self.send_error(401)
                    return
                if name not in ("start", "stop", "dump"):
                    self.send_error(404)
                    return
                getattr(outer, name)()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"done.\n")

            def log_message(self, format: str, *args: object) -> None:
                return

        return Handler

    # The server answers 200 whether or not the recorder is on: a real one logs a warning.

    def start(self) -> None:
        self.recording_since, self.steps = time.monotonic(), 0

    def stop(self) -> None:
        if self.recording_since is not None:
            self.steps = max(1, round(10 * (time.monotonic() - self.recording_since)))
        self.recording_since = None

    def dump(self) -> None:
        if self.mode is None:
            return
        ring = torch.zeros(1000, *self.loads.shape, dtype=torch.int32)
        ring[: self.steps] = self.loads.to(torch.int32)
        content = {"rank": 0, "logical_count": ring, "average_utilization_rate_over_window": 0.61}
        torch.save(content, self.recorder_dir / f"expert_distribution_recorder_{time.time()}.pt")


def init_expert_location(
    path: Path, *, ep_size: int, num_layers: int, num_experts: int, redundant: int
) -> torch.Tensor:
    """What a server does with `--init-expert-location FILE`; fails as it would."""
    content = json.loads(path.read_text())
    assert set(content) == {"physical_to_logical_map"}, (
        "passed on as keyword arguments: any other key is an error"
    )
    table = torch.tensor(content["physical_to_logical_map"])
    assert table.shape == (num_layers, num_experts + redundant)
    assert table.shape[1] % ep_size == 0
    for row in table:
        assert set(row.tolist()) == set(range(num_experts))
    return table
