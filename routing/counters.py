"""Counts of logical experts on the device, and the tickets of the exact deal that lie beside them."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenroute.eplb._checks import describe, require_int
from evenroute.routing.settings.checks import require_device, require_tensor
from evenroute.routing.settings.config import MAX_EXPERTS

# Programs spread over copies of the counts, and the reader sums them. With 4,096 words a layer counting costs 4 to 12 %
# of a launch for 128 experts, by where they happen to lie, and with 1,024 half of it; with 8,192 at most 2 % (H200).
GPU_COUNT_WORDS = 8192
GPU_TICKET_COPIES = 8
TICKET_STRIDE = 16  # int64 words: every ticket on a 128-byte line of its own
# Tickets start again here: a multiple of 65535 (the weighted deal's period) and of 1 to 12 (the even deal's), and below
# 2^31, so that a ticket does not reach the count before the next take.
TICKET_PERIOD = 65535 * 27720
MAX_LAYERS = 1 << 16
MAX_COPIES = 1 << 10
TICKET_BITS = 32  # a ticket word holds count << 32 | ticket: one atomic serves both


def _none() -> None:
    return None


def count_copies(num_logical_experts: int) -> int:
    """Copies of a layer's counts on a GPU: 16 to 64, a power of two, `GPU_COUNT_WORDS` in all where that suffices."""
    needed = -(-GPU_COUNT_WORDS // num_logical_experts)
    return min(max(1 << (needed - 1).bit_length(), 16), 64)


class ExpertCounters:
    """How often each logical expert was chosen, ``[L, E]``, since the last `take`.

    On CUDA the counts exist in several copies so that atomics do not collide. The exact deal's ticket words hold a
    ticket in their low half (it survives `take`) and a count in their high half (`take` reads and clears it); they
    are allocated when the first router with exact tickets asks for them. The reference keeps counts and tickets apart.

    Raises:
        ValueError: a number is out of range or no integer, or there is no such device.

    Attributes:
        counts   [L, copies, E] int32 on CUDA, int64 on CPU
        tickets  [L, ticket_copies, E, stride] int64 or None
    """

    def __init__(
        self,
        num_layers: int,
        num_logical_experts: int,
        *,
        device: torch.device | str,
        copies: int | None = None,
        ticket_copies: int | None = None,
    ) -> None:
        require_int("num_layers", num_layers, 1, MAX_LAYERS)
        require_int("num_logical_experts", num_logical_experts, 1, MAX_EXPERTS)
        for name, number in (("copies", copies), ("ticket_copies", ticket_copies)):
            if number is not None:
                require_int(name, number, 1, MAX_COPIES)
        self.top_k = 0  # of the routers that count here, the most
        self.num_layers = num_layers
        self.num_logical_experts = num_logical_experts
        self.device = require_device("device", device)
        on_gpu = self.device.type == "cuda"
        self.copies = copies if copies is not None else (count_copies(num_logical_experts) if on_gpu else 1)
        self.ticket_copies = (
            ticket_copies if ticket_copies is not None else (GPU_TICKET_COPIES if on_gpu else 1)
        )
        self.ticket_stride = TICKET_STRIDE if on_gpu else 1
        dtype = torch.int32 if on_gpu else torch.int64
        self.tickets: Tensor | None = None
        self._last_out: Callable[[], Tensor | None] = _none  # checked already: this is on the forward thread
        with torch.inference_mode(False):  # made under it, they could not be updated outside
            self.counts = torch.zeros(
                (num_layers, self.copies, num_logical_experts), dtype=dtype, device=self.device
            )
            self._total = torch.zeros(
                (num_layers, num_logical_experts), dtype=torch.int64, device=self.device
            )

    def enable_tickets(self) -> Tensor:
        """Allocate the ticket words once; the pointer is stable from then on."""
        if self.tickets is None:
            shape = (self.num_layers, self.ticket_copies, self.num_logical_experts, self.ticket_stride)
            with torch.inference_mode(False):
                self.tickets = torch.zeros(shape, dtype=torch.int64, device=self.device)
        return self.tickets

    def take(self, out: Tensor | None = None) -> Tensor:
        """Counts since the last take, ``[L, E] int64``; zeroes them, keeps the tickets.

        On CUDA: one small kernel and an asynchronous copy into ``out`` (pinned), both on the current stream; the
        caller waits for an event before it reads. Without ``out`` a tensor on the counters' device is returned.

        Raises:
            ValueError: ``out`` is no tensor, has another shape or dtype, or no memory of its own.
        """
        if out is not None and out is not self._last_out():
            require_tensor("out", out, tuple(self._total.shape), dtypes=(torch.int64,))
            self._require_own_memory(out)
            self._last_out = ref(out)
        if self.device.type == "cuda":
            self._take_on_device()
        elif out is not None and out.device.type == "cpu":
            self._take_on_host(out.detach().numpy())
            return out
        else:
            self._take_on_host(self._total.numpy())
        if out is None:
            return self._total.clone()
        return out.copy_(self._total, non_blocking=True)

    def _require_own_memory(self, out: Tensor) -> None:
        mine = [self.counts, self._total] + ([] if self.tickets is None else [self.tickets])
        memory = out.untyped_storage().data_ptr()
        folded = any(step == 0 and size > 1 for step, size in zip(out.stride(), out.shape, strict=True))
        if (
            out.is_meta
            or folded
            or out.is_neg()
            or any(memory == t.untyped_storage().data_ptr() for t in mine)
        ):
            raise ValueError(
                "out must have a word of memory for every count and share none with the counters, "
                f"found {describe(out)} with strides {list(out.stride())}"
            )

    def _take_on_host(self, out: NDArray[np.int64]) -> None:
        """NumPy takes half the time of torch, and this is on the forward thread."""
        counts = self.counts.numpy()
        out[...] = counts[:, 0] if self.copies == 1 else counts.sum(axis=1, dtype=np.int64)
        counts.fill(0)
        if self.tickets is None:
            return
        words = self.tickets.numpy()
        if int(words.max()) < TICKET_PERIOD:
            return  # as after the reference, which counts apart: one look at every word
        counted = words[..., 0] >> TICKET_BITS
        out += counted.sum(axis=1)
        tickets = words[..., 0] - (counted << TICKET_BITS)
        words[..., 0] = np.where(tickets >= TICKET_PERIOD, tickets - TICKET_PERIOD, tickets)

    def _take_on_device(self) -> None:
        from evenroute.routing.kernels.take import take_kernel

        block = 128
        has_tickets = self.tickets is not None
        take_kernel[(self.num_layers, -(-self.num_logical_experts // block))](
            self._total,
            self.counts,
            self.tickets if has_tickets else self.counts,
            self.num_logical_experts,
            COPIES=self.copies,
            TICKET_COPIES=self.ticket_copies,
            TICKET_STRIDE=self.ticket_stride,
            TICKET_PERIOD=TICKET_PERIOD,
            HAS_TICKETS=has_tickets,
            BLOCK=block,
            num_warps=4,
        )
