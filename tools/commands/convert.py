"""`evenroute convert IN OUT --to ...`: placements and loads in the form another engine reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenroute.tools.errors import check_output
from evenroute.tools.options import AsJson, Layout, NumExperts, Unfinished
from evenroute.tools.report.words import visible

if TYPE_CHECKING:
    from evenroute.eplb.loads.source import LoadSource, PlacementMap

In = Annotated[
    Path, typer.Argument(metavar="IN", help="Any file or folder that `evenroute inspect` reads, or -.")
]
Out = Annotated[
    Path, typer.Argument(metavar="OUT", help="File to write (a folder for TensorRT-LLM statistics).")
]
To = Annotated[str, typer.Option("--to", help="evenroute, sglang, trtllm or vllm-ascend.")]
What = Annotated[str | None, typer.Option(help="loads or placement, where IN holds both.")]
EpSize = Annotated[int | None, typer.Option(min=1, help="Ranks, where IN does not state them.")]
NumNodes = Annotated[int, typer.Option(min=1, help="Nodes, for an evenroute placement.")]
Dense = Annotated[int | None, typer.Option("--dense-layers", min=0, help="How many first layers are dense.")]
Hidden = Annotated[int | None, typer.Option("--num-hidden-layers", min=1, help="All layers, dense included.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Experts a token, for TensorRT-LLM statistics.")]
DropShares = Annotated[bool, typer.Option("--drop-shares", help="Write uneven shares as even ones.")]
Key = Annotated[str | None, typer.Option(help="Put the placement into the set OUT under this key.")]
FromKey = Annotated[str | None, typer.Option(help="Take this key of the set IN.")]


def convert(
    source: In,
    target: Out,
    to: To,
    what: What = None,
    ep_size: EpSize = None,
    num_nodes: NumNodes = 1,
    dense_layers: Dense = None,
    num_hidden_layers: Hidden = None,
    top_k: TopK = None,
    drop_shares: DropShares = False,
    key: Key = None,
    from_key: FromKey = None,
    num_experts: NumExperts = None,
    layout: Layout = None,
    unfinished: Unfinished = False,
    as_json: AsJson = False,
) -> None:
    """Write IN in the form that an engine reads; OUT is replaced as a whole or not at all."""
    from evenroute.eplb.files.write import TARGETS, ModelLayers, write_loads, write_placement

    if to not in TARGETS:
        raise ValueError(f"--to {to!r}, expected one of {', '.join(TARGETS)}")
    if what not in (None, "loads", "placement"):
        raise ValueError(f"--what {what!r}, expected loads or placement")
    if key is not None and to != "evenroute":
        raise ValueError("--key belongs to evenroute placement sets: give --to evenroute")
    if not (to == "trtllm" and target.is_dir()):  # its statistics are a folder
        check_output("OUT", target)
    found = _open(source, from_key, num_experts, layout, unfinished=unfinished)
    known = _placement(found)
    if what is None and found.has_loads and known is not None:
        raise ValueError(f"{source}: holds loads and a placement: give --what loads or --what placement")
    wanted = what or ("loads" if found.has_loads else "placement")
    if wanted == "loads":
        if not found.has_loads:
            raise ValueError(f"{source}: {found.kind} holds no loads")
        number = write_loads(target, found, to, top_k=top_k)
        line = f"{number} window{'' if number == 1 else 's'} of loads for {to}"
        _report(as_json, line, output=str(target), form=to, holds="loads", windows=number)
        return
    if known is None:
        raise ValueError(f"{source}: {found.kind} holds no placement")
    write_placement(
        target,
        known,
        to,
        ModelLayers(num_hidden_layers, dense_layers),
        ep_size=ep_size,
        num_nodes=num_nodes,
        includes_dense=_includes_dense(found),
        drop_shares=drop_shares,
        key=key,
    )
    layers, slots = known.physical_to_logical.shape
    experts = known.num_logical_experts
    line = f"placement of {experts} experts in {slots} slots for {to}"
    shape = {"num_layers": layers, "num_experts": experts, "num_slots": slots}
    _report(as_json, line, output=str(target), form=to, holds="placement", **shape)


def _report(as_json: bool, line: str, **facts: str | int) -> None:
    typer.echo(json.dumps(facts) if as_json else f"{visible(str(facts['output']))}: {line}")


def _open(
    path: Path, key: str | None, num_experts: int | None, layout: str | None, *, unfinished: bool
) -> LoadSource:
    from evenroute.tools.inputs import open_sources, tell_unfinished

    opened = open_sources([path], num_experts, layout, unfinished=unfinished)
    if lines := opened.errors or ([] if opened.sources else opened.unfinished):
        raise ValueError(lines[0])
    for line in opened.unfinished:
        tell_unfinished(line)
    names = [source.key for source in opened.sources]
    if key is not None:
        if key not in names:
            raise ValueError(f"{path}: no placement {key!r}, found {', '.join(map(repr, names))}")
        return opened.sources[names.index(key)]
    if len(opened.sources) != 1:
        raise ValueError(
            f"{path}: holds {len(opened.sources)}: {', '.join(map(repr, names))}; give --from-key"
        )
    return opened.sources[0]


def _placement(source: LoadSource) -> PlacementMap | None:
    """The placement of a file, or the newest one of a store or dump."""
    from evenroute.eplb.loads.source import PlacementMap

    if source.placement_map is not None:
        return source.placement_map
    if not source.placements:
        return None
    whole = [event for event in source.placements if (event.epoch, event.version) != (0, 0)]
    placement = (whole or source.placements)[
        -1
    ].placement  # of one version, where a switch was under way at the end
    return PlacementMap(
        placement.physical_to_logical,
        placement.num_logical_experts,
        placement.topology.ep_size,
        source.layer_ids,
        placement,
        source.model,
        source.phase,
    )


def _includes_dense(source: LoadSource) -> bool | None:
    """Whether the form of IN counts dense layers."""
    if source.kind.startswith("SGLang"):
        return True
    return False if source.kind.startswith("vLLM-Ascend") else None
