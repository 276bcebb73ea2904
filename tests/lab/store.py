"""Starts a real Mooncake store: a master here, and storage nodes here or behind a limited link.

Engines and daemons join it by the JSON file :attr:`Store.config`. They contribute no memory ("standalone-store"), so
every value lies on a storage node and every load crosses the link.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from tests.lab import process
from tests.lab.link import LimitedLink
from tests.lab.programs import Programs, StartError
from tests.support.waiting import poll


def program(name: str) -> str:
    """Path of a native Mooncake program inside its package."""
    package = importlib.util.find_spec("mooncake")
    if package is None or not package.submodule_search_locations:
        raise StartError("Mooncake is not installed")
    path = Path(package.submodule_search_locations[0]) / name
    if not os.access(path, os.X_OK):
        path.chmod(path.stat().st_mode | 0o111)
    return str(path)


class Store(Programs):
    """A master and its storage nodes. Each of the ``nodes`` holds ``memory``.

    With ``disk`` a node also stores values in that folder, which stays.
    """

    name = "store"

    def __init__(
        self,
        *,
        memory: str = "1 GB",
        link: LimitedLink | None = None,
        disk: Path | None = None,
        local_buffer: str = "256MB",
        lease_ms: int = 10_000,
        nodes: int = 1,
    ) -> None:
        super().__init__()
        self.memory = memory
        self.link = link
        self.disk = disk
        self.local_buffer = local_buffer
        self.lease_ms = lease_ms
        self.nodes = nodes
        self.segments: list[str] = []
        """Mooncake's name for the memory of each storage node, in the order of their start."""
        self.host_ip = link.host_ip if link is not None else "127.0.0.1"
        """The address under which engines on this side take part (``EngineSpec.host_ip``)."""
        self.node_ip = link.remote_ip if link is not None else "127.0.0.1"
        self.master_address = ""
        self.config = Path()
        """Names the cluster: for ``MOONCAKE_CONFIG_PATH`` and ``kvprefetchd serve --mooncake-config``."""
        self._metrics_port = 0
        self._master: list[str] = []

    @property
    def node_pids(self) -> list[int]:
        return [each.pid for each in self._processes[1:]]

    @property
    def node_pid(self) -> int:
        """Pid of the first storage node."""
        return self._processes[1].pid

    @property
    def master_pid(self) -> int:
        """Pid of the master."""
        return self._processes[0].pid

    def _start(self, scratch: Path) -> None:
        rpc, self._metrics_port, *node_rpc = process.free_ports(2 + self.nodes)
        self.master_address = f"{self.host_ip}:{rpc}"
        offload = [] if self.disk is None else ["--enable_offload=true"]
        on_evict = [] if self.disk is None else ["--offload_on_evict=true"]
        self._master = [
            program("mooncake_master"),
            f"--rpc_address={self.host_ip}",
            f"--rpc_port={rpc}",
            f"--metrics_host={self.host_ip}",
            f"--metrics_port={self._metrics_port}",
            f"--default_kv_lease_ttl={self.lease_ms}",
            # On a starved machine a node's heartbeat may come so late that the default drops its values.
            "--client_ttl=120",  # 0.3.14 takes it for both of its bounds
            *offload,
            *on_evict,
        ]
        self._processes.append(self._spawn_master(scratch))
        self._start_nodes(node_rpc, offload, scratch)

    def _start_nodes(self, ports: list[int], offload: list[str], scratch: Path) -> None:
        """Start a storage node on each port, then write the file that names the cluster."""
        for number, port in enumerate(ports):
            self._start_node(port, offload, scratch / f"node{number}.log")
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
        """End the master; the storage nodes stay."""
        process.reap(self._processes[0])

    def start_master(self, *, joined: bool = True) -> None:
        """Start an empty master at the same address; return when the first storage node has joined it, if any runs."""
        assert self._scratch is not None
        self._processes[0] = self._spawn_master(self._scratch)
        if not joined:
            return
        log = self._scratch / "node0.log"
        self._wait(self._processes[1], "a storage node", log, lambda: bool(self._page("get_all_segments").split()))

    def kill_nodes(self) -> None:
        """End the storage nodes; the master knows of that after its time for them."""
        while len(self._processes) > 1:
            process.reap(self._processes.pop())
        self.segments = []

    def start_node(self) -> None:
        """Start one storage node more."""
        assert self._scratch is not None
        [port] = process.free_ports(1)
        self._start_node(port, [], self._scratch / f"node{len(self._processes) - 1}.log")

    def _start_node(self, port: int, offload: list[str], log: Path) -> None:
        node = [
            program("mooncake_client"),
            f"--master_server_address={self.master_address}",
            "--metadata_server=P2PHANDSHAKE",
            f"--host={self.node_ip}",
            f"--port={port}",
            "--protocol=tcp",
            f"--global_segment_size={self.memory}",
            *offload,
        ]
        env = {**os.environ, "MC_TCP_BIND_ADDRESS": self.node_ip}
        if self.disk is not None:
            self.disk.mkdir(parents=True, exist_ok=True)
            env["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] = str(self.disk)
        if self.link is not None:
            self._processes.append(self.link.run_in_ns(node, log=log, env=env))
        else:
            self._processes.append(process.spawn(node, log=log, env=env))
        self._wait(
            self._processes[-1],
            "mooncake_client",
            log,
            lambda: len(self._page("get_all_segments").split()) > len(self.segments),
        )
        self.segments += set(self._page("get_all_segments").split()) - set(self.segments)

    @property
    def http(self) -> str:
        """HOST:PORT of the master's HTTP interface."""
        return f"{self.host_ip}:{self._metrics_port}"

    def _page(self, path: str) -> str:
        """A page of the master's HTTP server; empty while it is not there."""
        try:
            with urllib.request.urlopen(f"http://{self.http}/{path}", timeout=5) as page:
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
    def names(self) -> set[str]:
        """The keys of all values that the store holds."""
        return set(self._page("get_all_keys").split())

    @property
    def keys(self) -> int:
        """Number of values that the store holds."""
        return len(self.names)

    def wait_keys(self, count: int, timeout_s: float = 30.0) -> int:
        """Wait until the store holds ``count`` values (saving goes on after a pass); returns how many it holds."""
        poll(lambda: self.keys >= count, timeout_s)
        return self.keys

    def _master_answers(self) -> bool:
        host, _, port = self.master_address.rpartition(":")
        return process.listens(host, int(port))
