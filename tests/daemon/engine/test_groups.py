"""An engine with two KV groups: its keys, its hints and saves, and the prefix that its flags show."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import tracemalloc
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvprefetch.daemon.engine import transfers
from kvprefetch.daemon.engine.staging import HostStaging
from kvprefetch.daemon.engine.transfers import Found, RankLayout
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.telemetry.events import Ending
from kvprefetch.daemon.work.calls import CallKind
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.shmring.flags import Flag
from kvprefetch.shmring.wire.attach import WorkerInfo
from kvprefetch.shmring.wire.records import FlagState, Hint, ProtocolError, RecordKind, Saved, encode_saved
from tests.daemon.engine.epochs import SECOND_NS, Engine, Pools, digest, give_back, later_weights, make_epoch
from tests.support.encoded import encode_hint
from tests.support.engine_side import BLOCK_TOKENS

from .test_transfers import FakeStore

# A window of one block beside full attention.
GROUPS = Groups((Group(Kind.WINDOW, BLOCK_TOKENS, BLOCK_TOKENS), Group(Kind.FULL, BLOCK_TOKENS)), BLOCK_TOKENS)
OK, MISS = ErrorClass.OK, ErrorClass.MISS


def worker(
    *prefixes: str, size: int = 64, turn: tuple[int, int] = (1, 0), written: Sequence[list[int]] = ()
) -> WorkerInfo:
    return WorkerInfo(
        block_bytes=size, key_prefixes=list(prefixes), replicas=turn[0], replica_index=turn[1], written=list(written)
    )


def test_a_blocks_group_is_in_its_key_and_not_in_its_hash() -> None:
    staging: Any = SimpleNamespace(block_bytes=[64, 64], sum_bytes=0)
    ranked = RankLayout.of([worker("a@", "c@"), worker("b@", "d@")], staging)
    names = [b"\x01\x00", b"\x02\x01"]
    assert ranked.keys(names) == ["a@01", "b@01", "c@02", "d@02"]
    assert ranked.namespaces == ["a@", "b@", "c@", "d@"]
    store: Any = FakeStore(["a@01", "b@01", "c@02", "c@03", "d@03"])
    found = transfers.look_up(store, ranked, [[*names, b"\x03\x01"], [b"\x09\x00"]], media=False)
    assert found == [Found(b"\1\0\1", bytes(3)), Found(b"\0", b"\0")]
    assert store.keys("exist") == [["a@01", "b@01", "c@02", "d@02", "c@03", "d@03", "a@09", "b@09"]]
    found = transfers.look_up(store, ranked, [[b"\x01\x00", b"\x03\x01"]], media=True)
    assert found == [Found(b"\1\1", b"\1\0")]


def test_ranks_may_share_the_parts_of_one_group_and_not_those_of_another() -> None:
    """As states beside a head that both ranks hold. Each value is read once and put once, and is there for both."""
    workers = [worker("a@", "c@"), worker("b@", "c@")]
    transfers.check_replicas(workers, 2)
    staging = HostStaging(8, [64, 64])
    ranked = RankLayout.of(workers, staging)
    blocks = [(b"\x01\x00", 2), (b"\x02\x01", 0), (b"\x03\x00", 1)]
    keys = ["a@01", "b@01", "c@02", "a@03", "b@03"]
    store: Any = FakeStore(["a@01", "b@01", "c@02", "a@03"], [[OK] * 5, [OK, OK, OK, MISS, OK]])
    names = [name for name, _ in blocks]
    assert transfers.look_up(store, ranked, [names], media=True) == [Found(b"\1\1\0", b"\1\0\0")]
    assert transfers.fetch(store, ranked, blocks) == [OK, OK, OK]
    assert transfers.fetch(store, ranked, blocks) == [OK, OK, MISS]
    assert store.keys("get_into") == [keys, keys]
    for slot, filled in ((2, "ab"), (0, "cc")):
        found = [ctypes.string_at(address, 64) for address in staging.addresses(slot)]
        assert found == [bytes([ord(name) + (1 if slot else 2)]) * 64 for name in filled]
    store = FakeStore(["c@02"])
    assert transfers.save(store, ranked, blocks) == transfers.SaveResult(2, 1, 0, [])
    assert store.keys("put_from") == [["a@01", "b@01", "a@03", "b@03"]]
    assert store.taken["b@03"] == staging.addresses(1)[1]
    staging.close()


def test_what_each_group_of_each_rank_writes_of_a_value_goes_with_its_get() -> None:
    staging = HostStaging(8, [64, 64])
    workers = [
        worker("a@x@", "c@x@", turn=(2, 0), written=[[0, 64], [0, 8, 32, 40]]),
        worker("a@x@", "d@x@", turn=(2, 1), written=[[0, 64], [0, 16]]),
    ]
    ranked = RankLayout.of(workers, staging)
    asked: list[tuple[list[str], Any]] = []

    def get_into(keys: list[str], *_: Any, written: Any = None, sums: Any = ()) -> list[ErrorClass]:
        asked.append((keys, written))
        return [OK] * len(keys)

    store: Any = SimpleNamespace(get_into=get_into)
    assert transfers.fetch(store, ranked, [(b"\x01\x00", 2), (b"\x02\x01", 0)]) == [OK, OK]
    assert asked.pop() == (["a@x@01", "c@x@02", "d@x@02"], [None, (0, 8, 32, 40), (0, 16)])
    whole = RankLayout.of([each.model_copy(update={"written": []}) for each in workers], staging)
    transfers.fetch(store, whole, [(b"\x02\x01", 0)])
    assert asked.pop() == (["c@x@02", "d@x@02"], None)
    staging.close()


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ([worker("a@", "b@"), worker("c@")], "number of KV groups differs: groups=1 expected=2"),
        ([worker("a@", "a@")], "no two KV groups"),
        ([worker("a@", "b@"), worker("b@", "c@")], "no two KV groups"),
        ([worker("a@", "b@", turn=(2, 0)), worker("a@", "c@", turn=(2, 1))], "must take turns"),
        ([worker("a@", "b@"), worker("c@", "b@", size=32)], "of one size"),
        ([worker("a@", "b@"), worker("c@", "b@", written=[[0, 64], [0, 32]])], "write the same bytes .*='b@'"),
    ],
)
def test_ranks_whose_groups_do_not_fit_are_refused(workers: list[WorkerInfo], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transfers.check_replicas(workers, 2)


class Setup(Engine):
    """An epoch of an engine with two groups; a call ends when the test says so."""

    def __init__(self) -> None:
        self.now, self.pools = SECOND_NS, Pools()
        self.names: list[bytes] = []  # of the last hint
        # Whether the store has a block, and on disk alone; local ones, which are asked for after the others, it has.
        self.lies: dict[bytes, tuple[int, int]] = {}
        super().__init__(make_epoch(None, self.pools, lambda: self.now, chunk_blocks=12, groups=GROUPS))

    def hinted(self, number: int, *names: str, local: int = 0) -> Any:
        self.names = [digest(name) + bytes([group]) for group in (1, 0) for name in names[local:]]
        return self.hint([digest(name) for name in names], key=(number, 1), local=local)

    def answered(self, present: list[int], on_disk: list[int] | None = None) -> None:
        """The look-up of the last hint ends, after all its questions; full attention's blocks come first."""
        self.lies.update(zip(self.names, zip(present, on_disk or [0] * len(present), strict=True), strict=True))
        assert self.pools.calls[-1].kind is CallKind.LOOK_UP
        self.answer()

    def answer(self) -> None:
        while self.pools.calls and self.pools.calls[-1].kind is CallKind.LOOK_UP:
            run: Any = self.pools.calls[-1].run
            answers = [[self.lies.get(name, (1, 0)) for name in question] for question in run.args[2]]
            self.pools.end([Found(bytes(a for a, _ in each), bytes(b for _, b in each)) for each in answers])

    def fetched(self, *outcome: ErrorClass) -> None:
        assert any(self.epoch.start_fetch(lane) for lane in Lane)
        self.pools.end(list(outcome))
        self.answer()


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.leave()


