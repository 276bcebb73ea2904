"""The C extension's copy of segments, between any addresses."""

from __future__ import annotations

import numpy as np
import pytest

from kvprefetch.shmring import _atomics


def addresses(memory: np.ndarray, starts: list[int]) -> bytes:
    return np.asarray([memory.ctypes.data + start for start in starts], np.int64).tobytes()


@pytest.mark.parametrize("length", [0, 1, 63, 64, 200, 4096])
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_each_segment_is_copied_and_no_byte_beside_it(length: int, offset: int) -> None:
    source = np.random.default_rng(0).integers(1, 256, 20_000, np.uint8)
    target = np.zeros(20_000, np.uint8)
    starts, origins = [offset, 9000 + offset], [7000, 11]
    _atomics.copy(addresses(target, starts), addresses(source, origins), length)
    expected = np.zeros(20_000, np.uint8)
    for start, origin in zip(starts, origins, strict=True):
        expected[start : start + length] = source[origin : origin + length]
    assert np.array_equal(target, expected)


def test_unlike_numbers_of_targets_and_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in number: bytes=8,16"):
        _atomics.copy(bytes(8), bytes(16), 1)
