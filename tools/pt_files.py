"""Reads torch's `.pt` files without executing pickles, on a CPU whatever device they were saved from."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

from evenroute.eplb._io import open_input
from evenroute.eplb.loads.decoding import damaged


def read_pt(path: Path) -> Any:
    """The file's content with tensors as numpy arrays; large ones stay mapped to the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: torch is not installed, the file is cut off or damaged, or it holds classes (never executed).
    """
    try:
        import torch
    except ImportError:
        raise ValueError(f"{path}: reading .pt files needs torch: pip install 'evenroute[rank]'") from None
    with open_input(path) as file:
        head = file.read(2)
    if not head:
        raise damaged(path, "the file is empty")
    if head[:1] == b"\x80" and head[1:] != b"\x02":  # torch's older form is made of pickles of protocol 2
        raise ValueError(
            f"{path}: a pickle (protocol {head[1] if len(head) > 1 else '?'}), which is never executed; "
            "expected a file of torch.save"
        )
    mapped = zipfile.is_zipfile(path)  # the older form can only be read whole
    try:
        with warnings.catch_warnings():  # torch's advice is for those who wrote the file
            warnings.simplefilter("ignore")
            data = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped or None)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)|class (\S+)", str(error))
        if found:
            name = (found[1] or found[2]).rstrip(".,")
            raise ValueError(f"{path}: holds Python objects ({name}), which are never executed") from None
        raise damaged(path, "not a whole torch file") from None
    except (RuntimeError, EOFError, KeyError, ValueError, AttributeError, TypeError, IndexError) as error:
        raise damaged(path, " ".join(str(error).split())[:160] or type(error).__name__) from None
    return _plain(data, torch)


def _plain(value: Any, torch: Any) -> Any:
    """Tensors -> numpy (bfloat16 -> float32), inside dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor = tensor.float()
        return tensor.numpy()
    if isinstance(value, dict):
        return {key: _plain(item, torch) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, torch) for item in value]
    return value
