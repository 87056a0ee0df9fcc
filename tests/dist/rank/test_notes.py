"""What a rank notes of its switches: each vote, opening, transfer and commit once, bounded, and as spans."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from evenroute.dist import spans
from evenroute.dist.protocol.view import RunView
from evenroute.dist.rank.notes import SwitchNotes
from evenroute.dist.rebalancer.tracing import SwitchTraces
from evenroute.dist.wire.tracing import MAX_EVENTS, SwitchEvent, TraceReport


def names(notes: SwitchNotes) -> list[tuple[str, int]]:
    return [(event.name, event.layer) for event in notes.events()]


def test_a_switch_from_its_target_to_its_end() -> None:
    notes = SwitchNotes(3)
    notes.target((1, 7), 40)
    notes.add("open", 100.0, 40, 5)
    notes.add("open", 101.0, 40, 2)
    notes.staged([5, 2, 9], 0, 44)
    notes.staged([5, 2, 9], 2, 48)
    notes.staged([5, 2, 9], 2, 52)
    notes.add("commit", 103.0, 52, 5)
    notes.target((1, 7), 52)
    notes.target(None, 56)
    notes.target(None, 60)
    assert names(notes) == [
        ("open", 5),
        ("open", 2),
        ("transfer", 5),
        ("transfer", 2),
        ("commit", 5),
        ("switch", -1),
    ]
    transfers = [event for event in notes.events() if event.name == "transfer"]
    assert [event.began for event in transfers] == [100.0, 101.0]
    assert notes.events()[-1].number == 7


def test_only_the_newest_are_kept() -> None:
    notes = SwitchNotes(0)
    for step in range(3 * MAX_EVENTS):
        notes.add("vote", 1.0, step)
    assert [event.step for event in notes.events()][:: MAX_EVENTS - 1] == [2 * MAX_EVENTS, 3 * MAX_EVENTS - 1]


def view(ranks: int) -> RunView:
    seen = {rank: SimpleNamespace(peer=bytes([rank])) for rank in range(ranks)}
    return SimpleNamespace(run=9, job=SimpleNamespace(ep_size=ranks), ranks=seen)  # type: ignore[return-value]


def test_the_rebalancer_asks_each_rank_until_it_reports() -> None:
    traces, job = SwitchTraces(), view(3)
    assert list(traces.due(job, 0.0)) == [], "nobody asked"
    assert traces.ask(77, 0, job, 0.0).missing == [0, 1, 2]
    assert [peer for peer, _ in traces.due(job, 0.0)] == [b"\0", b"\1", b"\2"]
    assert list(traces.due(job, 0.5)) == []
    event = SwitchEvent("vote", 1.0, 0.1, 4)
    traces.take(TraceReport(9, 1, 77, [event]), job)
    traces.take(TraceReport(9, 0, 76, [event]), job)
    traces.take(TraceReport(8, 2, 77, [event]), job)
    traces.take(TraceReport(9, 999, 77, [event]), job)
    assert [peer for peer, _ in traces.due(job, 1.5)] == [b"\0", b"\2"], "asked again"
    found = traces.ask(77, 0, job, 2.0)
    assert ([report.rank for report in found.reports], found.missing, found.next_offset) == (
        [1],
        [0, 2],
        None,
    )
    assert traces.ask(78, 0, job, 3.0).reports == [], "another question begins anew"
    assert list(traces.due(job, 100.0)) == [], "nobody waits any more"


def test_long_answers_come_in_parts() -> None:
    traces, job = SwitchTraces(), view(250)
    traces.ask(5, 0, job, 0.0)
    events = [SwitchEvent("vote", 1.0, 0.1, step) for step in range(MAX_EVENTS)]
    for rank in range(250):
        traces.take(TraceReport(9, rank, 5, events), job)
    offset: int | None = 0
    ranks: list[int] = []
    parts = 0
    while offset is not None:
        answer = traces.ask(5, offset, job, 1.0)
        ranks += [report.rank for report in answer.reports]
        offset, parts = answer.next_offset, parts + 1
    assert ranks == list(range(250))
    assert parts == 3


@pytest.fixture
def exporter():
    """OpenTelemetry's own, where it is installed; else a stand-in for its tracer."""
    pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra otel")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    found, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    trace.set_tracer_provider(provider)
    spans._tracer.cache_clear()
    yield found
    spans._tracer.cache_clear()


def test_spans_reach_opentelemetry(exporter) -> None:
    notes = SwitchNotes(3)
    notes.target((1, 7), 40)
    notes.add("commit", 103.0, 52, 5)
    notes.target(None, 56)
    commit, switch = exporter.get_finished_spans()
    assert (commit.name, commit.start_time) == ("evenroute.commit", 103 * 10**9)
    assert commit.attributes["evenroute.layer"] == 5
    assert (switch.name, switch.attributes["evenroute.version"]) == ("evenroute.switch", 7)
    assert switch.end_time >= switch.start_time


def test_without_the_package_a_span_is_nothing_and_an_endpoint_is_refused(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    spans._tracer.cache_clear()
    spans.span("evenroute.plan", 1.0, 2.0, cycle=3)
    spans.export_spans("x")
    monkeypatch.setenv(spans.ENDPOINT, "http://127.0.0.1:4318")
    with pytest.raises(ValueError, match=r"pip install 'evenroute\[otel\]'"):
        spans.export_spans("x")
    spans._tracer.cache_clear()
