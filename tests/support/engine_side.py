"""The engine's side of one control segment, without vLLM, and what such an engine says of itself in its hellos.

Used where a real engine cannot be driven into a state; the same paths run against real vLLM under tests/e2e.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.shmring._atomics import Words
from kvprefetch.shmring.credits import CreditTaker
from kvprefetch.shmring.flags import ADOPTED, Flag, FlagAllocator, pack, unpack
from kvprefetch.shmring.layout import LINE_BYTES, Layout
from kvprefetch.shmring.liveness import Liveness
from kvprefetch.shmring.ring import Producer
from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.attach import GroupInfo, Hello, SchedulerInfo, WorkerInfo
from kvprefetch.shmring.wire.records import FlagState, Outcome, RecordKind
from tests.support.encoded import encode_hint
from tests.support.waiting import eventually

BLOCK_BYTES = 4096
BLOCK_TOKENS = 32
ONE_GROUP = Groups((Group(Kind.FULL, BLOCK_TOKENS),), BLOCK_TOKENS)
Key = tuple[int, int]  # a use of a flag: its index and generation


@dataclass(frozen=True)
class EngineSpec:
    """An engine as the daemon sees it. `device`: the UUID of the GPU that all of its ranks have, if any."""

    engine_id: str = "engine"
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    prefix: str = "model"
    models: Sequence[str] = ()
    device: str = ""
    ranks: int = 1
    block_bytes: int = BLOCK_BYTES
    max_blocks: int = 512
    events: bool = False
    loads: bool = True
    saves: bool = True
    groups: Groups = ONE_GROUP
    written: Sequence[list[int]] = ()
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    hash_algorithm: str = ""
    hash_start: str = ""

    def worker(self, rank: int = 0) -> WorkerInfo:
        return WorkerInfo(
            block_bytes=self.block_bytes,
            key_prefixes=[self.prefix_of(rank, group) for group in range(len(self.groups))],
            replicas=1,
            replica_index=0,
            written=list(self.written),
            device=self.device,
            fingerprint=dict(self.fingerprint),
        )

    def scheduler(self) -> SchedulerInfo:
        size = 64 * self.max_blocks
        named = [GroupInfo(**each._asdict() | {"kind": each.kind.value}) for each in self.groups.groups]
        return SchedulerInfo(
            max_blocks=self.max_blocks,
            max_hint_bytes=size,
            models=list(self.models),
            loads=self.loads,
            saves=self.saves,
            events=self.events,
            groups=named,
            hash_tokens=self.groups.hash_tokens,
            hash_algorithm=self.hash_algorithm,
            hash_start=self.hash_start,
        )

    def prefix_of(self, rank: int = 0, group: int = 0) -> str:
        """The prefix of a rank's keys, as the engine has it."""
        digits = f"fp:{namespace_digest(self.fingerprint)}@" if self.fingerprint else ""
        return f"{self.prefix}@tp_rank:{rank}@" + (f"group:{group}@" if group else "") + digits

    def hello(self, role: str, rank: int = 0, **changes: object) -> Hello:
        fields: dict[str, object] = {"protocol": records.PROTOCOL, "version": "test", "role": role, "rank": rank}
        fields |= {"engine_id": self.engine_id, "incarnation": self.incarnation}
        fields |= {"world_size": self.ranks}
        fields |= {"worker": self.worker(rank)} if role == "worker" else {"scheduler": self.scheduler()}
        return Hello.model_validate({**fields, **changes})


def namespace_digest(fingerprint: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(fingerprint.items())).encode()).hexdigest()[:32]


class EngineSide:
    """A scheduler's end of a control segment: it pushes records, moves flags and takes credits as a test says."""

    def open(self, buffer: memoryview, ring_bell: Callable[[], None] = lambda: None) -> None:
        """View the segment; `release` lets go of it."""
        self.layout = Layout.read(buffer)
        self.words = Words(buffer)
        self.producer = Producer(buffer, self.words, self.layout, ring_bell)
        self.table = self.flags = FlagAllocator(buffer, self.words, self.layout)
        self.credits = CreditTaker(buffer, self.words, self.layout)
        self.liveness = Liveness(self.words, consumer=False)

    def release(self) -> None:
        del self.producer, self.table, self.flags, self.credits, self.liveness, self.words

    # --- records ------------------------------------------------------------------------------------------------------

    def push(self, kind: int, payload: bytes) -> None:
        assert self.producer.push(kind, payload)

    def hint(
        self,
        digests: Sequence[bytes],
        *,
        local: int = 0,
        name: str = "request",
        key: Key | None = None,
        pages: Sequence[int] = (),
        names: int | None = None,
        session: bytes = records.NO_SESSION,
        early: bool = False,
    ) -> Key:
        """Push a hint in a free flag, or in the flag and generation of `key`, then with `pages` or its number.

        `names`: blocks of all KV groups, if there are more than digests.
        """
        if key is None:
            key = self.flags.take(FlagState.HINTED, names or len(digests))
            assert key is not None
        else:
            self.put(key, FlagState.HINTED)
            self.table.lend(key[0], pages or [key[0]])
        size, tokens = len(digests[0]), BLOCK_TOKENS * len(digests) + 1
        now, hashes = time.monotonic_ns(), b"".join(digests)
        hint = records.Hint(*key, name, len(digests), local, 0, tokens, now, size, hashes, self.table.lent(key[0]))
        self.push(RecordKind.HINT, encode_hint(hint._replace(session=session, early=early)))
        return key

    def ask(self, key: Key, *, stop: bool = False) -> None:
        """Send that the scheduler reached the request and found it pending, or that its fetch stops."""
        self.push(RecordKind.ASK, records.encode_ask(records.Ask(*key, time.monotonic_ns(), stop=stop)))

    def done(self, key: Key, outcome: Outcome = Outcome.LOADED, loaded: int = 0, start: int = 0) -> None:
        self.push(RecordKind.DONE, records.encode_done(records.Done(*key, outcome, start, loaded, 0, 0, 0, 0)))
        self.flags.give_back(key[0])

    def cancel(self, key: Key, outcome: Outcome = Outcome.ABORTED) -> None:
        """Give a published flag up without a claim."""
        assert self.move(key, FlagState.CANCELLED)
        self.done(key, outcome)

    # --- flags --------------------------------------------------------------------------------------------------------

    def flag(self, key: Key) -> Flag:
        return self.table.flag(key[0])

    def adopted(self, flag: int, now_ns: int) -> None:
        """The scheduler has the request of an early hint."""
        first = self.layout.flags_offset // 8
        self.words.store_release(first + flag * LINE_BYTES // 8 + ADOPTED, now_ns)

    def settled(self, key: Key, timeout_s: float = 10.0) -> Flag:
        """Wait for an answer and return the flag."""
        eventually(lambda: self.flag(key).state != FlagState.HINTED, timeout_s, "an answer")
        return self.flag(key)

    def slots(self, key: Key, start: int = 0, stop: int | None = None) -> list[int]:
        """Return the slots of entries [start, stop); by default of as many as blocks are published."""
        return list(self.table.read_slots(key[0], start, self.flag(key).count if stop is None else stop))

    def move(self, key: Key, state: FlagState, count: int | None = None) -> bool:
        word = self.table.load(key[0])
        flag = unpack(word)
        assert flag.generation == key[1]
        return self.table.exchange(key[0], word, pack(key[1], state, flag.count if count is None else count))

    def put(self, key: Key, state: FlagState, count: int = 0) -> None:
        """Set the flag, in whatever use it is."""
        assert self.table.exchange(key[0], self.table.load(key[0]), pack(key[1], state, count))
