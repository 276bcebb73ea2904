"""Checks the addresses of a cluster before Mooncake sees them: some end the process or hold it up.

Mooncake 0.3.13 ends the process (SIGABRT) for a metadata server of a kind that it was not built with, such as redis, or
(SIGSEGV) with the protocol `rpc_only`.  For an etcd that does not answer it holds the GIL for five seconds, ten for a
metadata server.
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
INFINIBAND = Path("/sys/class/infiniband")


def split(address: str) -> tuple[str, int] | None:
    """Return host and port of HOST:PORT or [IPV6]:PORT; None for anything else."""
    match = _PLAIN.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        return None
    return match["literal"] or match["host"], int(match["port"])


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host of this name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def elected(master: str) -> str | None:
    """Return the service through which clients find the leader of several masters: etcd, redis or k8s; or None."""
    match = _HA.fullmatch(master)
    return match["kind"] if match is not None else None


def endpoints(address: str) -> list[tuple[str, int] | None]:
    """Return host and port of each endpoint (an etcd may have several, one suffices); None for another form."""
    several = re.split("[;,]", address.removeprefix(_ETCD)) if address.startswith(_ETCD) else [address]
    return [split(re.sub(r"^(?:https?|redis)://|/.*$", "", each)) for each in several]


def master(address: str) -> str:
    """Return the address of a master. Raises ValueError."""
    kind = elected(address)
    if split(address) is not None or kind in ("redis", "k8s") or (kind == "etcd" and None not in endpoints(address)):
        return address
    raise ValueError(
        "must be host:port, with a port of 1 to 65535 ([…]:port for IPv6), or of masters with high availability "
        "etcd://host:port;host:port;…, redis://… or k8s://…"
    )


def metadata(address: str) -> str:
    """Return the address of a metadata server, by default none. Raises ValueError."""
    if address in ("", P2P) or split(address) is not None or _METADATA.fullmatch(address):
        return address or P2P
    raise ValueError(f"must be {P2P}, http://HOST:PORT/metadata or etcd://HOST:PORT")


def unreached(address: str, timeout_s: float) -> str | None:
    """Say why nothing listens at the last endpoint; None when one does, or when the address has no host and port."""
    why = None
    for endpoint in endpoints(address):
        if endpoint is None:
            return None
        try:
            socket.create_connection(endpoint, timeout_s).close()
        except (OSError, ValueError) as error:  # ValueError: not a name
            why = str(getattr(error, "strerror", None) or error)
        else:
            return None
    return why


def own(master: str) -> str:
    """Return this machine's address in a packet to `master`, as the host of HOST:PORT; sends nothing."""
    for endpoint in endpoints(master):
        with contextlib.suppress(OSError, ValueError):
            for family, kind, _, _, target in socket.getaddrinfo(*endpoint, type=socket.SOCK_DGRAM) if endpoint else ():
                with socket.socket(family, kind) as probe:
                    probe.connect(target)
                    found = str(probe.getsockname()[0])
                return f"[{found}]" if family == socket.AF_INET6 else found
    return "127.0.0.1"


def without_rdma(protocol: str) -> bool:
    """Whether the protocol needs an RDMA device and this machine has none: Mooncake then silently uses TCP."""
    return protocol == "rdma" and not (INFINIBAND.is_dir() and any(INFINIBAND.iterdir()))
