"""Kernel of `ExpertCounters.take`: sum the copies, clear the counts, keep the tickets."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def take_kernel(
    total_ptr,
    counts_ptr,
    tickets_ptr,
    num_experts,
    COPIES: tl.constexpr,
    TICKET_COPIES: tl.constexpr,
    TICKET_STRIDE: tl.constexpr,
    TICKET_PERIOD: tl.constexpr,
    HAS_TICKETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer = tl.program_id(0).to(tl.int64)
    expert = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = expert < num_experts
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for copy in range(COPIES):
        pointer = counts_ptr + (layer * COPIES + copy) * num_experts + expert
        total += tl.load(pointer, mask=live, other=0).to(tl.int64)
        tl.store(pointer, tl.zeros([BLOCK], dtype=tl.int32), mask=live)
    if HAS_TICKETS:
        for copy in range(TICKET_COPIES):
            index = ((layer * TICKET_COPIES + copy) * num_experts + expert) * TICKET_STRIDE
            word = tl.load(tickets_ptr + index, mask=live, other=0)
            total += word >> 32
            ticket = word & 0xFFFFFFFF
            tl.store(
                tickets_ptr + index,
                tl.where(ticket >= TICKET_PERIOD, ticket - TICKET_PERIOD, ticket),
                mask=live,
            )
    tl.store(total_ptr + layer * num_experts + expert, total, mask=live)
