"""The scheduler side's saves: the saved range, credits, acknowledgements, ended epochs."""

from __future__ import annotations

import pytest

from kvprefetch.connector.request import saves
from kvprefetch.connector.request.request_state import SAVING
from kvprefetch.connector.request.saves import Saves

from .fakes import BLOCK, Engine, FakeDaemon, Request, one_group


def saved_digests(engine: Engine) -> list[bytes]:
    engine.daemon.drain()
    names = [name for saved in engine.daemon.saved for name in saved.names]
    assert {name[-1] for name in names} <= {0}, "of the only group"
    return [name[:-1] for name in names]


@pytest.mark.parametrize("ratio", [1, 2])
def test_a_prompt_is_saved_block_by_block_as_it_is_computed(ratio: int) -> None:
    """Chunked prefill: each step saves the blocks it completes, from the current block table, into granted slots.

    A block goes by the hash of its end, however many hashes it has.
    """
    engine = Engine(world_size=2, groups=one_group(ratio), credits=[40, 41, 42, 43])
    request = engine.admitted("r", 3 * BLOCK + 3, ratio=ratio)
    metas = [engine.step([(request, n)]) for n in (BLOCK - 1, 1, 2 * BLOCK, 3, 1)]
    assert [[save.block_ids for save in meta.saves] for meta in metas] == [[], [[100]], [[101, 102]], [], []]
    assert [save.slots for meta in metas for save in meta.saves] == [[40], [41, 42]]
    for meta in metas:
        engine.acknowledge(meta, ranks=1)
    assert saved_digests(engine) == []
    assert engine.side.has_pending_work()
    for meta in metas:
        engine.acknowledge(meta, ranks=1)
    assert saved_digests(engine) == request.digests(0, 3)
    assert [saved.slots for saved in engine.daemon.saved] == [[40], [41, 42]]
    assert not engine.side.has_pending_work()


def test_more_blocks_than_a_record_holds_are_saved_in_several_steps() -> None:
    engine = Engine(ring=4096, slots=256, credits=range(64))
    request = engine.admitted("r", 60 * BLOCK)
    saves = [engine.step([(request, tokens)]).saves for tokens in (60 * BLOCK, 1, 1)]
    most = (4096 // 2 - 16 - 64) // (33 + 4)
    assert [[len(save.slots) for save in step] for step in saves] == [[most], [60 - most], []]
    assert [block for step in saves for save in step for block in save.block_ids] == list(range(100, 160))
    assert (engine.side.counters["saves"], engine.side.counters["save_blocks"]) == (2, 60)


def test_a_record_has_no_more_blocks_than_the_daemon_takes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "MAX_SAVED_BLOCKS", 20)
    engine = Engine(slots=256, credits=range(64))
    request = engine.admitted("r", 50 * BLOCK)
    steps = [engine.step([(request, tokens)]).saves for tokens in (50 * BLOCK, 1, 1, 1)]
    assert [[len(save.slots) for save in step] for step in steps] == [[20], [20], [10], []]


def test_blocks_in_the_store_are_not_copied() -> None:
    """Neither those loaded, nor those the lookup found, nor those saved before by another request."""
    engine = Engine(credits=range(30, 46))
    request = engine.add("a", 5 * BLOCK + 1, salt="same")
    engine.daemon.stage("a", 2, found=4)
    engine.take(request, 2 * BLOCK)
    (save,) = engine.step([(request, 3 * BLOCK + 1)]).saves
    assert save.block_ids == [104]
    other = engine.admitted("b", 6 * BLOCK, salt="same", local=5 * BLOCK)
    (save,) = engine.step([(other, BLOCK)]).saves
    assert save.block_ids == [105]


def test_what_was_loaded_is_not_saved_though_its_look_up_goes_on() -> None:
    engine = Engine(wait_policy="best_effort", credits=range(30, 40))
    request = engine.add("r", 4 * BLOCK)
    engine.daemon.stage("r", 2, ready=False)
    engine.take(request, 2 * BLOCK)
    (save,) = engine.step([(request, 2 * BLOCK)]).saves
    assert save.block_ids == [102, 103]


