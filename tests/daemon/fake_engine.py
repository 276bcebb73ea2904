"""Stands in for an engine without vLLM: it speaks the control protocol over real shared memory.

Used where a real engine cannot be driven into a state; the same paths run against real vLLM under tests/e2e.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
import uuid
from pathlib import Path
from typing import ClassVar

from kvprefetch.shmring._atomics import Words
from kvprefetch.shmring.credits import CreditTaker
from kvprefetch.shmring.doorbell import Doorbell
from kvprefetch.shmring.flags import Flag, FlagAllocator, FlagTable, pack, unpack
from kvprefetch.shmring.gpu.device import exported_bytes
from kvprefetch.shmring.layout import Layout
from kvprefetch.shmring.liveness import Liveness, PeerStatus
from kvprefetch.shmring.ring import Producer
from kvprefetch.shmring.segment import Segment
from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.attach import Attached, Hello, Mapped, SchedulerInfo, WorkerInfo
from kvprefetch.shmring.wire.codec import receive_message, send_message
from kvprefetch.shmring.wire.records import FlagState, Outcome, RecordKind
from tests.support.host_device import HostDevices, HostMemory
from tests.support.waiting import eventually

BLOCK_BYTES = 4096


def listening(path: Path) -> bool:
    """Tell whether a socket listens there; its file exists as soon as it is bound (`__SO_ACCEPTCON`, proc(5))."""
    sockets = (line.split() for line in Path("/proc/net/unix").read_text().splitlines())
    return any(fields[3] == "00010000" and fields[-1] == str(path) for fields in sockets)


class FakeEngine:
    """Scheduler and `ranks` workers of one engine, attached to the daemon behind `path`."""

    made: ClassVar[list[FakeEngine]] = []  # for the fixture that closes what a failed test left open

    def __init__(
        self, path: Path, *, engine_id: str = "engine", ranks: int = 1, block_bytes: int = BLOCK_BYTES,
        prefix: str = "model", incarnation: str | None = None, attach: bool = True, max_blocks: int = 512,
        events: bool = False, devices: HostDevices | None = None, fingerprint: dict[str, str] | None = None,
        saves: bool = True,
    ) -> None:  # fmt: skip
        self.path, self.ranks, self.block_bytes = path, ranks, block_bytes
        self.engine_id, self.incarnation = engine_id, incarnation or uuid.uuid4().hex
        self.prefix, self.max_blocks, self.events = prefix, max_blocks, events
        self.disk_blocks: int | None = None  # of the last load: blocks that came from disk
        self.fingerprint, self.saves = fingerprint or {}, saves
        FakeEngine.made.append(self)
        self.sockets: list[socket.socket] = []
        self.staging: list[Segment] = []
        self.devices = devices  # with them every rank has a GPU, which it shares with the others
        self.slabs: list[HostMemory] = []
        self.leases: list[int] = []
        if attach:
            self.attach()

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(10)
        sock.connect(str(self.path))
        self.sockets.append(sock)
        return sock

    def hello(self, role: str, rank: int = 0, **changes: object) -> Hello:
        fields: dict[str, object] = {
            "protocol": records.PROTOCOL, "version": "test", "engine_id": self.engine_id,
            "incarnation": self.incarnation, "role": role, "rank": rank, "world_size": self.ranks, "groups": 1,
            "block_tokens": 32,
        }  # fmt: skip
        if role == "worker":
            fields["worker"] = WorkerInfo(
                block_bytes=self.block_bytes, key_prefix=f"{self.prefix}@tp_rank:{rank}@", put_factor=1, put_turn=0,
                device=self.devices.device.uuid if self.devices is not None else "", fingerprint=self.fingerprint,
            )  # fmt: skip
        else:
            fields["scheduler"] = SchedulerInfo(
                max_blocks=self.max_blocks,
                max_hint_bytes=64 * self.max_blocks,
                loads=True,
                saves=self.saves,
                events=self.events,
            )
        return Hello.model_validate({**fields, **changes})

    def attach(self) -> None:
        self.scheduler = self.connect()
        workers = [self.connect() for _ in range(self.ranks)]
        for rank, sock in enumerate(workers):
            send_message(sock, self.hello("worker", rank))
        send_message(self.scheduler, self.hello("scheduler"))
        for sock in workers:
            attached, fds = self.receive(sock)
            self.staging.append(Segment(fds[0], attached.segment_bytes))
            send_message(sock, self.mapped(attached, fds[1:]))
        attached, fds = self.receive(self.scheduler)
        self.epoch = attached.epoch
        self.control = Segment(fds[0], attached.segment_bytes)
        self.bell = Doorbell(fds[1])
        self.layout = Layout.read(self.control.buffer)
        self.words = Words(self.control.buffer)
        self.producer = Producer(self.control.buffer, self.words, self.layout, self.bell.ring)
        self.table = FlagTable(self.control.buffer, self.words, self.layout)
        self.flags = FlagAllocator(self.table)
        self.credits = CreditTaker(self.control.buffer, self.words, self.layout)
        self.liveness = Liveness(self.words, consumer=False)
        send_message(self.scheduler, Mapped(epoch=attached.epoch))
        eventually(lambda: self.liveness.peer(time.monotonic_ns()) is PeerStatus.ALIVE, what="ACTIVE")

    def mapped(self, attached: Attached, leases: list[int]) -> Mapped:
        """Return a worker's answer, once it has its device slots."""
        self.leases += leases
        if self.devices is None or not attached.device_slots:
            return Mapped(epoch=attached.epoch)
        size = attached.device_slots * attached.slot_bytes
        if attached.device_handle:
            self.slabs.append(self.devices.device.open(bytes.fromhex(attached.device_handle), size))
            return Mapped(epoch=attached.epoch, device=True)
        self.slabs.append(self.devices.device.allocate(exported_bytes(size)))
        return Mapped(epoch=attached.epoch, device=True, device_handle=self.slabs[-1].handle().hex())

    def receive(self, sock: socket.socket) -> tuple[Attached, list[int]]:
        received = receive_message(sock)
        assert received is not None
        assert isinstance(received[0], Attached), received
        return received[0], received[1]

    # --- scheduler ----------------------------------------------------------------------------------------------------

    def hint(self, digests: list[bytes], *, local: int = 0, name: str = "request") -> tuple[int, int]:
        taken = self.flags.take(FlagState.HINTED)
        assert taken is not None
        hint = records.Hint(
            taken[0], taken[1], name, len(digests), local, 0, 32 * len(digests) + 1, time.monotonic_ns(),
            len(digests[0]), memoryview(b"".join(digests)),
        )  # fmt: skip
        assert self.producer.push(RecordKind.HINT, *records.encode_hint(hint))
        return taken

    def ask(self, key: tuple[int, int]) -> None:
        """Send that the scheduler reached the request and found it pending."""
        ask = records.Ask(key[0], key[1], time.monotonic_ns())
        assert self.producer.push(RecordKind.ASK, records.encode_ask(ask))

    def flag(self, key: tuple[int, int]) -> Flag:
        return self.table.flag(key[0])

    def settled(self, key: tuple[int, int], timeout_s: float = 10.0) -> Flag:
        """Wait for an answer and return the flag."""
        eventually(lambda: self.flag(key).state != FlagState.HINTED, timeout_s, "an answer")
        return self.flag(key)

    def move(self, key: tuple[int, int], state: FlagState, count: int | None = None) -> bool:
        word = self.table.load(key[0])
        flag = unpack(word)
        assert flag.generation == key[1]
        return self.table.exchange(key[0], word, pack(key[1], state, flag.count if count is None else count))

    def done(self, key: tuple[int, int], outcome: Outcome = Outcome.LOADED, loaded: int = 0, start: int = 0) -> None:
        done = records.Done(key[0], key[1], outcome, start, loaded, 0, 0, 0, 0)
        assert self.producer.push(RecordKind.DONE, records.encode_done(done))
        self.flags.give_back(key[0])

    def load(self, digests: list[bytes], *, local: int = 0, name: str = "request") -> list[bytes] | None:
        """Hint, wait, claim, read rank 0's slots and release; return the bytes of each block, None for a miss."""
        key = self.hint(digests, local=local, name=name)
        flag = self.settled(key)
        assert flag.state == FlagState.READY
        self.disk_blocks = self.table.disk(key[0])
        if flag.count <= local:
            assert self.move(key, FlagState.CANCELLED)
            self.done(key, Outcome.MISS)
            return None
        assert self.move(key, FlagState.CLAIMED)
        values = [self.read(slot) for slot in self.table.read_slots(key[0], local, flag.count)]
        assert self.move(key, FlagState.RELEASED)
        self.done(key, loaded=flag.count - local, start=local)
        return values

    # --- workers ------------------------------------------------------------------------------------------------------

    def read(self, slot: int, rank: int = 0) -> bytes:
        if slot >= self.layout.slot_count:
            at = self.slabs[rank].address + (slot - self.layout.slot_count) * self.block_bytes
            return ctypes.string_at(at, self.block_bytes)
        start = slot * self.block_bytes
        return bytes(self.staging[rank].buffer[start : start + self.block_bytes])

    def save(self, blocks: dict[bytes, bytes], *, reset_generation: int = 0, save_id: int = 1) -> None:
        """Copy values (the same on every rank) into granted slots and send the save."""
        eventually(lambda: self.credits.available() >= len(blocks), what="credits")
        slots = self.credits.take(len(blocks))
        for slot, value in zip(slots, blocks.values(), strict=True):
            for segment in self.staging:
                segment.buffer[slot * self.block_bytes : (slot + 1) * self.block_bytes] = value
        saved = records.Saved(save_id, reset_generation, False, slots, list(blocks))
        assert self.producer.push(RecordKind.SAVED, records.encode_saved(saved))

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()
        self.sockets = []
        for slab in self.slabs:
            slab.close()
        for lease in self.leases:
            os.close(lease)
        self.slabs, self.leases = [], []
        if self.staging:
            del self.table, self.flags, self.credits, self.producer, self.liveness
            self.words.release()
            self.control.close()
            self.bell.close()
            for segment in self.staging:
                segment.close()
            self.staging = []
