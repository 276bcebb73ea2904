"""Transfers that fail, and that bring pages of zeros, at the Mooncake client's border."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.store.owners import PAUSE_S
from tests.daemon.store.test_store import SETTINGS, Clock, opened


def test_a_value_of_an_owner_that_is_put_aside_lies_nowhere() -> None:
    clock = Clock()
    store, client = opened(clock)
    client.codes, client.size = [-800], 8
    assert store.get_into(["k"], [0], [8]) == [ErrorClass.TRANSFER]
    client.places = {"disk": [None]}
    assert store.tiers(["k", "disk"], 8) == [None, "disk"]
    clock.now += PAUSE_S[0]
    assert store.tiers(["k", "disk"], 8) == ["memory", "disk"], "somebody has to try"


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
