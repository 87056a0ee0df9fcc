"""Strangers and liars against a real rebalancer: keys and roles, garbage, half-open connections, impossible windows."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from evenroute.dist.client import RefusedError, UnreachableError, command, query_status
from evenroute.dist.wire.address import parse_address
from evenroute.dist.wire.control import RecordRead, RecordStart, RecordStop
from evenroute.dist.wire.keys import ClientKeys, generate_keys, load_client_keys, load_server_keys
from evenroute.dist.wire.link import DealerLink
from evenroute.dist.wire.messages import JobShape, RankWindow, SnapshotRequest, encode
from evenroute.tools.run.simulated_job import SimulatedJob
from support.control_plane import RebalancerProcess, child_environment, command_start_s, patience, wait_for

JOB = JobShape(3, 8, 12, 4, 1, 2, False, "secure")
FLAGS = ["--interval", "3600", "--planner", "support.stub_planner:plan"]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    generate_keys(folder)
    return folder


@pytest.fixture(scope="module")
def secured(tmp_path_factory, keys):
    folder = tmp_path_factory.mktemp("secured")
    flags = [*FLAGS, "--keys", str(keys)]
    with RebalancerProcess(folder, bind="tcp://127.0.0.1:0", flags=flags) as process:
        yield process


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with RebalancerProcess(
        tmp_path_factory.mktemp("plain"), bind="tcp://127.0.0.1:0", flags=FLAGS
    ) as process:
        yield process


@pytest.fixture
def job(plain):
    simulated = SimulatedJob(plain.address, JOB, period_s=3600.0)
    try:
        simulated.start(60)

        def all_heard():
            simulated.turn(0.05)
            status = plain.status()
            return status.run == simulated.run and all(rank.heard_s_ago is not None for rank in status.ranks)

        wait_for(all_heard, 60, "all ranks heard")
        yield simulated
    finally:
        simulated.close()


def link_to(address, own=None):
    return DealerLink(parse_address(address, field="address"), keys=own, max_message_bytes=1 << 24)


def send_within(link, frames):
    wait_for(lambda: link.send(*frames), 60, "a connection")


# ------------------------------------------------------------------------------------------------- keys


def test_known_keys_are_answered_and_no_others(secured, keys):
    assert query_status(secured.address, keys=keys / "viewer.toml").state == "waiting"
    refused = query_status(secured.address, keys=keys / "operator.toml").counters["keys_refused"]
    known = load_client_keys(keys / "viewer.toml")
    public, secret = (part.decode() for part in zmq.curve_keypair())
    stranger = ClientKeys("viewer", public, secret, known.server_public_key)
    link = link_to(secured.address, stranger)
    assert not link.socket.poll(700)
    wait_for(
        lambda: query_status(secured.address, keys=keys / "operator.toml").counters["keys_refused"] > refused,
        60,
        "its key is refused",
    )
    assert not link.send(b"control", b"anything"), "a stranger is never connected"
    link.close(0)
    with pytest.raises(UnreachableError, match=r"no answer within 0\.7 s"):
        query_status(secured.address, timeout_s=0.7)  # no key at all


def test_a_wrong_server_key_is_no_connection(secured, keys):
    """Ranks are not led by somebody who sits at the rebalancer's address."""
    own = load_client_keys(keys / "viewer.toml")
    other_public, _ = (part.decode() for part in zmq.curve_keypair())
    link = link_to(secured.address, ClientKeys("viewer", own.public_key, own.secret_key, other_public))
    time.sleep(0.5)
    assert not link.send(b"control", b"x")
    link.close(0)


