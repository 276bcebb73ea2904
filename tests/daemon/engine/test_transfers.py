"""Store calls of one engine on a store that answers as a test says: batches, media, ranks, one retry."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvprefetch.daemon.engine import transfers
from kvprefetch.daemon.engine.staging import HostStaging
from kvprefetch.daemon.engine.transfers import Found, RankLayout
from kvprefetch.daemon.store.errors import ErrorClass, StoreUnavailable
from kvprefetch.daemon.store.storage_nodes import Get
from kvprefetch.shmring.wire.attach import WorkerInfo


class FakeStore:
    """A store with the keys `there`. It answers a get with the next of `gets`, and a put by its key's last digit.

    `gone`: the call that finds the store gone.
    """

    def __init__(
        self, there: Iterable[str] = (), gets: Iterable[list[ErrorClass]] = (), puts: Mapping[str, ErrorClass] = {}
    ) -> None:
        self.there, self.gets, self.puts = set(there), list(gets), puts
        self.asked: list[tuple[str, list[str]]] = []
        self.taken: dict[str, int] = {}  # address of each value that was put
        self.gone = ""

    def ask(self, call: str, keys: Sequence[str]) -> None:
        self.asked.append((call, list(keys)))
        if call == self.gone:
            raise StoreUnavailable("planted")

    def keys(self, call: str) -> list[list[str]]:
        """The keys of every such call."""
        return [keys for name, keys in self.asked if name == call]

    def exist(self, keys: Sequence[str]) -> list[bool]:
        self.ask("exist", keys)
        return [key in self.there for key in keys]

    def media(self, keys: Sequence[str], size: int = 64) -> list[str | None]:
        """On disk what has a d or ends with 1, nowhere any more what has an e."""
        assert size == 64
        self.ask("media", keys)
        return [None if "e" in key else "disk" if "d" in key or key.endswith("1") else "memory" for key in keys]

    def get_into(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], get: Get | None, sums: Sequence[int]
    ) -> list[ErrorClass]:
        self.gone = self.gone or ("" if self.gets else "get_into")
        self.ask("get_into", keys)
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            ctypes.memset(address, ord(key[0]) + int(key[-1], 16), size)
        return self.gets.pop(0)

    def put_from(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], sums: Sequence[int]
    ) -> list[ErrorClass]:
        self.ask("put_from", keys)
        self.taken.update(zip(keys, addresses, strict=True))
        return [self.puts.get(key[-1], ErrorClass.OK) for key in keys]


@pytest.fixture
def layout() -> Iterator[Callable[..., RankLayout]]:
    """Makes the layout of ranks with these key prefixes, of 64 bytes each."""
    made: list[HostStaging] = []

    def make(*prefixes: str, slots: int = 8) -> RankLayout:
        made.append(HostStaging(slots, [64] * len(prefixes)))
        replicas = [(prefixes.count(name), prefixes[:rank].count(name)) for rank, name in enumerate(prefixes)]
        workers = [
            WorkerInfo(block_bytes=64, key_prefixes=[name], replicas=factor, replica_index=turn)
            for name, (factor, turn) in zip(prefixes, replicas, strict=True)
        ]
        return RankLayout.of(workers, made[-1])

    yield make
    while made:
        made.pop().close()


Make = Callable[..., RankLayout]


def test_several_questions_are_one_and_only_hits_are_asked_for_their_medium(layout: Make) -> None:
    ranked = layout("r0@", "r1@")
    store: Any = FakeStore({"r0@aa", "r1@aa", "r0@dd", "r1@dd", "r0@cc"})
    questions = [[b"\xaa\0", b"\xdd\0", b"\xcc\0"], [b"\xcc\0"], [b"\xdd\0"]]
    answers = transfers.look_up(store, ranked, questions, media=True)
    assert answers == [Found(b"\1\1\0", b"\0\1\0"), Found(b"\0", b"\0"), Found(b"\1", b"\1")]
    assert store.keys("media") == [["r0@aa", "r0@dd", "r0@dd"]], "one rank's keys, in one call, and none for a miss"


def test_what_is_foreign_or_gone_when_it_is_asked_for_its_medium_ends_its_question_alone(layout: Make) -> None:
    store: Any = FakeStore({"r0@aa", "r0@ee", "r0@dd"})
    questions = [[b"\xaa\0", b"\xee\0", b"\xdd\0"], [b"\xdd\0", b"\xaa\0"]]
    answers = transfers.look_up(store, layout("r0@"), questions, media=True)
    assert answers == [Found(b"\1\0\1", b"\0\0\1"), Found(b"\1\1", b"\1\0")]


def test_what_may_be_there_soon_is_tried_once_more_and_nothing_else(layout: Make) -> None:
    ranked = layout("r0@")
    first = [ErrorClass.OK, ErrorClass.RETRY, ErrorClass.FOREIGN, ErrorClass.LOOKUP_AGAIN]
    store: Any = FakeStore((), [first, [ErrorClass.OK, ErrorClass.LOOKUP_AGAIN]])
    outcome = transfers.fetch(store, ranked, [(bytes([i, 0]), i) for i in range(4)])
    assert outcome == [ErrorClass.OK, ErrorClass.OK, ErrorClass.FOREIGN, ErrorClass.LOOKUP_AGAIN]
    assert store.keys("get_into")[1] == ["r0@01", "r0@03"]
    store = FakeStore((), [[ErrorClass.LOOKUP_AGAIN]])
    assert transfers.fetch(store, ranked, [(b"0\0", 0)], get=Get(dropped=True)) == [ErrorClass.LOOKUP_AGAIN]
    assert len(store.keys("get_into")) == 1, "nobody wants it"


def test_the_slots_of_transfers_that_may_be_under_way_are_lost_and_the_memory_is_kept(layout: Make) -> None:
    """Also of a second try, of one rank's part, and of a call that raises what says nothing of its transfers."""
    ok, late, retry = ErrorClass.OK, ErrorClass.UNDER_WAY, ErrorClass.RETRY
    ranked = layout("a@", "b@")
    store: Any = FakeStore((), [[ok, ok, ok, late, retry, ok], [late]])
    outcome = transfers.fetch(store, ranked, [(bytes([slot, 0]), slot) for slot in range(3)])
    assert (outcome, ranked.staging.quarantined) == ([ok, late, late], {1, 2})
    broken: Any = SimpleNamespace(get_into=lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        transfers.fetch(broken, ranked, [(b"3\0", 3)])
    assert ranked.staging.quarantined == {1, 2, 3}
    answers: Any = FakeStore({"a@04"}, (), {"4": late})
    result = transfers.save(answers, ranked, [(b"\4\0", 4), (b"\5\0", 5)])
    assert (result.stored, result.failed, result.again, result.quarantined) == (1, 1, [], 1)
    assert ranked.staging.quarantined == {1, 2, 3, 4}
    address = ranked.staging.addresses(1)[0]
    registered: list[int] = [base for base, _ in ranked.staging.areas()]
    stub: Any = SimpleNamespace(register=lambda *_: None, unregister=registered.remove)
    ranked.staging.register(stub)
    ranked.staging.unregister()
    assert ranked.staging.kept_bytes == 8 * 128
    assert len(registered) == 2
    ranked.staging.close()
    ctypes.memset(address, 1, 64)  # still mapped: a segmentation fault otherwise


def test_a_second_try_that_fails_as_a_whole_takes_nothing_from_the_first(layout: Make) -> None:
    store: Any = FakeStore((), [[ErrorClass.OK, ErrorClass.RETRY, ErrorClass.OK]])
    outcome = transfers.fetch(store, layout("r0@"), [(bytes([i, 0]), i) for i in range(3)])
    assert outcome == [ErrorClass.OK, ErrorClass.RETRY, ErrorClass.OK]


def test_of_ranks_that_share_a_key_the_one_that_filled_the_slot_is_put(layout: Make) -> None:
    """The others did not copy their part: it stands in no store and is asked for once."""
    ranked = layout("a@", "a@", "b@")
    store: Any = FakeStore()
    result = transfers.save(store, ranked, [(bytes([slot, 0]), slot) for slot in range(4)])
    assert (result.stored, result.failed, result.again) == (4, 0, [])
    a, b = ([store.taken[f"{name}@0{slot}"] for slot in range(4)] for name in "ab")
    assert a == [ranked.staging.addresses(slot)[slot % 2] for slot in range(4)]
    assert b == [ranked.staging.addresses(slot)[2] for slot in range(4)]
    transfers.look_up(store, ranked, [[b"\1\0", b"\2\0"]], media=False)
    assert store.keys("exist")[-1] == ["a@01", "b@01", "a@02", "b@02"]


@pytest.mark.parametrize(
    "turns", [[(1, 0), (1, 0)], [(2, 0), (2, 0)], [(2, 0)], [(2, 1), (2, 2)], [(3, 0), (3, 1)], [(1, 1)]]
)
def test_replicas_that_would_leave_a_slot_unfilled_or_fill_it_twice_are_refused(turns: list[tuple[int, int]]) -> None:
    workers = [
        WorkerInfo(block_bytes=64, key_prefixes=["a@"], replicas=count, replica_index=index) for count, index in turns
    ]
    with pytest.raises(ValueError, match=r"must take turns: key_prefix='a@' .*expected="):
        transfers.check_replicas(workers, 1)


def test_what_became_of_each_block_of_a_save(layout: Make) -> None:
    """Stored, there already, to be tried again, or failed: each block is one of them, whatever its ranks' parts did."""
    ranked = layout("a@", "b@")
    puts = {
        "0": ErrorClass.OK,
        "3": ErrorClass.NO_SPACE,
        "4": ErrorClass.RETRY,
        "5": ErrorClass.TRANSIENT,
        "6": ErrorClass.WRITE,
        "7": ErrorClass.BUG,
        "2": ErrorClass.OK,
    }
    store: Any = FakeStore({"a@01", "b@01", "a@02"}, (), puts)
    blocks = [(bytes([digit, 0]), 7 - digit) for digit in range(8)]
    result = transfers.save(store, ranked, blocks, locate=True)
    assert (result.stored, result.present) == (2, 1), "of the second one rank's part was there"
    assert result.stored + result.present + result.failed + len(result.again) == 8
    assert {(bytes([digit, 0]), 7 - digit) for digit in (3, 4, 5)} <= set(result.again)
    assert (b"\7\0", 0) not in result.again, "what cannot be put is not tried for ever"
    assert (result.memory, result.disk) == ([7, 5], [6]), "slots of what is in the store now"
    assert (transfers.save(store, ranked, blocks).memory, transfers.save(store, ranked, blocks).disk) == ([], [])
    store.gone = "media"
    assert transfers.save(store, ranked, blocks, locate=True).memory == [7, 6, 5], "just put, so it lies in memory"
    for store.gone in ("exist", "put_from"):
        result = transfers.save(store, ranked, blocks)
        assert (result.stored, result.present, result.failed, result.again) == (0, 0, 0, blocks)
