"""Starts the ranks of a run on this host: the only way in which stress runs and benches start torchrun. No torch."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from typing import NoReturn

from evenroute.eplb._versions import check_versions


def has_torch() -> bool:
    """Whether torch is installed, without importing it."""
    try:
        return importlib.util.find_spec("torch") is not None
    except ImportError:
        return False


def require_torch(command: str) -> None:
    """ValueError that names the missing extra where torch is not installed, or is too old."""
    if not has_torch():
        raise ValueError(f"{command} needs torch, which is not installed: pip install 'evenroute[rank]'")
    try:
        check_versions()
    except ImportError as error:
        raise ValueError(str(error)) from None


def count_gpus() -> int:
    """CUDA devices of this host that torch can use; 0 without torch."""
    if not has_torch():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def launch(module: str, argv: list[str], ranks: int) -> NoReturn:
    """Run `torchrun --standalone --nproc-per-node ranks -m module argv...` in this process; end with its exit status.

    After Ctrl-C or SIGTERM the ranks get the signal and have torchrun's 30 s to end; no traceback is printed.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun does so too, with a warning of five lines
    try:
        torchrun.main(["--standalone", "--nproc-per-node", str(ranks), "-m", module, *argv])
    except SignalException as ended:
        raise SystemExit(128 + ended.sigval) from None
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        if first.exitcode < 0:
            print(
                f"evenroute: local rank {first.local_rank} was ended by signal {-first.exitcode}",
                file=sys.stderr,
            )
            raise SystemExit(128 - first.exitcode) from None
        raise SystemExit(first.exitcode) from None
    raise SystemExit(0)
