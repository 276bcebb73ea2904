"""Doubles around promotion: slot tables and claims as the engine sees them, and a device that copies on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvprefetch.daemon.planning.promotion import CopyOrder, Promotions
from kvprefetch.daemon.planning.requests import Key, Request
from kvprefetch.kv.prompts import Prompt
from tests.daemon.planning.support import ONE_GROUP

HOST = 100  # host slots come first


def request_of(number: int, names: Sequence[int], priority: int = 0) -> Request:
    hashes = b"".join(name.to_bytes(8, "big") for name in names)
    prompt = Prompt(ONE_GROUP, hashes, range(len(names)), room=0, staged=lambda _: False)
    return Request((number, 1), prompt, priority, number, prompt.names)


@dataclass
class Tables:
    """Slot tables and claims, as the engine sees them.

    `claim_next`: the engine claims this one between the next move and the look after it.
    """

    entries: dict[Key, list[int]] = field(default_factory=dict)
    claims: dict[Key, list[int] | None] = field(default_factory=dict)
    claim_next: Key | None = None
    looks: int = 0

    def move(self, key: Key, entries: Sequence[tuple[int, int]]) -> bool:
        if entries and self.claim_next == key:  # before the fence: it still reads the old entries
            self.claim(key)
        for block, slot in entries:
            self.entries[key][block] = slot
        self.looks += 1
        return self.claims[key] is None

    def claim(self, key: Key) -> None:
        self.claims[key] = list(self.entries[key])
        self.claim_next = None


class Device:
    """Promotions over the tables, with a device that copies on demand."""

    def __init__(self, count: int, chunk: int = 4) -> None:
        self.tables = Tables()
        self.promotions = Promotions(HOST, count, self.tables, chunk_blocks=chunk)
        self.host: dict[int, int] = {}  # host slot -> name
        self.slots: dict[int, int] = {}  # device slot -> name
        self.orders: list[CopyOrder] = []
        self.live: dict[Key, Request] = {}

    def show(self, number: int, names: Sequence[int], host: int = 0) -> Request:
        """Publish a request with these blocks, in host slots from `host` on."""
        request = request_of(number, names)
        self.publish(request, 0, range(host, host + len(names)), names)
        return request

    def publish(self, request: Request, start: int, slots: Sequence[int], names: Sequence[int]) -> None:
        self.live[request.key] = request
        self.host.update(zip(slots, names, strict=True))
        entries = self.promotions.published(request, start, slots)
        self.tables.entries.setdefault(request.key, []).extend(entries)
        self.tables.claims.setdefault(request.key, None)

    def entries(self, request: Request) -> list[int]:
        return self.tables.entries[request.key]

    def order(self) -> CopyOrder | None:
        order = self.promotions.next_order()
        if order is not None:
            self.orders.append(order)
        return order

    def copy(self, at: int = 0, *, ok: bool = True) -> None:
        order = self.orders.pop(at)
        for host, device in order.slots:
            self.slots[device] = self.host[host] if ok else -1
        self.promotions.copied(order.number, ok=ok)

    def tick(self) -> None:
        self.promotions.tick()

    def close(self) -> None:
        self.promotions.close()

    def promote(self) -> None:
        while self.order() is not None:
            self.copy()

    def drop(self, key: Key) -> None:
        del self.live[key], self.tables.entries[key], self.tables.claims[key]
        self.promotions.dropped(key)

    def on_device(self, *requests: Request) -> list[int]:
        """Count the entries of each request that name device slots."""
        return [sum(slot >= HOST for slot in self.entries(request)) for request in requests]

    def free_and_idle(self) -> tuple[int, int]:
        gauges = self.promotions.gauges()
        return gauges["device_slots_free"], gauges["device_slots_idle"]
