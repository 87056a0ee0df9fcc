"""Schedules with a fault at one chosen moment, which a random one meets too seldom."""

from __future__ import annotations

from support.elastic_world import Budget, Parts, World


class LeaverStops(World):
    """A rank has let go by an announced change, and what it has completed another has not. It stops, one of those who
    stay dies, and the rest must go on without knowing what it did; then it comes back."""

    def __init__(self, seed: int, parts: Parts | None = None):
        super().__init__(seed, parts, budget=Budget(0, 0, 0, leave=1, publish=0, crash=0), n=4)

    def event(self) -> None:
        super().event()
        leaver = next((one for one in self.members if one.core.left), None)
        if leaver is None or self.cover["let go"]:
            return
        self.cover["let go"] = 1
        others = [one for one in self.members if one is not leaver]
        behind = [one for one in others if one.core.completed < leaver.core.completed]
        if behind:
            leaver.stopped = True
            next(one for one in others if one is not behind[0]).alive = False
            self.cover["ambushed"] = 1
