"""Shared by the shared-memory tests: a control segment in this process, and peers in another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvprefetch.shmring._atomics import Words
from kvprefetch.shmring.layout import Layout
from kvprefetch.shmring.ring import Consumer, Producer
from kvprefetch.shmring.segment import Segment

PEER = Path(__file__).with_name("peer.py")


class Control:
    """A control segment with its words, as its creator holds it; the descriptor stays open only if it is `shared`."""

    def __init__(self, layout: Layout, *, shared: bool = False) -> None:
        self.layout = layout
        self.segment = Segment.create(layout.total_bytes)
        if not shared:
            os.close(self.segment.fd)
            self.segment.fd = -1
        self.buffer = self.segment.buffer
        layout.write(self.buffer)
        self.words = Words(self.buffer)
        self.bells = 0

    def producer(self) -> Producer:
        return Producer(self.buffer, self.words, self.layout, self._bell)

    def consumer(self) -> Consumer:
        return Consumer(self.buffer, self.words, self.layout)

    def close(self) -> None:
        del self.words
        self.segment.close()

    def _bell(self) -> None:
        self.bells += 1


def small_layout(**changes: int) -> Layout:
    """A layout with small parts, so that wraps and limits are near."""
    sizes = {"ring_bytes": 4096, "flag_count": 4, "page_count": 4, "table_entries": 8, "credit_entries": 8}
    return Layout(**{**sizes, "slot_count": 100, "epoch": 7, **changes})


@pytest.fixture
def make() -> Callable[..., Control]:
    """make(**changes): a fresh control segment of a small layout, in this process only."""
    return lambda **changes: Control(small_layout(**changes))


@pytest.fixture
def peer() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """peer(role, *arguments, fds): peer.py in a process of its own; killed at the end of the test if it still runs."""
    started: list[subprocess.Popen[str]] = []

    def start(
        role: str, *arguments: object, fds: tuple[int, ...], prefix: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        command = [*prefix, sys.executable, str(PEER), role, *map(str, arguments)]
        process = subprocess.Popen(
            command, pass_fds=fds, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.stdout is not None and not process.stdout.closed:
            process.kill()
            process.communicate()
