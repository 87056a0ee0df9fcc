"""The paths of the HTTP port, asked over the network from its real process: health, metrics, API, token, events."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import urllib.request

import msgspec
import pytest

from evenroute.dist.web import routes
from evenroute.dist.web.routes import API, PATHS, LiveState, Routes
from evenroute.dist.web.server import HttpRequest
from support.control_plane import ROOT, wait_for
from support.fake_control import status
from support.live_page import EPOCH, LivePage, Story

TOKEN = "a-token-of-the-page-and-its-api"


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    made = Story(tmp_path_factory.mktemp("story") / "run.db", layers=3, experts=16, slots=20, ranks=4)
    made.tell(1)
    return made


@pytest.fixture(scope="module")
def page(story):
    with LivePage(story) as made:

        def read():
            found = made.json("/api/history")
            return found.get("points") and not found["reading"]

        wait_for(read, 60, "history")
        yield made


def test_paths_that_are_there_and_the_rest_is_404(page):
    for path in PATHS:
        if path not in ("/api/events", "/api/layers/N"):
            assert page.get(path)[0] == 200, path
    for path in (
        "/nope",
        "/metrics/",
        "/api/",
        "/api/layers/x",
        "/index.html",
        "/../etc/passwd",
        "/healthz/x",
    ):
        code, body = page.get(path)
        assert code == 404
        assert "/healthz" in body
    assert json.loads(page.get("/api")[1])["paths"] == API


def test_status_is_that_of_the_command(page):
    found = page.json("/api/status")
    assert found["healthy"] is True
    assert {key: found[key] for key in ("num_layers", "epoch", "version")} == {
        "num_layers": 3, "epoch": EPOCH, "version": page.status.version,
    }  # fmt: skip
    assert (
        msgspec.convert({k: v for k, v in found.items() if k != "healthy"}, type(page.status)) == page.status
    )


def test_loads_history_placements_and_a_layer_agree(page, story):
    loads = page.json("/api/loads")
    layer = page.json("/api/layers/1")
    while (later := page.json("/api/loads")) != loads:  # "now" went on in between
        loads, layer = later, page.json("/api/layers/1")
    assert (loads["layers"], loads["ranks"]) == (3, 4)
    for row, balanced in zip(loads["relative"], loads["balancedness"]["per_layer"], strict=True):
        assert sum(row) == pytest.approx(4, abs=0.01)
        assert 1 / max(row) == pytest.approx(balanced, abs=0.01)
    assert layer["ranks"] == loads["relative"][1]
    for expert in layer["experts"]:
        assert expert["slots"], "every expert lies somewhere"
        placed = story.live.physical_to_logical[1][expert["slots"]]
        assert set(placed.tolist()) == {expert["expert"]}
    history = page.json("/api/history")
    assert history["problem"] == ""
    assert history["points"][-1]["balancedness"] > history["points"][-1]["without"]
    assert sum(p["tokens"] for p in history["points"]) == 40_000 * story.seq
    then = history["points"][0]
    old = page.json(f"/api/loads?at={then['time'] + then['seconds'] / 2}")
    assert old["balancedness"]["total"] == pytest.approx(then["balancedness"])
    for detail, many in (("layers", 3), ("ranks", 4)):
        found = page.json(f"/api/history?detail={detail}")
        assert {len(row) for row in found["detail"]} == {many}
        assert len(found["times"]) == len(found["detail"])
    placements = page.json("/api/placements")["placements"]
    assert [one["key"] for one in placements] == [f"{EPOCH:x}/{n}" for n in range(1, story.version + 1)]
    assert placements[0]["moved_slots"] > 0
    assert placements[0]["reason"].startswith("global: ")
    assert placements[-1]["achieved"] == pytest.approx(placements[-1]["predicted"], abs=0.05)
    assert placements[0]["achieved"] < placements[0]["predicted"] - 0.02, (
        "traffic changed while it was in use"
    )


def test_wrong_questions_are_told(page):
    assert page.get("/api/loads?at=yesterday")[0] == 400
    assert page.get("/api/history?detail=all")[0] == 400
    assert "nothing" in page.json("/api/loads?at=17")
    assert "nothing" in page.json("/api/layers/99")


def test_events_push_the_status_and_say_when_there_is_more(page):
    with urllib.request.urlopen(f"{page.url}/api/events", timeout=30) as stream:
        assert stream.headers["Content-Type"] == "text/event-stream"
        lines: list[str] = []
        while not {"event: status\n", "event: changed\n"} <= set(lines[:-1]):
            lines.append(stream.readline().decode())
            assert len(lines) < 200
    data = json.loads(lines[lines.index("event: status\n") + 1].removeprefix("data: "))
    assert data["state"] == "serving"


def test_a_foreign_name_is_refused_on_loopback(page):
    """A web page elsewhere whose name was pointed at 127.0.0.1 may not read what this one shows."""
    assert page.get("/api/status", Host="evil.example")[0] == 403
    for host in ("localhost:9421", "127.0.0.1", "[::1]:9421"):
        assert page.get("/api/status", Host=host)[0] == 200
    assert page.get("/metrics", Host="rebalancer.svc")[0] == 200


def test_with_a_token_page_and_api_take_it_and_health_does_not(story):
    with LivePage(story, token=TOKEN, is_local=False) as page:
        wait_for(lambda: page.get("/healthz")[0] == 200, 60, "health")
        assert page.get("/metrics")[0] == page.get("/readyz")[0] == 200
        for path in ("/", "/api", "/api/status", "/api/layers/0", "/api/events"):
            assert page.get(path)[0] == 401, path
            assert page.get(path, token="another")[0] == 401, path
        for basic in (True, False):
            assert page.get("/api/status", token=TOKEN, basic=basic, Host="rebalancer.example")[0] == 200
        assert page.get("/api/status", Authorization="Basic !!")[0] == 401


def test_without_a_token_page_and_api_are_off_where_others_reach_them(story):
    with LivePage(story, is_local=False) as page:
        wait_for(lambda: page.get("/healthz")[0] == 200, 60, "health")
        code, told = page.get("/")
        assert code == 403
        assert "--http-token FILE" in told
        assert page.get("/api/status")[0] == 403
        assert page.get("/metrics")[0] == 200


def answered(state, path):
    made = Routes(state, token="", is_local=True).respond(HttpRequest(path, {}, {}))
    return made.status, made.body.decode().strip()


def test_alive_and_ready_are_what_they_say(story, monkeypatch):
    state = LiveState(None, 10.0)
    assert answered(state, "/healthz") == (503, "starting")
    assert answered(state, "/readyz")[0] == 503
    state.feed(status())
    assert answered(state, "/healthz") == (200, "alive")
    assert answered(state, "/readyz")[0] == 200
    for change in ({"state": "waiting"}, {"plans_overdue": True}, {"paused": True}, {"state": "finished"}):
        state.feed(status(**change))
        assert answered(state, "/readyz")[0] == 503, change
        assert answered(state, "/healthz")[0] == 200, change
    state.feed(status(degraded=["not heard for 15 s: rank 3"]))
    assert answered(state, "/readyz")[0] == 200
    monkeypatch.setattr(routes, "SILENT_LOOP_S", -1.0)
    assert answered(state, "/healthz")[0] == answered(state, "/readyz")[0] == 503


def test_an_answer_that_fails_is_one_answer(story):
    state = LiveState(None, 10.0)  # no history: a defect
    state.feed(status())
    assert answered(state, "/api/loads")[0] == 500
    assert answered(state, "/api/status")[0] == 200


def test_its_process_may_die_and_hang_without_harm(story):
    """Killed, it is started anew on the same port; stopped, feeding it never waits."""
    with LivePage(story) as page:
        wait_for(lambda: page.get("/healthz")[0] == 200, 60, "health")
        page.process._restart_s = 0.0
        os.kill(page.process._child.pid, signal.SIGKILL)
        wait_for(lambda: page.process.restarts == 1 and page.process._child is not None, 60, "a new process")
        wait_for(lambda: page.get("/healthz")[0] == 200, 60, "health again")
        page.fed = False
        os.kill(page.process._child.pid, signal.SIGSTOP)
        began = time.thread_time()
        large = story.status(ranks=list(page.status.ranks) * 2000)
        for _ in range(20):
            page.process.feed(large, time.monotonic())
        assert time.thread_time() - began < 5.0
        assert page.process._pending, "the newest waits, the others were dropped"
        os.kill(page.process._child.pid, signal.SIGCONT)
        page.fed = True
        wait_for(lambda: page.get("/healthz")[0] == 200, 60, "health once more")


def test_the_port_is_free_after_the_end(story):
    with LivePage(story) as page:
        address = page.process.address.rpartition(":")
        wait_for(lambda: page.get("/healthz")[0] == 200, 60, "health")
        child = page.process._child
    assert child.poll() is not None
    with socket.create_server((address[0], int(address[2]))):
        pass


def test_the_document_names_every_path_and_field(page):
    """docs/live_page.md: its table of paths is what is served, and every field of the answers stands in it."""
    text = (ROOT / "docs/live_page.md").read_text()
    table = text.partition("## Paths")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| `(/[^`]*)` \|", table, re.MULTILINE)) == PATHS
    fields = text.partition("## Fields")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", fields))
    layer, placements = page.json("/api/layers/0"), page.json("/api/placements")
    history = page.json("/api/history?detail=layers")
    found = {*page.json("/api/loads"), *page.json("/api/loads")["balancedness"], *layer, *layer["experts"][0]}
    found |= {*history, *history["points"][0], *placements, *placements["placements"][0]}
    assert found - named == set()
