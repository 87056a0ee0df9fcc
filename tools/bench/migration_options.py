"""Flags of `bench_migration.py`, and how it starts its ranks where torchrun did not."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

PART_NAMES = ("steps", "throughput", "endurance", "kill", "stall", "damage")

GPU_DEFAULTS = {
    "layers": 3,
    "experts": 256,
    "slots": 288,
    "top_k": 8,
    "hidden": 7168,
    "intermediate": 2048,
    "tokens": 128,
    "steps": 200,
    "large_tokens": 8192,
    "large_steps": 10,
    "endurance_steps": 10_000,
    "check_every": 500,
    "chunk_mib": 176.0,
}
CPU_DEFAULTS = {
    "layers": 3,
    "experts": 32,
    "slots": 36,
    "top_k": 4,
    "hidden": 64,
    "intermediate": 32,
    "tokens": 16,
    "steps": 30,
    "large_tokens": 256,
    "large_steps": 3,
    "endurance_steps": 200,
    "check_every": 20,
    "chunk_mib": 0.05,
}


def parse(argv: list[str], on_gpu: bool, description: str | None) -> argparse.Namespace:
    """The bench's flags; sizes default to a DeepSeek-like stack on GPUs and to a toy on the CPU."""
    parser = argparse.ArgumentParser(
        prog="evenroute bench migration",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--parts", default="steps,throughput,endurance", help=f"of {', '.join(PART_NAMES)}")
    add("--ranks", type=int, help="without torchrun: start so many (default: one a GPU, else 2)")
    for name, value in (GPU_DEFAULTS if on_gpu else CPU_DEFAULTS).items():
        add(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value}")
    add("--staging-layers", type=int, default=2)
    add("--zipf-exponent", type=float, default=1.2)
    add("--policy", default="global", help="of the planner")
    add("--limit-s", type=float, default=300.0, help="of the process groups' collectives")
    add("--verify", action="store_true", help="compare checksums of every moved expert")
    add("--transfer-limit-s", type=float, default=30.0, help="a chunk that takes longer ends the job")
    add("--report", type=Path)
    args = parser.parse_args(argv)
    for part in args.parts.split(","):
        if part not in PART_NAMES:
            parser.error(f"--parts: found {part!r}, expected of {', '.join(PART_NAMES)}")
    if "damage" in args.parts.split(",") and not args.verify:
        parser.error("--parts: found 'damage' without --verify, which is what notices it")
    return args


def launch(argv: list[str], ranks: int) -> int:
    """Run the bench under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([*command, "-m", "evenroute.tools.bench.migration", *argv], check=False).returncode