def test_a_flag_shows_the_prefix_once_all_its_blocks_are_there(setup: Setup) -> None:
    key = setup.hinted(0, "a", "b", "c")
    setup.answered([1, 1, 1, 0, 0, 1])
    assert setup.table.found(0) == 3
    setup.fetched(OK, OK, OK, OK)
    assert setup.flag(key) == Flag(1, FlagState.READY, 3)
    assert len(set(setup.slots(key, 0, 4))) == 4
    setup.put(key, FlagState.CLAIMED, 3)
    setup.loaded(key, range(1, 3))
    assert setup.epoch.planner.gauges()["blocks_pinned"] == 0
    again = setup.hinted(1, "a", "b", "c", local=1)
    assert setup.flag(again) == Flag(1, FlagState.READY, 3), "what is staged needs no question"
    (line,) = [line for _, line in setup.epoch.parts.recent]
    assert (line["hint_blocks"], line["local_blocks"], line["found_blocks"], line["loaded_blocks"]) == (3, 0, 3, 2)
    assert (line["kv_groups"], line["bytes"]) == (2, 4 * 4096)
    setup.epoch.counters.publish()
    hits = setup.epoch.counters.metrics.totals("hit_blocks")
    assert hits == {"staging": 2, "memory": 3, "disk": 0}, "as misses count"


