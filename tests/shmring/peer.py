"""The other process of the two-process tests: a producer, a consumer or a vandal on a segment it was handed."""

from __future__ import annotations

import os
import random
import select
import struct
import sys
import time
import zlib

from kvprefetch.shmring._atomics import Words
from kvprefetch.shmring.doorbell import Doorbell
from kvprefetch.shmring.layout import Layout
from kvprefetch.shmring.ring import Consumer, Producer
from kvprefetch.shmring.segment import Segment

_SEQUENCE = struct.Struct("<QI")
SPINS = 50
LOST_AFTER_S = 20.0


def payload(sequence: int, largest: int) -> bytes:
    """The payload of one record: its number, a checksum, and a body of a length that follows from the number."""
    body = bytes([sequence & 0xFF]) * (sequence * 2654435761 % (largest - _SEQUENCE.size + 1))
    return _SEQUENCE.pack(sequence, zlib.crc32(body, sequence & 0xFFFFFFFF)) + body


def verify(data: memoryview, sequence: int, largest: int) -> None:
    """Raise ValueError unless this is the record of that number, whole and unmixed."""
    if data != payload(sequence, largest):
        raise ValueError(f"record {sequence} differs: {bytes(data[:32])!r} of {len(data)} bytes")


def produce(control: Segment, bell: Doorbell, count: int, largest: int, seed: int) -> int:
    """Push `count` records (for ever when negative), at full speed, with a rare pause so that the consumer sleeps."""
    words, layout = Words(control.buffer), Layout.read(control.buffer)
    producer = Producer(control.buffer, words, layout, bell.ring)
    dice = random.Random(seed)
    sequence = 0
    while sequence != count:
        data = payload(sequence, largest)
        while not producer.push(sequence & 0xFF, data):
            time.sleep(0)
        if dice.random() < 0.001:
            time.sleep(0.0005)
        sequence += 1
    return sequence


def consume(control: Segment, bell: Doorbell, count: int, largest: int, seed: int) -> int:
    """Take and verify `count` records (for ever when negative), sleeping whenever the ring stays empty."""
    words, layout = Words(control.buffer), Layout.read(control.buffer)
    consumer = Consumer(control.buffer, words, layout)
    epoll = select.epoll()
    epoll.register(bell.fd, select.EPOLLIN)
    sequence = 0
    while sequence != count:
        for _ in range(SPINS):
            if (record := consumer.peek()) is not None:
                break
        else:
            if consumer.prepare_sleep():
                if not epoll.poll(LOST_AFTER_S):
                    raise ValueError(f"lost wake-up after record {sequence}")
                bell.clear()
                consumer.wake()
            continue
        verify(record.payload, sequence, largest)
        consumer.advance()
        sequence += 1
    return sequence


def vandal(control: Segment, bell: Doorbell, count: int, largest: int, seed: int) -> int:
    """Overwrite random bytes of the whole segment, geometry excepted, until killed."""
    dice = random.Random(seed)
    interesting = [0, 1, 0x40, 0x7F, 0x80, 0xFF]
    while True:
        for _ in range(1000):
            at = dice.choice((dice.randrange(512, 1536), dice.randrange(512, control.size_bytes)))
            control.buffer[at] = dice.choice(interesting)
    return 0


def pushes(control: Segment, bell: Doorbell, count: int, largest: int, seed: int) -> int:
    """Push `count` records between two marks that a system-call trace can see."""
    words, layout = Words(control.buffer), Layout.read(control.buffer)
    producer = Producer(control.buffer, words, layout, bell.ring)
    data = bytes(largest)
    producer.push(1, data)  # what only the first push needs, such as memory of the interpreter's, comes before the mark
    os.getppid()
    for _ in range(count):
        if not producer.push(1, data):
            raise ValueError("the ring is too small for this test")
    os.getppid()
    return count


def polls(control: Segment, bell: Doorbell, count: int, largest: int, seed: int) -> int:
    """Poll a flag and the other side's liveness `count` times between two marks."""
    from kvprefetch.shmring.flags import FlagTable
    from kvprefetch.shmring.liveness import Liveness

    words, layout = Words(control.buffer), Layout.read(control.buffer)
    table, liveness = FlagTable(control.buffer, words, layout), Liveness(words, consumer=False)
    table.load(0)
    liveness.peer(0)
    os.getppid()
    for _ in range(count):
        table.load(0)
        liveness.peer(0)
    os.getppid()
    return count


ROLES = {"produce": produce, "consume": consume, "vandal": vandal, "pushes": pushes, "polls": polls}


def main() -> None:
    role, segment_fd, size_bytes, bell_fd, count, largest, seed = sys.argv[1], *map(int, sys.argv[2:8])
    control = Segment(segment_fd, size_bytes)
    print("ready", flush=True)
    print(ROLES[role](control, Doorbell(bell_fd), count, largest, seed), flush=True)


if __name__ == "__main__":
    main()
