"""The placement file: one JSON object, written beside and renamed."""

from __future__ import annotations

import os
import tempfile
from os import PathLike

import msgspec
import numpy as np

from evenroute.eplb._checks import as_integer, as_path, describe, require_instance, require_text
from evenroute.eplb._io import check_target, read_input
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology

FORMAT = "evenroute-placement"
FORMAT_VERSION = 1


class PlacementFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=False):
    """Content of a placement file; ``digests`` are those of the rows (62 bits)."""

    format: str
    format_version: int
    model: str
    phase: str
    num_logical_experts: int
    ep_size: int
    num_nodes: int
    epoch: int
    version: int
    digests: list[int]
    physical_to_logical_map: list[list[int]]
    shares: list[list[int]] | msgspec.UnsetType | None = msgspec.UNSET


def write_beside_and_rename(path: str | PathLike[str], data: bytes) -> None:
    """Replace ``path`` by ``data`` as a whole, durably: a reader sees the old file or the new one.

    Raises:
        OSError: the file cannot be written.
        ValueError: no path or no bytes, or a pipe, socket or device in the file's place.
    """
    target = as_path("path", path)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError(f"data must be bytes, found {describe(data)}")
    check_target(target)
    handle, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(beside, 0o666 & ~umask)
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise


def save_placement(
    path: str | PathLike[str],
    placement: Placement,
    *,
    model: str = "",
    phase: str = "",
    epoch: int = 0,
    version: int = 0,
) -> None:
    """Write ``placement`` to ``path``; same placement and names, same bytes.

    Raises:
        OSError: the file cannot be written.
        ValueError: names the argument that is of another kind, and what was found.
    """
    path = as_path("path", path)
    require_instance("placement", placement, Placement)
    require_text("model", model)
    require_text("phase", phase)
    epoch, version = as_integer("epoch", epoch, 0), as_integer("version", version, 0)
    content = PlacementFile(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        model=model,
        phase=phase,
        num_logical_experts=placement.num_logical_experts,
        ep_size=placement.topology.ep_size,
        num_nodes=placement.topology.num_nodes,
        epoch=epoch,
        version=version,
        digests=placement.row_digests().tolist(),
        physical_to_logical_map=placement.physical_to_logical.tolist(),
        shares=msgspec.UNSET if placement.shares is None else placement.shares.tolist(),
    )
    write_beside_and_rename(path, msgspec.json.encode(content) + b"\n")


def load_placement(path: str | PathLike[str]) -> tuple[Placement, PlacementFile]:
    """Read and check a placement file.

    Raises:
        OSError: the file cannot be read.
        ValueError: one line that names the file, the field, what was found and what was expected.
    """
    path = as_path("path", path)
    data = read_input(path)
    try:
        content = msgspec.json.decode(data, type=PlacementFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a placement file: {error}") from None
    if content.format != FORMAT or content.format_version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format is {content.format!r} version {content.format_version}, "
            f"expected {FORMAT!r} version {FORMAT_VERSION}"
        )
    try:
        placement = _placement_of(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return placement, content


def _placement_of(content: PlacementFile) -> Placement:
    rows = content.physical_to_logical_map
    lengths = {len(row) for row in rows}
    if len(lengths) != 1:
        raise ValueError(
            f"physical_to_logical_map rows must have one length, found {sorted(lengths) or 'no rows'}"
        )
    shares = None
    if isinstance(content.shares, list):
        if [len(row) for row in content.shares] != [len(row) for row in rows]:
            raise ValueError("shares must have the shape of physical_to_logical_map")
        shares = np.asarray(content.shares)
    placement = Placement(
        np.asarray(rows),
        content.num_logical_experts,
        Topology(content.ep_size, content.num_nodes),
        shares,
    )
    digests = placement.row_digests().tolist()
    if content.digests != digests:
        layer = next(
            (i for i, (a, b) in enumerate(zip(content.digests, digests, strict=False)) if a != b),
            min(len(content.digests), len(digests)),
        )
        raise ValueError(f"digests: layer {layer} does not match its row (file edited or damaged)")
    return placement
