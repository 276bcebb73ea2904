"""Measures our calls that need no other process (a poll, a hint), beside upstream's look-up of a prompt."""

from __future__ import annotations

import os
import time
from collections import Counter
from types import SimpleNamespace

from kvprefetch.connector import config as configuration
from kvprefetch.connector import hints
from kvprefetch.connector.claims import Claims, SystemClock
from kvprefetch.connector.policy import WaitPolicy
from kvprefetch.connector.session import SchedulerSession
from kvprefetch.connector.steps import StepTimes
from kvprefetch.connector.support import Geometry
from kvprefetch.shmring._atomics import Words
from kvprefetch.shmring.doorbell import Doorbell
from kvprefetch.shmring.flags import FlagTable, pack
from kvprefetch.shmring.layout import Layout, pages_of
from kvprefetch.shmring.liveness import Liveness
from kvprefetch.shmring.ring import Consumer
from kvprefetch.shmring.segment import Segment
from kvprefetch.shmring.wire.attach import Attached
from kvprefetch.shmring.wire.records import FlagState, Outcome

from .ring_peers import Ring, UpstreamLookup

now_ns = time.perf_counter_ns


class Samples(list[float]):
    """Microseconds per operation."""

    def at(self, share: float) -> float:
        return sorted(self)[min(len(self) - 1, int(len(self) * share))]

    @property
    def median(self) -> float:
        return self.at(0.5)

    def text(self) -> str:
        return f"{self.median:9.3f} us  ({self.at(0.1):.3f} .. {self.at(0.9):.3f})"


def pause(for_ns: int) -> None:
    """Pass the time awake: a core that slept is slow for a while after."""
    until = now_ns() + for_ns
    while now_ns() < until:
        pass


def poll_cost(ring: Ring, rounds: int) -> dict[str, Samples]:
    """Microseconds per poll: ours, the liveness check beside it, and one aligned load of a memoryview."""
    buffer = ring.segment.buffer
    words = Words(buffer)
    table, liveness = FlagTable(buffer, words, ring.layout), Liveness(words, consumer=False)
    plain = buffer.cast("Q")
    index = ring.layout.flags_offset // 8
    load, peer = table.load, liveness.peer
    now = time.monotonic_ns()
    result = {"poll of a flag": Samples(), "liveness of the daemon": Samples(), "memoryview load": Samples()}
    count = 2000
    for _ in range(rounds):
        start = now_ns()
        for _ in range(count):
            load(3)
        result["poll of a flag"].append((now_ns() - start) / count / 1000)
        start = now_ns()
        for _ in range(count):
            peer(now)
        result["liveness of the daemon"].append((now_ns() - start) / count / 1000)
        start = now_ns()
        for _ in range(count):
            plain[index]
        result["memoryview load"].append((now_ns() - start) / count / 1000)
    return result


def hint_cost(blocks: int, calls: int) -> Samples:
    """Microseconds of our part of on_new_request for a prompt of `blocks` blocks: join digests, take a flag, push."""
    layout = Layout(8 << 20, 256, 256 * pages_of(blocks), blocks, 64, 64, epoch=1)
    control, bell = Segment.create(layout.total_bytes), Doorbell.create()
    layout.write(control.buffer)
    words = Words(control.buffer)
    consumer, table = Consumer(control.buffer, words, layout), FlagTable(control.buffer, words, layout)
    attached = Attached(epoch=1, segment_bytes=layout.total_bytes, slot_count=64, slot_bytes=0)
    session = SchedulerSession.map(attached, [os.dup(control.fd), os.dup(bell.fd)])
    hashes = [os.urandom(32) for _ in range(blocks)]
    request = SimpleNamespace(
        request_id="request", priority=0, num_prompt_tokens=blocks * 32 + 1, block_hashes=hashes, trace_headers=None
    )
    geometry = Geometry(32, 1, 0, 1, 1, blocks, 1, True, False, False, (("full_attention", None),), False)
    config, policy = configuration.load({"socket": "/nowhere"}), WaitPolicy(StepTimes(), 32)
    claims = Claims(config, geometry, policy, None, Counter(), SystemClock())
    samples = Samples()
    for number in range(calls):
        start = now_ns()
        handle = claims.push(request, blocks, session, 0, start)
        samples.append((now_ns() - start) / 1000)
        assert handle is not None
        assert consumer.peek() is not None
        consumer.advance()
        hints.finish(handle, Outcome.UNUSED)
        table.exchange(handle.flag, table.load(handle.flag), pack(handle.generation, FlagState.FREE, 0))
        while consumer.peek() is not None:
            consumer.advance()
        if number % 50 == 0:
            pause(200_000)
    return samples


def upstream_cost(rounds: int) -> Samples:
    """Microseconds of one lookup of 64 blocks through vLLM's own client. Raises Unavailable."""
    client = UpstreamLookup().connect()
    hashes = [os.urandom(32) for _ in range(64)]
    samples = Samples()
    for number in range(max(50, rounds)):
        start = now_ns()
        client.lookup(str(number), 1024, hashes)
        samples.append((now_ns() - start) / 1000)
    client.close()
    return samples
