"""The C extension: bounds, types and lifetimes; its orders are shown by the models and the disassembly."""

from __future__ import annotations

import mmap
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprefetch.shmring import _atomics
from kvprefetch.shmring._atomics import Words

TOP = (1 << 64) - 1


def words(count: int = 4) -> Words:
    return Words(mmap.mmap(-1, count * 8))


def test_a_word_holds_what_was_stored_up_to_all_its_bits() -> None:
    view = words()
    for value in (0, 1, TOP):
        view.store_release(2, value)
        assert view.load_acquire(2) == value
    assert view.load_acquire(1) == view.load_acquire(3) == 0
    memory = mmap.mmap(-1, 64)
    Words(memory).store_release(1, 0x0102)
    assert memory[8:16] == b"\2\1" + bytes(6), "little-endian words of the buffer"


def test_an_exchange_happens_only_from_the_expected_value_and_says_what_it_found() -> None:
    view = words()
    assert view.compare_exchange(0, 0, 5) == 0
    assert view.compare_exchange(0, 0, 6) == 5
    assert view.load_acquire(0) == 5


@pytest.mark.parametrize("index", [-1, 4, 1 << 62])
def test_an_index_outside_the_buffer_is_an_index_error_that_names_it(index: int) -> None:
    view = words()
    for use in (
        lambda: view.load_acquire(index),
        lambda: view.store_release(index, 0),
        lambda: view.compare_exchange(index, 0, 0),
        lambda: view.publish(index, 0, 0),
        lambda: view.publish(0, 0, index),
    ):
        with pytest.raises(IndexError, match=rf"index={index} is outside 0\.\.3"):
            use()


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_a_value_that_is_no_word_is_an_overflow_error_and_stores_nothing(value: int) -> None:
    view = words()
    for use in (
        lambda: view.store_release(0, value),
        lambda: view.compare_exchange(0, 0, value),
        lambda: view.compare_exchange(0, value, 1),
        lambda: view.publish(0, value, 1),
    ):
        with pytest.raises(OverflowError):
            use()
    assert view.load_acquire(0) == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda view: view.load_acquire("0"),
        lambda view: view.store_release(0),
        lambda view: view.store_release(0, "1"),
        lambda view: view.compare_exchange(0, 1),
        lambda view: view.publish(0, 1),
        lambda view: view.publish(0, 1, None),
    ],
)
def test_wrong_arguments_are_type_errors(use: Callable[[Words], object]) -> None:
    with pytest.raises(TypeError):
        use(words())


def test_a_read_only_view_loads_and_refuses_to_store() -> None:
    view = Words(bytes(16), writable=False)
    assert not view.writable
    assert view.load_acquire(1) == 0
    for use in (
        lambda: view.store_release(0, 1),
        lambda: view.compare_exchange(0, 0, 1),
        lambda: view.publish(0, 1, 1),
    ):
        with pytest.raises(TypeError, match="read-only"):
            use()


def test_a_buffer_that_cannot_be_written_or_is_off_its_alignment_is_refused() -> None:
    assert words().writable
    with pytest.raises(TypeError):
        Words(bytes(16))
    with pytest.raises(ValueError, match="8-byte"):
        Words(memoryview(mmap.mmap(-1, 64))[4:])


def test_the_buffer_stays_while_it_is_viewed_and_goes_with_the_view() -> None:
    memory = mmap.mmap(-1, 64)
    view = Words(memory)
    with pytest.raises(BufferError):
        memory.close()
    del view
    memory.close()


def test_where_the_extension_is_missing_the_import_says_what_to_do() -> None:
    script = Path(_atomics.__file__).parent / "_atomics.py"
    assert Path(_atomics.__file__).suffix == ".so", "the extension goes first"
    with pytest.raises(ImportError, match=r"not built here for Python 3\.\d+: install kvprefetch again"):
        runpy.run_path(str(script))
