"""A closed loop behind a full queue, every prompt in a store behind a limited link: the load of `engine_thread`.

Every variant is an engine of its own, all alive at once, so that passes can alternate between them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.lab import connectors
from tests.lab.checkpoint import PEERS
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec, KVTransfer
from tests.lab.link import LimitedLink, available
from tests.lab.passes import Pass
from tests.lab.prompts import make_prompts
from tests.lab.store import Store

FILLER = "upstream-async"  # fills the store: what ours loads is then also what another wrote


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run."""

    prompts: int = 64
    prompt_tokens: int = 1500
    output_tokens: int = 32
    output_spread: int = 16
    outstanding: int = 16
    max_num_seqs: int = 4
    block_size: int = 32
    pool_blocks: int = 200
    max_num_batched_tokens: int = 2048
    link_mbit: float = 1000
    staging: str = "128MB"

    def output_lengths(self) -> list[int]:
        """Output tokens of each prompt: `output_tokens` give or take up to `output_spread`, seeded.

        Were all alike, an engine whose first requests start together would end and start requests together to the end,
        with their prefills in one step: a quarter of the steps that any engine needs whose requests arrive apart.
        """
        source = random.Random(0)
        low, high = self.output_tokens - self.output_spread, self.output_tokens + self.output_spread
        return [source.randint(low, high) for _ in range(self.prompts)]

    @property
    def hit_tokens(self) -> int:
        """Tokens of a prompt that can be loaded: full blocks, and at least one token stays to be computed."""
        return (self.prompt_tokens - 1) // self.block_size * self.block_size


class Bench:
    """The parts that are alive during one start."""

    def __init__(self, setting: Setting, model: Path, say: Callable[[str], None]) -> None:
        self.setting = setting
        self.model = model
        self.say = say
        self.prompts = make_prompts(setting.prompts, setting.prompt_tokens, vocab=PEERS.vocab)
        self.engines: dict[str, Engine] = {}
        self.link: LimitedLink | None = None
        self.daemon: Daemon | None = None

    def spec(self, store: Store, transfer: KVTransfer) -> EngineSpec:
        """The engine of a variant: all alike but for the connector."""
        setting = self.setting
        return EngineSpec(
            model=self.model,
            dtype=PEERS.dtype,
            block_size=setting.block_size,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            num_gpu_blocks=setting.pool_blocks,
            kv_transfer=transfer,
            mooncake_config=store.config,
            host_ip=store.host_ip,
        )

    @contextlib.contextmanager
    def started(self, variants: list[str]) -> Iterator[None]:
        """Start everything, and fill the store."""
        with contextlib.ExitStack() as stack:
            self.link = self._limited_link(stack)
            store = stack.enter_context(Store(link=self.link))
            transfers = {FILLER: connectors.upstream(lookup_async=True)}
            if "kvprefetch" in variants:
                daemon = Daemon(mooncake_config=store.config, staging=self.setting.staging)
                self.daemon = stack.enter_context(daemon)
                transfers["kvprefetch"] = connectors.ours(daemon.socket, wait_policy="adaptive", key_format="vllm")
            for variant in dict.fromkeys([*variants, FILLER]):
                self.say(f"starting the engine: {variant}")
                self.engines[variant] = stack.enter_context(Engine(self.spec(store, transfers[variant])))
            self._fill(store)
            yield

    def _limited_link(self, stack: contextlib.ExitStack) -> LimitedLink | None:
        why_not = available()
        if why_not is not None:
            self.say(f"WARNING: no limited link ({why_not}): the store is on loopback, loads cost less than stated")
            return None
        return stack.enter_context(LimitedLink(rate_mbit=self.setting.link_mbit))

    def _fill(self, store: Store) -> None:
        self.say(f"filling the store with {self.setting.prompts} prompts, by {FILLER}")
        self.engines[FILLER].run(self.prompts, max_tokens=1, concurrency=1, timeout_s=600)
        expected = self.setting.prompts * self.setting.hit_tokens // self.setting.block_size
        stored = store.wait_keys(expected)
        if stored != expected:
            self.say(f"WARNING: the store holds {stored} values instead of {expected}")

    def serve(self, variant: str) -> Pass:
        """One pass of all prompts, from an empty prefix cache."""
        engine = self.engines[variant]
        if not engine.reset_prefix_cache():
            self.say(f"WARNING: the prefix cache of {variant} could not be emptied")
        return engine.run(
            self.prompts,
            max_tokens=self.setting.output_lengths(),
            concurrency=self.setting.outstanding,
            timeout_s=600,
        )