def test_of_what_came_from_disk_the_flag_shows_the_share_in_blocks_of_the_prefix(setup: Setup) -> None:
    key = setup.hinted(0, "a", "b", "c", local=1)
    setup.answered([1, 1, 0, 1], on_disk=[1, 1, 0, 1])
    setup.fetched(OK, OK, OK)
    assert setup.flag(key) == Flag(1, FlagState.READY, 3)
    assert setup.table.disk(0) == 2


def test_where_a_block_fails_the_next_shorter_complete_prefix_is_shown(setup: Setup) -> None:
    key = setup.hinted(0, "a", "b", "c")
    setup.answered([1, 1, 1, 1, 1, 1])
    setup.fetched(OK, OK, MISS, OK)  # of the last window, then of a, b and c
    assert setup.flag(key) == Flag(1, FlagState.HINTED, 0)
    assert setup.table.found(0) == 1
    setup.fetched(OK)
    assert setup.flag(key) == Flag(1, FlagState.READY, 1)


def test_where_a_block_fails_nothing_is_shown_in_a_mode_that_fetches_no_other(setup: Setup) -> None:
    key = setup.hinted(0, "a", "b", "c")
    setup.answered([1, 1, 1, 1, 1, 1])
    setup.epoch.switch("off")
    setup.fetched(OK, OK, MISS, OK)
    assert setup.flag(key) == Flag(1, FlagState.READY, 0)


def test_a_value_that_is_known_to_be_bad_is_not_chosen_again(setup: Setup) -> None:
    setup.hinted(0, "a", "b")
    setup.answered([1, 1, 1, 1])
    setup.fetched(ErrorClass.CORRUPT, OK, OK)
    setup.fetched(OK)
    again = setup.hinted(1, "a", "b")
    setup.answered([1, 1, 1, 1])
    assert setup.flag(again) == Flag(1, FlagState.READY, 1)


def test_a_miss_a_store_that_is_away_and_a_mode_that_fetches_nothing_are_shown_as_nothing(setup: Setup) -> None:
    miss = setup.hinted(0, "x", "y", local=1)
    setup.answered([0, 0])
    assert setup.flag(miss) == Flag(1, FlagState.READY, 1)
    setup.epoch.switch("shadow")
    shadow = setup.hinted(1, "a", "b")
    setup.answered([1, 1, 1, 1])
    assert setup.flag(shadow) == Flag(1, FlagState.READY, 0)
    assert setup.table.found(1) == 2
    setup.epoch.switch("off")
    assert setup.flag(setup.hinted(2, "a", "b")) == Flag(1, FlagState.READY, 0)
    setup.epoch.switch("on")
    waiting = setup.hinted(3, "a", "b")
    setup.epoch.tick(setup.now + 2 * SECOND_NS)
    assert setup.flag(waiting).state == FlagState.HINTED, "its batch is out"
    setup.pools.end(RuntimeError("planted"))
    assert setup.flag(waiting) == Flag(1, FlagState.READY, 0)


def test_a_lease_that_was_lost_shortens_the_prefix(setup: Setup) -> None:
    key = setup.hinted(0, "a", "b")
    setup.answered([1, 1, 1, 1])
    setup.now += 6 * SECOND_NS
    setup.epoch.tick(setup.now)
    assert setup.pools.calls[-1].kind is CallKind.LOOK_UP
    setup.pools.end([Found(b"\0\1\1", bytes(3))])  # the window's block of "b" is gone
    setup.answer()
    setup.fetched(OK, OK)
    assert setup.flag(key) == Flag(1, FlagState.READY, 1)


