"""Pages of zeros are found in any of the values of one call."""

from __future__ import annotations

import ctypes
import random

import pytest

from kvprefetch.daemon.store.zeros import holed

SIZE = 16_384


@pytest.mark.parametrize("step", [SIZE, SIZE + 4])
def test_exactly_the_values_with_a_page_of_zeros_are_found(step: int) -> None:
    """A value may have another size, lie at any address, and a page may begin anywhere in it."""
    rng = random.Random(7)
    for _ in range(50):
        buffer = bytearray(b"\x11" * (8 * step))
        sizes = [rng.choice((100, SIZE, SIZE // 2, SIZE // 2 - 8)) for _ in range(8)]
        bad = {i for i in range(8) if sizes[i] > 4096 and rng.random() < 0.3}
        for i in bad:
            page = i * step + rng.randrange(sizes[i] // 2048 * 2048 - 4096 + 1)
            buffer[page : page + 4096] = bytes(4096)
        for i in range(8):  # words of zeros are no page
            word = i * step + rng.randrange(sizes[i] // 8) * 8
            buffer[word : word + 8] = bytes(8)
        start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        assert holed([start + i * step for i in range(8)], sizes) == bad


def test_a_value_below_half_a_page_is_not_looked_at() -> None:
    assert holed([8], [2047]) == set()
