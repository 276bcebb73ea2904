"""Shared by the tests on a GPU. They need torch, cupy, numpy and pytest, but neither vLLM nor Mooncake."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.device import Device
from tests.gpu.peer import Peer


@pytest.fixture(scope="session")
def device() -> Device:
    return cuda.open_device(cuda.uuid_of("cuda", 0))


@pytest.fixture
def peer() -> Iterator[Callable[[], Peer]]:
    """peer(): another process with the same GPU."""
    peers: list[Peer] = []

    def start() -> Peer:
        peers.append(Peer())
        return peers[-1]

    yield start
    for one in peers:
        if one.process.poll() is None:
            one.end()
