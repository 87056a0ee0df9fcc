"""A proxy between ranks and rebalancer, in a thread: it drops, delays, duplicates, reorders and cuts, seeded.

It understands ZeroMQ's message boundaries (ROUTER in front, one DEALER for each peer behind), so that a fault hits
whole messages, as a lost connection or a slow network with retries does.
"""

from __future__ import annotations

import heapq
import random
import threading
import time

import zmq


class LinkProxy:
    """From `front` to `back`; `drop`, `duplicate` (shares) and `delay_s` (low, high) may change at any time."""

    def __init__(self, front, back, *, seed=0, drop=0.0, duplicate=0.0, delay_s=(0.0, 0.0)):
        self.front, self.back = front, back
        self.drop, self.duplicate, self.delay_s = drop, duplicate, delay_s
        self.cut = False
        self.cut_down = False  # only what comes from `back`
        self.forwarded = self.dropped = self.duplicated = 0
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(10)

    def calm(self):
        """No more faults."""
        self.drop = self.duplicate = 0.0
        self.delay_s = (0.0, 0.0)
        self.cut = self.cut_down = False

    def _run(self):
        context = zmq.Context()
        front = self._socket(context, zmq.ROUTER)
        front.bind(self.front)
        poller = zmq.Poller()
        poller.register(front, zmq.POLLIN)
        peers, waiting, number = {}, [], 0
        while not self._stop.is_set():
            limit = min(20, 1000 * (waiting[0][0] - time.monotonic())) if waiting else 20
            ready = dict(poller.poll(max(0, int(limit))))
            if front in ready:
                for identity, *frames in self._read(front):
                    if identity not in peers:
                        peers[identity] = self._socket(context, zmq.DEALER)
                        peers[identity].connect(self.back)
                        poller.register(peers[identity], zmq.POLLIN)
                    number = self._queue(waiting, number, peers[identity], frames)
            for identity, peer in peers.items():
                if peer in ready:
                    for frames in self._read(peer):
                        if self.cut_down:
                            self.dropped += 1
                            continue
                        number = self._queue(waiting, number, front, [identity, *frames])
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, socket, frames = heapq.heappop(waiting)
                self.forwarded += 1
                try:
                    socket.send_multipart(frames, zmq.NOBLOCK)
                except zmq.ZMQError:
                    self.dropped += 1
        for socket in (front, *peers.values()):
            socket.close()
        context.term()

    @staticmethod
    def _socket(context, kind):
        socket = context.socket(kind)
        socket.linger = 0
        return socket

    @staticmethod
    def _read(socket):
        while True:
            try:
                yield socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _queue(self, waiting, number, socket, frames):
        if self.cut or self._random.random() < self.drop:
            self.dropped += 1
            return number
        copies = 2 if self._random.random() < self.duplicate else 1
        self.duplicated += copies - 1
        for _ in range(copies):
            # A delay of its own for each message also reorders them.
            heapq.heappush(
                waiting, (time.monotonic() + self._random.uniform(*self.delay_s), number, socket, frames)
            )
            number += 1
        return number
