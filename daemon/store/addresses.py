"""The addresses of a cluster, looked at before Mooncake sees them: some of them end the process or hold it up.

Mooncake 0.3.13 ends the process (SIGABRT) for a metadata server of a kind that it was not built with, such as redis, or
(SIGSEGV) with the protocol `rpc_only`.  An etcd that does not answer holds the interpreter's lock for ten seconds.
"""

from __future__ import annotations

import contextlib
import re
import socket
from pathlib import Path

P2P = "P2PHANDSHAKE"
_PORT = r":(?P<port>\d{1,5})"
_PLAIN = re.compile(rf"(?:\[(?P<literal>[^\]\s]+)\]|(?P<host>[^\s\[\],/]+)){_PORT}")
_METADATA = re.compile(r"(?:https?|etcd)://[^\s/]+(?:/\S*)?")
_HA = re.compile(r"(?:etcd|redis|k8s)://\S+")
_INFINIBAND = Path("/sys/class/infiniband")


def split(address: str) -> tuple[str, int] | None:
    """Host and port of HOST:PORT or [IPV6]:PORT; None when it is neither."""
    match = _PLAIN.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        return None
    return match["literal"] or match["host"], int(match["port"])


def wrong_master(address: str) -> str | None:
    """What is wrong with a master's address."""
    if split(address) is not None or _HA.fullmatch(address):
        return None
    return (
        "must be host:port, with a port of 1 to 65535 ([…]:port for IPv6), or of masters with high availability an "
        "address of etcd://, redis:// or k8s://"
    )


def wrong_metadata(address: str) -> str | None:
    """What is wrong with a metadata server's."""
    if address == P2P or split(address) is not None or _METADATA.fullmatch(address):
        return None
    return f"must be {P2P}, http://HOST:PORT/metadata or etcd://HOST:PORT"


def unreached(address: str, timeout_s: float) -> str | None:
    """Why nothing listens there; None when something does, or when it is no single host and port."""
    place = split(re.sub(r"^(?:https?|etcd)://|/.*$", "", address))
    if place is None:
        return None
    try:
        socket.create_connection(place, timeout_s).close()
    except (OSError, ValueError) as error:  # the second: not a name
        return str(getattr(error, "strerror", None) or error)
    return None


def own(master: str) -> str:
    """This host's address in a packet to `master`, as the host of HOST:PORT; nothing is sent."""
    place = split(master.rpartition("://")[2].split(",")[0])
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
