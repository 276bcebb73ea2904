"""Requests of an engine with several KV groups: the longest prefix there is, published whole or not at all.

Under random events: test_planner_histories.py.
"""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.kv.prompts import GIVE_UP_SLICES, SLICE, Choice, Prompt
from tests.daemon.planning.support import SHAPES
from tests.support.kv_groups import layouts

SIZE = 8
several = layouts().filter(lambda groups: not groups.partial)


def digest(prompt: int, number: int) -> bytes:
    """Prompts share their first three digests."""
    return hashlib.sha256(f"{prompt if number >= 3 else ''} {number}".encode()).digest()[:SIZE]


def name(groups: Groups, prompt: int, group: int, block: int) -> bytes:
    ratio = groups.groups[group].block_tokens // groups.hash_tokens
    return digest(prompt, (block + 1) * ratio - 1) + bytes([group])


def hashes(groups: Groups, prompt: int, units: int) -> bytes:
    return b"".join(digest(prompt, i) for i in range(groups.digests(units)))


def needed(groups: Groups, prompt: int, local: int, units: int) -> list[bytes]:
    """The names of a prefix, one by one, in the slot table's order."""
    unit = groups.unit_tokens
    items = enumerate(groups.items(local * unit, units * unit))
    return [name(groups, prompt, group, block) for group, blocks in items for block in blocks]


