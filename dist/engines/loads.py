"""Loads that an engine hands over as a tensor, on the host; anything else is refused in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenroute.eplb._checks import describe, one_line


def host_loads(name: str, weight: Any) -> NDArray[np.float64]:
    """A tensor ``[L, E]`` of real numbers, on any device, as float64 on the host.

    Raises:
        ValueError: no tensor, complex or quantised, without memory (meta), or of another shape.
    """
    array = _on_host(name, weight, torch.float64, "[layers, experts]")
    if array.ndim != 2 or array.shape[1] < 1:
        raise ValueError(f"{name} must be [layers, experts >= 1], found shape {list(array.shape)}")
    return array


def host_rows(name: str, indices: Any, num_layers: int) -> NDArray[Any]:
    """A tensor ``[L, P]`` of integers, on any device, as int64 on the host.

    Raises:
        ValueError: no tensor of integers, without memory (meta), or of another shape.
    """
    if isinstance(indices, Tensor) and (
        indices.is_floating_point() or indices.is_complex() or indices.dtype is torch.bool
    ):
        raise ValueError(f"{name} must hold integers, found {indices.dtype}")
    array = _on_host(name, indices, torch.int64, "[layers, slots]")
    if array.ndim != 2 or len(array) != num_layers:
        raise ValueError(f"{name} must be [{num_layers}, slots], found shape {list(array.shape)}")
    return array


def _on_host(name: str, tensor: Any, dtype: torch.dtype, form: str) -> NDArray[Any]:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor {form}, found {describe(tensor)}")
    if tensor.is_complex() or tensor.is_quantized:
        raise ValueError(f"{name} must hold real numbers, found {tensor.dtype}")
    try:
        return np.asarray(tensor.detach().to("cpu", dtype).numpy())
    except (RuntimeError, TypeError) as error:  # meta, sparse, ...
        raise ValueError(f"{name} can't be read: {one_line(error)}") from None
