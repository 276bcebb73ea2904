"""Lists of vLLM as plain numbers, in C: as the same lines of Python, or an error that changes nothing."""

from __future__ import annotations

import contextlib
import inspect
import sys
import tracemalloc
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprefetch.shmring._atomics import block_ids, heads, mark

PLACES = 8


@dataclass(slots=True)
class SlotBlock:
    """As vLLM's: the id is in a slot."""

    block_id: Any


class PlainBlock(SimpleNamespace):
    block_id: Any


@dataclass(slots=True)
class NarrowBlock(SlotBlock):
    """The slot is of the class above."""


class CountingBlock(SlotBlock):
    """Says something else than its slot."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return found + 1 if name == "block_id" else found


class PropertyBlock:
    def __init__(self, block_id: Any) -> None:
        self._given = block_id

    @property
    def block_id(self) -> Any:
        return self._given


class LateBlock:
    """Its own code runs when its id is asked for."""

    def __init__(self, act: Callable[[], object], block_id: Any = 7) -> None:
        self._act, self._given = act, block_id

    @property
    def block_id(self) -> Any:
        self._act()
        return self._given


KINDS = [SlotBlock, PlainBlock, NarrowBlock, CountingBlock, PropertyBlock]
BLOCKS = st.tuples(st.sampled_from(KINDS), st.integers(0, (1 << 32) - 2)).map(lambda each: each[0](block_id=each[1]))


@given(st.lists(BLOCKS, max_size=30), st.integers(0, 40), st.integers(0, 40), st.sampled_from([list, tuple, deque]))
def test_block_ids_are_those_of_a_slice(blocks: list[Any], start: int, more: int, kind: Any) -> None:
    """Of any sequence, and whatever says the id; what the sequence has not is left out."""
    assert block_ids(kind(blocks), start, start + more) == array(
        "I", [b.block_id for b in blocks[start : start + more]]
    )


def test_vllms_own_blocks_are_read() -> None:
    """By their slot: the look-up of the name in each of 65,536 objects would cost half as much again."""
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    blocks = [utils.KVCacheBlock(number) for number in range(5)]
    assert inspect.ismemberdescriptor(utils.KVCacheBlock.block_id)
    assert block_ids(blocks, 1, 4) == array("I", [1, 2, 3])
    assert block_ids((), 0, 0) == array("I"), "a request without blocks has an empty tuple"


EMPTY = SlotBlock.__new__(SlotBlock)
REFUSED: dict[str, tuple[type[Exception], tuple[Any, ...]]] = {
    "no sequence": (TypeError, (7, 0, 1)),
    "an iterator without end": (TypeError, (iter, 0, 1)),
    "numbers": (AttributeError, ([1, 2], 0, 1)),
    "letters": (AttributeError, ("ab", 0, 1)),
    "an empty slot": (AttributeError, ([EMPTY], 0, 1)),
    "a string": (TypeError, ([SlotBlock("1")], 0, 1)),
    "none": (TypeError, ([SlotBlock(None)], 0, 1)),
    "a fraction": (TypeError, ([SlotBlock(1.0)], 0, 1)),
    "negative": (OverflowError, ([SlotBlock(-1)], 0, 1)),
    "2^32": (OverflowError, ([SlotBlock(1 << 32)], 0, 1)),
    "2^64": (OverflowError, ([SlotBlock(1 << 64)], 0, 1)),
    "2^32 of another kind": (OverflowError, ([SlotBlock(0), PropertyBlock(1 << 32)], 0, 2)),
    "a block without an id": (AttributeError, ([SlotBlock(0), SimpleNamespace()], 0, 2)),
    "a class": (TypeError, ([SlotBlock(0), SlotBlock], 0, 2)),
    "before the first": (IndexError, ([SlotBlock(1), SlotBlock(2)], -1, 1)),
    "nothing before the first": (IndexError, ([SlotBlock(1), SlotBlock(2)], -1, -1)),
    "backwards": (IndexError, ([SlotBlock(1), SlotBlock(2)], 2, 1)),
    "no size": (OverflowError, ([SlotBlock(1)], 0, 1 << 80)),
    "no number": (TypeError, ([SlotBlock(1)], "0", 1)),
    "two arguments": (TypeError, ([SlotBlock(1)], 0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sequence_of_blocks_is_refused(name: str) -> None:
    error, wrong = REFUSED[name]
    with pytest.raises(error):
        block_ids(*wrong)


def test_every_reference_is_given_back() -> None:
    """After answers and after refusals, of slots and of other attributes."""
    number = 1 << 20
    good, bad = SlotBlock(number), SlotBlock("text")
    other = PropertyBlock(number)
    blocks: list[Any] = [good, other, bad]
    kinds = (SlotBlock, PropertyBlock)
    objects = (number, "text", good, bad, other, blocks, *kinds, *(vars(kind)["block_id"] for kind in kinds))
    held = [sys.getrefcount(each) for each in objects]
    for _ in range(10):
        block_ids(blocks, 0, 2)
        block_ids(blocks, 1, 2)
        block_ids(deque(blocks), 0, 2)
        with pytest.raises(TypeError):
            block_ids(blocks, 0, 3)
        with pytest.raises(IndexError):
            block_ids(blocks, 3, 2)
    assert [sys.getrefcount(each) for each in objects] == held


def test_no_memory_stays_behind() -> None:
    """Neither of answers nor of refusals."""
    blocks: list[Any] = [SlotBlock(number) for number in range(100)]
    wrong = [*blocks, SlotBlock("text")]

    def ask() -> None:
        block_ids(blocks, 0, 100)
        with contextlib.suppress(TypeError):
            block_ids(wrong, 0, 101)

    ask()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(100):
            ask()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100 * 100, "bytes: each answer has 400"


def test_a_block_lives_until_its_own_code_has_said_its_id() -> None:
    """Python asks a class of ours twice, and the list lets go of the block in between."""
    seen: list[str] = []

    class Asked:
        def __getattribute__(self, name: str) -> Any:
            blocks.clear()
            raise AttributeError

        def __getattr__(self, name: str) -> int:
            seen.append("answered")
            return 5

        def __del__(self) -> None:
            seen.append("gone")

    blocks: list[Any] = [Asked()]
    assert block_ids(blocks, 0, 1) == array("I", [5])
    assert seen == ["answered", "gone"]


@pytest.mark.parametrize("kind", KINDS[:3])
def test_the_greatest_id_is_read(kind: Any) -> None:
    assert block_ids([kind(block_id=(1 << 32) - 1)], 0, 1) == array("I", [(1 << 32) - 1])


def test_a_list_that_shrinks_meanwhile_is_an_error() -> None:
    blocks: list[Any] = []
    blocks += [SlotBlock(1), LateBlock(blocks.clear), SlotBlock(3)]
    with pytest.raises(IndexError):
        block_ids(blocks, 0, 3)


def test_a_list_that_grows_or_changes_meanwhile_is_read_as_it_is_then() -> None:
    """The range is that of before; a block that loses its last other reference lives until it is read."""
    blocks: list[Any] = []

    def act() -> None:
        blocks[0] = blocks[1] = None
        blocks[2:] = [SlotBlock(number) for number in range(20, 40)]

    blocks += [SlotBlock(1), LateBlock(act), SlotBlock(3)]
    assert block_ids(blocks, 0, 3) == array("I", [1, 7, 20])


def test_a_list_whose_class_lies_about_its_length_is_read_within_its_own() -> None:
    class Liar(list[Any]):
        def __len__(self) -> int:
            return 1 << 20

    assert block_ids(Liar([SlotBlock(4)]), 0, 1 << 20) == array("I", [4])


def marked(digests: list[bytes], mix: int, known: bool, places: list[int]) -> None:
    """The rule in Python."""
    for digest in digests:
        key = (int.from_bytes(digest[:8], "little") | 1) ^ mix
        if known:
            places[key % PLACES] = key
        elif places[key % PLACES] == key:
            places[key % PLACES] = 0


@given(
    st.lists(st.binary(min_size=8, max_size=9), min_size=1, max_size=10),
    st.lists(
        st.tuples(*[st.integers(0, 10)] * 2, st.integers(1, 4), st.sampled_from([0, 6, 1 << 63]), st.booleans()),
        max_size=6,
    ),
)
def test_heads_and_marks_are_as_in_python(digests: list[bytes], steps: list[tuple[int, int, int, int, bool]]) -> None:
    places, model = array("Q", [0] * PLACES), [0] * PLACES
    for one, other, step, mix, known in steps:
        start, stop = sorted((min(one, len(digests)), min(other, len(digests))))
        assert heads(digests, start, stop, step) == b"".join(digest[:8] for digest in digests[start:stop:step])
        mark(digests, start, stop, step, mix, known, places)
        marked(digests[start:stop:step], mix, known, model)
    assert places.tolist() == model


def test_many_marks_are_as_few() -> None:
    """They are made batch by batch."""
    digests, places = [number.to_bytes(8, "little") for number in range(1, 2000, 2)], array("Q", [0] * 2048)
    mark(digests, 1, 999, 3, 0, True, places)
    assert [key for key in places if key] == list(range(3, 1999, 6))


@pytest.mark.parametrize(
    "wrong",
    [
        ([bytes(7)], 0, 1, 1),
        ([b"", 8], 0, 2, 1),
        ([8], 0, 1, 1),
        ([bytes(8)], 0, 2, 1),
        ([bytes(8)], -1, 1, 1),
        ([bytes(8)], 1, 0, 1),
        ([bytes(8)], 0, 1, 0),
        ((bytes(8),), 0, 1, 1),
        ([bytes(8)], 0, 1),
    ],
    ids=str,
)
def test_what_is_no_list_of_digests_is_refused(wrong: Any) -> None:
    places = array("Q", [0])
    with pytest.raises((TypeError, ValueError, IndexError)):
        heads(*wrong)
    with pytest.raises((TypeError, ValueError, IndexError)):
        mark(*wrong, 0, True, places)  # type: ignore[call-arg]
    assert places[0] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        (0, True, array("Q", [0] * 3)),
        (0, True, array("B", [0] * 12)),
        (0, True, array("Q")),
        (0, True, bytes(8)),
        (1 << 64, True, array("Q", [0])),
        (-1, True, array("Q", [0])),
        (0, True),
    ],
    ids=str,
)
def test_wrong_marks_are_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        mark([bytes(8)], 0, 1, 1, *wrong)
