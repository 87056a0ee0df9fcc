"""Comparing the routing kernel with its reference: drawn inputs, and what may differ.

Ids must be the same, except where reference keys (or group scores) lie within 4 ulp of each other; an ulp is that of
the larger of score, bias and key, since a bias may cancel a score. Weights agree within 1e-6 relative; under a
softcap c two ulp of c come on top, since tanh is rounded before exp sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from evenroute.eplb.placement.classes import ShareClasses, default_class_rows, shares_of
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.output import OUTPUT_NAMES
from evenroute.routing.reference import order_keys, score_experts
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables

FLAVOURS = ("normal", "wide", "ties", "special", "hot", "equal")
ULP = 2.0**-23


@dataclass(frozen=True)
class Variant:
    """One compiled form of the kernel."""

    config: RouterConfig
    num_slots: int
    ep_size: int = 8
    dispatch: str = "dynamic"
    deal: str = "hash"
    tokens: str = "own"
    dtype: torch.dtype = torch.float32
    bias: str = "none"  # none, experts, rows, marked
    mode: str = "choose"  # choose, given, table
    padding: bool = True
    count: bool = True
    strided: bool = False
    emit: tuple[str, ...] = OUTPUT_NAMES
    shares: bool = False
    classes: bool = False


def draw_logits(flavour: str, rows: int, experts: int, generator: torch.Generator) -> torch.Tensor:
    """fp32 logits on the CPU with the trouble that the flavour names."""
    x = torch.randn((rows, experts), generator=generator)
    if flavour == "wide":
        return x * 12
    if flavour == "ties":
        return (x * 2).round() / 2
    if flavour == "equal":
        return torch.zeros_like(x)
    if flavour == "hot":
        x[:, torch.arange(0, experts, 32)] += 4  # one lane of the ungrouped layout holds some of them
        x[:, : max(1, experts // 16)] += 5
        return x
    if flavour == "special":
        kind = torch.randint(0, 12, x.shape, generator=generator)
        x = torch.where(kind == 0, float("nan"), x)
        x = torch.where(kind == 1, float("-inf"), x)
        x = torch.where(kind == 2, float("inf"), x)
        for row, value in zip(range(1, rows, 3), (float("nan"), float("-inf"), -200.0) * rows, strict=False):
            x[row] = value
    return x


@dataclass
class Case:
    logits: torch.Tensor | None
    call: dict[str, Any] = field(default_factory=dict)


def draw_case(variant: Variant, rows: int, flavour: str, seed: int, device: str) -> Case:
    """Inputs of one call for a variant."""
    generator = torch.Generator().manual_seed(seed)
    experts, top_k = variant.config.num_experts, variant.config.top_k
    call: dict[str, Any] = {"row_offset": int(torch.randint(0, 1 << 20, (1,), generator=generator))}
    logits = draw_logits(flavour, rows, experts, generator).to(variant.dtype)
    bias_scale = 0.02 if variant.config.bias_domain == "score" else 0.5
    if variant.bias in ("experts", "marked"):
        call["bias"] = torch.randn(experts, generator=generator) * bias_scale
    if variant.bias == "rows":
        call["bias"] = torch.randn((rows, experts), generator=generator) * bias_scale
    if variant.bias == "marked":
        call["marked_bias"] = torch.randn(experts, generator=generator) * bias_scale
        call["token_marker"] = torch.rand(rows, generator=generator) < 0.5
    if variant.padding:
        valid = torch.randint(0, rows + 1, (1,), generator=generator)
        call["num_valid_tokens"] = valid.to(torch.int32)
    if variant.mode == "table":
        vocab = 97
        ids = torch.rand((vocab, experts), generator=generator).argsort(dim=1)[:, :top_k]
        call["expert_ids_by_token"] = ids.to(torch.int32)
        call["token_ids"] = torch.randint(0, vocab, (rows,), generator=generator)
    if variant.mode == "given":
        ids = torch.rand((rows, experts), generator=generator).argsort(dim=1)[:, :top_k]
        if flavour == "special":
            ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
        call["logical_ids"] = ids.to(torch.int32)
        call["weights"] = torch.rand((rows, top_k), generator=generator)
    call = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()
    }
    call["count"] = variant.count
    logits = logits.to(device)
    if variant.strided:
        wide = torch.empty((rows, experts + 3), dtype=logits.dtype, device=device)
        wide[:, :experts] = logits
        logits = wide[:, :experts]
    return Case(None if variant.mode == "given" else logits, call)


def make_placement(variant: Variant, num_layers: int = 2) -> Placement:
    """Replicated placement, with uneven shares and sets for small batches where the variant wants them."""
    config, topology = variant.config, Topology(variant.ep_size)
    placement = Placement.initial(num_layers, config.num_experts, variant.num_slots, topology)
    if variant.classes:
        drawn, slots = np.random.default_rng(7), placement.physical_to_logical
        used = drawn.random((2, *slots.shape)) < 0.4
        used[..., np.arange(config.num_experts)] = True  # the first slot of each
        used[0, :, config.num_experts :] = False  # small batches: one slot an expert
        sets = np.stack([shares_of(slots, one) for one in used], axis=1)
        rows = default_class_rows(config.num_experts, config.top_k, variant.ep_size)[-2:]
        limits = np.tile(np.array(rows, np.int32), (num_layers, 1))
        placement = replace(placement, classes=ShareClasses(limits, sets[:, -len(rows) :]))
    if not variant.shares:
        return placement
    generator = torch.Generator().manual_seed(7)
    slots = placement.physical_to_logical[0]
    weight = torch.rand(len(slots), generator=generator) + 0.05
    shares = torch.zeros(len(slots), dtype=torch.int64)
    for expert in range(config.num_experts):
        at = torch.from_numpy((slots == expert).nonzero()[0])
        part = (weight[at] / weight[at].sum() * 65535).floor().long()
        part[0] += 65535 - part.sum()
        shares[at] = part
    rows = shares.to(torch.int32).numpy().astype("uint16")[None].repeat(num_layers, axis=0)
    return replace(placement, shares=rows)


class Pair:
    """The reference's and the kernel's router of one variant, each with its own counters."""

    def __init__(self, variant: Variant, device: str, backend: str, ep_rank: int = 1) -> None:
        self.variant, self.device = variant, device
        tables = DispatchTables(make_placement(variant), ep_rank=ep_rank, device=device)
        self.tables = tables
        self.routers = {}
        for name in ("reference", backend):
            small = name == "interpret"
            counters = ExpertCounters(
                2, variant.config.num_experts, device=device, copies=4 if small else None,
                ticket_copies=2 if small else None,
            )  # fmt: skip
            self.routers[name] = Router(
                variant.config,
                tables,
                counters,
                dispatch=variant.dispatch,
                deal=variant.deal,
                deterministic=variant.deal == "batch",
                tokens=variant.tokens,
                emit=variant.emit,
                backend=name,
            )
        self.reference, self.kernel = self.routers["reference"], self.routers[backend]

    def check(self, case: Case) -> int:
        """Compare one call; returns the number of rows that differ by near ties. AssertionError otherwise."""
        layer = 1
        expected = self.reference(case.logits, layer, **case.call)
        found = self.kernel.allocate(expected.weights.shape[0])
        for name in OUTPUT_NAMES:
            tensor = getattr(found, name)
            if tensor is not None:
                tensor.fill_(-77)
        self.kernel(case.logits, layer, out=found, **case.call)
        same = (expected.logical_ids == found.logical_ids).all(dim=1)
        differing = int((~same).sum())
        if differing:
            self._check_near_ties(case, expected, found, ~same)
        self._check_rows(expected, found, same)
        self._check_counts(found, case)
        self._check_consistent(found)
        return differing

    def _check_near_ties(self, case: Case, expected: Any, found: Any, rows: torch.Tensor) -> None:
        config = self.variant.config
        assert self.variant.mode == "choose", "given ids changed"
        bias = case.call.get("bias")
        scores = score_experts(
            case.logits, config, bias, case.call.get("marked_bias"), case.call.get("token_marker")
        )
        keys = scores.keys[rows]
        size = torch.maximum(scores.scores[rows], torch.nan_to_num(keys, neginf=0.0).abs())
        if bias is not None:
            size = torch.maximum(size, (bias if bias.dim() == 1 else bias[rows]).abs().nan_to_num(0.0))
        allowed = 4 * ULP * size.amax(dim=1)
        a, b = (out.logical_ids[rows][:, : config.top_k].long() for out in (expected, found))
        assert ((a >= 0) == (b >= 0)).all()
        assert all(len(set(row)) == config.top_k for row in b.tolist()), "ids repeat"
        if config.column_order == "expert_id":
            a, b = (torch.gather(t, 1, keys.gather(1, t).argsort(dim=1, descending=True)) for t in (a, b))
        gap = (keys.gather(1, a) - keys.gather(1, b)).abs().nan_to_num(0.0).amax(dim=1)
        close = gap <= allowed
        if config.grouped:
            width = config.num_experts // config.num_groups
            by_group = torch.nan_to_num(keys, nan=-torch.inf).view(len(keys), config.num_groups, width)
            score = by_group.amax(2) if config.topk_method == "greedy" else by_group.topk(2, 2).values.sum(2)
            ranked = score.sort(dim=1, descending=True).values
            edge = ranked[:, config.topk_group - 1] - ranked[:, config.topk_group]
            close |= edge <= 2 * allowed
        assert bool(close.all()), (
            f"ids differ beyond near ties: {a[~close][:2]} {b[~close][:2]} {gap[~close][:2]}"
        )

    def _check_rows(self, expected: Any, found: Any, same: torch.Tensor) -> None:
        # numpy has no fused multiply-add, which the kernels' exp is built on.
        rtol = 1e-6 if self.device == "cuda" else 4e-6
        if self.variant.config.softcap is not None:
            rtol += 2 * ULP * self.variant.config.softcap  # two ulp of a capped logit move exp by as much
        torch.testing.assert_close(found.weights[same], expected.weights[same], rtol=rtol, atol=1e-37)
        # A batch is dealt by all of its rows: one near tie may move the others' tokens too.
        whole = self.reference.plan.mode.pick != "batch" or bool(same.all())
        if self.reference.plan.mode.pick != "ticket" and whole:
            assert torch.equal(found.physical_ids[same], expected.physical_ids[same])
            assert torch.equal(found.local_ids[same], expected.local_ids[same])

    def _check_counts(self, found: Any, case: Case) -> None:
        ids = found.logical_ids[:, : self.variant.config.top_k]
        taken = self.kernel.counters.take()[1]
        self.reference.counters.take()
        if not self.variant.count:
            assert int(taken.sum()) == 0
            return
        assert torch.equal(taken, torch.bincount(ids[ids >= 0].long(), minlength=len(taken)))

    def _check_consistent(self, found: Any) -> None:
        """Outputs agree with each other: slots hold their experts, packed = ids and weights, histogram = ids."""
        config, tables, plan = self.variant.config, self.tables, self.kernel.plan
        top_k, shared = config.top_k, config.num_shared_experts
        physical, logical = found.physical_ids[:, :top_k].long(), found.logical_ids[:, :top_k].long()
        live = logical >= 0
        assert torch.equal(physical >= 0, live)
        slots = (
            physical
            if config.shared_mode == "global"
            else physical - physical // plan.slots_per_rank * shared
        )
        held = tables.physical_to_logical[1].long()[slots.clamp(min=0)]
        assert torch.equal(held[live], logical[live])
        assert bool(torch.isfinite(found.weights).all())
        assert not bool(found.weights[found.physical_ids < 0].any())
        if found.packed_ids is not None:
            bits = found.weights.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
            assert torch.equal(found.packed_ids, (found.physical_ids << 16) | bits)
        if found.slot_histogram is not None:
            ids = found.physical_ids[found.physical_ids >= 0].long()
            assert torch.equal(found.slot_histogram.long(), torch.bincount(ids, minlength=plan.num_buckets))


def same_order(keys: torch.Tensor) -> torch.Tensor:
    """Oracle: positions by a whole stable descending sort of the keys, NaN last."""
    return torch.sort(order_keys(keys), dim=1, descending=True, stable=True).indices


def with_config(variant: Variant, **changes: Any) -> Variant:
    return replace(variant, config=replace(variant.config, **changes))