def proofs(groups: Groups, prompt: int, units: int) -> list[bytes]:
    """The names of the blocks behind a prefix, in groups with drafts."""
    ends = [units * groups.unit_tokens // group.block_tokens for group in groups.groups]
    return [name(groups, prompt, i, end) for i, end in enumerate(ends) if groups.groups[i].drafts]


def longest(groups: Groups, prompt: int, local: int, units: int, there: set[bytes], room: int) -> int:
    for n in range(units, local, -1):
        wanted = needed(groups, prompt, local, n)
        if len(wanted) <= room and there.issuperset(wanted + proofs(groups, prompt, n)):
            return n
    return local


class Asked:
    """A prompt that asks, a few names at a time, a store that has the names `stored`, of which `disk` lie on disks."""

    def __init__(self, groups: Groups, local: int, units: int, room: int = 10_000, prompt: int = 1) -> None:
        self.stored, self.staged, self.disk = set[bytes](), set[bytes](), set[bytes]()
        self.names: list[bytes] = []
        blocks = range(local, units)
        self.prompt = Prompt(
            groups, hashes(groups, prompt, units), blocks, room=room, staged=lambda n: n in self.staged
        )

    def choose(self, most: int = 3) -> Choice:
        while names := self.prompt.next(most):
            assert len(names) <= most
            assert names == self.prompt.next(most), "asking changes nothing"
            self.names += names
            present = bytes(name in self.stored for name in names)
            self.prompt.found(present, bytes(name in self.disk for name in names))
        return self.prompt.choose()


@given(
    layouts().filter(lambda each: not each.partial), st.integers(0, 3), st.integers(1, 8), st.integers(0, 24), st.data()
)
def test_the_longest_prefix_that_is_there_and_fits_is_chosen_again_and_again(
    groups: Groups, local: int, more: int, room: int, data: st.DataObject
) -> None:
    units = local + more
    asked = Asked(groups, local, units, room)
    every = sorted(needed_by_any(groups, 1, local, units))
    asked.stored = set(data.draw(st.lists(st.sampled_from(every), unique=True, min_size=len(every) * 2 // 3)))
    asked.staged = set(data.draw(st.lists(st.sampled_from(every), unique=True)))
    asked.disk = asked.stored & set(data.draw(st.lists(st.sampled_from(every), unique=True)))
    there, most = asked.stored | asked.staged, data.draw(st.integers(1, 9))
    while True:
        choice = asked.choose(most)
        best = longest(groups, 1, local, units, there, room)
        assert choice.blocks == best
        names = needed(groups, 1, local, best)
        assert choice.names[: choice.entries * asked.prompt.name_bytes] == b"".join(names)
        assert [bool(each) for each in choice.on_disk] == [each in asked.disk and each in asked.names for each in names]
        assert not choice.missing or choice.missing[0] in set(needed(groups, 1, local, best + 1)) - there
        assert len(names) <= asked.prompt.most_blocks or not names
        if best == local:
            break
        start = data.draw(st.integers(0, len(names) - 1))
        lost = set(names[start : data.draw(st.integers(start + 1, len(names)))])
        there, asked.staged, asked.stored = there - lost, asked.staged - lost, asked.stored - lost
        asked.prompt.lost(range(start, start + len(lost)))
    assert len(set(asked.names)) == len(asked.names) or asked.staged, "no name is asked for twice"


@given(st.sampled_from(SHAPES), st.integers(0, 3), st.integers(1, 8), st.data())
def test_of_a_longer_local_prefix_only_what_the_load_needs_counts_as_loaded(
    groups: Groups, local: int, more: int, data: st.DataObject
) -> None:
    units = local + more
    asked = Asked(groups, local, units)
    asked.stored = needed_by_any(groups, 1, local, units)
    assert asked.choose().blocks == units
    start = data.draw(st.integers(local, units - 1))
    names, loaded = needed(groups, 1, local, units), asked.prompt.loaded(range(start, units))
    assert [names[i] for some in loaded for i in some] == needed(groups, 1, start, units)


def needed_by_any(groups: Groups, prompt: int, local: int = 0, units: int = 9) -> set[bytes]:
    prefixes = range(local + 1, units + 1)
    return {each for n in prefixes for each in needed(groups, prompt, local, n) + proofs(groups, prompt, n)}


def test_digests_are_those_of_the_blocks_ends() -> None:
    """By hand: two hash blocks of 2 tokens in a window's block of 4. Of the state the last one is enough."""
    asked, full = Asked(SHAPES[1], 0, 2), [digest(1, i) + b"\0" for i in range(4)]
    asked.stored = {*full, digest(1, 1) + b"\1", digest(1, 3) + b"\1", digest(1, 3) + b"\2"}
    choice = asked.choose(9)
    assert asked.names == [*full, digest(1, 1) + b"\1", digest(1, 3) + b"\1", digest(1, 3) + b"\2"]
    assert choice.names == b"".join(asked.names)
    assert (choice.blocks, choice.entries, asked.prompt.name_bytes) == (2, 7, SIZE + 1)


def test_a_prompt_that_is_not_there_asks_for_its_first_slice_alone() -> None:
    asked = Asked(SHAPES[0], 0, 8)
    assert asked.choose(3).blocks == 0
    assert asked.names == [digest(1, i) + b"\1" for i in range(3)], "of full attention"


def test_where_only_full_attention_is_there_each_block_is_asked_for_once() -> None:
    """As behind prompts that ended elsewhere: more and more of the shorter prefixes at a time."""
    groups = Groups((Group(Kind.FULL, 2), Group(Kind.STATE, 2)), 2)
    asked = Asked(groups, 0, 300)
    asked.stored = {name(groups, 1, 0, block) for block in range(300)} | {name(groups, 1, 1, 9)}
    questions = 0
    while names := asked.prompt.next(1000):
        questions += names[0][-1] == 1
        asked.names += names
        asked.prompt.found(bytes(each in asked.stored for each in names), b"")
    assert asked.prompt.choose().blocks == 10
    assert len(set(asked.names)) == len(asked.names) <= 600
    assert questions == 5, "1, 4, 16, 64 prefixes, and the rest"


def test_with_the_last_slice_of_full_attention_the_windows_of_the_longest_prefix_are_asked_for() -> None:
    """A hit takes two questions then. The first one is of full attention alone: most prompts are not there."""
    groups = Groups((Group(Kind.FULL, 2), Group(Kind.WINDOW, 2, 4), Group(Kind.STATE, 2)), 2)
    asked, questions = Asked(groups, 0, 100), list[list[int]]()
    asked.stored = needed_by_any(groups, 1, 0, 100)
    for most in (9, 1000):
        names = asked.prompt.next(most)
        questions.append([each[-1] for each in names])
        asked.prompt.found(bytes(each in asked.stored for each in names), b"")
    assert questions == [[0] * 9, [0] * 91 + [1] * 2 + [2]]
    assert (asked.prompt.next(9), asked.prompt.choose().blocks) == ([], 100)


def test_of_shorter_prefixes_other_groups_are_asked_where_the_first_one_has_its_blocks() -> None:
    groups = Groups((Group(Kind.FULL, 2), Group(Kind.WINDOW, 2, 2), Group(Kind.STATE, 2)), 2)
    asked = Asked(groups, 0, 300)
    asked.stored = {name(groups, 1, 0, block) for block in range(300)}
    asked.stored |= {name(groups, 1, group, block) for group, block in ((1, 9), (1, 99), (2, 9))}
    assert asked.choose(1000).blocks == 10
    assert {each for each in asked.names if each[-1] == 2} == {name(groups, 1, 2, block) for block in (299, 99, 9)}


def test_while_the_store_is_away_what_is_staged_counts_as_far_as_a_few_looks_reach() -> None:
    asked = Asked(SHAPES[0], 0, 8)
    asked.staged = set(needed(SHAPES[0], 1, 0, 5))
    asked.prompt.give_up()
    assert asked.prompt.choose().blocks == 5
    units = (GIVE_UP_SLICES + 2) * SLICE
    groups = Groups((Group(Kind.FULL, 2), Group(Kind.STATE, 2)), 2)
    asked = Asked(groups, 0, units, room=2 * units)
    asked.staged = {name(groups, 1, 0, block) for block in range(units)} | {name(groups, 1, 1, 0)}
    asked.prompt.give_up()
    assert asked.prompt.choose().blocks == 0
