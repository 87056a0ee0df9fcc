"""The end of the rebalancer's process, from outside: signals, queued frames, kill -9."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evenroute.eplb.store.writer import StoreReader
from support.control_plane import (
    child_environment,
    is_gone,
    patience,
    wait_for,
)
from support.outside import stored, turn_until

# ----------------------------------------------------------------------------------------- ends (B36)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_time_with_a_summary_and_no_socket_left(rebalancer, job, number):
    turn_until(job, lambda: stored(job) >= 8, "windows stored")
    began = time.monotonic()
    rebalancer.signal(number)
    assert rebalancer.process.wait(timeout=60) == 0
    assert time.monotonic() - began < 5 * patience()
    assert not Path(rebalancer.bind.removeprefix("ipc://")).exists()
    assert not rebalancer.ready.exists()
    assert "stored " in rebalancer.log()
    assert "dropped " in rebalancer.log()
    with StoreReader(rebalancer.store) as reader:
        assert sum(state.num_windows for state in reader.rank_states()) >= 8


def test_it_ends_in_time_with_frames_queued_to_a_peer_that_does_not_read(rebalancer, job):
    """B36 (a): 300 MB to a stopped reader would hang for ever with the default linger."""
    stopped = subprocess.Popen(
        [sys.executable, "-c", STOPPED_PEER, rebalancer.address],
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    try:
        assert stopped.stdout.readline() == "asked\n"
        began = time.monotonic()
        assert rebalancer.stop() == 0
        assert time.monotonic() - began < 5 * patience()
    finally:
        stopped.kill()
        stopped.wait(timeout=60)
        stopped.stdout.close()


STOPPED_PEER = """
import sys, time, zmq
from evenroute.dist.wire.control import StatusRequest, encode_control
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.RCVHWM, 1)
socket.connect(sys.argv[1])
for _ in range(20000):
    socket.send_multipart([b"control", encode_control(StatusRequest())])
print("asked", flush=True)
time.sleep(60)
"""


def test_no_process_is_left_of_it_after_kill_9(rebalancer, job):
    children = (
        Path(f"/proc/{rebalancer.process.pid}/task/{rebalancer.process.pid}/children").read_text().split()
    )
    assert children, "the planner's process"
    rebalancer.kill()
    wait_for(lambda: all(map(is_gone, children)), 60, "the planner ends with it")
