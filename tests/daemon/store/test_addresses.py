"""Addresses of a cluster: which are refused, which are asked, and under which name we join."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvprefetch.daemon.store import addresses


@pytest.mark.parametrize(
    ("address", "found", "through"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051), None),
        ("master.example:1", ("master.example", 1), None),
        ("[fd00::1]:65535", ("fd00::1", 65535), None),
        ("::1:50051", ("::1", 50051), None),  # Mooncake takes it as well
        *((wrong, None, None) for wrong in ("127.0.0.1", ":50051", "[]:50051", "h:0", "h:65536", " h:1", "h:1,h:2")),
        *((wrong, None, None) for wrong in ("tcp://h:1", "etcd://a:1;b", "etcd://", "consul://h:1")),
        ("etcd://a:1,b:2", None, "etcd"),
        ("etcd://a:1;[fd00::1]:2;http://c:3", None, "etcd"),
        ("redis://h:1", None, "redis"),
        ("k8s://space/lease", None, "k8s"),
    ],
)
def test_a_master_is_a_host_and_a_port_or_found_through_another_service(
    address: str, found: tuple[str, int] | None, through: str | None
) -> None:
    assert addresses.split(address) == found
    right = found is not None or through is not None
    with nullcontext() if right else pytest.raises(ValueError, match="must be host:port"):
        assert addresses.master(address) == address
    assert not right or addresses.elected(address) == through


def test_of_an_etcd_s_endpoints_one_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead, living = (f"127.0.0.1:{each.getsockname()[1]}" for each in (closed, server))
        assert addresses.unreached(f"etcd://{dead};{living}", 1.0) is None
        assert addresses.unreached(f"etcd://{dead};http://{dead}", 1.0) == "Connection refused"
    assert addresses.unreached("k8s://space/lease", 0.1) is None, "not tried"


@pytest.mark.parametrize(
    ("address", "good"),
    [
        ("P2PHANDSHAKE", True),
        ("", True),
        ("http://h:8080/metadata", True),
        ("etcd://h:2379", True),
        ("h:2379", True),
        ("p2phandshake", False),
        ("redis://h:6379", False),  # ends the process
        ("h", False),
    ],
)
def test_a_metadata_server_that_mooncake_does_not_know_is_refused(address: str, good: bool) -> None:
    with nullcontext() if good else pytest.raises(ValueError, match=f"must be {addresses.P2P}"):
        assert addresses.metadata(address) == (address or addresses.P2P)


@pytest.mark.parametrize("form", ["[::1]:{}", "http://[::1]:{}/metadata", "etcd://[::1]:{}"])
def test_who_listens_on_ipv6_is_reached_and_who_does_not_is_named(form: str) -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with server:
        address = form.format(server.getsockname()[1])
        assert addresses.unreached(address, 1.0) is None
    assert addresses.unreached(address, 1.0) == "Connection refused"


def test_our_name_is_the_address_that_the_master_sees() -> None:
    assert addresses.own("127.0.0.1:50051") == "127.0.0.1"
    assert addresses.own("no.such.host.invalid:1") == "127.0.0.1"
    assert addresses.own("etcd://no.such.host.invalid:1;127.0.0.2:1") == "127.0.0.1"
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
        assert addresses.own("[::1]:50051") == "[::1]"
        assert addresses.own("etcd://no.such.host.invalid:1,[::1]:1") == "[::1]", "the first that has an address"


def test_rdma_without_a_device_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "INFINIBAND", tmp_path / "infiniband")
    assert addresses.without_rdma("rdma")
    assert not addresses.without_rdma("tcp")
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert not addresses.without_rdma("rdma")
