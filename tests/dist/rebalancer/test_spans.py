"""Spans of a real rebalancer at a real receiver of OTLP over HTTP."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from evenroute.tools.run.simulated_job import SimulatedJob
from support.control_plane import RebalancerProcess
from support.outside import JOB, turn_until


@contextmanager
def receiver():
    """Paths and bodies that are posted to a server of this process, and its URL."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield got, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_a_plan_and_its_placement_arrive_as_spans(name, tmp_path, monkeypatch):
    trace_service = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs the extra otel"
    )
    with receiver() as (got, url):
        monkeypatch.setenv(name, url if name.endswith("OTLP_ENDPOINT") else f"{url}/v1/traces")
        flags = ["--interval", "2w", "--planner", "support.stub_planner:plan"]
        with RebalancerProcess(tmp_path, flags=flags) as process:
            job = SimulatedJob(process.address, JOB, period_s=0.05)
            try:
                job.start(60)
                turn_until(
                    job, lambda: min(rank.held for rank in job.ranks) > (0, 0), "a placement everywhere"
                )
            finally:
                job.close()
            assert process.stop() == 0, process.log()
    assert {path for path, _ in got} == {"/v1/traces"}
    spans = {}
    for _, body in got:
        for one in trace_service.ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {each.key: each.value.string_value for each in one.resource.attributes}
            assert named["service.name"] == "evenroute-rebalancer"
            spans.update((span.name, span) for scope in one.scope_spans for span in scope.spans)
    assert set(spans) == {"evenroute.plan", "evenroute.publish"}
    assert {each.key for each in spans["evenroute.publish"].attributes} >= {"evenroute.version"}
    for span in spans.values():
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
