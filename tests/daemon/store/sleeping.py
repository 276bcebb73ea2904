"""A store whose nodes, master and transfer engine are a model: what happens while a read sleeps, a test decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from kvprefetch.daemon.store import client
from kvprefetch.daemon.store.client import Store
from kvprefetch.daemon.store.joining import Joined
from kvprefetch.daemon.store.replicas import Place
from kvprefetch.daemon.store.sleeping_reads import SleepingReads
from tests.daemon.store.test_store import SETTINGS
from tests.support.clock import Clock

LEASE_NS = 200_000_000
SIZE = 8  # of a value that is right; its place has room for twice as much


@dataclass(eq=False)
class Transfer:
    """Copies a value's bytes, a few at a time, from what stands in the node's memory at that moment."""

    node: str
    destination: int
    source: int
    size: int
    done: int = 0
    failed: bool = False

    @property
    def status(self) -> int:
        return -1 if self.failed else int(self.done == self.size)


@dataclass
class Node:
    """A node's memory. `state`: alive, stopped (nothing moves, nor fails), or dead.

    `border`: where an area that Mooncake registered ends and another begins; a transfer across it fails.
    """

    memory: bytearray
    state: str = "alive"
    border: int = 1 << 62


@dataclass
class Model:
    """Mooncake's client and its transfer engine, both. `slots`: the reader's memory, by address."""

    nodes: dict[str, Node]
    clock: Clock = field(default_factory=Clock)
    values: dict[str, list[Place]] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)
    slots: bytearray = field(default_factory=lambda: bytearray(64 * SIZE))
    transfers: dict[int, Transfer] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)  # nodes of which the engine has the description
    begun: int = 0
    blocking: list[list[str]] = field(default_factory=list)  # the keys of each get of Mooncake's own
    on_begin: Callable[[], None] = lambda: None
    on_write: Callable[[Transfer], None] = lambda _: None

    # the client

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]:
        for key in keys:
            self.leases[key] = max(self.leases.get(key, 0), self.clock.ns + LEASE_NS)
        return {key: [_replica(place) for place in self.values[key]] for key in keys if key in self.values}

    def batch_get_into(self, keys: list[str], *_: Any) -> list[int]:
        self.blocking.append(keys)
        return [-704 if key not in self.values else -800 for key in keys]

    def get_size(self, key: str) -> int:
        return self.values[key][0].size if key in self.values else -704

    # the engine

    def send_probe(self, node: str) -> int:
        return 0 if self.nodes[node].state == "alive" else -102

    def batch_transfer_async_read(self, node: str, to: list[int], source: list[int], size: list[int]) -> int:
        if self.nodes[node].state == "dead":
            return 0
        assert node in self.known or self.nodes[node].state == "alive", "it waits, and all other transfers with it"
        self.known.add(node)
        self.begun += 1
        across = source[0] < self.nodes[node].border < source[0] + size[0]
        self.transfers[self.begun] = Transfer(node, to[0], source[0], size[0], failed=across)
        self.on_begin()
        return self.begun

    def transfer_check_status(self, number: int) -> int:
        status = self.transfers[number].status  # KeyError: its end was told before, which would crash
        if status:
            del self.transfers[number]
        return status

    # what happens

    def go_on(self, transfer: Transfer, count: int) -> None:
        """Let some bytes of a transfer arrive, or let it fail if its node is dead."""
        node = self.nodes[transfer.node]
        if node.state == "dead":
            transfer.failed = True
        elif node.state == "alive" and not transfer.failed:
            upto = min(transfer.size, transfer.done + count)
            if upto > transfer.done:
                self.on_write(transfer)
            at, source = transfer.destination, transfer.source
            self.slots[at + transfer.done : at + upto] = node.memory[source + transfer.done : source + upto]
            transfer.done = upto

    def put(self, key: str, value: bytes, *places: tuple[str, int]) -> None:
        for node, address in places:
            self.nodes[node].memory[address : address + len(value)] = value
        self.values[key] = [Place(node, address, len(value)) for node, address in places]


def _replica(place: Place) -> Any:
    buffer = SimpleNamespace(transport_endpoint=place.node, buffer_address=place.address, size=place.size)
    memory = SimpleNamespace(buffer_descriptor=buffer)
    return SimpleNamespace(is_memory_replica=lambda: True, get_memory_descriptor=lambda: memory)


def opened(model: Model, patch: pytest.MonkeyPatch, sleep: Callable[[float], object]) -> Store:
    """Return a store on the model that calls `sleep` instead of sleeping."""

    def reads(engine: Any, lease_ns: int) -> SleepingReads:
        return SleepingReads(engine, lease_ns, clock_ns=model.clock.now_ns, sleep=sleep)

    patch.setattr(client, "SleepingReads", reads)
    patch.setattr(client, "holed", lambda *_: [])  # the model's addresses are not this process's
    store = Store(SETTINGS, structlog.get_logger(), clock=model.clock.now_s, lease_ns=LEASE_NS)
    store.adopt(Joined(model, model))
    return store


def made(*names: str) -> Model:
    return Model({name: Node(bytearray(8 * 2 * SIZE)) for name in names})


class Sleeper:
    """Sleeps on the model's clock; at each sleep the next of `steps` happens, or all transfers arrive."""

    def __init__(self, model: Model, *steps: Callable[[], object]) -> None:
        self.model, self.steps, self.slept = model, list(steps), 0

    def __call__(self, seconds: float) -> None:
        self.slept += 1
        assert self.slept < 100_000
        self.model.clock.ns += int(seconds * 1e9)
        if self.steps:
            self.steps.pop(0)()
        else:
            self.all()

    def all(self) -> None:
        for transfer in list(self.model.transfers.values()):
            self.model.go_on(transfer, SIZE)
