"""The one call that makes a hint: it takes a flag and pushes the record that the daemon decodes, or changes nothing."""

from __future__ import annotations

import ast
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprefetch.shmring import layout
from kvprefetch.shmring._atomics import Handle
from kvprefetch.shmring.errors import SegmentCorrupt
from kvprefetch.shmring.flags import FREE, Flag, FlagAllocator, pack
from kvprefetch.shmring.layout import PAGE_ENTRIES, Line
from kvprefetch.shmring.wire.records import (
    MAX_REQUEST_ID_BYTES,
    NO_SESSION,
    NO_TRACE,
    PROTOCOL,
    FlagState,
    Hint,
    RecordKind,
    decode_hint,
)
from tests.support.encoded import encode_hint

from .conftest import Control, small_layout

HINTED = int(FlagState.HINTED)
KIND = int(RecordKind.HINT)


class Side:
    """The engine's and the daemon's side of one segment."""

    def __init__(self, **sizes: int) -> None:
        self.control = Control(small_layout(**sizes))
        self.table = FlagAllocator(self.control.buffer, self.control.words, self.control.layout)
        self.producer, self.consumer = self.control.producer(), self.control.consumer()

    def hint(self, digests: Any, **changes: Any) -> Handle[str] | None:
        fields: dict[str, Any] = {
            "kind": KIND,
            "version": PROTOCOL,
            "early": 0,
            "state": HINTED,
            "items": len(digests),
            "count": len(digests),
            "blocks": len(digests),
            "local_blocks": 0,
            "prompt_tokens": 99,
            "arrival_ns": 5,
            "epoch": "epoch",
            "flags": self.table,
            "digests": digests,
            "request_id": "request",
            "priority": 0,
            "trace": NO_TRACE,
            "session_digest": NO_SESSION,
        } | changes
        return self.producer.hint(*fields.values())

    def taken_any(self) -> tuple[int, bytes] | None:
        record = self.consumer.peek()
        if record is None:
            return None
        found = record.kind, bytes(record.payload)
        self.consumer.advance()
        return found

    def taken(self) -> bytes | None:
        record = self.taken_any()
        assert record is None or record[0] == KIND
        return None if record is None else record[1]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 64),
    st.integers(1, 20),
    st.text(max_size=600),
    st.integers(-(1 << 70), 1 << 70),
    st.integers(0, 19),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 64) - 1),
    st.binary(min_size=24, max_size=24),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 3),
)
def test_the_daemon_decodes_what_the_engine_hinted(
    size: int,
    count: int,
    name: str,
    priority: int,
    local: int,
    tokens: int,
    now: int,
    trace: bytes,
    session: bytes,
    more: int,
) -> None:
    side = Side()
    digests = [bytes([number]) * size for number in range(count + more)]  # the list may go on
    fields: dict[str, Any] = {
        "request_id": name,
        "priority": priority,
        "local_blocks": min(local, count),
        "prompt_tokens": tokens,
        "trace": trace,
        "session_digest": session,
    }
    handle = side.hint(digests, count=count, blocks=count, items=count, arrival_ns=now, **fields)
    assert handle is not None
    assert (handle.epoch, handle.digests, handle.blocks, handle.generation) == ("epoch", digests, count, 1)
    assert (handle.local_blocks, handle.asked_ns, handle.waited_ns, handle.claimed_ns) == (min(local, count), 0, 0, 0)
    assert side.table.flag(handle.flag) == Flag(1, HINTED, 0)
    payload, pages = side.taken(), side.table.lent(handle.flag)
    hashes = b"".join(digests[:count])
    local, origin = min(local, count), (trace, session)
    hint = Hint(handle.flag, 1, name, count, local, priority, tokens, now, size, hashes, pages, *origin)
    assert payload == encode_hint(hint)
    decoded = decode_hint(memoryview(payload))
    assert (decoded.flag, decoded.hashes, list(decoded.pages)) == (handle.flag, hashes, list(pages))
    assert (decoded.trace, decoded.session) == origin
    side.control.close()


