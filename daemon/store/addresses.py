"""The addresses of a cluster, looked at before Mooncake sees them: some of them end the process or hold it up.

Mooncake 0.3.13 ends the process (SIGABRT) for a metadata server of a kind that it was not built with, such as redis, or
(SIGSEGV) with the protocol `rpc_only`.  An etcd that does not answer holds the interpreter's lock for five seconds, and
for ten as a metadata server.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from pathlib import Path

P2P = "P2PHANDSHAKE"
_PORT = r":(?P<port>\d{1,5})"
_PLAIN = re.compile(rf"(?:\[(?P<literal>[^\]\s]+)\]|(?P<host>[^\s\[\],;/@]+)){_PORT}")
_METADATA = re.compile(r"(?:https?|etcd)://[^\s/]+(?:/\S*)?")
_HA = re.compile(r"(?P<kind>etcd|redis|k8s)://\S+")
_ETCD = "etcd://"
_INFINIBAND = Path("/sys/class/infiniband")


def split(address: str) -> tuple[str, int] | None:
    """Host and port of HOST:PORT or [IPV6]:PORT; None when it is neither."""
    match = _PLAIN.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        return None
    return match["literal"] or match["host"], int(match["port"])


def is_loopback(host: str) -> bool:
    """Whether a host of this name is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def elected(master: str) -> str | None:
    """Through what the one that leads of several masters is found: etcd, redis or k8s. None for a master alone."""
    match = _HA.fullmatch(master)
    return match["kind"] if match is not None else None


def endpoints(address: str) -> list[tuple[str, int] | None]:
    """Host and port of each endpoint of an etcd, of which one is enough, or of another address. None: it is no such."""
    several = re.split("[;,]", address.removeprefix(_ETCD)) if address.startswith(_ETCD) else [address]
    return [split(re.sub(r"^(?:https?|redis)://|/.*$", "", each)) for each in several]


def wrong_master(address: str) -> str | None:
    """What is wrong with a master's address."""
    kind = elected(address)
    if split(address) is not None or kind in ("redis", "k8s") or (kind == "etcd" and None not in endpoints(address)):
        return None
    return (
        "must be host:port, with a port of 1 to 65535 ([…]:port for IPv6), or of masters with high availability "
        "etcd://host:port;host:port;…, redis://… or k8s://…"
    )


def wrong_metadata(address: str) -> str | None:
    """What is wrong with a metadata server's."""
    if address == P2P or split(address) is not None or _METADATA.fullmatch(address):
        return None
    return f"must be {P2P}, http://HOST:PORT/metadata or etcd://HOST:PORT"


def unreached(address: str, timeout_s: float) -> str | None:
    """Why nothing listens there, of several at the last; None when something does, or when it is no host and port."""
    why = None
    for place in endpoints(address):
        if place is None:
            return None
        try:
            socket.create_connection(place, timeout_s).close()
        except (OSError, ValueError) as error:  # the second: not a name
            why = str(getattr(error, "strerror", None) or error)
        else:
            return None
    return why


def own(master: str) -> str:
    """This host's address in a packet to `master`, as the host of HOST:PORT; nothing is sent."""
    for place in endpoints(master):
        with contextlib.suppress(OSError, ValueError):
            for family, kind, _, _, target in socket.getaddrinfo(*place, type=socket.SOCK_DGRAM) if place else ():
                with socket.socket(family, kind) as probe:
                    probe.connect(target)
                    found = str(probe.getsockname()[0])
                return f"[{found}]" if family == socket.AF_INET6 else found
    return "127.0.0.1"


def without_rdma(protocol: str) -> bool:
    """Whether it needs an RDMA device and this machine has none: Mooncake then uses TCP, and says nothing."""
    return protocol == "rdma" and not (_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()))
