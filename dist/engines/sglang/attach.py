"""What evenroute has in one rank of SGLang: made when its model is loaded, driven by its forward passes.

At that moment the weights are loaded, the KV pool is not sized and nothing is captured: tables, counters and buffers
are in place before a CUDA graph takes their addresses, and SGLang counts their memory as the model's.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist

from evenroute.dist.engines.plugin import PluginSettings, read_settings, refuse, refusing, start_placement
from evenroute.dist.engines.sglang import topk, weights
from evenroute.dist.engines.sglang.ending import end_at_signal
from evenroute.dist.engines.sglang.limits import check_engine, check_layer
from evenroute.dist.engines.sglang.seams import ENGINE, require_hooks
from evenroute.dist.rank.agent import RankAgent
from evenroute.dist.weights.weight_mover import WeightMover
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.shares import logical_to_physical
from evenroute.routing.compiled import CompiledRouter
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.router import Router
from evenroute.routing.tables.tables import DispatchTables

logger = logging.getLogger("evenroute.sglang")

FORCE = "EVENROUTE_SGLANG_FORCE"  # for tests: on without --enable-eplb, which SGLang allows from two ranks on only
_attached: SglangRank | None = None


def attached() -> SglangRank | None:
    """This process's rank, once its model is loaded."""
    return _attached


def is_on(args: Any) -> bool:
    """Whether this server is balanced by evenroute: with `--enable-eplb`."""
    return bool(args.enable_eplb) or os.environ.get(FORCE) == "1"


