"""Looks over evenroute's shoulder inside vLLM's workers: what was really routed, and what a switch really left behind.

A plug-in of vLLM's, on where `EVENROUTE_CHECKS` names a folder. Each rank keeps there `routed-RANK.bin` (int64 [L, E]:
the logical experts that vLLM's own router would choose for the real rows of each pass) and `switches-RANK.jsonl` (each
switch: pass, layers, key, wrong slots by the hashes of the weights, whether vLLM's maps equal ours, bytes received).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist


def register() -> None:
    """Called by vLLM in each of its processes."""
    folder = os.environ.get("EVENROUTE_CHECKS")
    if not folder:
        return
    from vllm.v1.worker.worker_base import WorkerBase

    original = WorkerBase.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _watch(folder)  # not earlier: vLLM on CPUs can't have numba imported before its workers are made

    if original.__name__ != "made":
        WorkerBase.__init__ = made


def _watch(folder: str) -> None:
    from evenroute.dist.engines.vllm import job, routes

    if hasattr(job.VllmJob, "_checked"):
        return
    job.VllmJob._checked = True
    make, end, route = job.VllmJob.__init__, job.VllmJob.end_pass, routes.ModelRoutes.route

    def new_make(self: Any, settings: Any, config: Any, state: Any, model: Any, model_config: Any) -> None:
        make(self, settings, config, state, model, model_config)
        self.routes.watch = _Watch(Path(folder), self, model)

    def new_end(self: Any) -> Any:
        result = end(self)
        watch = getattr(self.routes, "watch", None)
        if watch is not None:
            watch.after_pass(result)
        return result

    def new_route(self: Any, layer: int, logits: Any, ids: Any, weights: Any) -> Any:
        watch = getattr(self, "watch", None)
        if watch is not None:
            watch.routed(layer, logits, ids)
        return route(self, layer, logits, ids, weights)

    job.VllmJob.__init__, job.VllmJob.end_pass, routes.ModelRoutes.route = new_make, new_end, new_route


class _Watch:
    def __init__(self, folder: Path, job: Any, model: Any) -> None:
        self.job, self.rank, self.folder = job, job.agent.rank, folder
        self.layers, self.weights = list(model.moe_layers), model.expert_weights
        placement = job.agent.placement
        shape = (placement.num_layers, placement.num_logical_experts)
        self.counts = np.memmap(folder / f"routed-{self.rank}.bin", np.int64, "w+", shape=shape)
        (folder / f"run-{self.rank}.json").write_text(json.dumps({"run": job.agent.run, "shape": shape}))
        self.truth = self._all_hashes(placement)
        self.note(what="start", choices=[route.choice.reason for route in job.routes.layers])

    def note(self, **event: Any) -> None:
        with (self.folder / f"switches-{self.rank}.jsonl").open("a") as out:
            print(json.dumps(event), file=out)

    def routed(self, layer: int, logits: Any, ids: Any) -> None:
        rows = self.job._passed_rows
        if not rows:
            return
        router = self.layers[layer].router
        if ids is None:
            hidden = logits.new_zeros(logits.shape[0], self.layers[layer].moe_config.hidden_dim)
            _, ids = router._compute_routing(hidden, logits.clone(), None, input_ids=None)
        found = torch.bincount(ids[:rows].flatten().long().cpu(), minlength=self.counts.shape[1])
        self.counts[layer] += found.numpy()

    def _hash(self, layer: int, slot: int) -> str:
        parts = (tensor[slot].cpu().contiguous().view(torch.uint8) for tensor in self.weights[layer])
        return hashlib.sha1(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()

    def _slots(self, placement: Any, layer: int) -> list[tuple[int, int]]:
        count = placement.num_local_slots
        row = placement.physical_to_logical[layer]
        return [(slot, int(row[self.rank * count + slot])) for slot in range(count)]

    def _all_hashes(self, placement: Any) -> dict[tuple[int, int], str]:
        from vllm.distributed.parallel_state import get_ep_group

        group = get_ep_group().cpu_group
        mine = {
            (layer, expert): self._hash(layer, slot)
            for layer in range(placement.num_layers)
            for slot, expert in self._slots(placement, layer)
        }
        parts: list[Any] = [None] * torch_dist.get_world_size(group)
        torch_dist.all_gather_object(parts, mine, group=group)
        return {key: value for part in parts for key, value in part.items()}

    def _maps_differ(self, placement: Any, layer: int) -> bool:
        state, row = self.job._state, placement.physical_to_logical[layer]
        slots = state.logical_to_physical_map[layer].cpu()
        wanted = [sorted(np.flatnonzero(row == expert).tolist()) for expert in range(slots.shape[0])]
        found = [sorted(one[one >= 0].tolist()) for one in slots]
        counts = state.logical_replica_count[layer].tolist()
        same = state.physical_to_logical_map[layer].tolist() == row.tolist()
        return not (same and found == wanted and counts == [len(one) for one in wanted])

    def after_pass(self, result: Any) -> None:
        if not result.switched:
            return
        placement = self.job.agent.placement
        self.note(
            what="switch",
            step=result.step,
            layers=list(result.switched),
            key=result.key,
            wrong=sum(
                self._hash(layer, slot) != self.truth[layer, expert]
                for layer in result.switched
                for slot, expert in self._slots(placement, layer)
            ),
            maps_differ=sum(self._maps_differ(placement, layer) for layer in result.switched),
            bytes=self.job.agent._mover.bytes_received,
            shares=placement.shares is not None,
        )
