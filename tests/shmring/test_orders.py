"""Shared words are reached through Words and nothing else, and every order is named by the same words at both ends."""

from __future__ import annotations

import ast
import ctypes
import mmap
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvprefetch.shmring import view
from kvprefetch.shmring._atomics import Words
from kvprefetch.shmring.credits import CreditGranter, CreditTaker
from kvprefetch.shmring.flags import FlagAllocator
from kvprefetch.shmring.layout import HEADER_BYTES
from kvprefetch.shmring.liveness import Liveness, PeerState
from kvprefetch.shmring.ring import Consumer, Producer

from .conftest import Control, small_layout

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("shmring", "daemon", "connector")
ACCESSES = {"load_acquire", "store_release", "compare_exchange", "publish"}
# The modules that may access shared words; outside shmring `publish` is an ordinary verb.
HOMES = {f"shmring/{name}.py" for name in ("ring", "flags", "credits", "liveness", "view")}
# The daemon's picture is a segment of its own, with an order of its own.
PICTURE = "daemon/telemetry/board.py"
ACCESS = r"\.?_?(load_acquire|store_release|compare_exchange|publish)\b[(,]"
# The engine's side in C accesses them, too.
IN_C, ACCESS_IN_C = {"shmring/_flags.c", "shmring/_handle.c", "shmring/_ring.c"}, r"order_\w+\("
# Other modules that know where the hot words lie, and why.
LINES = {"shmring/layout.py": "defines them"}
# Plain accesses to shared memory, each beside the order that covers it.
PLAIN = {
    "shmring/layout.py": "the geometry, before the segment is shared and before it is trusted",
    "shmring/ring.py": "record headers (SYNC tail)",
    "shmring/flags.py": "slot tables (SYNC flag)",
    "shmring/credits.py": "credit entries (SYNC credit)",
    "shmring/wire/records.py": "payloads of records already peeked (SYNC tail)",
}
PLAIN_CALLS = {"pack_into", "unpack_from", "frombuffer", "cast"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def attributes(tree: ast.AST) -> Counter[str]:
    return Counter(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def test_only_their_home_modules_touch_shared_words() -> None:
    wrong = [
        f"{name}: {access}"
        for name, tree in modules()
        if name not in HOMES | {PICTURE}
        for access in ACCESSES & set(attributes(tree))
        if not (access == "publish" and not name.startswith("shmring/"))
    ]
    assert wrong == []


def test_only_home_modules_know_where_the_shared_words_lie() -> None:
    wrong = [
        name
        for name, tree in modules()
        if name not in HOMES | set(LINES)
        and any(isinstance(node, ast.Name) and node.id == "Line" for node in ast.walk(tree))
    ]
    assert wrong == []


def test_shmring_reads_and_writes_plainly_only_what_an_order_covers() -> None:
    found = {
        name
        for name, tree in modules()
        if name.startswith("shmring/") and (PLAIN_CALLS & set(attributes(tree)) or "frombuffer" in ast.dump(tree))
    }
    assert found == set(PLAIN)


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_outside_shmring_nobody_takes_a_control_segment_apart(folder: str) -> None:
    """A struct over shared memory can expose a transient zero; records are decoded by shmring/wire/records.py alone."""
    wrong = [
        f"{name}: {call}"
        for name, tree in modules()
        if name.startswith(f"{folder}/") and name != PICTURE
        for call in {"pack_into", "unpack_from"} & set(attributes(tree))
    ]
    assert wrong == []


def sync_names() -> dict[str, Counter[str]]:
    """SYNC name -> {its words: how often they stand in code comments}."""
    names: dict[str, Counter[str]] = {}
    for home in sorted(HOMES - {"shmring/view.py"} | IN_C | {"shmring/_atomics.c"}):
        for name, words in re.findall(
            r"^\s+(?:#|/\*) SYNC (\w+): (.+?)(?: \*/)?$", (ROOT / home).read_text(), re.MULTILINE
        ):
            names.setdefault(name, Counter())[words] += 1
    return names


def test_every_order_stands_at_both_ends_in_the_same_words() -> None:
    names = sync_names()
    known = "tail head sleep flag slots claim copy credit taken gone state beat dropped adopted"
    assert set(names) == set(known.split())
    for name, words in names.items():
        assert len(words) == 1, f"SYNC {name} is worded differently at its ends: {list(words)}"
        assert sum(words.values()) >= 2, f"SYNC {name} stands at one end only"


def test_every_access_to_a_shared_word_names_its_order() -> None:
    """A SYNC comment stands at most five lines above each access, in the same function."""
    unnamed = []
    for home in sorted(HOMES - {"shmring/view.py"} | IN_C):
        lines = (ROOT / home).read_text().splitlines()
        for number, line in enumerate(lines):
            if re.search(ACCESS_IN_C if home in IN_C else ACCESS, line):
                above = "\n".join(lines[max(0, number - 5) : number + 1])
                if "SYNC" not in above and "SYNC" not in docstring_above(lines, number):
                    unnamed.append(f"{home}:{number + 1}: {line.strip()}")
    assert unnamed == []


def docstring_above(lines: list[str], number: int) -> str:
    """The function's lines from its `def` to the access."""
    start = number
    while start > 0 and not lines[start].lstrip().startswith("def "):
        start -= 1
    return "\n".join(lines[start:number])


def test_no_module_reaches_the_header_but_through_words() -> None:
    """With the header page of its buffer taken away, and Words on another mapping, everything still works."""
    control = Control(small_layout(), shared=True)
    other = mmap.mmap(control.segment.fd, control.segment.size_bytes)
    buffer = memoryview(other)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(other))
    child = os.fork()
    if child == 0:  # a touch of the page is a SIGSEGV here, not in the test run
        status = 1
        try:
            assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(HEADER_BYTES), 0) == 0
            use_everything(buffer, control)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    view.describe(control.buffer, 0)


def use_everything(buffer: memoryview, control: Control) -> None:
    words, layout = Words(control.buffer), control.layout
    producer, consumer = Producer(buffer, words, layout, lambda: None), Consumer(buffer, words, layout)
    for _ in range(200):
        assert producer.push(1, bytes(500))
        assert consumer.peek() is not None
        consumer.advance()
    assert consumer.prepare_sleep()
    consumer.wake()
    table = FlagAllocator(buffer, words, layout)
    index, _ = table.take(1, 1) or (0, 0)
    table.set_found(index, 3)
    table.set_disk(index, 2)
    table.write_slots(index, 0, [2])
    table.move(index, [(0, 1)])
    assert (table.found(index), table.disk(index), list(table.read_slots(index, 0, 1))) == (3, 2, [1])
    CreditGranter(buffer, words, layout).grant([5])
    assert CreditTaker(buffer, words, layout).take(1) == [5]
    liveness = Liveness(words, consumer=True)
    liveness.beat(1)
    liveness.set_state(PeerState.ACTIVE)
    liveness.peer(1)