def test_records_that_do_not_fit_the_groups_are_counted_and_skipped(setup: Setup) -> None:

    slots = setup.credits.take(1)
    setup.push(RecordKind.SAVED, encode_saved(Saved(1, 0, False, slots, [digest("a") + b"\2"])))
    assert setup.epoch.counters["bad_records"] == 1
    setup.push(RecordKind.SAVED, encode_saved(Saved(1, 0, False, slots, [digest("a") + b"\1"])))
    assert setup.epoch.counters["bad_records"] == 1
    setup.put((0, 1), FlagState.HINTED)
    for blocks, pages in ((3, [0]), (2, [0, 1])):
        hint = Hint(0, 1, "r", blocks, 0, 0, 99, 5, 32, bytes(64), pages)
        setup.push(RecordKind.HINT, encode_hint(hint))
    assert setup.epoch.counters["bad_records"] == 3


def test_a_hint_has_a_page_for_every_256_blocks_that_may_be_asked_for_in_any_group() -> None:
    """Those of a window too, although a prefix needs few of them: the pages bound what an engine's requests cost."""
    epoch = make_epoch(groups=GROUPS, max_blocks=512)
    assert (epoch.memory.layout.table_entries, epoch.memory.layout.page_count) == (1024, 4096)
    for blocks, local, pages in ((512, 0, 4), (512, 384, 1), (512, 383, 2), (1, 1, 1)):
        for count in (pages - 1, pages, pages + 1):
            hashes = b"".join(number.to_bytes(2, "big") for number in range(blocks))
            hint = Hint(0, 1, "r", blocks, local, 0, 1, 1, 2, hashes, range(count) or [0, 0])
            with contextlib.nullcontext() if count == pages else pytest.raises(ProtocolError, match="does not fit"):
                epoch.channel.check_hint(hint)
    hint = Hint(0, 1, "r", 513, 0, 0, 1, 1, 1, bytes(513), range(5))
    with pytest.raises(ProtocolError, match="names=1026 max=1024"):
        epoch.channel.check_hint(hint)
    epoch.end(Ending.ENGINE_GONE)
    give_back(epoch)


def test_hints_that_wait_hold_little_more_than_their_digests_bytes() -> None:
    """Names, of which each block of each group has one, are made as look-ups ask for them."""
    engine = Engine(make_epoch(pools=Pools(), groups=GROUPS, max_blocks=16384))
    hashes = [[i.to_bytes(28, "big") + number.to_bytes(4, "big") for i in range(16384)] for number in range(8)]
    gc.collect()
    tracemalloc.start()
    for number, digests in enumerate(hashes):
        pages = range(number * 128, number * 128 + 128)
        engine.hint(digests, key=(number, 1), pages=pages)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(engine.epoch.planner.requests) == 8
    assert held < 8 * 16384 * (32 + 2 + 4), "the digests, a byte for each block of two groups, and little else"
    engine.leave()


def test_a_hint_with_more_blocks_than_a_flag_can_count_is_skipped(setup: Setup) -> None:
    """All of them local, so that its slot table would be empty: no word of a flag holds their number."""
    blocks = (1 << 20) + 1
    setup.put((0, 1), FlagState.HINTED)
    hint = Hint(0, 1, "r", blocks, blocks, 0, 1, 1, 1, bytes(blocks), [0])
    with pytest.raises(ProtocolError, match="hint is too long"):
        setup.epoch.channel.check_hint(hint)


def test_a_look_up_of_before_a_reset_ends_after_a_fetch_that_failed(setup: Setup) -> None:
    """Its request was cancelled meanwhile, and the daemon has not read that yet."""
    setup.hinted(0, "a", "b")
    setup.answered([1, 1, 1, 1])
    assert any(setup.epoch.start_fetch(lane) for lane in Lane)
    fetch = setup.pools.calls[-1]
    cancelled = setup.hinted(1, "c", "d")
    look_up = setup.pools.calls[-1]
    setup.put(cancelled, FlagState.CANCELLED)
    setup.epoch.reset(later_weights())
    for call, result in ((fetch, [ErrorClass.CORRUPT] * 3), (look_up, [Found(b"\1\1", bytes(2))])):
        setup.pools.calls.remove(call)
        call.finish(result)
    assert setup.flag(cancelled).state == FlagState.CANCELLED
    setup.done(cancelled)
    assert setup.epoch.corrupt is None
    assert not setup.epoch.planner.requests
