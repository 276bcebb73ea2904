"""Starts LMCache's multiprocess server with a Redis behind it, here or beyond a limited link.

LMCache pins other versions of libraries than ours. Server and engines therefore run under an interpreter of their own,
with ``lmcache`` and the same vLLM (docs/BENCHMARKS.md says how to make it). Redis: Debian's ``redis-server``.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from tests.lab import process
from tests.lab.link import LimitedLink
from tests.lab.programs import Programs
from tests.support.waiting import poll

# Tokens of one object: with 64, as with vLLM's blocks of 32, 1,472 of 1,500 tokens can be loaded; with LMCache's own
# default of 256 it would be 1,280.
CHUNK_TOKENS = 64


def missing(python: Path) -> str | None:
    """Why LMCache cannot be run with this interpreter, or None if it can."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed (package redis-server)"
    probe = (
        "import importlib.util as u; print([n for n in ('lmcache', 'vllm') if u.find_spec(n) is None] "
        "or ('' if u.find_spec('tests') is None else 'tests'))"
    )
    try:
        found = subprocess.run([str(python), "-I", "-c", probe], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)
    if found.stdout.strip() == "tests":
        return f"{python} has a package named tests, which hides ours: pip uninstall cufile-python"
    return f"{python} lacks {found.stdout.strip()}" if found.stdout.strip() else None


class LMCache(Programs):
    """Server and Redis. One for all engines here, as one daemon is."""

    name, start_timeout_s, term_s = "lmcache", 180.0, 5.0

    def __init__(self, python: Path, *, link: LimitedLink | None = None) -> None:
        super().__init__()
        self._python = python
        self._link = link
        self._shared_memory = f"kvl-lmcache-{os.getpid()}"
        self._redis_address = ("127.0.0.1" if link is None else link.remote_ip, 0)
        self._port = self._http_port = 0

    def close(self) -> None:
        """End server and Redis and remove their files."""
        super().close()
        Path("/dev/shm", self._shared_memory).unlink(missing_ok=True)

    def connector(self, *, eager: bool) -> dict[str, Any]:
        """vLLM's ``kv_transfer_config`` for an engine of this server; ``eager`` looks up and prefetches at arrival."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self._port,
                "lmcache.mp.eager_prefetch": eager,
            },
        }

    def empty_memory(self) -> None:
        """Forget what stores left in the server's memory, so that loads come from Redis."""
        request = urllib.request.Request(f"http://127.0.0.1:{self._http_port}/cache/clear", data=b"", method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            json.load(answer)

    def wait_objects(self, count: int, timeout_s: float = 30.0) -> int:
        """Wait until Redis holds ``count`` objects; returns how many it holds."""
        poll(lambda: self._objects() >= count, timeout_s)
        return self._objects()

    def _objects(self) -> int:
        with socket.create_connection(self._redis_address, timeout=5) as redis, redis.makefile("rwb") as stream:
            stream.write(b"DBSIZE\r\n")
            stream.flush()
            return int(stream.readline().lstrip(b":"))

    def _start(self, scratch: Path) -> None:
        self._port, self._http_port, prometheus, redis_port = process.free_ports(4)
        self._redis_address = (self._redis_address[0], redis_port)
        host, port = self._redis_address
        redis = ["redis-server", "--bind", host, "--port", str(port), "--protected-mode", "no"]
        redis += ["--save", "", "--appendonly", "no", "--dir", str(scratch)]
        log = scratch / "redis.log"
        self._processes.append(
            process.spawn(redis, log=log) if self._link is None else self._link.run_in_ns(redis, log=log)
        )
        self._wait(self._processes[-1], "redis-server", log, lambda: self._objects() == 0)
        server = [str(self._python), "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
        server += ["--port", str(self._port), "--http-port", str(self._http_port)]
        server += ["--prometheus-port", str(prometheus), "--chunk-size", str(CHUNK_TOKENS)]
        server += ["--l1-size-gb", "1", "--eviction-policy", "LRU"]
        # How an engine on a CPU wants to move its blocks: out of memory that both see.
        server += ["--supported-transfer-mode", "engine_driven", "--no-l1-use-lazy", "--shm-name", self._shared_memory]
        server += ["--l2-adapter", json.dumps({"type": "resp", "host": host, "port": port})]
        log = scratch / "server.log"
        self._processes.append(process.spawn(server, log=log, env={**os.environ, "DO_NOT_TRACK": "1"}))
        self._wait(self._processes[-1], "lmcache server", log, self._healthy)

    def _healthy(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/healthcheck", timeout=5) as answer:
            return bool(answer.status == 200)
