"""A load in which fetching takes about as long as waiting: few places, long answers, and a store that is far.

Every way to get the KV is an engine of its own; all are alive at once, take turns with the same requests, and load
from one store.  With root the store is behind a limited link; otherwise it is a disk with a slow open.  Pauses and the
time of a fetch follow this machine: they are shares of the time that a request holds its place with all KV local.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.bench.far import FILL_MBIT, MEMORY
from benchmarks.bench.setting import MODEL
from tests.lab import connectors, process, slow_disk
from tests.lab.checkpoint import make_checkpoint
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineError, EngineSpec
from tests.lab.link import LimitedLink, available
from tests.lab.passes import Pass
from tests.lab.prompts import make_prompts
from tests.lab.store import Store

T = TypeVar("T")

RECOMPUTED, UPSTREAM, ON_DEMAND, PREFETCHED, LOCAL = WAYS = (
    "recomputed",
    "vLLM's Mooncake connector",
    "kvprefetch on demand",
    "kvprefetch",
    "all local",
)
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of an engine.

    Each of the `users` sends a request, reads the answer, and sends the next one after a pause. `pause` is the mean
    pause, `fetch` the time to fetch one prompt's KV alone, both as shares of the time that a request holds its place.
    """

    requests: int = 30
    rounds: int = 3
    users: int = 3
    places: int = 2
    prompt_tokens: int = 1900
    output_tokens: tuple[int, int] = (100, 160)
    pause: float = 0.3
    fetch: float = 0.3
    seed: int = 7

    def outputs(self) -> list[int]:
        """Output tokens of each request."""
        source = random.Random(self.seed)
        return [source.randint(*self.output_tokens) for _ in range(self.requests)]

    def pauses_s(self, place_s: float) -> list[float]:
        """Seconds from the end of each request to its user's next one; a request holds its place for `place_s`."""
        source = random.Random(self.seed)
        return [source.expovariate(1 / (self.pause * place_s)) for _ in range(self.requests)]

    def of_round(self, number: int, each: Sequence[T]) -> list[T]:
        """The part of `each` request's that this round serves."""
        return list(each[number :: self.rounds])

    @property
    def hit_blocks(self) -> int:
        """Blocks of a prompt that can be loaded: at least one token is computed."""
        return (self.prompt_tokens - 1) // BLOCK

    @property
    def fetched_bytes(self) -> int:
        """KV of one prompt."""
        return self.hit_blocks * BLOCK * MODEL.kv_bytes_per_token


