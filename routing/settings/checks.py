"""What callers hand in, checked on the host by attributes alone: no device is read and nothing waits.

Each check raises ValueError in one line that names the field, what was found and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evenroute.eplb._checks import describe

ID_DTYPES = (torch.int32, torch.int64)
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
BIAS_DTYPES = (
    *WEIGHT_DTYPES,
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
MARKER_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def fits(
    value: Any, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], device: torch.device | None
) -> bool:
    """Whether ``value`` is a plain (strided) tensor of this shape, one of the dtypes and on the device (None: any)."""
    return (
        isinstance(value, Tensor)
        and value.shape == shape
        and value.dtype in dtypes
        and (device is None or value.device == device)
        and value.layout is torch.strided
    )


def require_tensor(
    name: str,
    value: Any,
    *shapes: tuple[int | str, ...],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Raise ValueError unless ``value`` is a plain tensor of one of the shapes and dtypes on the device (None: any).

    A letter in a shape stands for any length; no shape at all allows every one.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, found {describe(value)}")
    if value.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, found layout {value.layout}")
    if value.dtype not in dtypes:
        allowed = " or ".join(_short(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {allowed}, found {value.dtype}")
    if shapes and not any(_matches(tuple(value.shape), shape) for shape in shapes):
        wanted = " or ".join("[" + ", ".join(map(str, shape)) + "]" for shape in shapes)
        raise ValueError(f"{name} must have shape {wanted}, found {list(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} lies on {value.device}, must lie on {device}")


def require_output(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> None:
    """Raise ValueError unless a launch can write into ``value``: as `require_tensor`, and contiguous."""
    if fits(value, shape, (dtype,), device) and value.is_contiguous():
        return
    require_tensor(name, value, shape, dtypes=(dtype,), device=device)
    raise ValueError(f"{name} must be contiguous, found strides {list(value.stride())}")


def require_device(name: str, value: Any) -> torch.device:
    """The device that ``value`` names; ValueError unless it is the CPU or a CUDA device that this process sees."""
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be cpu, cuda or cuda:N, found {describe(value)}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be cpu, cuda or cuda:N, found {str(device)!r}")
    if device.type == "cuda":
        number = torch.cuda.device_count()
        if (device.index or 0) >= number:
            raise ValueError(f"{name}={str(device)!r}: this process sees {number} CUDA devices")
    return device


def _matches(found: tuple[int, ...], shape: tuple[int | str, ...]) -> bool:
    return len(found) == len(shape) and all(
        isinstance(wanted, str) or length == wanted for length, wanted in zip(found, shape, strict=True)
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
