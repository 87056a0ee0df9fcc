"""A live page with a made-up job behind it: a store with a history, a status, and the real process of the HTTP port."""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from evenroute.dist.web.process import WebProcess, WebSettings
from evenroute.dist.wire.control import RankHealth, RebalancerStatus
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.plan import plan_placement
from evenroute.eplb.store.schema import IN_USE_EVENT, JobRow, PublishedPlacement, RankWindowRow, encode_in_use
from evenroute.eplb.store.writer import HistoryStore
from support.fake_control import status

RUN, EPOCH = 0x5E1F, 0x15D4AB << 20


class Story:
    """A job of ``layers`` x ``experts`` on ``ranks``: two kinds of traffic in turn, a plan after each change."""

    def __init__(
        self,
        path: Path,
        *,
        layers: int = 12,
        experts: int = 64,
        slots: int = 72,
        ranks: int = 8,
        seed: int = 3,
    ) -> None:
        self.path, self.layers, self.experts, self.slots, self.ranks = path, layers, experts, slots, ranks
        self.topology = Topology(ranks)
        self.rng = np.random.default_rng(seed)
        zipf = 1 / np.arange(1, experts + 1) ** 0.5
        self.kinds = [
            np.stack([self.rng.permutation(zipf / zipf.sum()) for _ in range(layers)]) for _ in range(2)
        ]
        self.live = Placement.initial(layers, experts, slots, self.topology)
        self.version = self.seq = 0
        self.store = HistoryStore(path)
        self.store.begin_epoch(EPOCH, pid=1, now=0.0)
        job = JobRow("DeepSeek-V3 (made up)", "decode", layers, experts, slots, ranks, 1, 8, True)
        self.store.set_job(RUN, job, epoch=EPOCH, now=0.0)

    def window(self, moment: float, kind: int, tokens: int = 40_000) -> None:
        """Counts of sixteen steps that arrived at ``moment``."""
        self.seq += 1
        steps = (16 * (self.seq - 1), 16 * self.seq - 1)
        counts = self.rng.poisson(self.kinds[kind] * tokens * 8).astype(np.int64)
        self.store.add_windows(
            [RankWindowRow(RUN, 0, self.seq, *steps, tokens, counts)], epoch=EPOCH, now=moment
        )

    def use(self, moment: float) -> None:
        """From now on the ranks route with `live`."""
        digests = self.live.row_digests()
        for layer, digest in enumerate(digests.tolist()):
            row = self.live.row(layer)
            self.store.keep_row(digest, row, epoch=EPOCH)
        key = (EPOCH, self.version) if self.version else (0, 0)
        text = encode_in_use(RUN, key, digests.astype("<i8").tobytes())
        self.store.add_event(IN_USE_EVENT, text, epoch=EPOCH, now=moment)

    def plan(self, moment: float, kind: int, policy: str = "weighted", max_moves: int | None = None) -> None:
        """A plan for a kind of traffic, published and in use two seconds later."""
        plan = plan_placement(
            self.kinds[kind] * 1e6,
            topology=self.topology,
            num_slots=self.slots,
            current=self.live,
            policy=policy,
            max_moves=max_moves,
        )
        self.version += 1
        self.live = plan.placement
        self.store.add_placement(
            PublishedPlacement(
                moment,
                EPOCH,
                self.version,
                plan.placement,
                plan.moves,
                plan.policy,
                plan.reason,
                balancedness_before=plan.before.total,
                balancedness_predicted=plan.predicted.total,
            )
        )
        self.use(moment + 2.0)

    def tell(self, minutes: float, *, every_s: float = 2.0, planned: bool = True) -> None:
        """The last ``minutes``: traffic changes every quarter of them, and a plan follows."""
        now = time.time()
        start = now - 60 * minutes
        self.use(start)
        moments = np.arange(start, now - 1, every_s)
        kind = 0
        for number, moment in enumerate(moments.tolist()):
            part = int(4 * number / len(moments))
            kind = part % 2
            self.window(moment, kind)
            quarter = len(moments) // 4
            if planned and number % quarter == quarter // 3:
                self.plan(
                    moment,
                    kind,
                    "global" if part == 0 else "weighted",
                    None if part == 0 else self.layers * self.slots // 50,
                )

    def status(self, **changes: Any) -> RebalancerStatus:
        """A healthy status of this job."""
        key = (EPOCH, self.version)
        noise = np.random.default_rng(1).normal(1, 0.04, self.ranks)
        ranks = [
            RankHealth(
                number, 0.2 + 0.1 * (number % 4), vote=900, held=key, last_seq=self.seq, first_step=0,
                last_step=16 * self.seq - 1, tokens=40_000 * self.seq // self.ranks,
            )
            for number in range(self.ranks)
        ]  # fmt: skip
        known = {
            "ranks": ranks,
            "ep_size": self.ranks,
            "num_layers": self.layers,
            "num_logical_experts": self.experts,
            "num_slots": self.slots,
            "model": "DeepSeek-V3 (made up)",
            "newest": key,
            "live_lowest": key,
            "live_highest": key,
            "epoch": EPOCH,
            "version": self.version,
            "run": RUN,
            "store": str(self.path),
            "uptime_s": 5400.0,
            "last_action": "shares",
            "last_reason": "shares: mean balancedness 0.9512 -> 0.9968, nothing moves",
            "plans_succeeded": 41,
            "plan_cycle": 41,
            "balancedness_per_layer": [0.97] * self.layers,
            "rank_load": np.round(noise / noise.mean(), 4).tolist(),
            "hottest_rank": [layer % self.ranks for layer in range(self.layers)],
            "hottest_expert": [layer % self.experts for layer in range(self.layers)],
            "hottest_expert_load": [0.06] * self.layers,
            "saved_gpu_seconds": 9000.0,
            "cost_gpu_seconds": 42.0,
        }
        return status(self.ranks, **{**known, **changes})


class LivePage:
    """The HTTP port of a story; a status goes to it every half second."""

    def __init__(
        self, story: Story, *, token: str = "", is_local: bool = True, host: str = "127.0.0.1"
    ) -> None:
        self.status = story.status()
        self.fed = True
        self.process = WebProcess(host, 0, WebSettings(str(story.path), 10.0, token, is_local, "info"))
        self.url = f"http://{self.process.address}"
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._thread.start()

    def _feed(self) -> None:
        while not self._ending.is_set():
            if self.fed:
                self.process.feed(msgspec.structs.replace(self.status), time.monotonic())
            self._ending.wait(0.5)

    def get(self, path: str, *, token: str = "", basic: bool = False, **headers: str) -> tuple[int, str]:
        """Status and body."""
        if token:
            pair = base64.b64encode(f"me:{token}".encode()).decode()
            headers["Authorization"] = f"Basic {pair}" if basic else f"Bearer {token}"
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def json(self, path: str) -> Any:
        code, body = self.get(path)
        assert code == 200, body
        return json.loads(body)

    def __enter__(self) -> LivePage:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(10)
        self.process.close()


def main() -> None:
    """A page to look at: `python -m support.live_page FOLDER [large]`."""
    import sys

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    large = sys.argv[2:] == ["large"]
    shape = {"layers": 92, "experts": 896, "slots": 1024, "ranks": 1024} if large else {}
    shape = shape or {"layers": 58, "experts": 256, "slots": 288, "ranks": 32}
    story = Story(folder / "run.db", **shape)
    story.tell(2 if large else 30, planned=not large)
    with LivePage(story) as page:
        print(page.url, flush=True)
        kind = 1
        while True:
            time.sleep(2)
            story.window(time.time(), kind)


if __name__ == "__main__":
    main()