def after_load_model(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
    """Behind `ModelRunner.load_model`: attach to the target model; a draft model stays SGLang's."""
    global _attached
    if runner.is_draft_worker:
        return result
    if not is_on(runner.server_args):
        logger.warning("evenroute: EVENROUTE_REBALANCER is set, --enable-eplb is not: evenroute stays off")
        return result
    settings = read_settings(ENGINE)
    assert settings is not None, "the hooks are registered with settings only"
    require_hooks()
    _attached = SglangRank(runner, settings)
    return result


def before_forward(runner: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
    """Before `ModelRunner.forward`, which every rank calls equally often, idle ones too: a step begins."""
    if _attached is not None and _attached.runner is runner:
        _attached.begin(forward_batch)


def after_update(result: Any, updater: Any, *_: Any, **__: Any) -> Any:
    """Behind each online update of weights (from disk, tensors, IPC or a group), on all ranks at the same pass."""
    if _attached is not None and updater.get_model() is _attached.model:
        _attached.weights_written()
    return result


class SglangRank:
    """All that one rank needs. `model`, `runner`: SGLang's; `layer_ids`: its numbers of the MoE layers, rising."""

    def __init__(self, runner: Any, settings: PluginSettings) -> None:
        from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
        from sglang.srt.runtime_context import get_parallel

        began = time.perf_counter()
        self.runner, self.model, self.settings = runner, runner.model, settings
        parallel, args = get_parallel(), runner.server_args
        check_engine(args, parallel, torch.device(runner.device))
        self.metadata: Any = get_global_expert_location_metadata()
        if self.metadata is None:
            refuse(
                ENGINE,
                f"{type(self.model).__name__} tells no number of experts (get_model_config_for_expert_location); "
                "SGLang's own EPLB can't serve it either",
            )
        meta = self.metadata
        self._tensors = weights.expert_tensors(self.model, meta.num_local_physical_experts)
        self.layer_ids = list(self._tensors)
        first = next(iter(self._tensors[self.layer_ids[0]].values()))
        rows = meta.physical_to_logical_map_cpu[self.layer_ids].numpy().astype(np.int32)
        nodes = settings.num_nodes or int(args.nnodes)
        placement = start_placement(ENGINE, rows, meta.num_logical_experts, parallel.moe_ep_size, nodes)
        rank = int(parallel.moe_ep_rank)
        self.tables = DispatchTables(placement, ep_rank=rank, device=first.device)
        self.counters = ExpertCounters(len(self.layer_ids), meta.num_logical_experts, device=first.device)
        self.shared_tokens = _shares_tokens(args)
        self._plain = self.shared_tokens and int(getattr(parallel, "attn_dp_size", 1)) == 1
        self.valid = torch.zeros(1, dtype=torch.int32, device=first.device)
        mode = getattr(args, "expert_distribution_recorder_mode", None)
        self._records_passes = mode in ("per_pass", "per_token")
        # Only where a pass's rows are known: those of a gathered buffer are not.
        keeps_ids = mode == "per_token" and self._plain
        self._ids = self._buffer_ids(args, first.device) if keeps_ids else None
        self._rows = 0
        self.layers = self._route_layers(args)
        self.agent = self._start(parallel, placement, first)
        for layer in self.layers:
            layer.agent = self.agent
        end_at_signal(self.agent)
        self._begun = False
        logger.info(
            "evenroute: rank %d: attached to %d layers of %s: %d experts, %d slots, %s tokens, %d tensors a layer, %s; "
            "%.2f s, %.1f MB staging",
            *(rank, len(self.layer_ids), type(self.model).__name__, meta.num_logical_experts),
            *(meta.num_physical_experts, "shared" if self.shared_tokens else "own"),
            *(len(self._tensors[self.layer_ids[0]]), settings.agent.mode),
            *(time.perf_counter() - began, self.mover.staging_bytes / 1e6),
        )

    # ---------------------------------------------------------------------------------------- start

    def _route_layers(self, args: Any) -> list[topk.LayerRouting]:
        """A router for each layer, carried by its TopKConfig; equal forms share one."""
        from sglang.srt.layers.moe import topk as theirs
        from sglang.srt.layers.moe.utils import has_per_rank_fused_shared_slots
        from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

        found = {
            int(m.layer_id): m
            for m in self.model.modules()
            if isinstance(m, theirs.TopK) and not getattr(m, "is_draft", False)
        }
        missing = [at for at in self.layer_ids if at not in found]
        if missing:
            refuse(
                ENGINE,
                f"layers {missing} of {type(self.model).__name__} choose experts without TopK (by token id, or in a "
                "router of their own); serve without evenroute",
            )
        simulated = topk.is_simulated(os.environ)
        captures = getattr(args, "enable_return_routed_experts", False) or get_global_experts_capturer()
        capture = theirs.capture_routed_experts_if_allowed if captures else None
        routers: dict[tuple[Any, ...], tuple[Router, CompiledRouter]] = {}
        layers = []
        for row, at in enumerate(self.layer_ids):
            config = found[at].topk_config
            check_layer(at, config, theirs.TopKOutputFormat)
            given = topk.is_given(config, simulated=simulated)
            per_rank = bool(has_per_rank_fused_shared_slots(topk.shared_columns(config)))
            packed = getattr(config, "fused_gate_packed_ids", False) and not topk.shared_columns(config)
            logical = capture is not None or self._ids is not None
            emit: tuple[str, ...] = ("weights", "physical_ids")
            emit += ("logical_ids",) if logical else ()
            emit += ("packed_ids",) if packed else ()
            with refusing(ENGINE):
                form = topk.router_config(config, self.tables.num_logical_experts, per_rank_shared=per_rank)
                key = (form, given, emit)
                if key not in routers:
                    router = topk.make_router(
                        config,
                        self.tables,
                        self.counters,
                        shared_tokens=self.shared_tokens,
                        per_rank_shared=per_rank,
                        algorithm=args.ep_dispatch_algorithm,
                        given=given,
                        emit=emit,
                    )
                    routers[key] = router, CompiledRouter(router)
            scale = config.fused_shared_experts_scaling_factor if topk.shared_columns(config) else None
            layer = topk.LayerRouting(
                row,
                *routers[key],
                given=given,
                shadow=self.settings.agent.mode == "shadow",
                fake=args.ep_dispatch_algorithm == "fake",
                valid=self.valid if self._plain else None,
                shared_scale=None if scale is None or per_rank else float(scale),
                capture=capture,
                ids=None if self._ids is None else self._ids[row],
                packed_output=theirs.StandardTopKOutputPacked if packed else None,
            )
            config.evenroute = layer
            layers.append(layer)
        return layers

    def _buffer_ids(self, args: Any, device: torch.device) -> torch.Tensor:
        """``[L, rows, K]``: the experts of a pass's tokens, written inside captured graphs too."""
        rows = max(int(getattr(args, "chunked_prefill_size", 0) or 0), 8192)
        tops = [m.topk_config for m in self.model.modules() if hasattr(m, "topk_config")]
        width = max(config.top_k - topk.shared_columns(config) for config in tops)
        return torch.full((len(self.layer_ids), rows, width), -1, dtype=torch.int32, device=device)

    def _start(self, parallel: Any, placement: Placement, like: torch.Tensor) -> RankAgent:
        ranks = torch_dist.get_process_group_ranks(parallel.moe_ep_group.cpu_group)
        votes = torch_dist.new_group(ranks, backend="gloo")
        moves = torch_dist.new_group(ranks, backend="nccl" if like.device.type == "cuda" else "gloo")
        registered = weights.register(self._tensors, self.metadata.num_local_physical_experts)
        config = self.settings.agent_config(
            model=self._model_name(),
            top_k=max(layer.router.config.top_k for layer in self.layers),
            shared_counts=self.shared_tokens,
        )
        if self._records_passes and not config.record_dir:
            folder = os.environ.get("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", "/tmp")
            os.makedirs(folder, exist_ok=True)
            config = dataclasses.replace(config, record_dir=folder)
        with refusing(ENGINE):
            self.mover = WeightMover(
                registered, self.tables, group=moves, resident=placement, config=self.settings.migration
            )
            return RankAgent.start(
                config,
                placement=placement,
                tables=self.tables,
                counters=self.counters,
                ep_group=votes,
                mover=self.mover,
                on_commit=self._write_metadata,
            )

    def _model_name(self) -> str:
        args = self.runner.server_args
        name = getattr(args, "served_model_name", None) or args.model_path
        return "".join(c for c in str(name).rstrip("/").rpartition("/")[2] if c.isprintable()).strip()

    # ----------------------------------------------------------------------------------------- pass

    def begin(self, forward_batch: Any) -> None:
        """A forward pass of the target model begins: switch, then announce its rows."""
        if self.valid.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a pass that is recorded, not run
        if not self._begun:
            self._begun = True
            self.counters.take()  # of warm-up and autotuning
        if self._ids is not None:
            for row, ids in enumerate(self._ids[:, : self._rows]):
                self.agent.record(row, ids)  # of the pass before
        done = self.agent.step()
        if done.switched:
            logger.info(
                "evenroute: rank %d pass %d: layers %s switched, key %s, %d bytes received so far",
                *(self.agent.rank, done.step, list(done.switched), done.key, self.mover.bytes_received),
            )
        ids = forward_batch.input_ids
        self._rows = 0 if ids is None else len(ids)
        if self._plain and ids is not None:
            self.valid.fill_(len(ids))
            self.agent.begin_pass(len(ids))
            self.agent.record_inputs(ids, forward_batch.positions)
        else:
            # The rows of a gathered buffer are not known here: all that is routed counts.
            self.valid.fill_((1 << 31) - 1)

    def weights_written(self) -> None:
        """SGLang has written new weights into the slots, each expert where the metadata says."""
        slots = self.metadata.num_local_physical_experts
        weights.require_same(self._tensors, weights.expert_tensors(self.model, slots))
        self.mover.weights_written()
        logger.info("evenroute: rank %d: weights updated online, copies under way renewed", self.agent.rank)

    def _write_metadata(self, layer: int, row: PlacementRow) -> None:
        """Keep SGLang's ExpertLocationMetadata equal: its loaders place experts by it."""
        meta, at = self.metadata, self.layer_ids[layer]
        slots = np.asarray(row.slots, dtype=np.int64)
        counts = np.bincount(slots, minlength=meta.num_logical_experts)
        width = meta.logical_to_all_physical_map.shape[-1]
        (every,) = logical_to_physical(slots[None], counts[None], width)
        for name, values in (
            ("physical_to_logical_map", slots),
            ("physical_to_logical_map_cpu", slots),
            ("logical_to_all_physical_map", every),
            ("logical_to_all_physical_map_cpu", every),
            ("logical_to_all_physical_map_num_valid", counts),
        ):
            getattr(meta, name)[at].copy_(torch.from_numpy(values))
        nearest = meta.logical_to_rank_dispatch_physical_map
        if nearest is not None:
            nearest[at].copy_(self.tables.static_slot[layer])


def _shares_tokens(args: Any) -> bool:
    """Whether all ranks route the same rows and outputs are summed; else each its own, and an exchange follows."""
    from sglang.srt.layers.moe import utils

    scattered = getattr(utils, "is_moe_input_scattered_across_dp_ranks", None)
    if scattered is not None:
        return not scattered()
    return str(args.moe_a2a_backend) == "none" and not utils.should_use_flashinfer_cutlass_moe_fp4_allgather()
