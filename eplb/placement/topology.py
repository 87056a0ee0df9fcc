"""Which ranks there are, which nodes they share, and how many slots fit on them."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from evenroute.eplb._checks import as_integer

MAX_EP_SIZE = 1 << 16
MAX_LOGICAL_EXPERTS = 1 << 20  # of a layer


@dataclass(frozen=True)
class Topology:
    """EP ranks and the nodes that hold them; node ``i`` holds a contiguous block of ranks.

    Raises:
        ValueError: a number is below 1, or ``num_nodes`` does not divide ``ep_size``.
    """

    ep_size: int
    num_nodes: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "ep_size", as_integer("ep_size", self.ep_size, 1, MAX_EP_SIZE))
        object.__setattr__(self, "num_nodes", as_integer("num_nodes", self.num_nodes, 1))
        if self.ep_size % self.num_nodes:
            allowed = [n for n in range(1, self.ep_size + 1) if self.ep_size % n == 0]
            nearest = min(allowed, key=lambda n: (abs(n - self.num_nodes), n))
            raise ValueError(
                f"num_nodes={self.num_nodes} does not divide ep_size={self.ep_size}; "
                f"nearest num_nodes that does: {nearest}"
            )

    @property
    def ranks_per_node(self) -> int:
        return self.ep_size // self.num_nodes

    def node_of_rank(self, rank: int) -> int:
        rank = as_integer("rank", rank)
        if not 0 <= rank < self.ep_size:
            raise ValueError(f"rank={rank} is outside [0, ep_size={self.ep_size})")
        return rank // self.ranks_per_node


def automatic_redundant_experts(num_logical_experts: int, ep_size: int) -> int:
    """Fewest redundant experts with which the slots divide over the ranks: ``(R - E mod R) mod R``."""
    return -num_logical_experts % as_integer("ep_size", ep_size, 1)


def nearest_num_slots(num_logical_experts: int, num_slots: int, ep_size: int) -> int:
    """Valid slot count nearest to ``num_slots``: a multiple of ``ep_size`` in [E, E * ep_size]; ties up."""
    low = -(-num_logical_experts // ep_size) * ep_size
    high = num_logical_experts * ep_size
    below = num_slots // ep_size * ep_size
    nearest = below if num_slots - below < ep_size - (num_slots - below) else below + ep_size
    return min(max(nearest, low), high)


def check_num_slots(num_logical_experts: int, num_slots: int, ep_size: int) -> None:
    """Check that P slots hold E experts over R ranks, no expert twice on a rank.

    Raises:
        ValueError: names the three numbers, the broken rule and the nearest valid ``num_slots``.
    """
    numbers = f"num_logical_experts={num_logical_experts}, num_slots={num_slots}, ep_size={ep_size}"
    rule = ""
    if num_slots < num_logical_experts:
        rule = "every expert needs a slot (num_slots >= num_logical_experts)"
    elif num_slots > num_logical_experts * ep_size:
        rule = (
            "a rank would hold an expert twice "
            f"(num_slots <= num_logical_experts * ep_size = {num_logical_experts * ep_size})"
        )
    elif num_slots % ep_size:
        rule = "num_slots must be a multiple of ep_size"
    if rule:
        nearest = nearest_num_slots(num_logical_experts, num_slots, ep_size)
        raise ValueError(f"{numbers}: {rule}; nearest valid num_slots: {nearest}")


def nearest_num_groups(num_logical_experts: int, num_groups: int, num_nodes: int) -> int:
    """Number of groups nearest to ``num_groups`` that divides E and is a multiple of ``num_nodes``, or 1."""
    low = [g for g in range(1, isqrt(num_logical_experts) + 1) if num_logical_experts % g == 0]
    divisors = {*low, *(num_logical_experts // g for g in low)}
    allowed = [g for g in divisors if g % num_nodes == 0 or g == 1]
    return min(allowed, key=lambda g: (abs(g - num_groups), g))


def check_plan_numbers(
    num_logical_experts: int, num_slots: int, num_groups: int, num_nodes: int, ep_size: int
) -> Topology:
    """Check the five numbers of a plan together; returns the topology.

    Raises:
        ValueError: one line that names all five numbers, the broken rule and the nearest valid ``num_slots``.
    """
    numbers = (
        f"num_logical_experts={num_logical_experts}, num_slots={num_slots}, num_groups={num_groups}, "
        f"num_nodes={num_nodes}, ep_size={ep_size}"
    )
    slots = f"nearest valid num_slots: {nearest_num_slots(num_logical_experts, num_slots, max(1, ep_size))}"
    for name, value in (("num_groups", num_groups), ("num_nodes", num_nodes), ("ep_size", ep_size)):
        if value < 1:
            raise ValueError(f"{numbers}: {name} must be >= 1; {slots}")
    if ep_size % num_nodes:
        raise ValueError(f"{numbers}: num_nodes must divide ep_size; {slots}")
    nearest = f"nearest valid num_groups: {nearest_num_groups(num_logical_experts, num_groups, num_nodes)}"
    if num_logical_experts % num_groups:
        raise ValueError(f"{numbers}: num_groups must divide num_logical_experts; {nearest}; {slots}")
    if num_groups % num_nodes and num_groups > 1:
        raise ValueError(f"{numbers}: num_nodes must divide num_groups (or 1 group); {nearest}; {slots}")
    check_num_slots(num_logical_experts, num_slots, ep_size)
    return Topology(ep_size, num_nodes)
