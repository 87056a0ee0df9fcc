"""`--moe` of the stress run: real weights for every expert, migrated while the layers run, outputs checked.

The run makes a `MoeStress`, gives its `mover` to the rank agent, and calls `forward` for every layer after the router.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as torch_dist
from torch import Tensor

from evenroute.dist.engines.ep_layer import EpMoeLayer
from evenroute.dist.engines.experts import SwiGluExperts
from evenroute.dist.weights.expert_weights import ExpertWeights
from evenroute.dist.weights.mover import TableUpdater
from evenroute.dist.weights.staging import layer_bytes
from evenroute.dist.weights.weight_mover import MigrationConfig, WeightMover
from evenroute.eplb.placement.placement import Placement
from evenroute.routing.output import RoutingOutput
from evenroute.tools.run.moe_model import LogicalExperts, WorstError, local_experts
from evenroute.tools.run.ranks import largest
from evenroute.tools.stress.checks import Finding

NUM_INPUTS = 8  # hidden states are drawn once and taken in turn
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class MoeSizes:
    """What the experts are made of; `staging_layers` whole layers fit the staging buffers."""

    hidden: int = 32
    intermediate: int = 16
    staging_layers: int = 2
    chunk_bytes: int = 1 << 20
    verify: bool = False


GPU_SIZES = MoeSizes(hidden=256, intermediate=128, chunk_bytes=32 << 20)


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
        self.rank = torch_dist.get_rank()
        backend = "nccl" if device.type == "cuda" else "gloo"
        layer_group, move_group = torch_dist.new_group(backend=backend), torch_dist.new_group(backend=backend)
        assert layer_group is not None
        assert move_group is not None
        resident = Placement.initial(
            placement.num_layers, placement.num_logical_experts, placement.num_slots, placement.topology
        )
        self.experts = LogicalExperts(
            self.sizes.hidden, self.sizes.intermediate, device, self.dtype, seed, keep=True
        )
        self._tensors = [self._in_order(layer, resident) for layer in range(placement.num_layers)]
        weights = ExpertWeights(self._tensors, placement.num_local_slots)
        config = MigrationConfig(
            staging_bytes=self.sizes.staging_layers
            * layer_bytes(weights.layers[0], placement.num_local_slots),
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
        self._errors = WorstError(device)

    def _in_order(self, layer: int, placement: Placement) -> dict[str, Tensor]:
        rows = [self.experts.rows(layer, expert) for expert in local_experts(placement, layer, self.rank)]
        return {name: torch.stack([one[name] for one in rows]) for name in rows[0]}

    def forward(self, layer: int, step: int, routing: RoutingOutput, *, check: bool = True) -> Tensor:
        """Run the layer on this step's routing (logical ids emitted) and compare with the reference on the device."""
        hidden = self._hidden[(step + layer) % NUM_INPUTS]
        out = self._layers[layer](hidden, routing)
        if check:
            assert routing.logical_ids is not None, "the router emits no logical ids"
            wanted = self.experts.output(layer, hidden, routing.logical_ids, routing.weights)
            if not routing.scaling_applied:
                wanted = wanted * routing.routed_scaling_factor
            self._errors.add(out, wanted)
        return out

    def findings(self, live: Placement, group: torch_dist.ProcessGroup) -> list[Finding]:
        """Outputs over all steps and ranks, and every slot's weights against the live placement, bit for bit.
        Collective over the CPU `group`."""
        worst = largest(self._errors.own(), group)
        wrong = largest(float(self.experts.wrong_slots(self._tensors, live, self.rank)), group)
        received = largest(float(self.mover.bytes_received), group)
        limit = TOLERANCE[self.dtype]
        checks = self._errors.checks
        detail = f"{checks} layer outputs a rank, largest relative error {worst:.1e} (allowed {limit:g})"
        return [
            Finding("moe outputs", checks > 0 and worst <= limit, detail),
            Finding(
                "moe weights",
                wrong == 0,
                f"{wrong:g} slots hold other weights than the placement says; "
                f"the busiest rank received {received / 1e6:.3f} MB",
            ),
        ]

    def close(self) -> None:
        """End the mover's watchdog."""
        self.mover.close()
