"""Shared by the tests on a GPU, or on the fake driver (side.py).

On a GPU they need torch, cupy, numpy and pytest, but neither vLLM nor Mooncake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvprefetch.shmring.gpu.cuda import Device
from tests.gpu.peer import ON_GPU, Peer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what measures speed, and everything where the fake driver cannot be built."""
    items = [item for item in items if "tests/gpu/" in item.path.as_posix()]
    if not items:  # this folder's files are skipped where torch is not installed
        return
    from tests.support import fakecuda

    if ON_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="it measures a GPU: make gpu"))
        else:
            item.add_marker(fakecuda.needs_fake)


@pytest.fixture(scope="module")
def _machine() -> None:
    from tests.support import fakecuda

    if not ON_GPU:
        fakecuda.machine()


@pytest.fixture
def on(_machine: None) -> Iterator[Any]:
    """A GPU with torch's tensors and streams."""
    from tests.gpu.side import side

    made = side()
    yield made
    made.close()


@pytest.fixture
def device(on: Any) -> Device:
    found: Device = on.device
    return found


@pytest.fixture
def peer(_machine: None) -> Iterator[Callable[..., Peer]]:
    """peer(): another process with the same GPU; peer(uid=…): of another user."""
    peers: list[Peer] = []

    def start(uid: int = 0) -> Peer:
        peers.append(Peer(uid))
        return peers[-1]

    yield start
    for one in peers:
        one.end()