def test_each_role_may_do_its_own(secured, keys):
    with pytest.raises(RefusedError, match="the role viewer may not do this; it takes operator"):
        command(secured.address, RecordStart(), keys=keys / "viewer.toml")
    with pytest.raises(RefusedError, match="the role rank may not do this"):
        query_status(secured.address, keys=keys / "rank.toml")
    # The operator is let in; what it asks for makes no sense before there is a job (U06).
    with pytest.raises(RefusedError, match="there is no running job"):
        command(secured.address, RecordStart(), keys=keys / "operator.toml")
    with pytest.raises(RefusedError, match="no recording runs"):
        command(secured.address, RecordStop(), keys=keys / "operator.toml")
    with pytest.raises(RefusedError, match="nothing was recorded"):
        command(secured.address, RecordRead(), keys=keys / "viewer.toml")
    link = link_to(secured.address, load_client_keys(keys / "operator.toml"))
    send_within(link, [encode(SnapshotRequest(0, 1, JOB))])
    wait_for(
        lambda: query_status(secured.address, keys=keys / "viewer.toml").counters["rejected_role"] > 0,
        60,
        "an operator's snapshot request is refused",
    )
    assert query_status(secured.address, keys=keys / "viewer.toml").epoch == 0
    link.close(0)


def test_key_files_are_private_never_overwritten_and_strictly_read(tmp_path):
    made = generate_keys(tmp_path / "k")
    assert all(os.stat(path).st_mode & 0o077 == 0 for path in made)
    with pytest.raises(FileExistsError, match="never overwritten"):
        generate_keys(tmp_path / "k")
    assert sorted(load_server_keys(tmp_path / "k").roles.values()) == ["operator", "rank", "viewer"]
    secret = load_client_keys(tmp_path / "k" / "rank.toml").secret_key
    assert secret not in repr(load_client_keys(tmp_path / "k" / "rank.toml"))
    rank = tmp_path / "k" / "rank.toml"
    good = rank.read_text()
    for bad, message in (
        (good.replace('"rank"', '"root"'), "role: 'root' found"),
        (good.replace("secret_key", "secretkey"), "secret_key: expected 40 characters"),
        (good[:-20], "not TOML"),
    ):
        rank.write_text(bad)
        with pytest.raises(ValueError, match=message):
            load_client_keys(rank)


