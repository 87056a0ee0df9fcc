"""Other planners, run from their own wheels or source trees where the benchmark is given them (`--peer NAME=PATH`).

Nothing of theirs is kept here: a file is loaded from the given place, with stand-ins for what it imports besides numpy,
scipy, numba and torch. `vllm`: DefaultEplbPolicy of vllm/distributed/eplb/policy. `flashlb`: FlashLB of vllm-ascend.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
# past windows [W, L, E] oldest first, slots in use [L, P], ranks -> slots [L, P]
Peer = Callable[[NDArray[np.float64], Rows, int], Rows]

FILES = {
    "vllm": ("vllm/distributed/eplb/policy", ("abstract", "default")),
    "flashlb": ("vllm_ascend/eplb/core/policy", ("policy_abstract", "policy_flashlb")),
}


def _stand_ins() -> None:
    """Modules that peers import for logging and process groups, unless the real ones are installed."""

    def no_group() -> None:
        raise RuntimeError("no process group in a benchmark")

    wanted: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.logger": {"logger": logging.getLogger("peer")},
        "vllm_ascend": {},
        "vllm_ascend.distributed": {},
        "vllm_ascend.distributed.parallel_state": {"get_dynamic_eplb_group": no_group},
    }
    for name, content in wanted.items():
        if name not in sys.modules:
            module = types.ModuleType(name)
            vars(module).update(content)
            sys.modules[name] = module


def _load(name: str, path: Path) -> Any:
    """The last of the peer's modules, loaded from a wheel or a source tree.

    Raises:
        ValueError: the place holds no such file, or it cannot be imported here.
    """
    folder, modules = FILES[name]
    if path.is_file() and zipfile.is_zipfile(path):
        root = Path(tempfile.mkdtemp(prefix="evenroute-peer-"))
        with zipfile.ZipFile(path) as wheel:
            held = set(wheel.namelist())
            for module in modules:
                if f"{folder}/{module}.py" in held:
                    wheel.extract(f"{folder}/{module}.py", root)
        path = root
    package = f"evenroute_peer_{name}"
    home = types.ModuleType(package)
    home.__path__ = [str(path / folder)]
    sys.modules[package] = home
    _stand_ins()
    loaded: Any = None
    for module in modules:
        file = path / folder / f"{module}.py"
        if not file.is_file():
            raise ValueError(
                f"--peer {name}: {file} is not there; give a wheel or a source tree that holds it"
            )
        spec = importlib.util.spec_from_file_location(f"{package}.{module}", file)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded
        try:
            spec.loader.exec_module(loaded)
        except ImportError as error:
            raise ValueError(f"--peer {name}: {file} cannot be imported here: {error}") from None
    return loaded


def _vllm(path: Path) -> Peer:
    import torch

    policy = _load("vllm", path).DefaultEplbPolicy

    def plan(past: NDArray[np.float64], rows: Rows, num_ranks: int) -> Rows:
        old = torch.from_numpy(rows.astype(np.int64))
        loads = torch.from_numpy(past.sum(axis=0))
        return np.asarray(policy.rebalance_experts(loads, rows.shape[1], 1, 1, num_ranks, old))

    return plan


def _flashlb(path: Path) -> Peer:
    import torch

    planner = _load("flashlb", path).FlashLB()

    def plan(past: NDArray[np.float64], rows: Rows, num_ranks: int) -> Rows:
        num_layers = len(rows)
        loads = np.stack([_slot_loads(window, rows) for window in past]).reshape(
            len(past), num_layers, num_ranks, -1
        )
        table = torch.from_numpy(rows.reshape(num_layers, num_ranks, -1))
        _, changed, found = planner.rebalance_experts(table, torch.from_numpy(loads))
        new = rows.copy()
        for layer in changed:
            new[layer] = np.asarray(found[layer]).reshape(-1)
        return new

    return plan


def _slot_loads(loads: NDArray[np.float64], rows: Rows) -> NDArray[np.float64]:
    counts = np.zeros(loads.shape)
    layers = np.arange(len(rows))[:, None]
    np.add.at(counts, (layers, rows), 1.0)
    return np.asarray((loads / np.maximum(counts, 1.0))[layers, rows])


MAKERS: dict[str, Callable[[Path], Peer]] = {"vllm": _vllm, "flashlb": _flashlb}


def open_peers(given: list[str]) -> dict[str, Callable[[], Peer]]:
    """Makers of the peers in ``NAME=PATH`` texts; each trace gets a planner of its own, for some keep state.

    Raises:
        ValueError: an unknown name, a text without "=", or a place without the planner.
    """
    makers: dict[str, Callable[[], Peer]] = {}
    for text in given:
        name, _, place = text.partition("=")
        if name not in MAKERS or not place:
            raise ValueError(f"--peer {text!r}, expected NAME=PATH with NAME one of {', '.join(MAKERS)}")
        maker, path = MAKERS[name], Path(place)
        try:
            maker(path)
        except ImportError as error:
            raise ValueError(f"--peer {name} needs torch and what the peer imports: {error}") from None
        makers[name] = lambda maker=maker, path=path: maker(path)  # type: ignore[misc]
    return makers
