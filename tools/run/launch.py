"""Starts the ranks of a run on this host: the only way in which stress runs and benches start torchrun. No torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import NoReturn


def has_torch() -> bool:
    """Whether torch is installed, without importing it."""
    try:
        return importlib.util.find_spec("torch") is not None
    except ImportError:
        return False


def require_torch(command: str) -> None:
    """ValueError that names the missing extra where torch is not installed."""
    if not has_torch():
        raise ValueError(f"{command} needs torch, which is not installed: pip install 'evenroute[rank]'")


def count_gpus() -> int:
    """CUDA devices of this host that torch can use; 0 without torch."""
    if not has_torch():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def launch(module: str, argv: list[str], ranks: int) -> NoReturn:
    """Become `torchrun --standalone --nproc-per-node ranks -m module argv...`: its output and exit status are ours."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", module, *argv]
    sys.stdout.flush()
    os.execv(sys.executable, command)
