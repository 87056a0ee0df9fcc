"""`evenroute trace`: what all ranks did for a switch, as a file that Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from evenroute.dist.wire.tracing import SwitchEvent, TraceReport
from evenroute.tools.operator.trace import perfetto
from support.command import assert_one_line_error, evenroute
from support.control_plane import RebalancerProcess, wait_for
from support.documented import Lines, runs
from support.job import Job

# Chrome's trace event format: what is required of complete (X) and metadata (M) events, and nothing unknown.
NUMBER = {"type": "number", "minimum": 0}
PLACE = {"pid": {"type": "integer", "minimum": 0}, "tid": {"type": "integer", "minimum": 0}}
FORMAT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["name", "ph", "ts", "dur", "pid", "tid"],
                        "properties": {
                            "name": {"type": "string", "minLength": 1},
                            "cat": {"type": "string"},
                            "ph": {"const": "X"},
                            "ts": NUMBER,
                            "dur": NUMBER,
                            "args": {"type": "object"},
                            **PLACE,
                        },
                    },
                    {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["name", "ph", "pid", "tid", "args"],
                        "properties": {
                            "name": {"enum": ["process_name", "process_sort_index", "thread_name"]},
                            "ph": {"const": "M"},
                            "args": {"type": "object"},
                            **PLACE,
                        },
                    },
                ]
            },
        },
    },
}


def spans(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") == name]


@runs("deploy/README.md", "evenroute trace")
def test_a_switch_of_a_real_job(lines: Lines, tmp_path: Path) -> None:
    """Two ranks switch; votes, commits and the switch of both are in the file, each in its order."""
    flags = ["--interval", "2w", "--planner", "support.stub_planner:plan"]
    agent = {"top_k": 1, "window_steps": 10, "heartbeat_s": 0.3, "resend_s": 0.3}
    with RebalancerProcess(tmp_path, flags=flags) as rebalancer:
        job = Job(tmp_path / "job", 2, endless=True, agent={**agent, "rebalancer": rebalancer.bind})
        with job:
            wait_for(lambda: rebalancer.status().live_lowest[1] > 0, 200, "a switch")
            changes = {"ADDR": rebalancer.address, "switch.json": str(tmp_path / "switch.json")}
            outcome = evenroute(*lines.words("evenroute trace", changes)[1:], "--timeout", 60)
            assert outcome.status == 0, outcome.err
            job.stop_file.touch()
            assert job.wait(200) == [0, 0], job.logs()
    trace = json.loads((tmp_path / "switch.json").read_text())
    jsonschema.validate(trace, FORMAT)
    for name in ("vote", "commit", "switch"):
        assert {event["pid"] for event in spans(trace, name)} == {0, 1}, name
    versions = [{e["args"]["version"] for e in spans(trace, "switch") if e["pid"] == rank} for rank in (0, 1)]
    assert versions[0] & versions[1]
    for event in spans(trace, "commit"):
        assert event["args"]["layer"] in range(4)
    assert "of 2 ranks" in outcome.out


def test_transfers_that_overlap_stand_in_rows_of_their_own() -> None:
    events = [
        SwitchEvent("open", 10.0, 0.1, 4, 0),
        SwitchEvent("transfer", 10.0, 2.0, 8, 0),
        SwitchEvent("transfer", 11.0, 2.0, 8, 1),
        SwitchEvent("transfer", 12.5, 1.0, 8, 2),
        SwitchEvent("switch", 9.0, 5.0, 12, number=7),
    ]
    trace = perfetto([TraceReport(1, 3, 5, events)])
    jsonschema.validate(trace, FORMAT)
    found = {event["name"]: event for event in spans(trace, "transfer")}
    rows = [found[f"transfer layer {layer}"]["tid"] for layer in range(3)]
    assert rows[0] != rows[1]
    assert rows[2] == rows[0]
    (switch,) = spans(trace, "switch")
    assert switch["args"] == {"step": 12, "version": 7}
    assert (switch["ts"], switch["dur"], switch["pid"]) == (9e6, 5e6, 3)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert sorted(set(names)) == ["open and commit", "switches", "transfers"]


def test_before_a_switch_and_wrong_use(tmp_path: Path) -> None:
    with RebalancerProcess(tmp_path) as rebalancer:
        outcome = evenroute("trace", rebalancer.address, "-o", tmp_path / "x.json")
        assert_one_line_error(outcome, "no rank has switched yet")
        assert not (tmp_path / "x.json").exists()
    assert_one_line_error(evenroute("trace", "ipc:///tmp/x", "-o", tmp_path / "no/x.json"), "does not exist")
    assert_one_line_error(
        evenroute("trace", "ipc:///tmp/x", "-o", tmp_path / "x", "--timeout", 0), "--timeout: 0"
    )
