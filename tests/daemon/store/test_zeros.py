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


def spoiled(value: bytes, begin: int, count: int) -> bytes:
    return value[:begin] + bytes(count) + value[begin + count :]


def is_holed(value: bytes, *written: int) -> bool:
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer := bytearray(value)))
    found = holed([start], [len(buffer)], [written])
    return found == {0}


# A state in each of two pages of which the last part is padding, as of two layers; neither border is a page's.
WRITTEN = (0, 11_456, SIZE, SIZE + 11_456)
STATES = b"".join(spoiled(b"\x11" * SIZE, end, SIZE - end) for end in (11_456, 11_456))


def test_zeros_that_nobody_wrote_are_right_and_a_page_of_those_that_somebody_wrote_is_found() -> None:
    assert not is_holed(STATES, *WRITTEN)
    for page in range(0, len(STATES), 512):
        written = [range(*WRITTEN[:2]), range(*WRITTEN[2:])]
        lost = [len(range(max(each.start, page), min(each.stop, page + 4096))) for each in written]
        assert is_holed(spoiled(STATES, page, 4096), *WRITTEN) == (max(lost) >= 512), page


def test_a_page_that_begins_or_ends_outside_is_judged_by_what_is_written_of_it() -> None:
    """512 bytes at the end of a stretch are enough; inside it half a page is."""
    for begin, count, found in (
        (11_456 - 512, 4096, True),
        (11_456 - 500, 4096, False),
        (SIZE - 4096 + 512, 4096, True),
        (SIZE - 4096 + 500, 4096, False),
        (4096, 2048, True),
        (4096 + 8, 2040, False),
    ):
        assert is_holed(spoiled(STATES, begin, count), *WRITTEN) == found, (begin, count)


def test_small_stretches_are_judged_as_a_whole_and_the_smallest_are_left_alone() -> None:
    value = bytes(SIZE)
    assert not is_holed(value), "nothing is written"
    assert not is_holed(value, 100, 163)
    assert is_holed(value, 100, 164)
    assert is_holed(value, 3, 163)
    assert not is_holed(value[:120] + b"\x11" + value[121:], 100, 164)
    assert is_holed(spoiled(b"\x11" * SIZE, 100, 64), 100, 164), "what lies beside it in a word does not count"


def test_values_of_one_size_are_judged_each_by_what_is_written_of_it() -> None:
    buffer = bytearray(b"\x11" * (4 * SIZE))
    for i in range(3):
        buffer[i * SIZE : i * SIZE + 4096] = bytes(4096)
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    written = [None, (4096, SIZE), (0, SIZE), (0, SIZE)]
    assert holed([start + i * SIZE for i in range(4)], [SIZE] * 4, written) == {0, 2}
