"""What one record may name: no digest twice, no more blocks than its bound, nothing that changes once it is read."""

from __future__ import annotations

import struct

import pytest

from kvprefetch.daemon.engine import epoch_calls, saver
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.shmring._atomics import repeats
from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.records import MAX_SAVED_BLOCKS, FlagState, ProtocolError, RecordKind, Saved
from tests.daemon.engine.epochs import Engine, block, digest, later_weights, make_epoch
from tests.support.encoded import encode_hint


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 32, 64])
@pytest.mark.parametrize("alike", [0, 8, 31])
def test_a_repeat_is_found_wherever_it_is_and_however_digests_begin(size: int, alike: int) -> None:
    """`alike`: so many of their first bytes are the same."""
    same = min(alike, size - 1)
    chain = [bytes(same) + bytes([number]) * (size - same) for number in range(100)]
    assert not repeats(b"".join(chain), size)
    assert not repeats(chain[0], size)
    for at, again in ((0, 99), (98, 99), (0, 1)):
        assert repeats(b"".join([*chain[:again], chain[at], *chain[again + 1 :]]), size)


def test_a_hint_that_names_a_digest_twice_is_refused_and_the_others_go_on() -> None:
    """It would pin one slot as often as it names it: a million times in one record."""
    engine = Engine(make_epoch())
    engine.stage((0, 1), *"ab")
    engine.hint([digest(name) for name in "abca"], key=(1, 1))
    assert engine.epoch.counters["bad_records"] == 1
    assert list(engine.epoch.planner.requests) == [(0, 1)]
    engine.stage((1, 2), *"abc")
    assert engine.epoch.planner.requests[1, 2].published == 3
    engine.leave()


def test_an_engine_that_writes_to_a_hint_behind_its_check_changes_nothing() -> None:
    hint = records.Hint(0, 1, "r", 2, 0, 0, 9, 5, 32, digest("a") + digest("b"), [0])
    payload = bytearray(encode_hint(hint))
    decoded = records.decode_hint(memoryview(payload))
    payload[-32:] = digest("a")
    assert decoded.hashes == hint.hashes


@pytest.mark.parametrize("dropped", [False, True])
def test_a_record_names_no_more_saved_blocks_than_one_put_has(dropped: bool) -> None:
    for count in (MAX_SAVED_BLOCKS, MAX_SAVED_BLOCKS + 1):
        saved = Saved(1, 0, dropped, list(range(count)), [] if dropped else [bytes(33)] * count)
        payload = memoryview(records.encode_saved(saved))
        if count <= MAX_SAVED_BLOCKS:
            assert records.decode_saved(payload) == saved
        else:
            with pytest.raises(ProtocolError, match="too many blocks are saved at once: blocks=4097 max=4096"):
                records.decode_saved(payload)


def test_save_slots_of_refused_records_stay_out_and_others_come_back() -> None:
    engine = Engine(make_epoch())
    slots = engine.credits.take(4)
    engine.push(RecordKind.SAVED, records.encode_saved(Saved(1, 0, True, slots * 2000, [])))
    assert (engine.epoch.counters["bad_records"], engine.credits.available()) == (1, 0)
    engine.push(RecordKind.SAVED, records.encode_saved(Saved(1, 0, True, slots, [])))
    assert engine.credits.available() == 4
    engine.leave()


def turns(engine: Engine) -> int:
    """Return how many turns of the loop it takes until nothing is owed."""
    count = 0
    while engine.epoch.owes:
        engine.epoch.drain(0)
        count += 1
    return count


