"""Kernels that find and carry out the best operation of joint planning; arrays as in `kernels.spread`."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from evenroute.eplb._compiled import kernel
from evenroute.eplb.planner.kernels.moves import COPY, SWAP, operation_cost, swap_links, unlink
from evenroute.eplb.planner.kernels.spread import cube


@kernel
def _coolest(slot, nxt, num_local, heat):
    """The other replica of this slot's expert whose rank is the coolest."""
    best = nxt[slot]
    other = nxt[best]
    while other != slot:
        if heat[other // num_local] < heat[best // num_local]:
            best = other
        other = nxt[other]
    return best


@kernel
def _list_copies(anchor, slots, num_local, nxt, flow, excess, heat, where, hand_on):
    """Slots that may be overwritten, ``where``; ``hand_on``: what their heir's rank gains. Returns how many.

    Slots of the anchor itself, and those whose heir it is, are left out.
    """
    size = 0
    for j in range(slots.shape[0]):
        if nxt[j] == j or j // num_local == anchor:
            continue
        heir = _coolest(j, nxt, num_local, heat) // num_local
        if heir == anchor:
            continue
        change = -heat[heir]
        for w in range(excess.shape[0]):
            change += cube(excess[w, heir] + flow[w, j])
        where[size], hand_on[size] = j, change
        size += 1
    return size


@kernel
def _half_changes(i, anchor, size, flow, excess, near, change):
    """Fill ``change[:size]``: the objective of rank ``anchor`` and of the others, if they take half of slot i's load.

    ``near [W, P]`` is the excess of the rank of each listed slot without that slot's own load.
    """
    source = 0.0
    for w in range(excess.shape[0]):
        source += cube(excess[w, anchor] - 0.5 * flow[w, i])
    change[:size] = source
    for w in range(excess.shape[0]):
        half = 0.5 * flow[w, i]
        for c in range(size):
            u = near[w, c] + half
            u = u if u > 0.0 else 0.0
            change[c] += u * u * u


@kernel
def _even_copy_change(i, j, loads, slots, num_local, nxt, part, excess, heat, trial, touched):
    """Change of the objective if slot j becomes one more replica of slot i's expert, shares staying even."""
    a, b = slots[i], slots[j]
    more, fewer = 1.0 / (1.0 / part[i] + 1.0), 1.0 / (1.0 / part[j] - 1.0)
    num_windows = loads.shape[0]
    size = 0
    for start, expert, new in ((i, a, more), (j, b, fewer)):
        other = start
        while True:
            rank = other // num_local
            at = -1
            for t in range(size):
                if touched[t] == rank:
                    at = t
            if at < 0:
                at = size
                size += 1
                touched[at] = rank
                trial[:, at] = excess[:, rank]
            for w in range(num_windows):
                if expert == b and other == j:
                    trial[w, at] += loads[w, a] * more - loads[w, b] * part[j]
                else:
                    trial[w, at] += loads[w, expert] * (new - part[other])
            other = nxt[other]
            if other == start:
                break
    change = 0.0
    for t in range(size):
        change -= heat[touched[t]]
        for w in range(num_windows):
            change += cube(trial[w, t])
    return change


@kernel
def _swap_changes(i, anchor, flow, excess, over, change):
    """Fill ``change [P]``: the objective of both ranks after slot i's load is exchanged with each slot's.

    ``over [W, P]`` is the excess of a slot's rank.
    """
    change[:] = 0.0
    for w in range(flow.shape[0]):
        mine = flow[w, i]
        here = excess[w, anchor] - mine
        for j in range(change.shape[0]):
            theirs = flow[w, j]
            u = here + theirs
            u = u if u > 0.0 else 0.0
            v = over[w, j] + mine - theirs
            v = v if v > 0.0 else 0.0
            change[j] += u * u * u + v * v * v


@kernel
def _price(kind, i, j, free, kinds, slots, num_local, at_first):
    """What an operation is held against: its moved slots, twice as many if it mixes primaries and replicas."""
    cost = 1.0 if free else max(0.5, float(operation_cost(kind, i, j, slots, num_local, at_first)))
    mixes = kinds[i] != kinds[j] if kind == SWAP else kinds[j] == 0
    return 2.0 * cost if mixes else cost


@kernel
def best_operation(
    anchor, kinds, free, slots, num_local, nxt, flow, excess, heat, holds, at_first,
    change, over, near, where, hand_on, least,
):  # fmt: skip
    """The operation at slots of rank ``anchor`` that lowers the objective most per moved slot: (kind, i, j)."""
    num_windows, num_slots = flow.shape
    best, best_kind, best_i, best_j = 0.0, -1, -1, -1
    for w in range(num_windows):
        for j in range(num_slots):
            over[w, j] = excess[w, j // num_local]
    size = _list_copies(anchor, slots, num_local, nxt, flow, excess, heat, where, hand_on)
    for w in range(num_windows):
        for c in range(size):
            near[w, c] = over[w, where[c]] - flow[w, where[c]]
    for i in range(anchor * num_local, (anchor + 1) * num_local):
        a = slots[i]
        _swap_changes(i, anchor, flow, excess, over, change)
        for j in range(num_slots):
            to = j // num_local
            gain = heat[anchor] + heat[to] - change[j]
            if gain <= least or gain <= 0.5 * best or to == anchor or holds[to, a] or holds[anchor, slots[j]]:
                continue
            cost = _price(SWAP, i, j, free, kinds, slots, num_local, at_first)
            if gain > best * cost:
                best, best_kind, best_i, best_j = gain / cost, SWAP, i, j
        _half_changes(i, anchor, size, flow, excess, near, change)
        for c in range(size):
            j = where[c]
            to = j // num_local
            gain = heat[anchor] + heat[to] - change[c] - hand_on[c]
            if gain <= least or gain <= 0.5 * best or holds[to, a]:
                continue
            cost = _price(COPY, i, j, free, kinds, slots, num_local, at_first)
            if gain > best * cost:
                best, best_kind, best_i, best_j = gain / cost, COPY, i, j
    return best_kind, best_i, best_j


@kernel
def best_even_operation(
    anchor, kinds, free, loads, slots, num_local, nxt, part, flow, excess, heat, holds, at_first,
    change, over, trial, touched, least,
):  # fmt: skip
    """As `best_operation`, with shares that stay even: counts of replicas change what all of them carry."""
    num_windows, num_slots = flow.shape
    best, best_kind, best_i, best_j = 0.0, -1, -1, -1
    for w in range(num_windows):
        for j in range(num_slots):
            over[w, j] = excess[w, j // num_local]
    for i in range(anchor * num_local, (anchor + 1) * num_local):
        a = slots[i]
        _swap_changes(i, anchor, flow, excess, over, change)
        for j in range(num_slots):
            to = j // num_local
            if to == anchor:
                continue
            foreign = not holds[anchor, slots[j]]
            for kind, x, y in ((SWAP, i, j), (COPY, i, j), (COPY, j, i)):
                if (kind == SWAP or x == i) and holds[to, a]:
                    continue
                if (kind == SWAP or x == j) and not foreign:
                    continue
                if kind == SWAP:
                    gain = heat[anchor] + heat[to] - change[j]
                elif nxt[y] == y:
                    continue
                else:
                    gain = -_even_copy_change(
                        x, y, loads, slots, num_local, nxt, part, excess, heat, trial, touched
                    )
                if gain <= least or gain <= 0.5 * best:
                    continue
                cost = _price(kind, x, y, free, kinds, slots, num_local, at_first)
                if gain > best * cost:
                    best, best_kind, best_i, best_j = gain / cost, kind, x, y
    return best_kind, best_i, best_j


@kernel
def apply_operation(kind, i, j, slots, num_local, even, nxt, part, heat):
    """Carry out an operation on slots, rings and shares."""
    if kind == SWAP:
        swap_links(nxt, i, j)
        slots[i], slots[j] = slots[j], slots[i]
        part[i], part[j] = part[j], part[i]
        return
    if not even:
        part[_coolest(j, nxt, num_local, heat)] += part[j]
        part[i] *= 0.5
        part[j] = part[i]
    else:
        fewer, more = 1.0 / (1.0 / part[j] - 1.0), 1.0 / (1.0 / part[i] + 1.0)
        other = nxt[j]
        while other != j:
            part[other] = fewer
            other = nxt[other]
        other = i
        while True:
            part[other] = more
            other = nxt[other]
            if other == i:
                break
        part[j] = more
    unlink(nxt, j)
    slots[j] = slots[i]
    nxt[j] = nxt[i]
    nxt[i] = j
