"""Rules of KV groups against plain ones: a prefix counts when each group has each block that its layers will read."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.kv.prompts import Prompt as Known
from tests.support.kv_groups import layouts

LONGEST = 20  # units of a prompt


def read(group: Group, tokens: int) -> set[int]:
    """The blocks that hold what the next token's layer reads, token by token."""
    if group.kind is Kind.STATE:
        return {tokens // group.block_tokens - 1} if tokens else set()
    if group.kind is Kind.WINDOW:
        first = tokens - group.window_tokens + 1
    else:
        first = tokens // group.window_tokens * group.window_tokens if group.kind is Kind.CHUNK else 0
    return {token // group.block_tokens for token in range(max(first, 0), tokens)}


def proof(group: Group, tokens: int) -> set[int]:
    """The block whose first token the drafter's KV of the prefix's last one was computed from."""
    return {tokens // group.block_tokens} if group.drafts else set()


def lengths(groups: Groups, local: int, usable: int) -> range:
    return range(local + groups.unit_tokens, usable + 1, groups.unit_tokens)


def beyond(groups: Groups, local: int, tokens: int) -> list[set[int]]:
    """For each group, the blocks that a prefix reads and that are not local."""
    return [{block for block in read(group, tokens) if block >= local // group.block_tokens} for group in groups.groups]


Prompt = tuple[Groups, int, int, int]
prompts = st.tuples(layouts(), st.integers(0, LONGEST), st.integers(0, LONGEST), st.integers(0, 11))
# The groups; local, others above it, and usable tokens, in units.
ranges = st.tuples(layouts(), st.integers(0, 9), st.integers(0, 9), st.integers(0, LONGEST))


def in_tokens(found: Prompt) -> Prompt:
    groups, local, above, more = found
    unit = groups.unit_tokens
    return groups, local * unit, (local + above) * unit, (local + above + more) * unit


@given(ranges, st.randoms(use_true_random=False))
def test_wanted_is_what_some_prefix_reads(found: Prompt, random: Random) -> None:
    groups, local, above, usable = in_tokens(found)
    prefixes = [tokens for tokens in lengths(groups, above, usable) if random.random() < 0.7]
    needs = [
        [need | proof(group, tokens) for group, need in zip(groups.groups, beyond(groups, local, tokens), strict=True)]
        for tokens in prefixes
    ]
    for number, blocks in enumerate(groups.wanted(local, np.array(prefixes, dtype=np.int64))):
        assert blocks.tolist() == sorted(set().union(*(need[number] for need in needs)))


@given(layouts(), st.integers(0, 9), st.integers(0, LONGEST))
def test_no_prefix_needs_more_than_the_names_of_its_blocks(groups: Groups, local: int, more: int) -> None:
    unit = groups.unit_tokens
    every = [more * unit // group.block_tokens for group in groups.groups]
    assert groups.names(more) == sum(every) >= groups.most_items(local * unit, (local + more) * unit)


@given(prompts)
def test_items_are_what_a_prefix_reads_and_is_not_local(prompt: Prompt) -> None:
    groups, local, longer, _ = prompt
    local, tokens = local * groups.unit_tokens, (local + longer) * groups.unit_tokens
    found = [list(blocks) for blocks in groups.items(local, tokens)]
    assert found == [sorted(need) if longer else [] for need in beyond(groups, local, tokens)]


@given(ranges, st.integers(0, LONGEST))
def test_a_slot_tables_entries_are_those_of_the_blocks_to_load(found: Prompt, staged: int) -> None:
    """The engine's own cache may have grown since the hint: then it loads a part of what is staged."""
    groups, local, start, stop = in_tokens(found)
    end = max(stop, staged * groups.unit_tokens)
    table = [(group, block) for group, blocks in enumerate(groups.items(local, end)) for block in blocks]
    spans = groups.spans(local, end, start, stop)
    assert all(span for span in spans)
    loaded = [table[entry] for span in spans for entry in span]
    wanted = {(group, block) for group, blocks in enumerate(groups.items(start, stop)) for block in blocks}
    assert loaded == sorted(wanted & set(table))
    assert len(loaded) == len(wanted) or end > stop


@given(prompts, st.integers(1, LONGEST * 8), st.sampled_from([None, 0, 1, 2, 5]))
def test_saves_are_enough_to_go_on_where_vllm_does(prompt: Prompt, prefill: int, retention: int | None) -> None:
    """At the last unit before the end of the prompt, and with a retention interval at each multiple of it.

    With drafts a proof is needed, too: there the last unit is the one before.
    """
    groups, before, after, rest = prompt
    unit = groups.unit_tokens
    before, after = sorted((before * unit + rest, after * unit + rest))
    kept = None if retention is None else retention * unit
    found = [set(map(int, blocks)) for blocks in groups.saved(before, after, prefill, kept)]
    goals = {(prefill - 1) // unit * unit}
    if groups.proof_tokens:
        goals = {max(0, each // unit * unit - unit) for each in (prefill - 1, prefill)}
    if kept != 0:
        goals |= set(range(kept or unit, after + 1, kept or unit))
    for tokens in goals - {0}:
        for group, blocks in zip(groups.groups, found, strict=True):
            new = range(before // unit * unit // group.block_tokens, after // unit * unit // group.block_tokens)
            if group.kind is not Kind.STATE:
                assert (read(group, tokens) | proof(group, tokens)) & set(new) <= blocks
                assert blocks <= set(new)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (Groups((), 4), "groups=0 min=1 max=32"),
        (Groups((Group(Kind.FULL, 4),) * 33, 4), "groups=33 min=1 max=32"),
        (Groups((Group(Kind.FULL, 6),), 4), "block_tokens=6 hash_tokens=4"),
        (Groups((Group(Kind.FULL, 0),), 4), "block_tokens=0"),
        (Groups((Group(Kind.FULL, 4),), 0), "hash_tokens=0"),
        (Groups((Group(Kind.FULL, 4), Group(Kind.WINDOW, 4)), 4), "kind=window window_tokens=0"),
        (Groups((Group(Kind.FULL, 4, 8),), 4), "kind=full window_tokens=8"),
        (Groups((Group(Kind.FULL, 4), Group(Kind.CHUNK, 4, 6)), 4), "window_tokens=6 unit_tokens=4"),
        (Groups((Group(Kind.STATE, 4), Group(Kind.WINDOW, 4, 6)), 4), "attention only: groups=2 kinds=state,window"),
    ],
)
def test_groups_without_rules_are_refused_in_one_line(groups: Groups, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        groups.check()
    assert "\n" not in str(refused.value)


@given(layouts())
def test_groups_with_rules_are_accepted(groups: Groups) -> None:
    groups.check()


def test_a_prefix_ends_at_a_whole_unit_before_the_first_absent_block() -> None:
    """A block inside the unit would be staged, and named in the slot table, though no prefix has it."""
    groups = Groups((Group(Kind.FULL, 32), Group(Kind.FULL, 64)), 32)
    prompt = Known(
        groups, b"".join(bytes([number]) * 32 for number in range(6)), range(3), room=100, staged=lambda _: False
    )
    while names := prompt.next(100):
        prompt.found(bytes(name != bytes([3]) * 32 + b"\0" for name in names), bytes(len(names)))
    assert (prompt.choose().blocks, prompt.choose().entries) == (1, 3), "a unit: two blocks and one"


def test_a_block_lost_behind_another_lost_one_makes_no_longer_prefix() -> None:
    """Fetches end in any order."""
    groups = Groups((Group(Kind.FULL, 32),), 32)
    hashes = b"".join(bytes([number]) * 32 for number in range(10))
    prompt = Known(groups, hashes, range(10), room=0, staged=lambda _: False)
    while names := prompt.next(100):
        prompt.found(b"\1" * len(names), bytes(len(names)))
    assert prompt.choose().blocks == 10
    prompt.lost(range(3, 4))
    prompt.lost(range(5, 6))
    assert prompt.choose().blocks == 3
