"""SGLang: a bridge that drives its expert recorder over HTTP, plans, and hands the placement back as a file.

    python -m sglang.launch_server ... --expert-distribution-recorder-mode stat       # with
    SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR=/shared/dumps                             # in its environment

    python -m evenroute.tools.sglang --url http://127.0.0.1:30000 --recorder-dir /shared/dumps --seconds 60 \
        --ep-size 16 --ep-num-redundant-experts 32 -o location.json

    python -m sglang.launch_server ... --ep-num-redundant-experts 32 --init-expert-location location.json

What it can't do: change the placement of a running server (SGLang loads it at start; its own `--enable-eplb` rebalances
while it runs), uneven shares (SGLang spreads an expert's tokens over its replicas by `--ep-dispatch-algorithm`), or see
the recorder's files on another machine (the folder must be shared).
"""

from __future__ import annotations

import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._io import write_beside_and_rename
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology, check_plan_numbers
from evenroute.eplb.planner.plan import Plan, plan_placement
from evenroute.tools.errors import one_line_errors
from evenroute.tools.flags import FlagParser

RECORDER_DIR = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
REMEDY = (
    f"start the server with --expert-distribution-recorder-mode stat and {RECORDER_DIR} set to that folder"
)
POLICIES = ("global", "hierarchical", "incremental")  # those with even shares
SETTLE_S = 1.0  # files of several ranks come one by one


