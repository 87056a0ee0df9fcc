"""Load generator for the transport: many simulated ranks against one real rebalancer process. No torch.

evenroute bench transport --ranks 1024 --seconds 60 --rate 1
evenroute bench transport --ranks 1024 --seconds 20 --rate 0      # as fast as it goes
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

from evenroute.dist.client import query_status
from evenroute.dist.wire.messages import NO_KEY, JobShape
from evenroute.eplb.store.writer import StoreReader
from evenroute.tools.flags import FlagParser
from evenroute.tools.run.rebalancer import ChildRebalancer
from evenroute.tools.run.simulated_job import SimulatedJob


def cpu_seconds(pid: int) -> float:
    """User and system time of one process (its children not included)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int, field: str) -> float:
    """`VmHWM` (peak) or `VmRSS` of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    return 0.0


@dataclass(frozen=True)
class TransportOptions:
    """`rate`: windows a second and rank, 0 = as fast as it goes; `plan_after` seconds: the one plan of the run."""

    ranks: int = 1024
    layers: int = 58
    experts: int = 256
    seconds: float = 60.0
    rate: float = 1.0
    plan_after: float = 0.0
    planner: str | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "layers", "experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}: {getattr(self, name)} found, expected at least 1")
        for name, least in (("seconds", "above 0"), ("rate", "at least 0"), ("plan_after", "at least 0")):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and least == "above 0"):
                raise ValueError(f"--{name.replace('_', '-')}: {value:g} found, expected a number {least}")


def _job(options: TransportOptions) -> JobShape:
    # No more redundancy than divisibility asks for.
    slots = -(-options.experts // options.ranks) * options.ranks
    return JobShape(options.layers, options.experts, slots, options.ranks, 1, 8, False, "bench")


def run_transport(options: TransportOptions) -> dict[str, float | int | bool | None]:
    """Run the bench; the figures by name (README, "Transport")."""
    job = _job(options)
    planner: dict[str, str | float] = {"interval": options.plan_after or 1e6, "policy": "global"}
    if options.planner is not None:
        planner["function"] = options.planner
    with ChildRebalancer(planner) as rebalancer:
        simulated = SimulatedJob(
            rebalancer.address, job, period_s=1.0 / options.rate if options.rate else 0.0
        )
        try:
            figures = _measure(options, simulated, rebalancer.address, rebalancer.pid)
        finally:
            simulated.close()
        acknowledged = sum(rank.stored for rank in simulated.ranks)
        with StoreReader(rebalancer.store) as reader:
            _, total = reader.total_counts(simulated.run)
        exact = total is not None and bool((total == simulated.counts * acknowledged).all())
    return {**figures, "windows_acknowledged": acknowledged, "stored_equals_acknowledged": exact}


def _measure(
    options: TransportOptions, simulated: SimulatedJob, address: str, pid: int
) -> dict[str, float | int | bool | None]:
    simulated.start()
    deadline = time.monotonic() + 60
    while query_status(address).run != simulated.run or not _all_heard(address):
        if time.monotonic() > deadline:
            raise TimeoutError("bench: not all ranks were heard within 60 s")
        for _ in range(20):
            simulated.turn(0.02, windows=False)
    began, cpu = time.monotonic(), cpu_seconds(pid)
    own_cpu = time.process_time()
    while time.monotonic() - began < options.seconds:
        simulated.turn(0.005)
    elapsed, used = time.monotonic() - began, cpu_seconds(pid) - cpu
    acknowledged = len(simulated.latencies)
    last = sorted(simulated.latencies[-min(acknowledged, options.ranks) :])
    drained = simulated.drain(30.0)
    reach = _reach(simulated)
    return {
        "ranks": options.ranks,
        "seconds": round(elapsed, 2),
        "windows_a_second": round(acknowledged / elapsed, 1),
        "rebalancer_cores": round(used / elapsed, 3),
        "rebalancer_us_a_window": round(1e6 * used / max(1, acknowledged), 1),
        "generator_cores": round((time.process_time() - own_cpu) / (time.monotonic() - began), 3),
        "lag_median_s": round(last[len(last) // 2], 4) if last else None,
        "lag_max_s": round(last[-1], 4) if last else None,
        "resent": simulated.resent,
        "drained": drained,
        "rebalancer_peak_mb": round(memory_mb(pid, "VmHWM"), 1),
        "placement_reach_s": reach,
    }


def _all_heard(address: str) -> bool:
    found = query_status(address)
    return found.state == "serving" and all(rank.heard_s_ago is not None for rank in found.ranks)


def _reach(simulated: SimulatedJob) -> float | None:
    """Seconds between the first and the last rank that got the newest placement all have; None without one."""
    key = min(rank.held for rank in simulated.ranks)
    if key == NO_KEY:
        return None
    times = [rank.held_at for rank in simulated.ranks if rank.held == key]
    return round(max(times) - min(times), 4)


def main(argv: list[str] | None = None) -> int:
    """`evenroute bench transport`: run and print one JSON object. Exit status 1 when a count was lost."""
    parser = FlagParser("evenroute bench transport", (__doc__ or "").split("\n")[0], "bench transport")
    helps = {
        "ranks": "simulated ranks",
        "layers": "MoE layers",
        "experts": "logical experts a layer",
        "seconds": "how long they send",
        "rate": "windows a second and rank; 0: no pause",
        "plan_after": "seconds until a placement is planned and sent (0: none)",
        "planner": "MODULE:FUNCTION in place of the built-in planner",
    }
    for name, default in vars(TransportOptions()).items():
        kind = str if default is None else type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=helps[name])
    given = parser.parse_args(argv)
    try:
        options = TransportOptions(**vars(given))
    except ValueError as error:
        parser.error(str(error))
    figures = run_transport(options)
    print(json.dumps(figures))
    return 0 if figures["stored_equals_acknowledged"] and figures["drained"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
