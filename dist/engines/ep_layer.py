"""An expert-parallel MoE layer, for trying placements and for proving migrations; engines bring their own.

``tokens="own"``: rows go to the ranks of their physical experts by all-to-all and come back; ``tokens="shared"``: every
rank has all tokens, computes its local experts, and the outputs are summed by an all-reduce.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as torch_dist
from torch import Tensor

from evenroute.dist.engines.experts import ExpertCompute, expert_mlp
from evenroute.dist.groups import require_group
from evenroute.eplb._checks import (
    MAX_INTEGER,
    describe,
    require_bool,
    require_choice,
    require_int,
    require_number,
)
from evenroute.routing.settings.checks import ID_DTYPES, WEIGHT_DTYPES, require_tensor

EXCHANGES = ("exact", "padded")
TOKEN_MODES = ("own", "shared")


class Routing(Protocol):
    """The part of `routing.output.RoutingOutput` that the layer reads."""

    weights: Tensor
    physical_ids: Tensor
    routed_scaling_factor: float
    scaling_applied: bool


class EpMoeLayer:
    """One MoE layer of one rank.

    Columns of ``physical_ids [T, C]``: id -1 is padding; ids below ``ep_size * experts.num_slots`` go to rank
    ``id // num_slots``, local slot ``id % num_slots`` (with shared experts per rank, these are the last local slots of
    each rank: register the tensors' first slots only for migration); higher ids are global shared experts, computed
    here for this rank's own tokens.

    A row's products go back one by one and are summed by column in fp32, so that the output does not depend on which
    rank or replica computed them: bit-equal across a switch that only moves experts (``tokens="own"``).
    """

    def __init__(
        self,
        experts: ExpertCompute,
        *,
        group: torch_dist.ProcessGroup,
        tokens: str = "own",
        exchange: str = "exact",
        shared_experts: list[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """Put the layer together.

        Args:
            experts: the local slots.
            group: the EP ranks, in EP rank order; carries the layer's collectives.
            tokens: "own" or "shared", as the router's.
            exchange: "exact" sends just the rows there are and reads their numbers on the host; "padded" sends
                ``T * C`` rows to every rank, needs the same T on all ranks, synchronises nowhere and so can be captured
                in a CUDA graph.
            shared_experts: (gate_up, down) of each global shared expert, replicated on every rank.

        Raises:
            ValueError: a mode that does not exist; experts, a group or shared experts of another kind.
        """
        require_choice("tokens", tokens, TOKEN_MODES)
        require_choice("exchange", exchange, EXCHANGES)
        if isinstance(experts, type) or not callable(experts):
            raise ValueError(f"experts must be callable as experts(rows, ends), found {describe(experts)}")
        require_int("experts.num_slots", getattr(experts, "num_slots", None), 1, MAX_INTEGER)
        self.rank, self.ep_size = require_group("group", group)
        _check_shared(shared_experts)
        self.experts = experts
        self.group = group
        self.tokens, self.exchange = tokens, exchange
        self.shared_experts = list(shared_experts or ())

    def __call__(self, hidden: Tensor, routing: Routing) -> Tensor:
        """``hidden [T, H]`` -> ``[T, H]``, same dtype. All ranks of the group call it together.

        Raises ValueError, before anything is sent, for hidden rows or a routing of another form.
        """
        _check_call(self.experts, hidden, routing)
        for number, (gate_up, _) in enumerate(self.shared_experts):
            form = ("2 I", int(hidden.shape[1]))
            name = f"shared_experts[{number}] gate_up"
            require_tensor(name, gate_up, form, dtypes=(hidden.dtype,), device=hidden.device)
        num_slots = self.experts.num_slots
        ids = routing.physical_ids.to(torch.int64)
        routed = (ids >= 0) & (ids < num_slots * self.ep_size)
        if self.tokens == "shared":
            out = self._without_exchange(hidden, routing.weights, ids, routed)
        elif self.exchange == "exact":
            out = self._exact(hidden, routing.weights, ids, routed)
        else:
            out = self._padded(hidden, routing.weights, ids, routed)
        for number, (gate_up, down) in enumerate(self.shared_experts):
            weight = (routing.weights * (ids == num_slots * self.ep_size + number)).sum(dim=1, keepdim=True)
            product = torch.addcmul(out, expert_mlp(hidden, gate_up, down).float(), weight)
            out = torch.where(weight == 0, out, product)  # a row of padding may hold anything
        if not routing.scaling_applied:
            out = out * routing.routed_scaling_factor
        return out.to(hidden.dtype)

    def __repr__(self) -> str:
        return f"<EpMoeLayer rank {self.rank} of {self.ep_size}, {self.experts.num_slots} slots, tokens={self.tokens}>"

    def _compute(self, rows: Tensor, slots: Tensor) -> Tensor:
        """Local experts on unsorted rows; ``slots [M]`` local, ``num_slots`` for padding."""
        order = torch.argsort(slots, stable=True)
        bounds = torch.arange(self.experts.num_slots, device=slots.device)
        ends = torch.searchsorted(slots[order], bounds, right=True).to(torch.int32)
        out = torch.empty_like(rows)
        out[order] = self.experts(rows[order], ends)
        return out

    def _exact(self, hidden: Tensor, weights: Tensor, ids: Tensor, routed: Tensor) -> Tensor:
        num_columns = ids.shape[1]
        pairs = routed.flatten().nonzero().squeeze(1)  # of (token, column), flat
        slots = ids.flatten()[pairs]
        order = torch.argsort(slots // self.experts.num_slots, stable=True)
        pairs, slots = pairs[order], slots[order]
        sends = torch.bincount(slots // self.experts.num_slots, minlength=self.ep_size)
        gets = torch.empty_like(sends)
        torch_dist.all_to_all_single(gets, sends, group=self.group)
        split = (gets.tolist(), sends.tolist())
        received = self._all_to_all(hidden[pairs // num_columns], *split)
        local = self._all_to_all(slots % self.experts.num_slots, *split)
        back = self._all_to_all(self._compute(received, local), *reversed(split))
        position = torch.zeros(ids.numel(), dtype=torch.int64, device=ids.device)
        position[pairs] = torch.arange(len(pairs), device=ids.device)
        return _combine(back, position.view_as(ids), torch.where(routed, weights, 0.0), hidden)

    def _all_to_all(self, rows: Tensor, gets: list[int], sends: list[int]) -> Tensor:
        out = rows.new_empty((sum(gets), *rows.shape[1:]))
        torch_dist.all_to_all_single(out, rows.contiguous(), gets, sends, group=self.group)
        return out

    def _padded(self, hidden: Tensor, weights: Tensor, ids: Tensor, routed: Tensor) -> Tensor:
        num_columns, capacity = ids.shape[1], ids.numel()
        flat, valid = ids.flatten(), routed.flatten()
        rank = torch.where(valid, flat // self.experts.num_slots, self.ep_size)
        order = torch.argsort(rank, stable=True)
        bounds = torch.arange(self.ep_size + 1, device=ids.device)
        starts = torch.searchsorted(rank[order], bounds)
        # Place of each pair in the send buffer; padding goes to a row of its own after the end.
        place = torch.empty_like(flat)
        sorted_rank = rank[order]
        within = torch.arange(capacity, device=ids.device) - starts[sorted_rank]
        place[order] = torch.where(
            sorted_rank < self.ep_size, sorted_rank * capacity + within, self.ep_size * capacity
        )
        total = self.ep_size * capacity
        rows = hidden.new_zeros((total + 1, hidden.shape[1]))
        rows[place] = _repeat_rows(hidden, num_columns)
        slots = torch.full((total + 1,), self.experts.num_slots, dtype=torch.int64, device=ids.device)
        slots[place] = torch.where(valid, flat % self.experts.num_slots, self.experts.num_slots)
        received, local = torch.empty_like(rows[:total]), torch.empty_like(slots[:total])
        torch_dist.all_to_all_single(received, rows[:total], group=self.group)
        torch_dist.all_to_all_single(local, slots[:total], group=self.group)
        back = torch.empty_like(received)
        torch_dist.all_to_all_single(back, self._compute(received, local), group=self.group)
        position = torch.where(valid, place, 0).view_as(ids)
        return _combine(back, position, torch.where(routed, weights, 0.0), hidden)

    def _without_exchange(self, hidden: Tensor, weights: Tensor, ids: Tensor, routed: Tensor) -> Tensor:
        """Every rank has the same tokens and the same ids; it computes those that are its own."""
        num_columns, num_slots = ids.shape[1], self.experts.num_slots
        own = routed & (ids // num_slots == self.rank)
        slots = torch.where(own, ids % num_slots, num_slots).flatten()
        products = self._compute(_repeat_rows(hidden, num_columns), slots)
        position = torch.arange(ids.numel(), device=ids.device).view_as(ids)
        out = _combine(products, position, torch.where(own, weights, 0.0), hidden)
        torch_dist.all_reduce(out, group=self.group)
        return out


def _check_shared(shared: object) -> None:
    if shared is None:
        return
    if not isinstance(shared, list | tuple):
        raise ValueError(f"shared_experts must be a list of (gate_up, down), found {describe(shared)}")
    for number, pair in enumerate(shared):
        name = f"shared_experts[{number}]"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"{name} must be (gate_up, down), found {describe(pair)}")
        gate_up, down = pair
        require_tensor(f"{name} gate_up", gate_up, ("2 I", "H"), dtypes=WEIGHT_DTYPES)
        wide, hidden = gate_up.shape
        if wide % 2:
            raise ValueError(f"{name} gate_up must have shape [2 I, H], found {list(gate_up.shape)}")
        require_tensor(
            f"{name} down", down, (hidden, wide // 2), dtypes=(gate_up.dtype,), device=gate_up.device
        )


def _check_call(experts: ExpertCompute, hidden: Tensor, routing: Routing) -> None:
    # Experts of an engine's own may lack these attributes.
    dtype, device = getattr(experts, "dtype", None), getattr(experts, "device", None)
    width = getattr(experts, "hidden_size", "H")
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else WEIGHT_DTYPES
    on = device if isinstance(device, torch.device) else None
    require_tensor("hidden", hidden, ("T", width), dtypes=dtypes, device=on)
    if hidden.is_meta:
        raise ValueError("hidden must lie in memory, found a tensor on meta")
    weights, ids = (getattr(routing, name, None) for name in ("weights", "physical_ids"))
    if weights is None or ids is None:
        raise ValueError(f"routing must hold weights and physical_ids, found {describe(routing)}")
    rows = int(hidden.shape[0])
    require_tensor("routing.physical_ids", ids, (rows, "C"), dtypes=ID_DTYPES, device=hidden.device)
    require_tensor("routing.weights", weights, tuple(ids.shape), dtypes=WEIGHT_DTYPES, device=hidden.device)
    require_bool("routing.scaling_applied", getattr(routing, "scaling_applied", None))
    require_number("routing.routed_scaling_factor", getattr(routing, "routed_scaling_factor", None))


def _repeat_rows(hidden: Tensor, times: int) -> Tensor:
    """``[T, H]`` -> ``[T * times, H]``, each row ``times`` times."""
    return hidden[:, None].expand(-1, times, -1).reshape(-1, hidden.shape[1])


def _combine(products: Tensor, position: Tensor, weights: Tensor, hidden: Tensor) -> Tensor:
    """``sum_c weights[t, c] * products[position[t, c]]`` in fp32, column by column; weight 0 takes no part."""
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    if products.shape[0] == 0:
        return out
    for column in range(position.shape[1]):
        weight = weights[:, column, None]
        row = products.index_select(0, position[:, column])
        out = torch.where(weight == 0, out, torch.addcmul(out, row.float(), weight))
    return out
