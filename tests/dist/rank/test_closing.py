"""However an engine's process ends: a clean end sends the last window and a goodbye, a death sends nothing."""

import subprocess
import sys

import numpy as np
import pytest
import zmq

from evenroute.dist.wire.messages import Ack, Goodbye, RankWindow, encode
from evenroute.dist.wire.received import decode_up
from support.control_plane import child_environment

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize(
    ("way", "status", "last"),
    [
        ("return", 0, "goodbye"),
        ("exit", 3, "goodbye"),
        ("signal", 0, "goodbye"),
        ("interrupted in a step", 0, "goodbye"),
        ("collected", 0, "goodbye"),
        ("child of a fork", 0, "goodbye"),
        ("forked by multiprocessing", 0, "goodbye"),
        ("raise", 1, "window"),
        ("killed", -9, ""),
        ("os._exit", 0, ""),
    ],
)
def test_ways_to_end(tmp_path, way, status, last):
    address = f"ipc://{tmp_path}/r.sock"
    windows, tags = {}, []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind(address)
        command = [sys.executable, "-m", "support.ending_rank", way, address]
        with subprocess.Popen(command, env=child_environment(), stderr=subprocess.PIPE, text=True) as process:
            quiet = 0
            while quiet < 3:
                if not router.poll(300):
                    quiet = quiet + 1 if process.poll() is not None else 0
                    continue
                peer, frame = router.recv_multipart()
                message = decode_up(frame)
                tags.append(message.__struct_config__.tag)
                if isinstance(message, RankWindow):
                    windows[message.seq] = message.tokens, int(np.frombuffer(message.counts, "<i8").sum())
                    router.send_multipart([peer, encode(Ack(message.run, 1, message.seq))])
                if isinstance(message, Goodbye):
                    assert message.rank == 0
            assert process.wait(60) == status, process.stderr.read()
    assert list(windows.values()) == ([(4, 4)] if last else [])
    assert tags.count("goodbye") == (last == "goodbye")
    if last == "goodbye":
        assert tags[-1] == "goodbye", "nothing follows it"