def test_a_request_id_that_is_no_valid_text_still_makes_a_hint() -> None:
    side = Side()
    assert side.hint([bytes(8)], request_id="a\ud800b" + "é" * 600) is not None
    payload = side.taken()
    assert payload is not None
    name = decode_hint(memoryview(payload)).request_id
    assert (name[:3], len(name.encode()) <= MAX_REQUEST_ID_BYTES + 2) == ("a?b", True), "cut within a character"


def test_a_request_id_with_control_characters_is_printable_in_the_daemon() -> None:
    """Else one that clients choose writes to an operator's terminal, and takes six times its room in the log."""
    side = Side()
    assert side.hint([bytes(8)], request_id="é\x1b[2J\n" + "\x01" * 600) is not None
    payload = side.taken()
    assert payload is not None
    name = decode_hint(memoryview(payload)).request_id
    assert name == "é?[2J?" + "?" * (MAX_REQUEST_ID_BYTES - 7)


def test_without_a_flag_pages_or_room_there_is_no_hint_and_nothing_is_taken() -> None:
    side = Side(flag_count=2, page_count=2)
    assert side.hint([bytes(32)] * 3, items=3 * PAGE_ENTRIES) is None
    assert side.hint([bytes(64)] * 40) is None, "the record would be longer than half of the ring"
    assert side.hint([bytes(64)] * 20) is not None
    assert side.hint([bytes(64)] * 20) is not None
    assert side.hint([bytes(64)]) is None, "no flag"
    assert [side.taken() is not None for _ in range(3)] == [True, True, False]
    full = Side()
    while full.producer.push(1, bytes(48)):
        pass
    assert full.hint([bytes(8)]) is None
    assert all(full.table.flag(index).state == FREE for index in range(4))


@pytest.mark.parametrize(
    "wrong",
    [
        {"digests": []},
        {"digests": [bytes(8), bytes(9)]},
        {"digests": [bytes(8), 8]},
        {"digests": [8]},
        {"digests": (bytes(8),)},
        {"digests": [b""]},
        {"digests": [bytes(65)]},
        {"count": 0},
        {"count": 3},
        {"count": 1 << 40},
        {"items": 1 << 40},
        {"items": -1},
        {"state": 16},
        {"kind": 0xFFFFFFFF},
        {"prompt_tokens": 1 << 32},
        {"arrival_ns": 1 << 64},
        {"arrival_ns": "now"},
        {"flags": None},
        {"request_id": 7},
        {"priority": "high"},
        {"trace": b"short"},
        {"trace": None},
        {"session_digest": b"short"},
        {"session_digest": None},
    ],
    ids=str,
)
def test_wrong_arguments_raise_and_change_nothing(wrong: dict[str, Any]) -> None:
    side = Side()
    with pytest.raises((TypeError, ValueError, OverflowError)):
        side.hint(**{"digests": [bytes(8)] * 2, **wrong})
    assert side.taken() is None
    assert all(side.table.load(index) == 0 for index in range(4))
    handle = side.hint([bytes(8)])
    assert handle is not None
    assert (handle.flag, handle.generation) == (0, 1)


def test_a_flag_that_the_daemon_wrote_while_it_was_free_is_passed_over() -> None:
    side = Side()
    side.table.exchange(0, 0, pack(7, FlagState.CLAIMED, 3))
    handle = side.hint([bytes(8)])
    assert handle is not None
    assert handle.flag == 1
    assert side.table.flag(0) == Flag(7, FlagState.CLAIMED, 3)


def test_an_impossible_head_is_reported_and_takes_no_flag() -> None:
    side = Side()
    while side.producer.push(1, bytes(48)):
        pass
    side.control.words.store_release(Line.HEAD, 1 << 50)
    for use in (lambda: side.hint([bytes(8)]), lambda: side.producer.push(1), lambda: side.producer.fits(1)):
        with pytest.raises(SegmentCorrupt, match="ring head is impossible"):
            use()
    assert side.table.load(0) == 0