def test_strangers_could_reach_it_so_it_does_not_start(tmp_path):
    for bind in ("tcp://0.0.0.0:0", "tcp://*:0"):
        began = time.monotonic()
        found = subprocess.run(
            [
                sys.executable,
                "-m",
                "evenroute.tools.cli",
                "rebalancer",
                "--bind",
                bind,
                "--store",
                str(tmp_path / "run.db"),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            env=child_environment(),
        )
        spent = time.monotonic() - began
        assert found.returncode == 2
        assert spent - command_start_s() < 5 * patience(), "it waits for something"
        assert found.stderr.count("\n") == 1
        assert "there are no keys" in found.stderr
        assert bind in found.stderr
    assert not (tmp_path / "run.db").exists()


# --------------------------------------------------------------------------------------------- garbage


def test_a_flood_of_garbage_changes_nothing(plain, job):
    before = plain.status()
    rng = np.random.default_rng(5)
    link = link_to(plain.address)
    send_within(link, [b""])
    sent = 1
    good = encode(SnapshotRequest(0, 1, JOB))
    for number in range(3000):
        kind = number % 4
        size = int(rng.integers(1, 2000))
        frames = [rng.bytes(size)]
        if kind == 1:  # a good frame with one byte changed in its type tag
            frames = [good.replace(b"snapshot?", b"snapshat?")]
        if kind == 2:  # too many frames
            frames = [b"a", b"b", b"c", b"d"]
        if kind == 3:
            frames = [b"control", rng.bytes(size)]
        deadline = time.monotonic() + 60
        while not link.send(*frames):
            assert time.monotonic() < deadline, f"frame {number} cannot be sent"
            time.sleep(0.002)
        sent += 1
    after = wait_for(
        lambda: (
            (s := plain.status()).counters["rejected_decode"] >= before.counters["rejected_decode"] + sent
            and s
        ),
        60,
        "all garbage refused",
    )
    link.close(0)
    for name in ("epoch", "version", "run", "newest", "live_lowest"):
        assert getattr(after, name) == getattr(before, name)
    for name in ("windows_stored", "windows_rejected", "rejected_internal"):
        assert after.counters[name] == before.counters[name]
    assert plain.log().count("refused: ") < 200, "a flood does not fill the log"


def test_a_frame_above_the_limit_costs_its_sender_the_connection(plain):
    link = link_to(plain.address)
    send_within(link, [b"x"])
    rejected = plain.status().counters["rejected_decode"]
    send_within(link, [bytes(9 * 1024 * 1024)])
    time.sleep(0.5)
    assert plain.status().counters["rejected_decode"] <= rejected + 1, "it never reached the decoder"
    link.close(0)


def test_half_open_connections_are_shed_and_service_goes_on(plain):
    address = parse_address(plain.address, field="address")
    raw = []
    for number in range(300):
        connection = socket.create_connection((address.host, address.port), timeout=60)
        if number % 3 == 1:
            connection.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f")  # the first part of a greeting
        if number % 3 == 2:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        raw.append(connection)
    assert plain.status().state in ("serving", "waiting")
    fds = Path(f"/proc/{plain.process.pid}/fd")
    wait_for(
        lambda: len(list(fds.iterdir())) < 100, 60, "half-open connections closed by the handshake limit"
    )
    for connection in raw:
        connection.close()


def impossible_windows(run, good):
    shape = (JOB.num_layers, JOB.num_logical_experts)
    negative = np.frombuffer(good, "<i8").reshape(shape).copy()
    negative[1, 2] = -5
    negative[1, 3] += 5
    overflow = np.full(shape, 2**62, "<i8")
    base = {"run": run, "rank": 1, "seq": 1, "first_step": 0, "last_step": 9, "tokens": 100, "counts": good}
    yield {**base, "counts": good[:-8]}
    yield {**base, "counts": good + bytes(8)}
    yield {**base, "counts": b""}
    yield {**base, "counts": negative.tobytes()}
    yield {**base, "counts": overflow.tobytes()}
    yield {**base, "rank": 4}
    yield {**base, "rank": 65535}
    yield {**base, "last_step": 9, "first_step": 10}
    yield {**base, "seq": 11}
    yield {**base, "run": run ^ 1}


def test_windows_that_cannot_be_do_not_move_the_numbers(plain, job):
    good = np.full((JOB.num_layers, JOB.num_logical_experts), 25, "<i8").tobytes()  # 100 tokens x top-2
    before = plain.status().counters
    link = link_to(plain.address)
    send_within(link, [b"x"])
    sent = 0
    for fields in impossible_windows(job.run, good):
        job.ranks[1].socket.send(
            encode(RankWindow(**fields))
        )  # of the rank itself: a stranger is not even read
        send_within(link, [encode(RankWindow(**{**fields, "counts": good, "last_step": 2**40}))])
        sent += 2
    # Types out of range never get past the decoder.
    for name, value in (("seq", 0), ("seq", -1), ("tokens", 2**41), ("first_step", -1), ("counts", "text")):
        fields = {
            "run": job.run,
            "rank": 1,
            "seq": 1,
            "first_step": 0,
            "last_step": 9,
            "tokens": 100,
            "counts": good,
        }
        send_within(link, [msgspec.msgpack.encode({"type": "window", **fields, name: value})])
        sent += 1

    def all_refused():
        after = plain.status().counters
        names = ("windows_rejected", "windows_ignored", "rejected_decode")
        return sum(after[name] - before[name] for name in names) >= sent + 1 and after

    after = wait_for(all_refused, 60, "all of them refused")
    assert after["windows_stored"] == before["windows_stored"]
    assert after["rejected_internal"] == before["rejected_internal"]
    # The true window with that very number is still welcome.
    job.ranks[1].socket.send(encode(RankWindow(job.run, 1, 1, 0, 9, 100, good)))
    wait_for(
        lambda: plain.status().counters["windows_stored"] == before["windows_stored"] + 1, 60, "the good one"
    )
    link.close(0)
