"""Ordered access to 64-bit words in shared memory, and copies (types of the C extension)."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from typing_extensions import Buffer, Self

from .flags import Flag

S = TypeVar("S")
F = TypeVar("F")

class Words:
    @property
    def writable(self) -> bool: ...
    def __new__(cls, buffer: Buffer, writable: bool = True) -> Words: ...
    def load_acquire(self, index: int, /) -> int: ...
    def store_release(self, index: int, value: int, /) -> None: ...
    def compare_exchange(self, index: int, expected: int, desired: int, /) -> int: ...
    def publish(self, index: int, value: int, look: int, /) -> int: ...
    def peer(self, gone: int, state: int, beat: int, limit_ns: int, now_ns: int, /) -> int: ...

class Flags(Generic[F]):
    def __new__(
        cls,
        words: Words,
        tables: list[Sequence[int]],
        free: list[int],
        pages: list[int],
        table: Buffer,
        slot_bound: int,
        flag_type: type[F],
        /,
    ) -> Self: ...
    def found(self, index: int, /) -> int: ...
    def disk(self, index: int, /) -> int | None: ...
    def read_slots(self, index: int, start: int, stop: int, /) -> array[int]: ...
    def take(self, state: int, items: int, /) -> tuple[int, int] | None: ...

class Handle(Generic[S]):
    @property
    def epoch(self) -> S: ...
    @property
    def digests(self) -> list[bytes]: ...
    @property
    def flag(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def local_blocks(self) -> int: ...
    asked_ns: int
    waited_ns: int
    claimed_ns: int
    missing: int
    cost_ns: int
    spared_ns: int
    stopped: bool
    def look(self) -> Flag: ...
    def wait(self, until_ns: int, /) -> Flag: ...
    def adopt(self, now_ns: int, /) -> None: ...
    def claim(self, state: int, count: int, taken: int, start: int, stop: int, now_ns: int, /) -> array[int] | None: ...

class Pusher:
    def __new__(
        cls,
        ring: Buffer,
        words: Words,
        lines: tuple[int, int, int],
        tail: int,
        head: int,
        ring_bell: Callable[[], object],
        /,
    ) -> Self: ...
    def push(self, kind: int, payload: Buffer = b"", /) -> bool: ...
    def fits(self, length: int, /) -> bool: ...
    def hint(
        self,
        kind: int,
        version: int,
        early: int,
        state: int,
        items: int,
        count: int,
        blocks: int,
        local_blocks: int,
        prompt_tokens: int,
        arrival_ns: int,
        epoch: S,
        flags: Flags[Any],
        digests: list[bytes],
        request_id: str,
        priority: int,
        trace: bytes,
        session_digest: bytes,
        /,
    ) -> Handle[S] | None: ...

def fence() -> None: ...
def copy(targets: bytes, sources: bytes, length: int, /) -> None: ...
def repeats(digests: bytes, size: int, /) -> bool: ...
