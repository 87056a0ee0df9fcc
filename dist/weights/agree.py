"""All ranks must cut the same chunks of the same tensors: compared at the start, before any collective."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as torch_dist

from evenroute.dist.groups import compare_ranks
from evenroute.dist.weights.expert_weights import ExpertWeights, LayerWeights
from evenroute.dist.wire.messages import PROTOCOL_VERSION
from evenroute.eplb.placement.placement import DIGEST_MASK

LIMIT_S = 600.0  # ranks come here when their weights are loaded


def compare_weights(
    weights: ExpertWeights, settings: Mapping[str, object], group: torch_dist.ProcessGroup
) -> None:
    """Compare everything that chunks are cut by: the protocol, ``settings`` and the tensors of every layer.

    Then connect the ranks to each other, so that the first chunk does not have to (CUDA).

    Raises:
        ValueError: on every rank alike; names what differs and on which ranks.
        MissingRanksError: a rank did not come in time.
    """
    equal = {"protocol": PROTOCOL_VERSION, **settings, "slots of a rank": weights.num_local_slots}
    equal |= {"layers": weights.num_layers, **dict(_tensors(weights))}
    compare_ranks(group, "weights", equal, limit_s=LIMIT_S)
    if weights.device.type == "cuda":
        tiny = torch.zeros(torch_dist.get_world_size(group), dtype=torch.int64, device=weights.device)
        torch_dist.all_to_all_single(torch.empty_like(tiny), tiny, group=group)


def weights_digest(weights: ExpertWeights, settings: Mapping[str, object]) -> int:
    """62-bit digest of what `compare_weights` compares, for members that meet in a collective."""
    parts = [*settings.items(), ("slots", weights.num_local_slots), *_tensors(weights)]
    text = repr([(str(name), str(value)) for name, value in parts])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & DIGEST_MASK


def _tensors(weights: ExpertWeights) -> Iterator[tuple[str, str]]:
    for number, layer in enumerate(weights.layers):
        yield f"layer {number} tensors", ", ".join(layer.tensors)
        for name in layer.tensors:
            yield f"layer {number} tensor {name!r}", _form(layer, name)


def _form(layer: LayerWeights, name: str) -> str:
    tensor = layer.tensors[name]
    # An expert's bytes travel in the order in which they lie in memory.
    order = "" if tensor[0].is_contiguous() else f" strides {list(tensor.stride()[1:])}"
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{order}"