def test_the_loop_goes_on_with_what_one_record_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here an event may do no more than two blocks' work."""
    engine = Engine(make_epoch())
    engine.stage((0, 1), *"abcdefgh")
    engine.loaded((0, 1), range(8))
    monkeypatch.setattr(epoch_calls, "RUNS", 2)
    engine.want((1, 1), *"hgfedcba")
    while engine.epoch.channel.table.flag(1).state != FlagState.READY:
        assert not engine.epoch.start_fetch(Lane.MEMORY), "all is staged"
        assert engine.epoch.owes
        engine.epoch.drain(0)
    assert engine.epoch.channel.table.flag(1).count == 8
    turns(engine)
    engine.loaded((1, 1), range(8))
    assert engine.epoch.gauges()["blocks_pinned"] > 0
    assert engine.epoch.channel.table.flag(1).state == FlagState.FREE, "the engine does not wait for it"
    assert turns(engine) > 1
    assert engine.epoch.gauges()["blocks_pinned"] == 0
    engine.epoch.reset(later_weights())
    assert turns(engine) > 0
    assert engine.epoch.gauges()["slots_free"] == 12
    engine.leave()


def test_a_reset_ends_saves_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a line, and an engine may have one for each slot."""
    monkeypatch.setattr(saver, "ENDS", 1)
    engine = Engine(make_epoch())
    for number, slot in enumerate(engine.credits.take(4)):
        saved = Saved(number, 0, False, [slot], [block("abcd"[number])])
        engine.push(RecordKind.SAVED, records.encode_saved(saved))
    engine.epoch.reset(later_weights())
    assert engine.epoch.gauges()["saves_queued"] > 0
    assert turns(engine) > 1
    assert engine.epoch.gauges()["saves_queued"] == 0
    assert engine.epoch.counters["failed_saves"] == 4
    assert engine.credits.available() == 4


def hint_record(engine: Engine, *, blocks: int = 2, local: int = 0, name: bytes = b"r") -> bytes:
    """Return a hint in a free flag; the encoder makes none like it."""
    taken = engine.flags.take(FlagState.HINTED, blocks)
    assert taken is not None
    index, generation = taken
    pages = list(engine.flags.lent(index))
    head = records.HINT_HEAD.pack(
        records.PROTOCOL,
        32,
        len(name),
        len(pages),
        index,
        blocks,
        local,
        0,
        100,
        generation,
        1,
        records.NO_TRACE,
        records.NO_SESSION,
    )
    return head + name + struct.pack(f"<{len(pages)}I", *pages) + b"".join(digest(str(i)) for i in range(blocks))


@pytest.mark.parametrize("local", [3, 1 << 20, (1 << 32) - 1])
def test_a_hint_with_more_local_blocks_than_blocks_is_a_bad_record(local: int) -> None:
    """Local blocks are some of all: a larger number would fit no flag."""
    epoch = make_epoch()
    engine = Engine(epoch)
    engine.push(RecordKind.HINT, hint_record(engine, local=local))
    assert epoch.counters["bad_records"] == 1
    engine.leave()


def test_a_request_s_name_is_bounded() -> None:
    epoch = make_epoch()
    engine = Engine(epoch)
    room = engine.producer.max_payload_bytes - 512
    engine.push(RecordKind.HINT, hint_record(engine, name=b"n" * min(room, records.MAX_REQUEST_ID_BYTES + 1)))
    assert epoch.counters["bad_records"] == 1
    engine.leave()


def test_the_end_of_a_refused_use_leaves_the_pages_of_the_flag_s_request() -> None:
    """The engine may still read its slot table."""
    epoch = make_epoch(max_blocks=300)
    engine = Engine(epoch)
    engine.hint([b"%032d" % i for i in range(300)], key=(0, 1), pages=[0, 1])
    engine.hint([bytes(32)], key=(0, 2), pages=[5])
    engine.put((0, 2), FlagState.CANCELLED)
    engine.done((0, 2))
    bad = epoch.counters["bad_records"]
    engine.hint([b"%032d" % i for i in range(300, 600)], key=(1, 1), pages=[0, 1])
    assert epoch.counters["bad_records"] == bad + 1, "pages of the first request, which may still be written"
    engine.leave()
