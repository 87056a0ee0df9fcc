"""`bench router`: figures for every part, a table and one JSON object; wrong use in one line."""

from __future__ import annotations

import json

import pytest

from evenroute.tools.bench import router as bench_router


def test_bench_reports_launch_parts_floor_and_torch_steps(capsys: pytest.CaptureFixture[str]) -> None:
    bench_router.main(["--model", "qwen3", "--rows", "1,4", "--device", "cpu", "--json"])
    report = json.loads(capsys.readouterr().out)
    names = {entry["name"] for entry in report["results"]}
    assert {"hash", "exact", "weighted", "static", "hash, no record", "floor", "torch steps"} <= names
    assert {entry["rows"] for entry in report["results"]} == {1, 4}
    assert all(entry["microseconds"] >= 0 for entry in report["results"])
    text = bench_router.table(report)
    assert "T=4" in text
    assert "hash, no record" in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "gpt"], "--model: found 'gpt'"),
        (["--rows", "0"], "--rows: found '0'"),
        (["--rows", "1,x"], "--rows: found '1,x'"),
    ],
)
def test_wrong_use_is_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench_router.main([*flags, "--device", "cpu"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
