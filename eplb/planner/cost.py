"""What moves and imbalance cost in time, measured by the ranks, given, or by default."""

from __future__ import annotations

from dataclasses import dataclass

from evenroute.eplb._checks import describe, is_number, require_choice

SOURCES = ("default", "given", "measured")


@dataclass(frozen=True)
class TimeCosts:
    """Time that moving a slot takes, and time that imbalance takes.

    The defaults are one fp8 expert of DeepSeek-V3 (3 x 7168 x 2048 bytes) over half of a 400 Gbit/s link, and a step
    of which half is the experts' time; the two sources say where the figures come from, and reasons name them.

    Attributes:
        bytes_per_slot: weights of one expert of one layer.
        seconds_per_slot: a rank needs to fetch one; ranks fetch side by side.
        slowdown: part of that time that serving loses; 1: as if it stood still.
        step_seconds: one step at perfect balance.
        load_fraction: part of a step that grows with the hottest rank's load (in mean rank loads).
        source: default, given or measured: of what moving costs.
        step_source: the same of ``step_seconds`` and ``load_fraction``.
    """

    bytes_per_slot: float = 44.0e6
    seconds_per_slot: float = 44.0e6 / 25.0e9
    slowdown: float = 1.0
    step_seconds: float = 0.05
    load_fraction: float = 0.5
    source: str = "default"
    step_source: str = "default"

    def __post_init__(self) -> None:
        for name in ("bytes_per_slot", "seconds_per_slot", "step_seconds", "load_fraction"):
            value = getattr(self, name)
            if not is_number(value) or not value > 0:
                raise ValueError(f"{name} must be a finite number > 0, found {describe(value)}")
        for name in ("slowdown", "load_fraction"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= 1:
                raise ValueError(f"{name}={describe(value)}, expected a number in [0, 1]")
        for name in ("source", "step_source"):
            require_choice(name, getattr(self, name), SOURCES)

    def moving(self, num_moves: int, num_ranks: int) -> float:
        """Seconds of the whole job that fetching this many slots costs."""
        return num_moves * self.seconds_per_slot * self.slowdown / num_ranks

    def step(self, balancedness: float) -> float:
        """Length of a step at this total balancedness (mean / hottest), in steps at perfect balance."""
        return 1.0 - self.load_fraction + self.load_fraction / max(balancedness, 1e-9)

    def saved(self, seconds: float, before: float, after: float) -> float:
        """Seconds saved out of ``seconds`` when total balancedness goes from before to after."""
        return seconds * (1.0 - self.step(after) / self.step(before))

    def price_per_slot(self, seconds: float, num_layers: int, num_ranks: int) -> float:
        """Balancedness of one layer that one moved slot must gain to pay for itself within ``seconds``."""
        return self.moving(1, num_ranks) * num_layers / (seconds * self.load_fraction)

    def told(self) -> str:
        """The figures and where they come from, in one line."""
        lost = 1e3 * self.seconds_per_slot * self.slowdown
        return (
            f"a slot costs its rank {lost:.3g} ms ({self.source}); {self.load_fraction:.0%} of a step of "
            f"{1e3 * self.step_seconds:.3g} ms follow the hottest rank ({self.step_source})"
        )
