"""The users of namespaces: which prefixes meet, which user may have them, and the file of them."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from kvprefetch.daemon.store import namespaces as module
from kvprefetch.daemon.store.namespaces import (
    FILE,
    MAX_NAMESPACES,
    MAX_OF_ONE_UID,
    Namespaces,
    NamespaceTaken,
    name_of,
)
from kvprefetch.daemon.store.removal import patterns
from kvprefetch.daemon.store.settings import SettingsError
from kvprefetch.shmring.wire.checks import KeyPrefix
from kvprefetch.shmring.wire.codec import MAX_MESSAGE_BYTES, encode_message
from tests.support.waiting import eventually

ALICE, BOB = 1000, 1001
NAME = "llama@tp_rank:*@"
PREFIX: TypeAdapter[str] = TypeAdapter(KeyPrefix)
# Pieces of which one prefix may be made to look like another with the digits of a hash behind it.
PIECES = st.sampled_from(
    ["llama", "@", "@tp_rank:0@", "@tp_rank:1@", "@pp_rank:10@", "tp_rank:*", "ab", "0", ".*", "é"]
)
PREFIXES = st.lists(PIECES, min_size=1, max_size=5).map(lambda parts: "".join(parts) + "@")
HASHES = st.binary(min_size=1, max_size=4).map(bytes.hex)


class Times:
    """Seconds, each later than the one before."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        self.now += 1
        return self.now


def registry(folder: Path | None = None) -> Namespaces:
    return Namespaces(folder, structlog.get_logger(), clock_s=Times())


def claim(
    known: Namespaces, uid: int, *names: str, shared: bool = False, in_use: tuple[str, ...] = (), **said: str
) -> None:
    known.claim(uid, dict.fromkeys(names, said), shared=shared, in_use=in_use)


def users_of(known: Namespaces) -> dict[str, int]:
    return {each.name: each.uid for each in known.page(None, "").namespaces}


@given(PREFIXES, HASHES, PREFIXES, HASHES)
def test_keys_of_two_namespaces_never_meet(one: str, a_hash: str, other: str, another_hash: str) -> None:
    """Neither is a key of one a key of the other, nor does the removal of one take it."""
    if name_of(one) == name_of(other):
        return
    assert one + a_hash != other + another_hash
    theirs, ours = patterns([one])
    assert patterns([name_of(one)]) == (theirs, ours)
    for pattern in (theirs, rf"{ours}\Z"):
        assert re.match(pattern, other + another_hash) is None
        assert re.match(pattern, one + a_hash)


@pytest.mark.parametrize("prefix", ["llama", "llama@ab", "llama@\n", "lla\x00ma@", "", "@" * 1025, "lla\u2028ma@"])
def test_a_prefix_that_could_be_part_of_another_s_key_is_none(prefix: str) -> None:
    with pytest.raises(ValidationError):
        PREFIX.validate_python(prefix)
    assert PREFIX.validate_python("模型 7B@") == "模型 7B@"


def test_a_namespace_belongs_to_the_first_user() -> None:
    known = registry()
    claim(known, ALICE, NAME, weights="a")
    claim(known, ALICE, NAME)
    with pytest.raises(
        NamespaceTaken,
        match=rf"namespace='{re.escape(NAME)}' uid={BOB} owner_uid={ALICE}: .*namespaces = .* or have root or ",
    ):
        claim(known, BOB, "other@", NAME)
    with pytest.raises(NamespaceTaken):
        known.check(0, [NAME], shared=False)  # root is a user like others here
    [mine] = known.page(ALICE, "").namespaces
    assert (mine.fingerprint, mine.last_attached_s - mine.first_attached_s) == ({"weights": "a"}, 1)
    assert known.page(BOB, "").namespaces == []
    claim(known, BOB, NAME, shared=True, weights="b")
    assert users_of(known) == {NAME: ALICE}, "it is still the first one's when it is not shared any more"


def test_a_namespace_is_free_once_it_is_empty_unless_it_was_used_meanwhile() -> None:
    known = registry()
    claim(known, ALICE, NAME, "other@")
    purged = known.known(["llama@tp_rank:7@", "other@", "absent@"])
    assert [each.name for each in purged] == [NAME, "other@"]
    claim(known, ALICE, NAME)
    known.free(purged)
    assert users_of(known) == {NAME: ALICE}
    claim(known, BOB, "other@")
    assert users_of(known) == {NAME: ALICE, "other@": BOB}


def test_one_user_has_a_bounded_number_and_loses_the_oldest_of_its_own() -> None:
    known = registry()
    claim(known, BOB, "bob@")
    claim(known, ALICE, "attached@")
    for number in range(MAX_OF_ONE_UID):
        claim(known, ALICE, f"{number}@", in_use=("attached@",))
    assert {"bob@", "attached@", "1@"} <= users_of(known).keys()
    assert "0@" not in users_of(known)
    assert len(users_of(known)) == MAX_OF_ONE_UID + 1
    with pytest.raises(NamespaceTaken, match=rf"too many namespaces: uid={ALICE} has=.* max={MAX_OF_ONE_UID}"):
        claim(known, ALICE, *(f"many-{number}@" for number in range(MAX_OF_ONE_UID + 1)))
    with pytest.raises(NamespaceTaken, match="too many namespaces"):
        claim(known, ALICE, "one-more@", in_use=tuple(users_of(known)))


