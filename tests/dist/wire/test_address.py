"""What a stranger's paths, addresses and numbers may not do: each refused in one line, nothing of theirs touched."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from evenroute.dist.client import ControlClient
from evenroute.dist.rebalancer.guards import JobLock, LockHeldError
from evenroute.dist.wire.address import check_bind, parse_address
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.settings.config import RouterConfig


def test_a_file_that_is_no_socket_is_never_bound_over(tmp_path: Path) -> None:
    keep = tmp_path / "keep.txt"
    keep.write_text("precious")
    address = parse_address(f"ipc://{keep}", field="--bind")
    with pytest.raises(ValueError, match="is not a socket") as error:
        check_bind(address, field="--bind", has_keys=False, insecure=False)
    assert "\n" not in str(error.value)
    assert keep.read_text() == "precious"


def test_one_lock_whatever_name_the_store_goes_by(tmp_path: Path) -> None:
    store, link = tmp_path / "run.db", tmp_path / "link.db"
    store.write_bytes(b"")
    link.symlink_to(store)
    lock = JobLock([("store", store)])
    try:
        with pytest.raises(LockHeldError, match="running already"):
            JobLock([("store", link)])
    finally:
        lock.release()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://a b:5"])
def test_an_address_that_nobody_can_connect_to_is_wrong_use(address: str) -> None:
    with pytest.raises(ValueError, match="address") as error:
        ControlClient(address)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "address", ["http://host:80", "tcp://:5555", "tcp://host", "ipc://", "host:5555", "tcp://h:70000"]
)
def test_other_forms_than_two_are_refused_by_their_field(address: str) -> None:
    with pytest.raises(ValueError, match=r"^field: .* expected ipc://PATH or tcp://HOST:PORT"):
        parse_address(address, field="field")


@pytest.mark.parametrize("address", [None, 5555, b"tcp://127.0.0.1:5555"])
def test_an_address_is_text(address: object) -> None:
    with pytest.raises(ValueError, match="field"):
        parse_address(address, field="field")  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.inf, math.nan, 1e300])
def test_a_client_waits_for_a_stated_time(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        ControlClient("ipc:///tmp/nobody.sock", timeout_s=timeout_s)


@pytest.mark.timeout(60)
def test_a_topology_beyond_all_clusters_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="ep_size must be <="):
        Topology(10**15, 7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("renormalize_epsilon", 1e-46),
        ("renormalize_epsilon", 5e-324),
        ("routed_scaling_factor", 5e-324),
        ("routed_scaling_factor", 1e-40),
        ("routed_scaling_factor", 1e300),
        ("softcap", 1e300),
    ],
)
def test_settings_that_fp32_cannot_hold_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        RouterConfig(8, 2, **{field: value})
