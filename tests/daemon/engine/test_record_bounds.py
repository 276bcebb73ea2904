"""What one record may name: no digest twice, no more blocks than its bound, nothing that changes once it is read."""

from __future__ import annotations

import pytest

from kvprefetch.kv.prompts import repeats
from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.records import MAX_SAVED_BLOCKS, ProtocolError, RecordKind, Saved
from tests.daemon.engine.epochs import Engine, digest, make_epoch
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