def test_all_users_together_have_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMESPACES", 3)
    known = registry()
    for number in range(3):
        claim(known, ALICE, f"{number}@")
    with pytest.raises(NamespaceTaken, match="too many namespaces"):
        claim(known, BOB, "bob@")
    claim(known, ALICE, "3@")
    assert users_of(known).keys() == {"1@", "2@", "3@"}


def test_the_largest_that_there_can_be_come_page_by_page() -> None:
    known = registry()
    said: Any = {f"{'a' * 31}{chr(ord('a') + number)}": "x" * 64 for number in range(16)}
    names = [f"{number:04}".ljust(1023, "🦙") + "@" for number in range(50)]
    for name in names:
        claim(known, ALICE, name, **said)
    found: list[str] = []
    more = True
    while more:
        page = known.page(ALICE, found[-1] if found else "")
        assert len(encode_message(page)) <= MAX_MESSAGE_BYTES
        found += [each.name for each in page.namespaces]
        more = page.more
    assert found == names


def test_the_next_start_knows_it(tmp_path: Path) -> None:
    known = registry(tmp_path)
    claim(known, ALICE, NAME, weights="a")
    claim(known, BOB, "bob@")
    known.close()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [FILE]
    again = registry(tmp_path)
    assert again.page(None, "") == known.page(None, "")
    with pytest.raises(NamespaceTaken):
        claim(again, BOB, NAME)
    again.free(again.known([NAME]))
    again.close()
    assert users_of(registry(tmp_path)) == {"bob@": BOB}


GOOD = {"name": "a@", "uid": 1, "fingerprint": {}, "first_attached_s": 1.0, "last_attached_s": 1.0}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "EOF while parsing"),
        ("{", "EOF while parsing"),
        ("[" * 100_000, "recursion"),
        ({"version": 2, "namespaces": []}, "version: input should be 1"),
        ({"version": 1, "namespaces": [{**GOOD, "uid": -1}]}, r"namespaces\.0\.uid: .*=-1"),
        ({"version": 1, "namespaces": [{**GOOD, "uid": "0"}]}, r"namespaces\.0\.uid: "),
        ({"version": 1, "namespaces": [{**GOOD, "name": "a"}]}, r"namespaces\.0\.name: .* end with '@'"),
        ({"version": 1, "namespaces": [{**GOOD, "fingerprint": {"a": "\n"}}]}, r"namespaces\.0\.fingerprint"),
        ({"version": 1, "namespaces": [GOOD] * (MAX_NAMESPACES + 1)}, f"at most {MAX_NAMESPACES} items"),
    ],
)
def test_a_file_that_cannot_be_right_is_one_line_and_gives_nothing_away(
    tmp_path: Path, content: Any, words: str
) -> None:
    (tmp_path / FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(SettingsError, match=rf"^disk: .*{words}[^\n]{{,400}}; mend it, or remove it: [^\n]*$"):
        registry(tmp_path)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(SettingsError, match="should be a file"):
        registry(tmp_path)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).symlink_to("/etc/passwd")
    with pytest.raises(SettingsError, match="symbolic links"):
        registry(tmp_path)
    (tmp_path / FILE).unlink()
    with (tmp_path / FILE).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(SettingsError, match=f"size_bytes={1 << 40} max="):
        registry(tmp_path)


def test_a_disk_that_stands_still_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: no disk stands still when a test wants it. What was claimed last is written when it moves again."""
    moves, stands = threading.Event(), threading.Event()
    sync = os.fsync

    def fsync(fd: int) -> None:
        stands.set()
        assert moves.wait(30)
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    known = registry(tmp_path)
    claim(known, ALICE, NAME)
    assert stands.wait(10)
    claim(known, BOB, "bob@")
    assert not (tmp_path / FILE).exists()
    moves.set()
    known.close()
    eventually(lambda: users_of(registry(tmp_path)) == {NAME: ALICE, "bob@": BOB}, what="the file")


def test_what_could_not_be_written_is_said_and_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    lines: list[dict[str, Any]] = []
    log: Any = SimpleNamespace(warning=lambda event, **said: lines.append({"event": event, **said}))
    known = Namespaces(folder, log)
    folder.rmdir()
    claim(known, ALICE, NAME)
    eventually(lambda: lines, what="the warning")
    assert lines[0]["event"] == "namespaces.unwritten"
    assert "No such file or directory: file=" in lines[0]["error"]
    folder.mkdir()
    known.close()
    assert users_of(registry(folder)) == {NAME: ALICE}
