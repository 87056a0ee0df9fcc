"""Kernels that both move searches share: operations, their cost, replaying them.

An operation is ``(kind, i, j)``: SWAP exchanges the experts of slots i and j, COPY overwrites slot j with the
expert of slot i. Its cost is the change in slots whose expert their rank did not hold at first, so undoing an
earlier move pays back.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from evenroute.eplb._compiled import kernel

SWAP, COPY = 0, 1


@kernel
def fill_holds(slots, num_local, holds):
    """``holds [R, E]``: does the rank hold the expert."""
    holds[:] = False
    for slot in range(slots.shape[0]):
        holds[slot // num_local, slots[slot]] = True


@kernel
def operation_cost(kind, i, j, slots, num_local, at_first):
    """Change in moved slots; ``at_first [R, E]`` is what the ranks held before the first operation."""
    a, b = slots[i], slots[j]
    to, source = j // num_local, i // num_local
    cost = 0
    if not at_first[to, a]:
        cost += 1
    if not at_first[to, b]:
        cost -= 1
    if kind == SWAP:
        if not at_first[source, b]:
            cost += 1
        if not at_first[source, a]:
            cost -= 1
    return cost


@kernel
def unlink(nxt, slot):
    """Take ``slot`` out of its expert's ring."""
    before = slot
    while nxt[before] != slot:
        before = nxt[before]
    nxt[before] = nxt[slot]
    nxt[slot] = slot


@kernel
def swap_links(nxt, i, j):
    """Exchange the places of slots i and j, of different experts, in their rings."""
    before_i = i
    while nxt[before_i] != i:
        before_i = nxt[before_i]
    before_j = j
    while nxt[before_j] != j:
        before_j = nxt[before_j]
    after_i, after_j = nxt[i], nxt[j]
    nxt[j] = after_i if after_i != i else j
    nxt[i] = after_j if after_j != j else i
    if before_i != i:
        nxt[before_i] = j
    if before_j != j:
        nxt[before_j] = i


@kernel
def replay(operations, chosen, slots):
    """Apply the first ``chosen [L]`` operations of ``[L, K, 3]`` to ``slots [L, P]``, in place."""
    for layer in range(slots.shape[0]):
        row = slots[layer]
        for step in range(chosen[layer]):
            kind, i, j = operations[layer, step]
            if kind == SWAP:
                row[i], row[j] = row[j], row[i]
            else:
                row[j] = row[i]
