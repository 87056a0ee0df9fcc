"""Where an expert's weights come from when no rank of the job holds them any more, or a new rank begins."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from evenroute.dist.weights.expert_weights import ExpertWeights, Loader
from evenroute.eplb._checks import as_path, describe, require_callable

INDEX_FILE = "model.safetensors.index.json"


class ExpertSource(Protocol):
    """Gives the rows of one expert, as `WeightMover`'s loader does."""

    def __call__(self, layer: int, expert: int) -> Mapping[str, Tensor]:
        """The expert's tensors by registered name, each of the registered shape without dimension 0."""


class SafetensorsSource:
    """An `ExpertSource` over a checkpoint of safetensors files, mapped into memory: nothing is read before it is asked
    for. Needs ``pip install 'evenroute[elastic]'``.

    ``names`` maps each registered tensor to a checkpoint's name with ``{layer}`` and ``{expert}``, or to several that
    are put together along dimension 0 (gate and up); without ``{expert}`` in it the checkpoint's tensor holds all
    experts, and its row ``expert`` is taken. ``first_layer`` is added to ``{layer}`` (dense layers in front);
    ``layers`` gives the checkpoint's number of each MoE layer instead.
    """

    def __init__(
        self,
        path: str | Path,
        names: Mapping[str, str | tuple[str, ...]],
        *,
        first_layer: int = 0,
        layers: list[int] | None = None,
        convert: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        """``path``: a file, or a folder of them with their index; ``convert(name, rows)``: to the registered form.

        Raises ValueError for a path or names that can't be, and where safetensors is not installed.
        """
        try:
            from safetensors import safe_open
        except ImportError:
            raise ValueError(
                "SafetensorsSource needs safetensors, which is not installed: pip install 'evenroute[elastic]'"
            ) from None

        if not isinstance(names, Mapping) or not names:
            raise ValueError(
                f"names must map registered tensors to a checkpoint's names, found {describe(names)}"
            )
        if convert is not None:
            require_callable("convert", convert, "convert(name, rows)")
        self.path = as_path("path", path)
        self._open = safe_open
        self._first = first_layer
        self._layers = layers
        self._convert = convert
        self._names = {name: (one,) if isinstance(one, str) else tuple(one) for name, one in names.items()}
        for name, parts in self._names.items():
            for part in parts:
                if set(re.findall(r"{(\w*)}", part)) - {"layer", "expert"}:
                    raise ValueError(
                        f"names: {name!r} is {part!r}, expected {{layer}} and {{expert}} alone in braces"
                    )
        self._files = self._index()
        self._handles: dict[Path, Any] = {}

    def _index(self) -> dict[str, Path]:
        """The file of each tensor."""
        if self.path.is_file():
            return dict.fromkeys(self._keys(self.path), self.path)
        index = self.path / INDEX_FILE
        if index.is_file():
            found = json.loads(index.read_text())
            parts = found.get("weight_map") if isinstance(found, dict) else None
            if not isinstance(parts, dict):
                raise ValueError(f"{index}: weight_map is missing, expected the file of each tensor")
            return {name: self.path / str(file) for name, file in parts.items()}
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{self.path}: no .safetensors file found")
        return {name: file for file in files for name in self._keys(file)}

    def _keys(self, file: Path) -> list[str]:
        with self._open(str(file), framework="pt") as handle:
            return list(handle.keys())

    def _handle(self, file: Path) -> Any:
        if file not in self._handles:
            self._handles[file] = self._open(str(file), framework="pt")
        return self._handles[file]

    def __call__(self, layer: int, expert: int) -> Mapping[str, Tensor]:
        """See `ExpertSource`. Raises ValueError for a tensor that the checkpoint lacks."""
        number = self._layers[layer] if self._layers is not None else layer + self._first
        return {
            name: self._rows(name, [self._part(part, number, expert) for part in parts])
            for name, parts in self._names.items()
        }

    def _part(self, template: str, layer: int, expert: int) -> Tensor:
        wanted = template.replace("{layer}", str(layer)).replace("{expert}", str(expert))
        file = self._files.get(wanted)
        if file is None:
            raise ValueError(f"{self.path}: tensor {wanted!r} is not in the checkpoint")
        handle = self._handle(file)
        if "{expert}" in template:
            tensor: Tensor = handle.get_tensor(wanted)
            return tensor
        row: Tensor = handle.get_slice(wanted)[expert]
        return row

    def _rows(self, name: str, parts: list[Tensor]) -> Tensor:
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rows if self._convert is None else self._convert(name, rows)

    def __repr__(self) -> str:
        return f"<SafetensorsSource {self.path}, {len(self._files)} tensors>"


def fill_slot(weights: ExpertWeights, layer: int, slot: int, expert: int, source: Loader) -> None:
    """Local ``slot`` of ``layer`` = the source's ``expert``. Raises ValueError as `ExpertWeights.load`."""
    rows = [rows[slot] for rows in weights.layers[layer].rows]
    weights.load_staged(layer, expert, source, rows)