class FarStore:
    """The daemon, the engines, and the store that is far from them."""

    def __init__(self, load: Load, work: Path, say: Callable[[str], None]) -> None:
        self.load, self.say, self._work = load, say, work
        prompts = make_prompts(load.requests + 2 * load.places, load.prompt_tokens, vocab=MODEL.vocab, seed=load.seed)
        self.prompts, self.warm_up = prompts[: load.requests], prompts[load.requests :]
        self.engines: dict[str, Engine] = {}
        self.place_s = 0.0
        self.fetch_s = 0.0
        why_not = available()
        self.link = LimitedLink(rate_mbit=FILL_MBIT) if why_not is None else None
        if why_not is not None:
            say(f"no limited link here ({why_not}): the store is a slow disk, which vLLM's own connector cannot read")
        self.ways = tuple(way for way in WAYS if self.link is not None or way != UPSTREAM)

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Start everything, fill the store, and make it far."""
        with contextlib.ExitStack() as stack:
            if self.link is not None:
                self._behind_link(stack, self.link)
            else:
                self._on_disk(stack)
            yield

    def _behind_link(self, stack: contextlib.ExitStack, link: LimitedLink) -> None:
        stack.enter_context(link)
        store = stack.enter_context(Store(link=link))
        daemon = self.daemon = stack.enter_context(Daemon(mooncake_config=store.config, staging=self._staging))
        self._start_engines(stack, {"mooncake_config": store.config, "host_ip": store.host_ip})
        self._fill(daemon)
        self.fetch_s = self.load.fetch * self.place_s
        link.limit(8e-6 * self.load.fetched_bytes / self.fetch_s)

    def _on_disk(self, stack: contextlib.ExitStack) -> None:
        folder = process.scratch("far-store")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if why_not := slow_disk.available(folder):
            raise EngineError(f"no store can be made far here: {why_not}")
        daemon = self.daemon = stack.enter_context(Daemon(memory=MEMORY, disk=str(folder), staging=self._staging))
        self._start_engines(stack, {})
        self._fill(daemon)
        daemon.sigterm(60)  # a restart leaves all of it on disk
        daemon.start()
        self.fetch_s = self.load.fetch * self.place_s
        stack.enter_context(slow_disk.SlowDisk(folder, self.fetch_s / self.load.hit_blocks))
        if daemon.wait_record("engine.attached", count=2, timeout_s=30) is None:
            raise EngineError("the engines did not come back to the daemon after its restart")

    @property
    def _staging(self) -> str:
        """Memory for sixteen prompts."""
        return f"{16 * self.load.fetched_bytes >> 20}MiB"

    def _start_engines(self, stack: contextlib.ExitStack, options: dict[str, Any]) -> None:
        load, socket = self.load, self.daemon.socket
        # As vLLM's own connector, they wait for whatever the store has: recomputing would hide what waiting costs.
        ours = {"wait_policy": "wait", "key_format": "vllm"}
        transfers = {
            UPSTREAM: connectors.upstream(lookup_async=True),
            ON_DEMAND: connectors.ours(socket, hint_on_arrival=False, **ours),
            PREFETCHED: connectors.ours(socket, **ours),
        }
        per_request = (load.prompt_tokens + load.output_tokens[1]) // BLOCK + 1
        spec = EngineSpec(
            model=make_checkpoint(self._work / "checkpoints", MODEL),
            own_worker=False,
            block_size=BLOCK,
            max_model_len=per_request * BLOCK,
            max_num_batched_tokens=per_request * BLOCK,
            max_num_seqs=load.places,
            num_gpu_blocks=(load.places + 2) * per_request,
            **options,
        )
        self.say("starting a vLLM engine: without connector")
        bare = stack.enter_context(Engine(spec.but(num_gpu_blocks=4 * load.requests * per_request)))
        self.engines = {RECOMPUTED: bare, LOCAL: bare}
        for way, transfer in transfers.items():
            if way in self.ways:
                self.say(f"starting a vLLM engine: {way}")
                self.engines[way] = stack.enter_context(Engine(spec.but(kv_transfer=transfer)))

    def _fill(self, daemon: Daemon) -> None:
        """Store all prompts, and compute them in the engine that has all local, which then serves at its own pace."""
        load, bare = self.load, self.engines[LOCAL]
        stored = [*self.warm_up, *self.prompts]
        self.say(f"storing the KV of {len(stored)} prompts, {len(stored) * load.fetched_bytes >> 20} MiB")
        self._store(daemon, stored)
        bare.run(self.prompts, max_tokens=1, concurrency=1, timeout_s=180)
        few = load.of_round(0, self.prompts)
        result = bare.run(few, max_tokens=load.of_round(0, load.outputs()), concurrency=load.places, timeout_s=180)
        self.place_s = load.places * result.total_s / len(few)
        for engine in self.engines.values():  # the first requests are slower: code and memory are cold
            engine.run(self.warm_up, max_tokens=8, concurrency=load.places)

    def _store(self, daemon: Daemon, prompts: Sequence[list[int]]) -> None:
        """Have the engine compute and save the prompts; what it had no room to save, on a busy machine, once more."""
        engine, wanted, there = self.engines[PREFETCHED], len(prompts) * self.load.hit_blocks, 0
        for _ in range(3):
            engine.run(prompts, max_tokens=1, concurrency=1, timeout_s=180)
            deadline = time.monotonic() + 10
            while there < wanted and time.monotonic() < deadline:
                there = sum(int(each["stored_blocks"]) for each in daemon.records("save.done"))
                time.sleep(0.05)
            if there >= wanted:
                return
            engine.reset_prefix_cache()
        raise EngineError(f"the store took {there} of {wanted} blocks")

    def serve(self, way: str, number: int) -> Pass:
        """Serve the requests of a round, from an empty prefix cache but for LOCAL."""
        engine, load = self.engines[way], self.load
        if engine.spec.kv_transfer is not None and not engine.reset_prefix_cache():
            self.say(f"WARNING: the prefix cache could not be emptied before: {way}")
        return engine.run(
            load.of_round(number, self.prompts),
            max_tokens=load.of_round(number, load.outputs()),
            concurrency=load.users,
            pauses_s=load.of_round(number, load.pauses_s(self.place_s)),
            sampling={"skip_reading_prefix_cache": True} if way == RECOMPUTED else {},
            timeout_s=300,
        )