def test_without_credit_a_step_looks_at_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may last, and there are steps of hundreds of long requests."""
    engine = Engine()
    request = engine.admitted("r", 3 * BLOCK)
    with monkeypatch.context() as patch:
        looks: list[range] = []
        patch.setattr(Saves, "_wanted", lambda _self, _state, blocks, *_: (looks.append(blocks) or [], blocks.start))
        engine.step([(request, 3 * BLOCK)])
    assert looks == []
    engine.daemon.credits.grant([1, 2, 3])
    request.num_tokens += 1
    assert engine.step([(request, 1)]).saves[0].block_ids == [100, 101, 102]


@pytest.mark.parametrize("decode", [False, True])
def test_what_waited_for_a_credit_brings_no_decoded_block_along(decode: bool) -> None:
    engine = Engine(save_decode_cache=decode)
    request = engine.admitted("r", 2 * BLOCK + 1)
    engine.step([(request, 2 * BLOCK + 1)])
    for _ in range(BLOCK):
        request.num_tokens += 1
        engine.step([(request, 1)])
    engine.daemon.credits.grant(list(range(8)))
    (save,) = engine.step([(request, 1)]).saves
    assert save.block_ids == [100, 101, 102][: 2 + decode]
    left = engine.side.requests["r"].phase == SAVING
    assert left is decode, "a step does not look at requests of which all is saved"


def saved_into_a_full_ring() -> tuple[Engine, Request]:
    engine = Engine(ring=4096, flags=64, credits=[1])
    request = engine.admitted("r", 2 * BLOCK)
    meta = engine.step([(request, BLOCK)])
    for i in range(40):
        engine.add(f"fill{i}", (20 if i < 20 else 2) * BLOCK)
    engine.acknowledge(meta)
    return engine, request


def test_a_full_ring_delays_saved_records() -> None:
    engine, request = saved_into_a_full_ring()
    assert engine.side.has_pending_work()
    assert saved_digests(engine) == []
    engine.step()
    assert saved_digests(engine) == request.digests(0, 1)
    assert not engine.side.has_pending_work()


def test_a_copy_that_failed_on_a_rank_gives_its_slots_back_unused_and_the_next_request_tries_again() -> None:
    engine = Engine(world_size=2, credits=[5])
    request = engine.admitted("r", BLOCK)
    meta = engine.step([(request, BLOCK)])
    engine.acknowledge(meta, ranks=1, failed=[meta.saves[0].save_id])
    engine.acknowledge(meta, ranks=1)
    engine.daemon.drain()
    (saved,) = engine.daemon.saved
    assert (saved.dropped, saved.slots, saved.names) == (True, [5], [])
    engine.daemon.credits.grant([6])
    again = engine.admitted("again", BLOCK, salt="r")
    assert [save.slots for save in engine.step([(again, BLOCK)]).saves] == [[6]]


def test_after_another_connectors_failed_load_nothing_of_the_request_is_stored() -> None:
    """It was admitted with that connector's blocks, or with local ones, and neither loaded nor missed ours."""
    engine = Engine(credits=range(30, 40))
    request, waiting = engine.add("r", 4 * BLOCK), engine.add("waiting", 2 * BLOCK)
    engine.daemon.stage("r", 2)
    engine.match(request)
    engine.allocate(request, 0)
    engine.side.outputs(None, failed_blocks=[100])
    assert engine.step([(request, 4 * BLOCK)]).saves == []
    engine.admit(waiting)
    assert len(engine.step([(waiting, 2 * BLOCK)]).saves) == 1, "it had no blocks yet"
    late = engine.admitted("late", 3 * BLOCK, local=BLOCK)
    assert engine.step([(late, 2 * BLOCK)]).saves == [], "its local block may be unfilled still"
    engine.side.finished(request)
    last = engine.admitted("last", 3 * BLOCK, local=BLOCK)
    assert len(engine.step([(last, 2 * BLOCK)]).saves) == 1


def test_no_saves_when_not_a_producer() -> None:
    engine = Engine(saves=False)
    engine.daemon.credits.grant([1, 2])
    request = engine.admitted("r", 2 * BLOCK)
    assert engine.step([(request, 2 * BLOCK)]).saves == []


def test_saves_of_an_ended_epoch_are_forgotten() -> None:
    engine = Engine(credits=[1])
    request = engine.admitted("r", BLOCK)
    meta = engine.step([(request, BLOCK)])
    engine.link.epoch = FakeDaemon(engine.clock, epoch=2).epoch()
    engine.step()
    engine.acknowledge(meta)
    assert not engine.side.has_pending_work()
    assert saved_digests(engine) == []


def test_a_full_ring_of_an_ended_epoch_holds_up_nothing() -> None:
    """Nobody empties it any more."""
    engine, old = saved_into_a_full_ring()
    engine.side.finished(old)
    engine.daemon = FakeDaemon(engine.clock, epoch=2)
    engine.link.epoch = engine.daemon.epoch()
    engine.daemon.credits.grant([1])
    request = engine.admitted("new", 2 * BLOCK)
    engine.acknowledge(engine.step([(request, BLOCK)]))
    assert saved_digests(engine) == request.digests(0, 1)
    assert not engine.side.has_pending_work()


def test_the_next_daemons_store_may_lack_what_the_last_ones_had() -> None:
    engine = Engine(loads=False)
    for epoch, blocks in ((1, 2), (1, 0), (2, 2)):
        if epoch != engine.daemon.layout.epoch:
            engine.daemon = FakeDaemon(engine.clock, epoch=epoch)
            engine.link.epoch = engine.daemon.epoch()
        engine.daemon.credits.grant([1, 2])
        request = engine.admitted(f"{epoch} {blocks}", 2 * BLOCK, salt="same")
        meta = engine.step([(request, 2 * BLOCK)])
        assert sum(len(save.slots) for save in meta.saves) == blocks
        engine.acknowledge(meta)
