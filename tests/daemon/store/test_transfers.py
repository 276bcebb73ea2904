"""Transfers that fail, that may still be under way, and that bring pages of zeros, at the Mooncake client's border."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvprefetch.daemon.store import connection, give_up
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.store.storage_nodes import PAUSE_S
from tests.daemon.store.test_store import SETTINGS, opened
from tests.support.clock import Clock


@pytest.mark.parametrize(("monotonic_s", "realtime_s"), [(60, 60), (60, 0), (1, 61), (60, -3600)])
def test_a_transfer_that_fails_when_it_may_have_been_given_up_is_under_way_by_either_clock(
    monotonic_s: int, realtime_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of CLOCK_REALTIME ends every transfer; one that began before a step back may last longer than 60 s."""
    times = [(0, 10**18), (monotonic_s * 10**9, 10**18 + realtime_s * 10**9)]
    store, client = opened()
    monkeypatch.setattr(give_up, "clocks_ns", lambda: times[client.calls % 2])
    client.codes, client.size = [-800, 8, -704, -900], -900  # nor is the master asked about them, which is away
    keys, addresses = list("abcd"), list(range(0, 32, 8))
    under_way = [ErrorClass.UNDER_WAY, ErrorClass.OK, ErrorClass.UNDER_WAY, ErrorClass.UNDER_WAY]
    assert store.get_into(keys, addresses, [8] * 4) == under_way
    times.reverse()
    assert store.put_from(keys, addresses, [8] * 4) == under_way
    store.close()
    assert not client.closed, "its end could free what the transfer uses"


def test_after_a_transfer_that_raised_the_client_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of what was under way, so the client must not go away under it."""
    store, client = opened()

    def raises(*_: object) -> list[int]:
        raise RuntimeError("of Mooncake's")

    monkeypatch.setattr(client, "batch_get_into", raises)
    with pytest.raises(RuntimeError):
        store.get_into(["k"], [0], [8])
    store.close()
    assert not client.closed


def test_a_client_in_whose_call_a_transfer_may_hang_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a transfer may take: closing it under the call would crash the process."""
    monkeypatch.setattr(connection, "_CLOSE_WAIT_S", 0.2)
    store, client = opened()
    client.codes, client.hold = [8], threading.Event()
    with ThreadPoolExecutor(1) as threads:
        hangs = threads.submit(store.get_into, ["k"], [0], [8])
        assert client.entered.wait(5)
        store.close()
        assert not client.closed
        client.hold.set()
        assert hangs.result(5) == [ErrorClass.OK]


@pytest.mark.parametrize("failed_s", [0, 1, 50])
def test_a_transfer_that_fails_sooner_has_ended(failed_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, client = opened()
    monkeypatch.setattr(give_up, "clocks_ns", lambda: (client.calls * failed_s * 10**9,) * 2)
    client.codes, client.size = [-800], 8
    assert store.get_into(["k"], [0], [8]) == [ErrorClass.TRANSFER]
    assert store.put_from(["k"], [0], [8]) == [ErrorClass.TRANSFER]
    store.close()
    assert client.closed


def test_a_value_of_an_owner_that_is_put_aside_lies_nowhere() -> None:
    clock = Clock()
    store, client = opened(clock)
    client.codes, client.size = [-800], 8
    assert store.get_into(["k"], [0], [8]) == [ErrorClass.TRANSFER]
    client.replicas = {"disk": [None]}
    assert store.media(["k", "disk"], 8) == [None, "disk"]
    clock.advance_ms(1000 * PAUSE_S[0])
    assert store.media(["k", "disk"], 8) == ["memory", "disk"], "somebody has to try"


@pytest.mark.parametrize(
    ("private", "disk", "kind"),
    [(False, False, ErrorClass.CORRUPT), (True, True, ErrorClass.CORRUPT), (True, False, ErrorClass.OK)],
)
def test_a_page_of_zeros_is_found_wherever_the_value_is_said_to_lie(
    private: bool, disk: bool, kind: ErrorClass
) -> None:
    """It may be read from a disk although it lay in memory when it was looked up. Without a disk no page is lost."""
    store, client = opened(settings=replace(SETTINGS, private=private, enable_ssd_offload=disk))
    values = (ctypes.c_char * 32768).from_buffer(bytearray(b"\x11" * 32768))
    ctypes.memset(ctypes.addressof(values) + 16384 + 100, 0, 4096)
    client.codes = [16384, 16384]
    start = ctypes.addressof(values)
    assert store.get_into(["whole", "holed"], [start, start + 16384], [16384] * 2) == [ErrorClass.OK, kind]
    for written, judged in (((0, 16384), kind), ((4196, 16384), ErrorClass.OK), ((), ErrorClass.OK)):
        found = store.get_into(["whole", "holed"], [start, start + 16384], [16384] * 2, written=[None, written])
        assert found == [ErrorClass.OK, judged]