class Interrupted(FlagAllocator):
    """Where a hint runs Python, another thread may push: here it does, a record of `pushed` bytes."""

    pushed = 0
    push: Any

    def room(self, blocks: int) -> bool:
        answer = super().room(blocks)
        self.push(1, bytes(self.pushed))
        return answer

    def give_back(self, index: int) -> None:
        super().give_back(index)
        self.push(1, bytes(self.pushed))


def interrupted(pushed: int) -> Side:
    side = Side()
    table = Interrupted(side.control.buffer, side.control.words, side.control.layout)
    table.push, table.pushed, side.table = side.producer.push, pushed, table
    return side


def test_a_hint_looks_for_room_after_another_thread_pushed() -> None:
    side = interrupted(pushed=1500)
    taken = [side.hint([bytes(8)]) for _ in range(side.control.layout.flag_count)]
    for handle in filter(None, taken):
        word = side.table.load(handle.flag)
        assert side.table.exchange(handle.flag, word, pack(1, FREE, 0))
        side.table.give_back(handle.flag)
    while side.taken_any():
        pass
    while side.producer.fits(1500 + 400):  # until there is room for the other thread's record, or for the hint
        side.producer.push(1, bytes(300))
    side.hint([bytes([number]) * 8 for number in range(24)])
    while side.taken_any():  # a record that went over unread ones is SegmentCorrupt
        pass


def test_a_hint_writes_its_record_after_another_thread_pushed() -> None:
    side = interrupted(pushed=100)
    side.table.exchange(0, 0, pack(7, FlagState.CLAIMED, 3))
    handle = side.hint([bytes(8)], early=7)
    assert handle is not None
    first, second = side.taken_any(), side.taken_any()
    assert first is not None
    assert second is not None
    assert (first[0], second[0]) == (1, KIND)
    hint = decode_hint(memoryview(second[1]))
    assert (hint.early, hint.named_by) == (True, 3)


def test_two_threads_push_records_that_follow_each_other() -> None:
    side, count, done = Side(flag_count=16), 3000, []
    interval = sys.getswitchinterval()

    def push(kind: int) -> None:
        for number in range(count):
            while not side.producer.push(kind, number.to_bytes(4, "little") * (1 + number % 40)):
                time.sleep(0)
        done.append(kind)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=push, args=(kind,)) for kind in (1, 2)]
        for each in threads:
            each.start()
        found: dict[int, list[int]] = {1: [], 2: []}
        while len(done) < 2 or side.consumer.waiting:
            if (record := side.taken_any()) is not None:
                assert record[1] == record[1][:4] * (len(record[1]) // 4)
                found[record[0]].append(int.from_bytes(record[1][:4], "little"))
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == {1: list(range(count)), 2: list(range(count))}


def test_only_a_hint_makes_a_handle() -> None:
    with pytest.raises(TypeError):
        Handle()


# --- what stands in both languages ------------------------------------------------------------------------------------

FOLDER = Path(layout.__file__).parent


def test_the_c_code_and_the_stub_name_the_arguments_in_one_order() -> None:
    """They are positional: two that change places would pass each other's checks."""
    text = (FOLDER / "_ring.c").read_text()
    numbers, others = re.findall(r"enum \{ ((?:KIND|EPOCH)\b[^}]*) \}", text)
    in_c = [name.split("=")[0].strip().lower() for name in f"{numbers}, {others}".split(",")]
    in_c = [{"id": "request_id"}.get(name, name) for name in in_c if name not in ("numbers", "arguments")]
    stub = ast.parse((FOLDER / "_atomics.pyi").read_text())
    [call] = [node for node in ast.walk(stub) if isinstance(node, ast.FunctionDef) and node.name == "hint"]
    assert in_c == [argument.arg for argument in call.args.posonlyargs[1:]]
