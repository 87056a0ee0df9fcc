"""The log: one line a message, as text or as JSON with the event's fields; strangers write no lines of their own."""

from __future__ import annotations

import json
import logging

import pytest

from evenroute.dist.log import LimitedLog, event, set_up_logging


@pytest.fixture
def logger():
    root = logging.getLogger("evenroute")
    kept = root.handlers[:], root.level, root.propagate
    yield logging.getLogger("evenroute.dist.rebalancer")
    root.handlers[:], root.propagate = kept[0], kept[2]
    root.setLevel(kept[1])


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_is_one_object_a_line_with_the_fields(logger, capsys):
    set_up_logging("info", "json")
    logger.info("version %d published", 3, extra=event("published", version=3, before=0.5, reason="why\nnot"))
    logger.debug("not shown")
    LimitedLog(logger).log(logging.WARNING, "decode", "refused: \x1b[2J\nforged")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("a defect")
    published, refused, defect = lines(capsys)
    assert published == {
        "time": published["time"], "level": "info", "logger": "evenroute.dist.rebalancer", "event": "published",
        "message": "version 3 published", "version": 3, "before": 0.5, "reason": "why\nnot",
    }  # fmt: skip
    assert published["time"].endswith("Z")
    assert (refused["event"], refused["level"]) == ("decode", "warning")
    assert refused["message"] == "decode: refused: \x1b[2J\nforged", "escaped by JSON, in one line"
    assert "ValueError: two" in defect["traceback"]


def test_text_is_as_before(logger, capsys):
    set_up_logging("info")
    logger.info("serving %s", "a\nb", extra=event("serving", address="x"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO evenroute.dist.rebalancer: serving a\\nb")
