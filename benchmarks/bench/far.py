"""The store that is far from the engines: a cluster behind a limited link, or the daemon's own with a slow disk."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.setting import BLOCK, MODEL, blocks_of
from tests.lab import connectors, process, slow_disk
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineError
from tests.lab.link import LimitedLink, available
from tests.lab.lmcache import LMCache
from tests.lab.store import Store

BLOCK_BYTES = BLOCK * MODEL.kv_bytes_per_token
# The rate of the link while the store is filled.
FILL_MBIT = 10_000.0
# Of the store with a disk: a few prompts, so that the others are read from disk.
MEMORY = "16MiB"
FILL_S = 600
StartEngine = Callable[[dict[str, Any], dict[str, Any]], Engine]
"""Makes an engine, not yet started, with this `kv_transfer_config` and these further fields of its spec."""


class Far:
    """Store and daemon, filled once; a context manager.

    `staged_bytes`: room for what one pass fetches. `lmcache_python`: LMCache takes part, with this interpreter.
    """

    def __init__(
        self, kind: str, staged_bytes: int, say: Callable[[str], None], lmcache_python: Path | None = None
    ) -> None:
        self.kind, self._say, self._lmcache_python = kind, say, lmcache_python
        self._staging = f"{staged_bytes >> 20}MiB"
        self._stack = contextlib.ExitStack()
        self.link: LimitedLink | None = None
        self.server: LMCache | None = None
        self.engine_options: dict[str, Any] = {}
        self._slow: contextlib.ExitStack | None = None
        self._delay_s = 0.0

    def __enter__(self) -> Far:
        with contextlib.ExitStack() as stack:
            if self.kind == "link":
                self._start_cluster(stack)
            else:
                self._folder = process.scratch("bench-disk")
                stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
                if why_not := slow_disk.available(self._folder):
                    raise EngineError(f"no store can be made far here: {why_not}")
                daemon = Daemon(memory=MEMORY, disk=str(self._folder), staging=self._staging)
                self.daemon = stack.enter_context(daemon)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _start_cluster(self, stack: contextlib.ExitStack) -> None:
        if (why_not := available()) is not None:
            raise EngineError(f"no limited link here: {why_not}")
        self.link = stack.enter_context(LimitedLink(rate_mbit=FILL_MBIT))
        self._store = store = stack.enter_context(Store(memory="3 GB", link=self.link))
        self.engine_options = {"mooncake_config": store.config, "host_ip": store.host_ip}
        self.daemon = stack.enter_context(Daemon(mooncake_config=store.config, staging=self._staging))
        if self._lmcache_python is not None:
            self.server = stack.enter_context(LMCache(self._lmcache_python, link=self.link))

    def fill(self, prompts: Sequence[list[int]], engine: StartEngine) -> None:
        """Compute and store the prompts, each in a step of its own, with an engine that ends afterwards."""
        if not prompts:
            return
        size = sum(len(each) // BLOCK for each in prompts) * BLOCK_BYTES >> 20
        self._say(f"storing the KV of {len(prompts)} prompts, {size} MiB")
        if self.kind == "disk":
            self._fill_disk(prompts, engine)
            return
        wanted = blocks_of(prompts)
        with engine(connectors.upstream(), {}) as filler:
            filler.run(prompts, max_tokens=1, concurrency=1, timeout_s=FILL_S)
            there = self._store.wait_keys(wanted, timeout_s=60)
        if there < wanted:
            raise EngineError(f"the store took {there} of {wanted} blocks")
        if self.server is not None:
            with engine(self.server.connector(eager=False), {"python": self._lmcache_python}) as filler:
                filler.run(prompts, max_tokens=1, concurrency=1, timeout_s=FILL_S)
                there = self.server.wait_objects(wanted, timeout_s=60)
            if there < wanted:
                raise EngineError(f"LMCache's store took {there} of {wanted} chunks")
            self.server.empty_memory()

    def _fill_disk(self, prompts: Sequence[list[int]], engine: StartEngine) -> None:
        """Prompts whose saves found no room are computed once more; then a restart leaves all of it on disk."""
        daemon, wanted, there = self.daemon, blocks_of(prompts), 0
        with engine(connectors.ours(daemon.socket, key_format="vllm"), {}) as filler:
            for _ in range(3):
                filler.run(prompts, max_tokens=1, concurrency=1, timeout_s=FILL_S)
                deadline = time.monotonic() + 10
                while there < wanted and time.monotonic() < deadline:
                    there = sum(int(each["stored_blocks"]) for each in daemon.records("save.done"))
                    time.sleep(0.05)
                if there >= wanted:
                    break
                filler.reset_prefix_cache()
        if there < wanted:
            raise EngineError(f"the disk took {there} of {wanted} blocks")
        daemon.sigterm(60)
        daemon.start()

    def away(self, rate_mbit: float) -> None:
        """Let a fetch take as long as over a link of this rate."""
        if self.link is not None:
            if self.link.rate_mbit != rate_mbit:
                self.link.limit(round(rate_mbit, 3))
            return
        delay_s = 8e-6 * BLOCK_BYTES / rate_mbit
        if self._slow is None or delay_s != self._delay_s:
            if self._slow is not None:
                self._slow.close()
            self._slow, self._delay_s = contextlib.ExitStack(), delay_s
            self._slow.enter_context(slow_disk.SlowDisk(self._folder, delay_s))
            self._stack.push(self._slow)
