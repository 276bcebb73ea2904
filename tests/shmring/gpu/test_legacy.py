"""Memory of a GPU without descriptors: shared within one user, and freed only when no process has it mapped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu.driver import GRAIN_BYTES
from tests.gpu.peer import Peer
from tests.support.fakecuda import UUID, Gpu, Machine, needs_fake
from tests.support.waiting import eventually

pytestmark = needs_fake
SIZE, NOBODY = GRAIN_BYTES, 65534


@pytest.fixture
def gpus() -> Iterator[Machine]:
    machine = Machine([Gpu(UUID, descriptors=False)])
    yield machine
    machine.remove()


@pytest.fixture
def peer(gpus: Machine) -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(uid: int = 0) -> Peer:
        peers.append(Peer(uid, gpus.environment))
        return peers[-1]

    yield start
    for one in peers:
        one.end()


def test_memory_is_freed_when_the_last_process_let_go(gpus: Machine, peer: Callable[..., Peer]) -> None:
    """The exporter may be done with it long before."""
    exporter, importer = peer(), peer()
    slab = exporter.ask("allocate", bytes=SIZE, seed=1)
    importer.ask("open", slab, bytes=SIZE)
    os.close(slab)
    exporter.ask("close", id=0)
    importer.ask("write", id=0, seed=2)
    assert importer.ask("holds", id=0, seed=2)
    assert gpus.memories() == 1
    importer.ask("close", id=0)
    eventually(lambda: gpus.memories() == 0, what="the memory given back")
    exporter.ask("nothing")


def test_a_killed_importer_holds_nothing(gpus: Machine, peer: Callable[..., Peer]) -> None:
    exporter, importer = peer(), peer()
    slab = exporter.ask("allocate", bytes=SIZE, seed=1)
    importer.ask("open", slab, bytes=SIZE)
    os.close(slab)
    importer.kill()
    assert exporter.ask("holds", id=0, seed=1)
    exporter.ask("close", id=0)
    eventually(lambda: gpus.memories() == 0, what="the memory given back")


def test_new_memory_is_zero(peer: Callable[..., Peer]) -> None:
    exporter = peer()
    os.close(exporter.ask("allocate", bytes=SIZE, seed=0))
    assert exporter.ask("is_zero", id=0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_user_is_refused_in_one_line(gpus: Machine, peer: Callable[..., Peer]) -> None:
    exporter, importer = peer(), peer(uid=NOBODY)
    slab = exporter.ask("allocate", bytes=SIZE, seed=1)
    with pytest.raises(DeviceError, match=f"^this GPU shares memory among .*: uid={NOBODY} daemon_uid=0$"):
        importer.ask("open", slab, bytes=SIZE)
    os.close(slab)
    exporter.ask("close", id=0)
    eventually(lambda: gpus.memories() == 0, what="the memory given back")
