"""A real Mooncake cluster with high availability: an etcd, several masters, and storage nodes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.lab import process
from tests.lab.programs import StartError
from tests.lab.store import Store, program
from tests.support.waiting import poll

MASTERS = 2
LEADER_TIMEOUT_S = 60.0


def etcd() -> str | None:
    """Path of the program etcd; None where it is not installed."""
    return shutil.which("etcd") or shutil.which("etcd", path=str(Path(sys.executable).parent))


class HighlyAvailableStore(Store):
    """As :class:`Store`, with its master found through an etcd. ``lead`` is the number of the master that leads.

    A master leads six seconds after its start: for five of them it waits for a former leader to notice.
    """

    def __init__(self, *, memory: str = "1 GB", nodes: int = 1, options: tuple[str, ...] = ()) -> None:
        super().__init__(memory=memory, nodes=nodes)
        self.options = options
        """Of each master, beside those that make it one of several."""
        self.masters: list[subprocess.Popen[bytes]] = []
        self.etcd_port = 0
        self._etcd: list[str] = []
        self._masters: list[list[str]] = []
        self._metrics_ports: list[int] = []
        self.lead = 0

    def _start(self, scratch: Path) -> None:
        ports = process.free_ports(2 + 2 * MASTERS + self.nodes)
        self.etcd_port, peers, *ports = ports
        rpc, self._metrics_ports, node_ports = ports[:MASTERS], ports[MASTERS : 2 * MASTERS], ports[2 * MASTERS :]
        found = etcd()
        if found is None:
            raise StartError("etcd is not installed")
        url, peer = f"http://{self.host_ip}:{self.etcd_port}", f"http://{self.host_ip}:{peers}"
        self._etcd = [
            found,
            f"--data-dir={scratch / 'etcd'}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]
        self.master_address = f"etcd://{self.host_ip}:{self.etcd_port}"
        self.start_etcd()
        for port, metrics in zip(rpc, self._metrics_ports, strict=True):
            self._masters.append(
                [
                    program("mooncake_master"),
                    "--enable_ha=true",
                    f"--etcd_endpoints={self.host_ip}:{self.etcd_port}",
                    f"--rpc_address={self.host_ip}",
                    f"--rpc_port={port}",
                    f"--metrics_host={self.host_ip}",
                    f"--metrics_port={metrics}",
                    *self.options,
                ]
            )
        self.start_masters()
        self.wait_leader()
        self._start_nodes(node_ports, [], scratch)

    def start_etcd(self) -> None:
        """Start it, with what it knew; returns when it listens."""
        assert self._scratch is not None
        log = self._scratch / "etcd.log"
        self._processes[:1] = [process.spawn(self._etcd, log=log)]  # the first, where others have their master
        self._wait(self._processes[0], "etcd", log, lambda: process.listens(self.host_ip, self.etcd_port))

    def kill_etcd(self) -> None:
        """End it with SIGKILL; its files stay."""
        process.reap(self._processes[0])

    @property
    def etcd_pid(self) -> int:
        return self._processes[0].pid

    @property
    def master_pid(self) -> int:
        """Pid of the master that led when it was last asked."""
        return self.masters[self.lead].pid

    @property
    def standby_http(self) -> str:
        """Where a master that does not lead answers over HTTP."""
        return f"{self.host_ip}:{self._metrics_ports[self.lead - 1]}"

    def kill_master(self) -> None:
        """SIGKILL for the one that leads."""
        process.reap(self.masters[self.lead])

    def start_masters(self) -> None:
        """All of them, none of which runs."""
        self.masters = [process.spawn(each, log=self._log(number)) for number, each in enumerate(self._masters)]

    def wait_leader(self, timeout_s: float = LEADER_TIMEOUT_S) -> int:
        """Wait until one leads and serves; returns its number."""
        if not poll(self._leads, timeout_s):
            logs = (process.tail(self._log(each)) for each in range(MASTERS))
            raise StartError("\n".join(["no master leads", *logs]))
        return self.lead

    def _leads(self) -> bool:
        for number, port in enumerate(self._metrics_ports):
            self._metrics_port = port
            if self.masters[number].poll() is None and '"service_ready":true' in self._page("health"):
                self.lead = number
                return True
        return False

    def close(self) -> None:
        for master in self.masters:
            process.reap(master)
        super().close()

    def _log(self, number: int) -> Path:
        assert self._scratch is not None
        return self._scratch / f"master{number}.log"
