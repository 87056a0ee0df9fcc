"""Simulated routing: the five inputs of stress runs and benchmarks.

`fake`         logits U(5, 10); the router's bias counts as zero
`uniform`      logical ids: a random base per token, the K ids spread evenly from it; weights 1/K
`round-robin`  logical ids: slot t*K+j is dealt over the EP ranks in turn; weights 1/K
`zipf`         logits = Gumbel noise + log popularity, popularity Zipf(a), its order drawn per layer
`trace`        logits whose top-k follow each layer's frequencies in a load file

`LogitSource.rewrites_ids` distinguishes the two kinds that give ids (`ids`, `weights`) from the three that give logits
(`logits`). Everything is a function of (seed, rank, step, layer): replays agree, and with `shared=True` all ranks
draw the same rows. Noise comes from a pool drawn once and cut at hashed places, so that a call costs a slice and an
addition (real logits all the same: they go through the real router).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.simulated.tables import TraceTables
from evenroute.routing.simulated.trace import NUM_ORDERS, build_trace_design, moe_layers

KINDS = ("fake", "uniform", "round-robin", "zipf", "trace")

_POOL = 1 << 22
_STEP = 16  # cuts start at multiples of 64 bytes
_MASK = (1 << 64) - 1


class LogitSource:
    """Input of one rank for all layers.

    kind         one of `KINDS`
    config       the router's configuration
    num_layers   MoE layers
    seed         of everything drawn here; give all ranks the same
    rank, ep_size  this rank and their number: ranks draw different rows unless `shared`
    shared       all ranks draw the same rows (`tokens="shared"`)
    loads        [L', E], for `trace`: zero rows (dense layers) are skipped, the next `num_layers` rows are used
    exponent     a of Zipf(a)
    device       of all results

    Raises ValueError for loads that are misshapen or that no choice can follow.
    """

    def __init__(
        self,
        kind: str,
        config: RouterConfig,
        num_layers: int,
        seed: int,
        *,
        rank: int = 0,
        ep_size: int = 1,
        shared: bool = False,
        loads: NDArray[np.floating] | list[list[float]] | None = None,
        exponent: float = 1.2,
        device: torch.device | str = "cpu",
    ) -> None:
        self.kind = kind
        self.config = config
        self.num_layers = num_layers
        self.seed = seed
        self.rank = rank
        self.ep_size = ep_size
        self.shared = shared
        self.exponent = exponent
        self.device = torch.device(device)
        self._pool = self._draw_pool() if kind in ("fake", "zipf", "trace") else None
        self._log_popularity: Tensor | None = None
        self._trace: TraceTables | None = None
        if kind == "zipf":
            self.reshuffle(seed)
        if loads is not None:
            self.set_loads(loads)

    @property
    def rewrites_ids(self) -> bool:
        """True if this source gives logical ids (`ids`), False if it gives `logits`."""
        return self.kind in ("uniform", "round-robin")

    def reshuffle(self, seed: int) -> bool:
        """Draw a new order of popularity for every layer; False if this kind has none (all but `zipf`)."""
        if self.kind != "zipf":
            return False
        rng = np.random.default_rng((seed & _MASK, 0x21FF))
        experts = self.config.num_experts
        order = rng.permuted(np.tile(np.arange(experts), (self.num_layers, 1)), axis=1)
        log_rank = -self.exponent * np.log(np.arange(1, experts + 1))
        table = (log_rank - log_rank.mean())[order]
        self._log_popularity = torch.from_numpy(table.astype(np.float32)).to(self.device)
        return True

    def set_loads(self, loads: NDArray[np.floating] | list[list[float]]) -> None:
        """Follow other loads from the next call on (`trace`): a change of workload."""
        rows = moe_layers(loads, self.num_layers, self.config.num_experts)
        design = build_trace_design(
            rows,
            top_k=self.config.top_k,
            num_groups=self.config.num_groups,
            topk_group=self.config.topk_group,
            rng=np.random.default_rng((self.seed & _MASK, 0x7ACE)),
        )
        self._trace = TraceTables(design, self.config, self.device)

    def frequencies(self, layer: int) -> NDArray[np.float64] | None:
        """[E] expected share of each expert in this layer's choices (`trace`), else None."""
        return None if self._trace is None else self._trace.design.frequencies[layer]

    def logits(self, layer: int, num_tokens: int, step: int) -> Tensor:
        """[T, E] float32 logits, contiguous and the caller's own."""
        key = self._key(layer, step)
        if self.kind == "trace":
            assert self._trace is not None
            rows = self._cut_rows(key, num_tokens)
            places = self._cut(_mix(key, 1), num_tokens * (2 + self.config.top_k))
            return self._trace.logits(layer, _mix(key, 2) % NUM_ORDERS, rows, places)
        if self._log_popularity is None:
            return self._cut_rows(key, num_tokens).clone()
        return self._cut_rows(key, num_tokens) + self._log_popularity[layer]

    def ids(self, layer: int, num_tokens: int, step: int) -> Tensor:
        """[T, K] int32 logical ids, distinct in a row; of the kinds that rewrite ids alone."""
        experts, top_k = self.config.num_experts, self.config.top_k
        key = self._key(layer, step)
        if self.kind == "uniform":
            # Plain numpy: a generator per call is cheap there and the same on all devices.
            base = np.random.default_rng(key).integers(0, experts, num_tokens)
            first = torch.from_numpy(base).to(self.device)[:, None]
            spread = torch.arange(top_k, device=self.device) * experts // top_k
            ids = (first + spread) % experts
        else:
            block = step * self.ep_size + (0 if self.shared else self.rank)
            slots = torch.arange(num_tokens * top_k, device=self.device) + block * num_tokens * top_k
            rank = slots % self.ep_size
            start = rank * experts // self.ep_size
            size = (rank + 1) * experts // self.ep_size - start
            ids = (start + (slots // self.ep_size) % size).view(num_tokens, top_k)
        return ids.to(torch.int32)

    def weights(self, num_tokens: int) -> Tensor:
        """[T, K] float32, 1/K: the weights that belong to `ids`."""
        return torch.full((num_tokens, self.config.top_k), 1.0 / self.config.top_k, device=self.device)

    def _key(self, layer: int, step: int) -> int:
        key = _mix(self.seed & _MASK, 0 if self.shared else self.rank + 1)
        return _mix(_mix(key, layer), step)

    def _draw_pool(self) -> Tensor:
        rng = np.random.default_rng((self.seed & _MASK, 0x9001))
        uniform = rng.random(_POOL, dtype=np.float32)
        if self.kind == "fake":
            uniform = 5.0 + 5.0 * uniform
        elif self.kind == "zipf":
            uniform = -np.log(-np.log(np.clip(uniform, 1e-7, 1.0 - 1e-7)))
        return torch.from_numpy(uniform).to(self.device)

    def _cut(self, key: int, length: int) -> Tensor:
        """[length] values of the pool from a hashed place on; several pieces if the pool is too short."""
        assert self._pool is not None
        longest = _POOL // 2
        if length <= longest:
            start = key % ((_POOL - length) // _STEP + 1) * _STEP
            return self._pool[start : start + length]
        sizes = [min(longest, length - done) for done in range(0, length, longest)]
        return torch.cat([self._cut(_mix(key, 1000 + i), size) for i, size in enumerate(sizes)])

    def _cut_rows(self, key: int, num_tokens: int) -> Tensor:
        experts = self.config.num_experts
        return self._cut(key, num_tokens * experts).view(num_tokens, experts)


def _mix(key: int, value: int) -> int:
    """64-bit mix of a key with a value (splitmix64's finaliser)."""
    x = (key + (value + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
