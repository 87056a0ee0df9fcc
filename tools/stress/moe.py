"""`--moe` of the stress run: real weights for every expert, migrated while the layers run, outputs checked.

The run makes a `MoeStress`, gives its `mover` to the rank agent, and calls `forward` for every layer after the router.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor

from evenroute.dist.engines.ep_layer import EpMoeLayer
from evenroute.dist.engines.experts import SwiGluExperts, swiglu
from evenroute.dist.weights.expert_weights import ExpertWeights
from evenroute.dist.weights.mover import TableUpdater
from evenroute.dist.weights.staging import layer_bytes
from evenroute.dist.weights.weight_mover import MigrationConfig, WeightMover
from evenroute.eplb.placement.placement import Placement
from evenroute.routing.output import RoutingOutput
from evenroute.tools.stress.checks import Finding

NUM_INPUTS = 8  # hidden states are drawn once and taken in turn
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PAIR_BYTES = 256 << 20  # the reference gathers at most so many bytes of weights at once


@dataclass(frozen=True)
class MoeSizes:
    """What the experts are made of; `staging_layers` whole layers fit the staging buffers."""

    hidden: int = 32
    intermediate: int = 16
    staging_layers: int = 2
    chunk_bytes: int = 1 << 20
    verify: bool = False


GPU_SIZES = MoeSizes(hidden=256, intermediate=128, chunk_bytes=32 << 20)


def logical_experts(
    seed: int, layer: int, num_experts: int, sizes: MoeSizes, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """`gate_up [E, 2 I, H]` and `down [E, H, I]` of a layer: the same on every rank of one kind of device."""
    generator = torch.Generator(device).manual_seed(seed * 100_003 + layer)
    hidden, wide = sizes.hidden, sizes.intermediate

    def draw(*shape: int) -> Tensor:
        values: Tensor = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return values.mul_(shape[-1] ** -0.5).to(dtype)

    return {"gate_up": draw(num_experts, 2 * wide, hidden), "down": draw(num_experts, hidden, wide)}


def reference_rows(hidden: Tensor, ids: Tensor, weights: Tensor, experts: dict[str, Tensor]) -> Tensor:
    """`sum_k weights[t, k] * expert[ids[t, k]](hidden[t])`, fp32 `[T, H]`: one process, logical experts, -1 = none."""
    gate_up, down = experts["gate_up"], experts["down"]
    top_k = ids.shape[1]
    pairs = ids.flatten().clamp(min=0).long()
    factors = torch.where(ids >= 0, weights, 0.0).flatten()
    rows = hidden.repeat_interleave(top_k, dim=0)
    step = max(1, PAIR_BYTES // (gate_up[0].nbytes + down[0].nbytes))
    parts = []
    for start in range(0, len(pairs), step):
        own = pairs[start : start + step]
        wide = torch.bmm(gate_up[own], rows[start : start + step, :, None]).squeeze(2)
        parts.append(torch.bmm(down[own], swiglu(wide)[:, :, None]).squeeze(2).float())
    products = torch.cat(parts) * factors[:, None]
    return products.view(-1, top_k, hidden.shape[1]).sum(dim=1)


class MoeStress:
    """The experts of all layers on this rank, their mover, and the reference beside them.

    Made on all ranks together, after `init_process_group` (it makes two groups of its own).
    """

    def __init__(
        self,
        placement: Placement,
        tables: TableUpdater,
        *,
        device: torch.device,
        tokens: int,
        token_mode: str,
        seed: int,
        sizes: MoeSizes | None = None,
    ) -> None:
        """Weights lie in identity order (round-robin redundancy) as after loading a checkpoint; the agent's `load`
        moves them to where the agreed placement says. Any placement of this shape may be agreed."""
        self.sizes = sizes or (GPU_SIZES if device.type == "cuda" else MoeSizes())
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.rank, self._topology = torch_dist.get_rank(), placement.topology
        self._num_local = placement.num_local_slots
        self._num_layers, self._num_experts = placement.num_layers, placement.num_logical_experts
        backend = "nccl" if device.type == "cuda" else "gloo"
        layer_group, move_group = torch_dist.new_group(backend=backend), torch_dist.new_group(backend=backend)
        assert layer_group is not None
        assert move_group is not None
        resident = Placement.initial(
            placement.num_layers, placement.num_logical_experts, placement.num_slots, placement.topology
        )
        self._experts = [
            logical_experts(seed, layer, self._num_experts, self.sizes, device, self.dtype)
            for layer in range(placement.num_layers)
        ]
        self._tensors = [self._in_order(layer, resident) for layer in range(placement.num_layers)]
        weights = ExpertWeights(self._tensors, self._num_local)
        config = MigrationConfig(
            staging_bytes=self.sizes.staging_layers * layer_bytes(weights.layers[0], self._num_local),
            chunk_bytes=self.sizes.chunk_bytes,
            verify=self.sizes.verify,
        )
        self.mover = WeightMover(weights, tables, group=move_group, resident=resident, config=config)
        self._layers = [
            EpMoeLayer(SwiGluExperts(t["gate_up"], t["down"]), group=layer_group, tokens=token_mode)
            for t in self._tensors
        ]
        own = torch.Generator(device).manual_seed(seed + (self.rank + 1 if token_mode == "own" else 0))
        shape = (NUM_INPUTS, tokens, self.sizes.hidden)
        self._hidden = torch.randn(shape, generator=own, device=device).to(self.dtype)
        self._worst = torch.zeros((), device=device)
        self._broken = torch.zeros((), dtype=torch.int64, device=device)
        self._checked = 0

    def _in_order(self, layer: int, placement: Placement) -> dict[str, Tensor]:
        first = self.rank * self._num_local
        slots = placement.physical_to_logical[layer][first : first + self._num_local]
        index = torch.as_tensor(slots.astype(np.int64), device=self.device)
        return {name: full[index].clone() for name, full in self._experts[layer].items()}

    def forward(self, layer: int, step: int, routing: RoutingOutput, *, check: bool = True) -> Tensor:
        """Run the layer on this step's routing (logical ids emitted) and compare with the reference on the device."""
        hidden = self._hidden[(step + layer) % NUM_INPUTS]
        out = self._layers[layer](hidden, routing)
        if check:
            assert routing.logical_ids is not None, "the router emits no logical ids"
            wanted = reference_rows(hidden, routing.logical_ids, routing.weights, self._experts[layer])
            if not routing.scaling_applied:
                wanted = wanted * routing.routed_scaling_factor
            error = (out.float() - wanted).norm() / wanted.norm().clamp(min=1e-30)
            self._broken += (~torch.isfinite(error)).long()
            self._worst = torch.maximum(self._worst, torch.nan_to_num(error))
            self._checked += 1
        return out

    def findings(self, live: Placement, group: torch_dist.ProcessGroup) -> list[Finding]:
        """Outputs over all steps and ranks, and every slot's weights against the live placement, bit for bit.
        Collective over the CPU `group`."""
        wrong = 0
        for layer in range(self._num_layers):
            for name, wanted in self._in_order(layer, live).items():
                differs = (self._tensors[layer][name] != wanted).flatten(1).any(dim=1)
                wrong += int(differs.sum())
        numbers = torch.tensor(
            [float(self._worst), float(self._broken), float(wrong), float(self.mover.bytes_received)],
            dtype=torch.float64,
        )
        torch_dist.all_reduce(numbers, torch_dist.ReduceOp.MAX, group=group)
        worst, broken, wrong_slots, received = numbers.tolist()
        limit = TOLERANCE[self.dtype]
        detail = (
            f"{self._checked} layer outputs a rank, largest relative error {worst:.1e} (allowed {limit:g}), "
            f"{broken:g} not finite"
        )
        return [
            Finding("moe outputs", self._checked > 0 and worst <= limit and broken == 0, detail),
            Finding(
                "moe weights",
                wrong_slots == 0,
                f"{wrong_slots:g} slots hold other weights than the placement says; "
                f"the busiest rank received {received / 1e6:.3f} MB",
            ),
        ]

    def close(self) -> None:
        """End the mover's watchdog."""
        self.mover.close()
