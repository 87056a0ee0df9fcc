"""What the rebalancer has published: the newest version, and when a next one may follow an unfinished one. No I/O."""

from evenroute.dist.protocol.agreement import Version
from evenroute.dist.protocol.store import ProtocolStore
from evenroute.dist.protocol.types import PlacementInfo, Timeouts
from evenroute.dist.wire.messages import NO_KEY, JobShape, Key, PlacementMessage, WirePlacement
from evenroute.dist.wire.placement import pack_placement
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.store.schema import PublishedPlacement


class Publication:
    """``version``: the last one of this life, 0 before its first. ``at``: when it was published (driver's clock).

    ``newest``: the newest version, of this life or of the store, and ``wire`` its wire form; None before there is one.
    """

    def __init__(self, store: ProtocolStore, timeouts: Timeouts) -> None:
        self.version = 0
        self.at = 0.0
        self.newest: Version | None = None
        self.wire: WirePlacement | None = None
        self._store = store
        self._timeouts = timeouts
        self._timeout = timeouts.publish_timeout_s
        self._message: PlacementMessage | None = None

    @property
    def key(self) -> Key:
        """Key of the newest version; NO_KEY without one."""
        return NO_KEY if self.newest is None else self.newest.key

    def take_stored(self, job: JobShape | None) -> None:
        """Newest = the store's, under the key it has there, if it fits the job. Raises StoreError."""
        self.newest = self.wire = None
        stored = self._store.newest_placement()
        if stored is not None and job is not None and fits(stored.placement, job):
            self._set_newest(Version.of((stored.epoch, stored.version), stored.placement))

    def publish(
        self, placement: Placement, info: PlacementInfo, epoch: int, run: int, stamp: float, now: float
    ) -> PlacementMessage:
        """Keep the next version, then return its message. Raises StoreError and StaleEpochError: nothing changed."""
        self._store.add_placement(PublishedPlacement(stamp, epoch, self.version + 1, placement, **vars(info)))
        self.version += 1
        self.at = now
        self._set_newest(Version.of((epoch, self.version), placement))
        return self.message(run, epoch)

    def _set_newest(self, version: Version) -> None:
        self.newest, self.wire, self._message = version, pack_placement(version.placement), None

    def message(self, run: int, epoch: int) -> PlacementMessage:
        """The newest version for the ranks of a run: the same object until either changes."""
        assert self.newest is not None
        assert self.wire is not None
        if self._message is None or self._message.run != run:
            self._message = PlacementMessage(run, epoch, self.newest.key, self.newest.digest, self.wire)
        return self._message

    def overdue(self, now: float) -> bool:
        """Whether the newest version has had its time, so that another may follow though it is not settled."""
        return now - self.at >= self._timeout

    def late(self) -> None:
        """A version followed one that was overdue: the next gets twice the time."""
        self._timeout = min(2 * self._timeout, self._timeouts.max_publish_timeout_s)

    def settled_in_time(self) -> None:
        """The newest version is live everywhere."""
        self._timeout = self._timeouts.publish_timeout_s


def fits(placement: Placement, job: JobShape) -> bool:
    """Whether a placement has the job's sizes."""
    topology = placement.topology
    found = (placement.num_layers, placement.num_logical_experts, placement.num_slots)
    return (*found, topology.ep_size, topology.num_nodes) == (
        *(job.num_layers, job.num_logical_experts, job.num_slots),
        *(job.ep_size, job.num_nodes),
    )
