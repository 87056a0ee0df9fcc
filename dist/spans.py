"""Spans for OpenTelemetry (extra `otel`): plan and publish in the rebalancer; switch, transfer and commit on the ranks.

Without the package this costs one test a span. On ranks the engine's own tracer provider is used, if it has set one;
the rebalancer sets one up when `OTEL_EXPORTER_OTLP_ENDPOINT` is set, and exports from a thread that nothing waits for.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import Any

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@cache
def _tracer() -> Any:
    try:
        trace = importlib.import_module("opentelemetry.trace")
    except ImportError:
        return None
    return trace.get_tracer("evenroute")


def span(name: str, began: float, ended: float, **attributes: str | float | None) -> None:
    """One finished span; times in seconds since 1970. Attributes that are None are left out."""
    tracer = _tracer()
    if tracer is None:
        return
    known = {f"evenroute.{key}": value for key, value in attributes.items() if value is not None}
    one = tracer.start_span(name, start_time=int(began * 1e9), attributes=known)
    one.end(end_time=int(ended * 1e9))


def export_spans(service: str) -> None:
    """Send this process's spans to the endpoint of the environment; ValueError when one is set without the extra."""
    named = next(filter(os.environ.get, (ENDPOINT, TRACES_ENDPOINT)), None)
    if named is None:
        return
    try:
        trace = importlib.import_module("opentelemetry.trace")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        raise ValueError(
            f"{named} is set and {error.name} is not installed: pip install 'evenroute[otel]'"
        ) from None
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": service}))
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
