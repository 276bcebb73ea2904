"""The private Mooncake master, and the settings of a store beside it, for a daemon with no cluster configured.

The daemon itself holds the DRAM segment and the disk (Mooncake's bucket backend, which finds its data again after a
restart; the offset-allocator backend does not).  A bucket has one value: Mooncake never writes a partly filled one, so
with more the last values put would never reach the disk, and eviction and removal would take strangers with them.

A value is on disk after the first heartbeat of the disk (1 s) that finds it complete, plus the time to write it.  A
clean stop that calls `Store.flush` first loses nothing; a SIGKILL of the daemon loses the puts of about the last two
heartbeats.  `Store.open` finds everything older.  Mooncake does not fsync: a power failure can lose what the kernel had
not written back.

While memory is full of values not yet on disk, puts answer NO_SPACE; a value that waits for the disk is never evicted.
Room returns about three seconds later (heartbeat, then the lease that writing to disk takes on each value).
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ..config.model import ConfigError
from . import loopback
from .disk import Disk, DiskSpec
from .disk_watch import MIN_FREE_BYTES
from .errors import LIBRARIES, StoreError
from .fill import FillWatch, StoreFill
from .settings import MooncakeSettings
from .untouched import Untouched

_UNIT_BYTES = 16 << 20  # one allocation unit of Mooncake's segment; set-up refuses 8 MiB
_DISK_LEASE_MS = 2000
_START_TIMEOUT_S = 10.0
_ATTEMPTS = 5
_SAID_CHARACTERS = 200
_WRONG = re.compile(r"^[EF]\d{4} |what\(\):|fatal error:")  # glog's levels, C++'s and Go's last words

# Runs in the child and then becomes the master: the death signal outlives execve. A parent that died before the prctl
# would never send it, so the child compares the parent's pid afterwards. PR_SET_PDEATHSIG is 1 (linux/prctl.h). Not a
# preexec_fn: that runs Python between fork and exec, which can deadlock in a process with threads. A process group of
# its own, because Ctrl-C is for us: without its master the store writes nothing to disk any more.
_LAUNCH = (
    "import ctypes,os,sys;os.setpgid(0,0);ctypes.CDLL(None).prctl(1,9,0,0,0);"
    "os.getppid()==int(sys.argv[1]) or os._exit(1);"
    "os.execv(sys.argv[2],sys.argv[2:])"
)


class EmbeddedMaster:
    """A `mooncake_master` process on loopback that dies with this process, even by SIGKILL.

    `memory_bytes` is the DRAM segment of the store in this process (raised to whole units of 16 MiB).  `stopping` ends
    a start.  With `anywhere` the master starts also where other machines could reach the store (loopback.py).
    """

    def __init__(
        self,
        memory_bytes: int,
        disk: DiskSpec | None,
        log: Any,
        *,
        master_port: int | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.anywhere = False
        self._memory_bytes = -(-max(memory_bytes, 1) // _UNIT_BYTES) * _UNIT_BYTES
        self._disk_spec = disk
        self._disk: Disk | None = None  # from `start` to `stop`
        self._log = log
        self._port = master_port
        self._stopping = stopping
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._fill: FillWatch | None = None
        self._untouched: Untouched | None = None
        self.http = ""  # host:port of its HTTP interface, once it was started
        self._said = self._wrong = ""  # its last line, and its first error

    @property
    def pid(self) -> int | None:
        """Process id of the master, None before `start` and after `stop`."""
        return self._process.pid if self._process else None

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def disk_values(self) -> int:
        """How many values were on the disk at its start, whose index the store's opening reads."""
        return self._disk.values if self._disk is not None else 0

    def opening(self) -> Untouched:
        """Return the account of the memory that a store takes next; the caller says when it `opened`."""
        self._untouched = Untouched(self._memory_bytes)
        return self._untouched

    @property
    def untouched_bytes(self) -> int:
        """How much of the store's memory has no pages yet, as of a few seconds ago."""
        return self._untouched.bytes if self._untouched is not None else self._memory_bytes

    def _look(self) -> None:
        if self._untouched is not None:
            self._untouched.look()

    def disk_fault(self) -> str:
        """Say why nothing can be kept on disk, in one line; empty when it can, and without a disk."""
        return disk.watch.fault if (disk := self._disk) is not None else ""

    def disk_works(self) -> bool:
        """Try the disk now; False without one."""
        return (disk := self._disk) is not None and not disk.watch.probe()

    def fill(self) -> StoreFill | None:
        """Return how full the store was at most a few seconds ago; None while its master does not say it."""
        now = self._fill.now if self._fill is not None else None
        free_bytes = disk.watch.free_bytes if (disk := self._disk) is not None else None
        if now is None or free_bytes is None:
            return now
        # The configured bound, or Mooncake's own of 2 TiB, may be beyond what the file system has.
        room = now.disk_used_bytes + max(0, free_bytes - MIN_FREE_BYTES)
        return now.model_copy(update={"disk_bytes": min(now.disk_bytes, room)})

    def tick(self) -> None:
        """Called a few times a second."""
        if self._disk is not None:
            self._disk.tick()

    def start(self) -> MooncakeSettings:
        """Start the master, once, and wait until it answers; return the settings for one Store in this process.

        Call it on the main thread: the kernel sends the death signal when the *thread* that forked ends. Call it before
        any Store.open: it sets MOONCAKE_* and MC_* variables, which Mooncake reads when it is loaded. Raises
        StoreError, also when `stopping` says so meanwhile, and ConfigError.
        """
        if not self.anywhere:
            _check_confined()
        os.environ["MC_TCP_BIND_ADDRESS"] = "127.0.0.1"
        if self._disk_spec is not None:
            self._disk = Disk(self._disk_spec, self._log)
            os.environ.update(self._disk.environment())
        binary = master_program()
        for attempt in range(_ATTEMPTS):
            port, metrics_port = free_ports(self._port)
            try:
                self._spawn(binary, port, metrics_port)
            except OSError as error:  # no process can be had
                self._wrong = str(error)
                break
            if self._listens(port):
                self._log.info("master.started", pid=self.pid, port=port, memory_bytes=self._memory_bytes)
                self._fill = FillWatch(self.http, self._look)
                return self._settings(port)
            self._log.debug("master.retried", port=port, attempt=attempt)
            self._end()
            if self._stopping():
                break
        self.stop()
        why = self._wrong or self._said or "it said nothing"
        cure = f": {LIBRARIES}" if "shared libraries" in why else ""
        raise StoreError(f"mooncake_master did not start: {why}{cure}")

    def stop(self) -> None:
        """End the master, at once: it keeps nothing, and takes most of a second to end by itself. Idempotent."""
        self._end()
        if self._fill is not None:
            self._fill.close()
        if self._disk is not None:
            self._disk.close()
            self._disk = None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        by_itself = {} if (code := process.poll()) is None else {"code": code}
        process.kill()
        process.wait()
        if self._reader is not None:
            self._reader.join(1.0)
        self._log.info("master.stopped", pid=process.pid, **by_itself)

    def _spawn(self, binary: str, port: int, metrics_port: int) -> None:
        self.http = f"127.0.0.1:{metrics_port}"
        command = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), binary]
        command += ["--rpc_address=127.0.0.1", f"--rpc_port={port}", "--rpc_thread_num=4"]
        command += ["--metrics_host=127.0.0.1", f"--metrics_port={metrics_port}", "--logtostderr"]
        if self._disk is not None:
            # Writing a value to disk takes a lease on it, and memory under lease cannot be reused: the default of 10 s
            # would let the segment turn over only once in 11 s.
            command += ["--enable_offload=true", f"--default_kv_lease_ttl={_DISK_LEASE_MS}"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), name="kvprefetch-master-log", daemon=True
        )
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._said = line.strip()[:_SAID_CHARACTERS]
                if not self._wrong and _WRONG.search(line):
                    self._wrong = self._said
                self._log.debug("master.said", line=line.rstrip())

    def _listens(self, port: int) -> bool:
        """Wait until our child listens there. A connection would not do: a stranger may have taken the port first."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self.alive() and not self._stopping() and time.monotonic() < deadline:
            if self.pid is not None and port in loopback.listening_ports(self.pid):
                return True
            time.sleep(0.02)
        return False

    def _settings(self, port: int) -> MooncakeSettings:
        return MooncakeSettings(
            metadata_server="P2PHANDSHAKE",
            master_server_address=f"127.0.0.1:{port}",
            protocol="tcp",
            device_name="",
            global_segment_size=self._memory_bytes,
            tenant_id="default",
            enable_ssd_offload=self._disk is not None,
            ssd_offload_path=str(self._disk.path) if self._disk else "",
            private=self._port is None,
        )


def master_program() -> str:
    spec = importlib.util.find_spec("mooncake")  # finds the package without importing it
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "mooncake_master"
        if os.access(path, os.X_OK, effective_ids=True):  # what exec goes by
            return str(path)
    raise StoreError(
        "mooncake_master is not installed: install kvprefetch with daemon-cpu, daemon-cuda12 or daemon-cuda13"
    )


def _check_confined() -> None:
    """Raise ConfigError where other machines could reach the store's sockets."""
    if (why := loopback.refusal()) and (others := loopback.interfaces()):
        raise ConfigError(
            "store_reach: other machines could reach the embedded store's memory, and this kernel lets its sockets "
            f"neither be bound to the loopback interface nor be filtered: {why}: store_reach='local' "
            f"interfaces={','.join(others)[:100]}: "
            "use Linux 5.7 or later, a network namespace with loopback only, or store_reach='any' behind a firewall"
        )


def free_ports(asked: int | None) -> tuple[int, int]:
    """Return the asked port, or a free one, and another free one. Both are open together, so they differ."""
    try:
        first = socket.create_server(("127.0.0.1", asked or 0))
    except OSError as error:
        kind = StoreError if error.errno == errno.EADDRINUSE else ConfigError
        why = f"{os.strerror(error.errno or 0)}: master_port={asked}; another one, or none for a free one"
        raise kind(f"master_port: cannot be bound: {why}") from None
    with first, socket.create_server(("127.0.0.1", 0)) as second:
        return int(first.getsockname()[1]), int(second.getsockname()[1])