class SglangRecorder:
    """The recorder of one running server."""

    def __init__(
        self, url: str, recorder_dir: Path, *, timeout_s: float = 30.0, api_key: str | None = None
    ) -> None:
        """Attach to a server.

        Args:
            url: ``http://HOST:PORT`` of the server.
            recorder_dir: the folder that the server writes its dumps to, as seen from here.
            timeout_s: limit of each request, and of the wait for a dump's files.
            api_key: sent as a bearer token (a server with ``--api-key`` or ``--admin-api-key``).

        Raises:
            ValueError: the address is not one of HTTP, the folder does not exist, or the limit is not above 0.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url: found {url!r}, expected http://HOST:PORT")
        if not recorder_dir.is_dir():
            raise ValueError(f"--recorder-dir: {recorder_dir} is no folder; {REMEDY}")
        if not timeout_s > 0:
            raise ValueError(f"--timeout: found {timeout_s}, expected above 0")
        self.url = url.rstrip("/")
        self.recorder_dir = recorder_dir
        self.timeout_s = timeout_s
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # The server is a neighbour: no proxy of the environment stands between.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def start(self) -> None:
        """Begin a recording; what was recorded before is dropped by the server."""
        self._post("start_expert_distribution_record")

    def stop(self) -> None:
        """End the recording."""
        self._post("stop_expert_distribution_record")

    def dump(self) -> list[Path]:
        """Have the recording written; the new files, one a rank or one for the job, by the recorder's mode.

        Raises:
            ValueError: the server answered, but no file came within the limit (the recorder is off).
        """
        before = self._files()
        self._post("dump_expert_distribution_record")
        deadline = time.monotonic() + self.timeout_s
        found: dict[Path, int] = {}
        while time.monotonic() < deadline:
            new = {path: size for path, size in self._files().items() if before.get(path) != size}
            if new and new == found:
                return sorted(new)
            found = new
            time.sleep(min(SETTLE_S, self.timeout_s / 4))
        raise ValueError(
            f"--recorder-dir: the server answered, but wrote no dump to {self.recorder_dir} within "
            f"{self.timeout_s:g} s; {REMEDY}"
        )

    def record(self, seconds: float) -> list[Path]:
        """Record for this long and dump; the recording is stopped even if something fails."""
        self.start()
        try:
            time.sleep(seconds)
        finally:
            self.stop()
        return self.dump()

    def _files(self) -> dict[Path, int]:
        return {path: path.stat().st_size for path in self.recorder_dir.glob("*.pt")}

    def _post(self, endpoint: str) -> None:
        request = urllib.request.Request(
            f"{self.url}/{endpoint}", data=b"", headers=self._headers, method="POST"
        )
        try:
            with self._opener.open(request, timeout=self.timeout_s) as answer:
                answer.read(4096)
        except urllib.error.HTTPError as error:
            raise ValueError(f"--url: {self.url}/{endpoint} answered {error.code} {error.reason}") from None
        except (urllib.error.URLError, TimeoutError) as error:
            raise ValueError(f"--url: {self.url}/{endpoint}: {getattr(error, 'reason', error)}") from None


def summed_loads(paths: Sequence[Path]) -> NDArray[np.float64]:
    """Loads ``[L, E]`` of a dump's files over all steps and ranks; dense layers are rows of zeros.

    Raises:
        ValueError: a file can't be read, parts do not fit together, or nothing was counted.
    """
    from evenroute.tools.inputs import all_windows, open_loads

    total: Any = 0.0
    for counts in all_windows(open_loads(paths)):
        total = total + counts
    loads = np.asarray(total, dtype=np.float64)
    if not loads.any():
        raise ValueError(f"{paths[0]}: nothing was counted; send requests while it records")
    return loads


def plan_location(
    loads: NDArray[np.float64],
    *,
    ep_size: int,
    num_redundant_experts: int,
    num_nodes: int = 1,
    num_groups: int = 1,
    current: Placement | None = None,
    policy: str = "global",
) -> Plan:
    """A placement that SGLang can load: even shares, all hidden layers, dense ones as they are.

    Raises:
        ValueError: numbers that do not divide, or a policy that makes uneven shares.
    """
    slots = loads.shape[1] + num_redundant_experts
    topology = check_plan_numbers(loads.shape[1], slots, num_groups, num_nodes, ep_size)
    plan = plan_placement(
        loads, topology=topology, num_slots=slots, num_groups=num_groups, current=current, policy=policy
    )
    if plan.placement.shares is not None:
        raise ValueError(
            f"--policy: {policy} made uneven shares, which SGLang can't use; take global or hierarchical"
        )
    return plan


def write_location(path: Path, placement: Placement) -> None:
    """Write ``{"physical_to_logical_map": [[...]]}``, the one key that ``--init-expert-location`` allows."""
    content = {"physical_to_logical_map": placement.physical_to_logical.tolist()}
    write_beside_and_rename(path, msgspec.json.encode(content) + b"\n")


def read_location(path: Path, topology: Topology) -> Placement:
    """The placement that a server runs with, from its ``--init-expert-location`` file (not one with loads alone)."""
    from evenroute.eplb.files.open import open_source
    from evenroute.tools.inputs import read_pt

    source = open_source(path, read_pt=read_pt)
    if source.placement_map is None:
        raise ValueError(f"{path}: {source.kind} holds no physical_to_logical_map")
    return source.placement_map.to_placement(topology.ep_size, topology.num_nodes)


def build_parser() -> FlagParser:
    """The bridge's flags, named as SGLang's where it has them."""
    parser = FlagParser(
        "python -m evenroute.tools.sglang",
        "Record expert loads of a running SGLang server, plan, write a file for --init-expert-location.",
    )
    add = parser.add_argument
    add("--url", required=True, help="the server, http://HOST:PORT")
    add("--recorder-dir", type=Path, required=True, help=f"the server's {RECORDER_DIR}")
    add("--seconds", type=float, default=60.0, help="how long to record")
    add("--ep-size", "--ep", type=int, required=True, help="EP ranks")
    add("--ep-num-redundant-experts", type=int, default=0, help="slots beyond one per expert")
    add("--nnodes", type=int, default=1, help="nodes of the EP group")
    add("--num-groups", type=int, default=1, help="expert groups that stay on a node (policy hierarchical)")
    add("--init-expert-location", type=Path, help="the file the server runs with, so that little has to move")
    add("--policy", choices=POLICIES, default="global", help="of the planner")
    add(
        "--timeout", type=float, default=30.0, help="limit of a request, and of the wait for the dump's files"
    )
    add("--api-key-env", help="name of the environment variable that holds the server's API key")
    add("-o", "--output", type=Path, required=True, help="where the placement goes")
    return parser


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Record, plan, write; prints what was planned. Exit status 2 in one line for anything that stands in the way."""
    args = build_parser().parse_args(argv)
    if not (math.isfinite(args.seconds) and args.seconds > 0):
        raise ValueError(f"--seconds: found {args.seconds}, expected above 0")
    topology = Topology(args.ep_size, args.nnodes)
    api_key = None
    if args.api_key_env is not None:
        api_key = os.environ.get(args.api_key_env)
        if not api_key:
            raise ValueError(f"--api-key-env: {args.api_key_env} is not set")
    recorder = SglangRecorder(args.url, args.recorder_dir, timeout_s=args.timeout, api_key=api_key)
    current = (
        None if args.init_expert_location is None else read_location(args.init_expert_location, topology)
    )
    loads = summed_loads(recorder.record(args.seconds))
    plan = plan_location(
        loads,
        ep_size=args.ep_size,
        num_redundant_experts=args.ep_num_redundant_experts,
        num_nodes=args.nnodes,
        num_groups=args.num_groups,
        current=current,
        policy=args.policy,
    )
    write_location(args.output, plan.placement)
    print(f"{args.output}: {plan.reason}; {int(plan.moves.sum())} slots move")


if __name__ == "__main__":
    main()
