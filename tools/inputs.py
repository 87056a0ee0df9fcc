"""What `advise`, `replay`, `plan`, `inspect` and `convert` share: opening loads, `.pt` files without executing
pickles, and the size of an expert."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from numpy.typing import NDArray

from evenroute.eplb._io import open_input, unpacked_bytes, visible
from evenroute.eplb.files import open as files
from evenroute.eplb.files.open import Opened, open_source
from evenroute.eplb.loads.decoding import damaged
from evenroute.eplb.loads.source import LoadSource, PlacementMap
from evenroute.eplb.placement.models import MODEL_SHAPES, ModelShape
from evenroute.tools.stdin import with_stdin


def tell_unfinished(line: str) -> None:
    """One line on stderr for a dump that was never finished and is left out."""
    typer.echo(f"evenroute: note: {visible(' '.join(line.split()))}", err=True)


def open_loads(
    paths: Sequence[Path], *, num_experts: int | None = None, layout: str | None = None
) -> list[LoadSource]:
    """`evenroute.open_loads` with `.pt` files, `-` for standard input, and a note for each dump that is left out."""
    return files.open_loads(
        with_stdin(paths),
        num_experts=num_experts,
        layout=layout,
        read_pt=read_pt,
        on_unfinished=tell_unfinished,
    )


def open_sources(
    paths: Sequence[Path], num_experts: int | None, layout: str | None, *, unfinished: bool
) -> Opened:
    """Everything under the paths, loads or not, with `.pt` files and `-` for standard input."""
    return files.open_sources(
        with_stdin(paths),
        read_pt=read_pt,
        num_logical_experts=num_experts,
        layout=layout,
        unfinished=unfinished,
    )


def open_placement(path: Path) -> PlacementMap:
    """The placement in a file of any known form; ValueError if it holds none, or several."""
    source = open_source(path, read_pt=read_pt)
    if source.placement_map is None:
        raise ValueError(f"{path}: holds no placement but {source.kind}")
    return source.placement_map


def all_windows(sources: Sequence[LoadSource]) -> Iterator[NDArray[Any]]:
    """Counts ``[L, E]`` of all sources, one after the other."""
    for source in sources:
        for window in source.windows():
            yield window.counts


def known_model(name: str | None, source: LoadSource) -> tuple[ModelShape | None, bool]:
    """The model by name, else the one with as many experts, and whether that was only assumed."""
    if name is not None:
        if name not in MODEL_SHAPES:
            raise ValueError(f"--model {name!r}, expected one of {', '.join(MODEL_SHAPES)}")
        return MODEL_SHAPES[name], False
    if source.model in MODEL_SHAPES:
        return MODEL_SHAPES[source.model], False
    for shape in MODEL_SHAPES.values():
        if shape.num_logical_experts == source.num_logical_experts:
            return shape, True
    return None, False


@dataclass(frozen=True)
class ExpertSize:
    """Bytes of one expert's weights in one layer, and where the figure comes from; None = not known."""

    num_bytes: int | None
    origin: str


def expert_size(
    *,
    given: int | None,
    weight_bytes: float,
    model: ModelShape | None,
    assumed: bool,
    hidden: int | None = None,
    intermediate: int | None = None,
) -> ExpertSize:
    """Given, else gate, up and down projection: 3 x hidden x intermediate x bytes a weight."""
    if given is not None:
        return ExpertSize(given, "given")
    sizes = (hidden, intermediate)
    if None not in sizes:
        return ExpertSize(round(3 * sizes[0] * sizes[1] * weight_bytes), "given sizes")  # type: ignore[operator]
    if model is None:
        return ExpertSize(None, "not known: give --expert-bytes, or --hidden and --intermediate, or --model")
    wide = hidden or model.hidden_size
    high = intermediate or model.moe_intermediate_size
    origin = f"{model.name}'s sizes{' (assumed by its number of experts)' if assumed else ''}"
    return ExpertSize(round(3 * wide * high * weight_bytes), f"{origin}, {weight_bytes:g} bytes a weight")


def number_list(name: str, text: str) -> list[int]:
    """ "0,32,64" -> [0, 32, 64]; ValueError names the option."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} {text!r}: expected whole numbers separated by commas") from None


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
    if mapped:
        unpacked_bytes(path)
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
