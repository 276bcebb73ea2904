"""A real Mooncake store for engines to share: a master here, the owner of all memory here or behind a limited link.

Engines and daemons join by the JSON file :attr:`Store.config`. They contribute no memory of their own
("standalone-store"), so every value lies with the owner and every load crosses the link.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab import process
from tests.lab.link import LimitedLink
from tests.support.waiting import poll

START_TIMEOUT_S = 30.0


class StoreError(RuntimeError):
    """The master or the owner did not start; the message ends with its log."""


def program(name: str) -> str:
    """Path of a native Mooncake program inside its package."""
    package = importlib.util.find_spec("mooncake")
    if package is None or not package.submodule_search_locations:
        raise StoreError("Mooncake is not installed")
    path = Path(package.submodule_search_locations[0]) / name
    if not os.access(path, os.X_OK):
        path.chmod(path.stat().st_mode | 0o111)
    return str(path)


class Store:
    """Master and owner; use as a context manager. ``disk`` gives the owner a disk tier in that folder.

    With ``owners=2`` a second process holds as much memory again; :attr:`segments` names what each of them holds.
    """

    def __init__(
        self,
        *,
        memory: str = "1 GB",
        link: LimitedLink | None = None,
        disk: Path | None = None,
        local_buffer: str = "256MB",
        lease_ms: int = 10_000,
        owners: int = 1,
    ) -> None:
        self.memory = memory
        self.link = link
        self.disk = disk
        self.local_buffer = local_buffer
        self.lease_ms = lease_ms
        self.owners = owners
        self.segments: list[str] = []
        """Mooncake's name for the memory of each owner, in the order of their start."""
        self.host_ip = link.host_ip if link is not None else "127.0.0.1"
        """The address under which engines on this side take part (``EngineSpec.host_ip``)."""
        self.owner_ip = link.remote_ip if link is not None else "127.0.0.1"
        self.master_address = ""
        self.config = Path()
        """Names the cluster: for ``MOONCAKE_CONFIG_PATH`` and ``kvprefetchd serve --mooncake-config``."""
        self._metrics_port = 0
        self._master: list[str] = []
        self._scratch: Path | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Store:
        self._scratch = process.scratch("store")
        try:
            self._start(self._scratch)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End owner and master and remove their files; a disk tier stays."""
        while self._processes:
            process.reap(self._processes.pop())
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    @property
    def owner_pids(self) -> list[int]:
        return [each.pid for each in self._processes[1:]]

    @property
    def owner_pid(self) -> int:
        """Pid of the process that holds the data; of the first, when there are several."""
        return self._processes[1].pid

    @property
    def master_pid(self) -> int:
        """Pid of the master."""
        return self._processes[0].pid

    def _start(self, scratch: Path) -> None:
        rpc, self._metrics_port, *owner_rpc = process.free_ports(2 + self.owners)
        self.master_address = f"{self.host_ip}:{rpc}"
        offload = [] if self.disk is None else ["--enable_offload=true"]
        self._master = [
            program("mooncake_master"),
            f"--rpc_address={self.host_ip}",
            f"--rpc_port={rpc}",
            f"--metrics_host={self.host_ip}",
            f"--metrics_port={self._metrics_port}",
            f"--default_kv_lease_ttl={self.lease_ms}",
            # On a starved machine the owner's heartbeat can be late by more than the default; its values would be gone.
            "--client_ttl=120",
            *offload,
        ]
        self._processes.append(self._spawn_master(scratch))
        self._start_owners(owner_rpc, offload, scratch)

    def _start_owners(self, ports: list[int], offload: list[str], scratch: Path) -> None:
        """An owner on each port, and then the file that names the cluster."""
        for number, port in enumerate(ports):
            self._start_owner(port, offload, scratch / f"owner{number}.log")
        settings: dict[str, Any] = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": self.master_address,
            "protocol": "tcp",
            "device_name": "",
            "mode": "standalone-store",
            "global_segment_size": 0,
            "local_buffer_size": self.local_buffer,
            "enable_offload": self.disk is not None,
        }
        self.config = scratch / "mooncake.json"
        self.config.write_text(json.dumps(settings, indent=2) + "\n")

    def _spawn_master(self, scratch: Path) -> subprocess.Popen[bytes]:
        log = scratch / "master.log"
        master = process.spawn(self._master, log=log)
        self._wait(master, "mooncake_master", log, self._master_answers)
        return master

    def kill_master(self) -> None:
        """End it; the owner stays."""
        process.reap(self._processes[0])

    def start_master(self) -> None:
        """A new one at the address of the one killed, that knows of nothing; returns when the owner has joined it."""
        assert self._scratch is not None
        self._processes[0] = self._spawn_master(self._scratch)
        log = self._scratch / "owner0.log"
        self._wait(self._processes[1], "its owner", log, lambda: bool(self._page("get_all_segments").split()))

    def _start_owner(self, port: int, offload: list[str], log: Path) -> None:
        owner = [
            program("mooncake_client"),
            f"--master_server_address={self.master_address}",
            "--metadata_server=P2PHANDSHAKE",
            f"--host={self.owner_ip}",
            f"--port={port}",
            "--protocol=tcp",
            f"--global_segment_size={self.memory}",
            *offload,
        ]
        env = {**os.environ, "MC_TCP_BIND_ADDRESS": self.owner_ip}
        if self.disk is not None:
            self.disk.mkdir(parents=True, exist_ok=True)
            env["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] = str(self.disk)
        if self.link is not None:
            self._processes.append(self.link.run_in_ns(owner, log=log, env=env))
        else:
            self._processes.append(process.spawn(owner, log=log, env=env))
        self._wait(
            self._processes[-1],
            "mooncake_client",
            log,
            lambda: len(self._page("get_all_segments").split()) > len(self.segments),
        )
        self.segments += set(self._page("get_all_segments").split()) - set(self.segments)

    def _page(self, path: str) -> str:
        """A page of the master's HTTP server; empty while it is not there."""
        try:
            with urllib.request.urlopen(f"http://{self.host_ip}:{self._metrics_port}/{path}", timeout=5) as page:
                return str(page.read().decode())
        except OSError:
            return ""

    def metric(self, name: str) -> float:
        """One value of the master's Prometheus page; 0.0 while it is not there."""
        for line in self._page("metrics").splitlines():
            if line.startswith(name) and line[len(name) : len(name) + 1] in (" ", "{"):
                return float(line.rpartition(" ")[2])
        return 0.0

    @property
    def keys(self) -> int:
        """Number of values that the store holds."""
        return len(self._page("get_all_keys").split())

    def wait_keys(self, count: int, timeout_s: float = 30.0) -> int:
        """Wait until the store holds ``count`` values (saving goes on after a pass); returns how many it holds."""
        poll(lambda: self.keys >= count, timeout_s)
        return self.keys

    def _master_answers(self) -> bool:
        host, _, port = self.master_address.rpartition(":")
        return process.listens(host, int(port))

    def _wait(self, child: subprocess.Popen[bytes], name: str, log: Path, ready: Callable[[], bool]) -> None:
        if not process.comes_up(child, ready, START_TIMEOUT_S):
            raise StoreError(f"{name} did not start\n{process.tail(log)}")
