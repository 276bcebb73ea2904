"""Store work of one engine on a store that answers what it is told: batches, media, ranks, one retry."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvprefetch.daemon.engine import transfers
from kvprefetch.daemon.engine.staging import HostStaging
from kvprefetch.daemon.engine.transfers import Found, RankLayout
from kvprefetch.daemon.store.errors import ErrorClass, StoreUnavailable
from kvprefetch.daemon.store.storage_nodes import Get
from kvprefetch.shmring.wire.attach import WorkerInfo


class Told:
    """A store with the keys `there`; `gets` are the answers to get_into, one after the other."""

    def __init__(self, there: set[str], gets: list[list[ErrorClass]] | None = None) -> None:
        self.there, self.gets = there, gets or []
        self.asked: list[Any] = []
        self.looked_for = 0

    def exist(self, keys: Sequence[str]) -> list[bool]:
        self.looked_for += len(keys)
        return [key in self.there for key in keys]

    def media(self, keys: Sequence[str], size: int) -> list[str | None]:
        """On disk what has a d, nowhere any more what has an e."""
        assert size == 64
        self.asked.append(list(keys))
        return [None if "e" in key else "disk" if "d" in key else "memory" for key in keys]

    def get_into(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], get: Get | None
    ) -> list[ErrorClass]:
        self.asked.append(list(keys))
        if not self.gets:
            raise StoreUnavailable("the store failed")
        return self.gets.pop(0)


def test_several_questions_are_one_and_only_hits_are_asked_for_their_tier() -> None:
    staging = HostStaging(1, [64, 64])
    shape = RankLayout(("r0@", "r1@"), ((1, 0), (1, 0)), staging)
    store: Any = Told({"r0@aa", "r1@aa", "r0@dd", "r1@dd", "r0@cc"})
    questions = [[b"\xaa", b"\xdd", b"\xcc"], [b"\xcc"], [b"\xdd"]]
    answers = transfers.look_up(store, shape, questions, media=True)
    assert answers == [Found(2, b"\0\1"), Found(0, b""), Found(1, b"\1")]
    assert store.asked == [["r0@aa", "r0@dd", "r0@dd"]], "one rank's keys, in one call, and none for a miss"
    staging.close()


def test_what_is_foreign_or_gone_when_it_is_asked_for_its_tier_ends_its_question_alone() -> None:
    staging = HostStaging(1, [64])
    store: Any = Told({"r0@aa", "r0@ee", "r0@dd"})
    questions = [[b"\xaa", b"\xee", b"\xdd"], [b"\xdd", b"\xaa"]]
    answers = transfers.look_up(store, RankLayout(("r0@",), ((1, 0),), staging), questions, media=True)
    assert answers == [Found(1, b"\0"), Found(2, b"\1\0")]
    staging.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_many_digests_those_behind_a_miss_are_not_asked_for(ranks: int) -> None:
    """The answers are those of asking for all: a random store says so."""
    chance = random.Random(ranks)
    staging = HostStaging(1, [64] * ranks)
    shape = RankLayout(tuple(f"r{rank}@" for rank in range(ranks)), ((1, 0),) * ranks, staging)
    for _ in range(50):
        questions = [[chance.randbytes(4) for _ in range(chance.choice([0, 1, 5, 40]))] for _ in range(8)]
        there = {
            f"r{rank}@{digest.hex()}"
            for digests in questions
            for digest in digests
            for rank in range(ranks)
            if chance.random() < 0.9
        }
        store: Any = Told(there)
        answers = transfers.look_up(store, shape, questions, media=False)
        whole = [[all(f"{p}{d.hex()}" in there for p in shape.key_prefixes) for d in each] for each in questions]
        assert answers == [Found([*each, False].index(False), b"") for each in whole]
    store = Told(set())
    assert transfers.look_up(store, shape, [[bytes([i]) for i in range(100)]] * 3, media=False) == [Found(0, b"")] * 3
    assert store.looked_for == 3 * ranks
    staging.close()


def test_what_may_be_there_soon_is_tried_once_more_and_nothing_else() -> None:
    staging = HostStaging(4, [64])
    shape = RankLayout(("r0@",), ((1, 0),), staging)
    first = [ErrorClass.OK, ErrorClass.RETRY, ErrorClass.FOREIGN, ErrorClass.LOOKUP_AGAIN]
    store: Any = Told(set(), [first, [ErrorClass.OK, ErrorClass.LOOKUP_AGAIN]])
    outcome = transfers.fetch(store, shape, [(bytes([i]), i) for i in range(4)])
    assert outcome == [ErrorClass.OK, ErrorClass.OK, ErrorClass.FOREIGN, ErrorClass.LOOKUP_AGAIN]
    assert store.asked[1] == ["r0@01", "r0@03"]
    staging.close()


def test_the_slots_of_transfers_that_may_be_under_way_are_lost_and_the_memory_is_kept() -> None:
    """Also of a second try, of one rank's part, and of a call that raises what says nothing of its transfers."""
    ok, late, retry = ErrorClass.OK, ErrorClass.UNDER_WAY, ErrorClass.RETRY
    staging = HostStaging(8, [64, 64])
    shape = RankLayout(("a@", "b@"), ((1, 0), (1, 0)), staging)
    store: Any = Told(set(), [[ok, ok, ok, late, retry, ok], [late]])
    outcome = transfers.fetch(store, shape, [(bytes([slot]), slot) for slot in range(3)])
    assert (outcome, staging.lost) == ([ok, late, late], {1, 2})
    broken: Any = SimpleNamespace(get_into=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        transfers.fetch(broken, shape, [(b"3", 3)])
    assert staging.lost == {1, 2, 3}
    answers: Any = Answers({"a@04"}, {"4": late, "5": ok})
    result = transfers.save(answers, shape, [(b"\4", 4), (b"\5", 5)])
    assert (result.stored, result.failed, result.again, result.lost) == (1, 1, [], 1)
    assert staging.lost == {1, 2, 3, 4}
    address = staging.addresses(1)[0]
    registered: list[int] = [base for base, _ in staging.areas()]
    stub: Any = SimpleNamespace(register=lambda *_: None, unregister=registered.remove)
    staging.register(stub)
    staging.unregister()
    assert staging.kept_bytes == 8 * 128
    assert len(registered) == 2
    staging.close()
    ctypes.memset(address, 1, 64)  # still mapped: a segmentation fault otherwise


def test_a_second_try_that_fails_as_a_whole_takes_nothing_from_the_first() -> None:
    staging = HostStaging(3, [64])
    store: Any = Told(set(), [[ErrorClass.OK, ErrorClass.RETRY, ErrorClass.OK]])
    outcome = transfers.fetch(store, RankLayout(("r0@",), ((1, 0),), staging), [(bytes([i]), i) for i in range(3)])
    assert outcome == [ErrorClass.OK, ErrorClass.RETRY, ErrorClass.OK]
    staging.close()


class Puts:
    """A store that holds nothing and takes everything: key -> address."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}

    def exist(self, keys: Sequence[str]) -> list[bool]:
        self.asked = list(keys)
        return [False] * len(keys)

    def put_from(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[ErrorClass]:
        self.taken.update(zip(keys, addresses, strict=True))
        return [ErrorClass.OK] * len(keys)


def test_of_ranks_that_share_a_key_the_one_whose_turn_the_slot_is_is_put() -> None:
    """The others did not copy their part: it stands in no store and is asked for once."""
    staging = HostStaging(4, [64, 64, 64])
    shape = RankLayout(("a@", "a@", "b@"), ((2, 0), (2, 1), (1, 0)), staging)
    store: Any = Puts()
    result = transfers.save(store, shape, [(bytes([slot]), slot) for slot in range(4)])
    assert (result.stored, result.failed, result.again) == (4, 0, [])
    a, b = ([store.taken[f"{name}@0{slot}"] for slot in range(4)] for name in "ab")
    assert a == [staging.addresses(slot)[slot % 2] for slot in range(4)]
    assert b == [staging.addresses(slot)[2] for slot in range(4)]
    transfers.look_up(store, shape, [[b"\1", b"\2"]], media=False)
    assert store.asked == ["a@01", "b@01", "a@02", "b@02"]
    staging.close()


@pytest.mark.parametrize(
    "turns", [[(1, 0), (1, 0)], [(2, 0), (2, 0)], [(2, 0)], [(2, 1), (2, 2)], [(3, 0), (3, 1)], [(1, 1)]]
)
def test_ranks_that_would_leave_a_slot_to_nobody_or_to_two_are_refused(turns: list[tuple[int, int]]) -> None:
    workers = [WorkerInfo(block_bytes=64, key_prefix="a@", put_factor=factor, put_turn=turn) for factor, turn in turns]
    with pytest.raises(ValueError, match=r"must take turns: key_prefix='a@' .*expected="):
        transfers.check_replicas(workers)


def test_ranks_that_share_a_key_with_parts_of_two_sizes_are_refused() -> None:
    workers = [
        WorkerInfo(block_bytes=size, key_prefix="a@", put_factor=2, put_turn=turn)
        for turn, size in enumerate((64, 128))
    ]
    with pytest.raises(ValueError, match=r"of one size: key_prefix='a@' block_bytes=\[64, 128\]"):
        transfers.check_replicas(workers)


def test_a_part_that_several_ranks_hold_is_read_once_and_is_there_for_all() -> None:
    """Mooncake fills one destination only of a key that stands twice in a get."""
    staging = HostStaging(3, [64, 64, 64])
    shape = RankLayout(("a@", "a@", "b@"), ((2, 0), (2, 1), (1, 0)), staging)
    asked: list[str] = []

    def get_into(
        keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], get: Get | None
    ) -> list[ErrorClass]:
        asked.extend(keys)
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            ctypes.memset(address, ord(key[0]) + int(key[-1]), size)
        return [ErrorClass.OK] * len(keys)

    store: Any = SimpleNamespace(get_into=get_into)
    assert transfers.fetch(store, shape, [(b"\1", 2), (b"\2", 0)]) == [ErrorClass.OK] * 2
    assert asked == ["a@01", "b@01", "a@02", "b@02"]
    for slot, block in ((2, 1), (0, 2)):
        parts = [ctypes.string_at(address, 64) for address in staging.addresses(slot)]
        assert parts == [bytes([ord(name) + block]) * 64 for name in "aab"]
    staging.close()


class Answers:
    """A store that holds the keys `there`, and answers a put of each other one by its last digit."""

    def __init__(self, there: set[str], puts: dict[str, ErrorClass]) -> None:
        self.there, self.puts = there, puts
        self.gone: str | None = None  # the call that finds the store gone

    def _asked(self, call: str) -> None:
        if call == self.gone:
            raise StoreUnavailable("planted")

    def exist(self, keys: Sequence[str]) -> list[bool]:
        self._asked("exist")
        return [key in self.there for key in keys]

    def put_from(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[ErrorClass]:
        self._asked("put_from")
        return [self.puts[key[-1]] for key in keys]

    def media(self, keys: Sequence[str]) -> list[str]:
        self._asked("media")
        return ["disk" if key.endswith("1") else "memory" for key in keys]


def test_what_became_of_each_block_of_a_save() -> None:
    """Stored, there already, to be tried again, or failed: each block is one of them, whatever its ranks' parts did."""
    staging = HostStaging(8, [64, 64])
    shape = RankLayout(("a@", "b@"), ((1, 0), (1, 0)), staging)
    puts = {
        "0": ErrorClass.OK,
        "3": ErrorClass.NO_SPACE,
        "4": ErrorClass.RETRY,
        "5": ErrorClass.TRANSIENT,
        "6": ErrorClass.WRITE,
        "7": ErrorClass.BUG,
        "2": ErrorClass.OK,
    }
    store: Any = Answers({"a@01", "b@01", "a@02"}, puts)
    blocks = [(bytes([digit]), 7 - digit) for digit in range(8)]
    result = transfers.save(store, shape, blocks, locate=True)
    assert (result.stored, result.present) == (2, 1), "of the second one rank's part was there"
    assert result.stored + result.present + result.failed + len(result.again) == 8
    assert {(bytes([digit]), 7 - digit) for digit in (3, 4, 5)} <= set(result.again)
    assert (b"\7", 0) not in result.again, "what cannot be put is not tried for ever"
    assert (result.memory, result.disk) == ([7, 5], [6]), "slots of what is in the store now"
    assert (transfers.save(store, shape, blocks).memory, transfers.save(store, shape, blocks).disk) == ([], [])
    store.gone = "media"
    assert transfers.save(store, shape, blocks, locate=True).memory == [7, 6, 5], "just put, so it lies in memory"
    for store.gone in ("exist", "put_from"):
        result = transfers.save(store, shape, blocks)
        assert (result.stored, result.present, result.failed, result.again) == (0, 0, 0, blocks)
    staging.close()
