"""KV events of stored blocks: published once and only when stored, taken back later; the medium that hits came from."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvprefetch.connector.engine.events import KEPT
from kvprefetch.shmring.wire.attach import Stored
from kvprefetch.shmring.wire.records import FlagState

from .fakes import BLOCK, Engine

LIFETIME_S = 60

asks_for_sources = pytest.mark.skipif(
    find_spec("vllm.v1.metrics.cache_hit_source") is None, reason="vLLM asks for the sources of a hit from 0.32 on"
)


def saved(engine: Engine, blocks: int = 3, **fields: Any) -> int:
    """Send a request's blocks into the store; return the save id."""
    request = engine.admitted("r", blocks * BLOCK, **fields)
    meta = engine.step([(request, blocks * BLOCK)])
    engine.acknowledge(meta)
    return meta.saves[0].save_id


def test_a_block_is_announced_when_the_store_has_it_and_once() -> None:
    engine = Engine(publish=True)
    connector = engine.hooks
    engine.daemon.credits.grant([7, 8, 9])
    lora = LoRARequest("adapter", 4, "/adapter")
    engine.read(lora, "content")
    save_id = saved(engine, lora_request=lora, session_id="s")
    assert list(connector.take_events()) == [], "copied, pushed, and not yet in the store"
    engine.link.stored.append(Stored(save_id=save_id, memory=[7], disk=[9]))
    events = list(connector.take_events())
    digests = [maybe_convert_block_hash(d) for d in engine.side.requests["r"].request.digests(0, 3)]
    assert [type(event) for event in events] == [BlockStored, BlockStored]
    assert [(event.block_hashes, event.parent_block_hash, event.medium) for event in events] == [
        ([digests[0]], None, MEDIUM_CPU),
        ([digests[2]], digests[1], MEDIUM_STORAGE),
    ]
    assert events[1].token_ids == list(range(2 * BLOCK, 3 * BLOCK))
    common = {(e.block_size, e.lora_id, e.lora_name, e.session_id, e.group_idx, e.kv_cache_spec_kind) for e in events}
    assert common == {(BLOCK, 4, "adapter", "s", 0, "full_attention")}
    engine.link.stored.append(Stored(save_id=save_id, memory=[7], failed=[8]))
    assert list(connector.take_events()) == []
    assert engine.side.events is not None
    assert not any(engine.side.events.saving.values()), "nothing is remembered of a save that is settled"


def test_reports_that_are_lost_leave_little_behind() -> None:
    engine = Engine(publish=True)
    for number in range(20):
        engine.daemon.credits.grant([7, 8, 9])
        engine.daemon.drain()
        engine.daemon.free()
        saved(engine, salt=f"{number}")
        engine.side.finished(engine.side.requests["r"].request)
    assert engine.side.events is not None
    assert 3 <= sum(map(len, engine.side.events.saving.values())) <= 3 * KEPT


def test_a_report_counts_though_its_slot_was_filled_again_three_times() -> None:
    engine = Engine(publish=True)
    saves = []
    for number in range(4):
        engine.daemon.credits.grant([7, 8, 9])
        engine.daemon.drain()
        engine.daemon.free()
        saves.append(saved(engine, salt=f"{number}"))
        engine.side.finished(engine.side.requests["r"].request)
    engine.link.stored.extend(Stored(save_id=save_id, memory=[7, 8, 9]) for save_id in saves)
    assert len(list(engine.hooks.take_events())) == 12


def test_extra_keys_are_those_of_each_block() -> None:
    """Equal tokens differ by adapter, by images with their place in the block, and by the first block's salt."""
    image = MultiModalFeatureSpec(None, "image", "cat", PlaceholderRange(offset=BLOCK - 4, length=8))
    later = MultiModalFeatureSpec(None, "image", "dog", PlaceholderRange(offset=2 * BLOCK + 3, length=2))
    engine = Engine(publish=True, credits=[7, 8, 9, 10])
    lora = LoRARequest("adapter", 4, "/adapter")
    engine.read(lora, "content")
    save_id = saved(engine, 4, cache_salt="s", mm_features=[image, later], lora_request=lora)
    engine.link.stored.append(Stored(save_id=save_id, memory=[7, 8, 9, 10]))
    assert [event.extra_keys for event in engine.hooks.take_events()] == [
        [("adapter", ("cat", BLOCK - 4), "s")],
        [("adapter", ("cat", -4))],
        [("adapter", ("dog", 3))],
        [("adapter",)],
    ]


@pytest.mark.parametrize("how", ["reset", "epoch", "failed copy"])
def test_a_save_that_was_dropped_is_never_announced(how: str) -> None:
    engine = Engine(publish=True, credits=[7])
    request = engine.admitted("r", BLOCK)
    meta = engine.step([(request, BLOCK)])
    save_id = meta.saves[0].save_id
    if how == "reset":
        engine.side.reset()
    if how == "epoch":
        engine.link.epoch = None
        engine.step()
    engine.acknowledge(meta, failed=[save_id] if how == "failed copy" else [])
    engine.link.stored.append(Stored(save_id=save_id, memory=[7]))
    assert list(engine.hooks.take_events()) == []


class Router:
    """What Dynamo's indexer (ai-dynamo-runtime 1.6.1, `python -m dynamo.indexer`) made of such events when it was run.

    A block is in a medium until it is removed from there, however often it was stored; an unknown medium is dropped.
    """

    MEDIA = ("GPU", "CPU", "STORAGE")

    def __init__(self, engine: Engine) -> None:
        self.engine, self.blocks = engine, set[tuple[str, Any]]()

    def holds(self, request: Any) -> list[str]:
        """The media of each of the request's blocks, once the engine has ended another step."""
        for event in self.engine.hooks.take_events():
            named = {(event.medium, digest) for digest in event.block_hashes if event.medium in self.MEDIA}
            self.blocks = self.blocks - named if isinstance(event, BlockRemoved) else self.blocks | named
        digests = [maybe_convert_block_hash(each) for each in request.digests(0, request.num_tokens // BLOCK)]
        return ["+".join(medium for medium in self.MEDIA if (medium, digest) in self.blocks) for digest in digests]


def used(engine: Engine, how: str) -> None:
    """Begin the lifetime of the first two blocks of request r again."""
    if how == "load":
        request = engine.add("again", 2 * BLOCK + 1, salt="r", staged=2)
        engine.take(request, 2 * BLOCK)
        engine.acknowledge(engine.step([(request, 1)]))
    elif how == "use":
        assert engine.match(engine.add("again", 2 * BLOCK + 1, salt="r", local=2 * BLOCK)) == (0, False)
        engine.daemon.drain()
        assert engine.daemon.used, "the daemon asks the store"
    else:
        save_id = 99  # saved again, after the store had lost them
        names = engine.side.requests["r"].request.names(0, 2)
        assert engine.side.events is not None
        for slot, name in enumerate(names):
            engine.side.events.begin(save_id, slot, name, None)
        engine.link.stored.append(Stored(save_id=save_id, memory=[0], disk=[1]))


@pytest.mark.parametrize("how", ["load", "use", "save"])
def test_a_lost_value_is_gone_from_a_router_after_its_lifetime(how: str) -> None:
    """The store reports no eviction. A block that is saved, loaded or used in time stays announced."""
    engine = Engine(publish=True, credits=[7, 8, 9], event_lifetime_s=LIFETIME_S)
    router = Router(engine)
    engine.link.stored.append(Stored(save_id=saved(engine), memory=[7, 8], disk=[9]))
    request = engine.side.requests["r"].request
    assert router.holds(request) == ["CPU", "CPU", "STORAGE"]
    engine.clock.advance_ms(LIFETIME_S * 1000 - 1)
    engine.daemon.beat()
    assert router.holds(request) == ["CPU", "CPU", "STORAGE"]
    used(engine, how)
    engine.clock.advance_ms(1)
    assert router.holds(request) == ["CPU", "CPU", ""]
    engine.clock.advance_ms(LIFETIME_S * 1000)
    assert router.holds(request) == ["", "", ""]


@pytest.mark.parametrize("disk", [0, 1])
def test_what_comes_from_the_store_is_announced_whoever_put_it_there(disk: int) -> None:
    engine = Engine(publish=True)
    router = Router(engine)
    request = loaded(engine, disk=disk, local=1, cache_salt="s")
    engine.acknowledge(engine.step([(request, 1)]))
    [event] = events = list(engine.hooks.take_events())
    digests = [maybe_convert_block_hash(each) for each in request.digests(0, 3)]
    assert (event.block_hashes, event.parent_block_hash) == (digests[1:], digests[0])
    assert (event.token_ids, event.extra_keys) == (list(range(BLOCK, 3 * BLOCK)), [None, None])
    assert event.medium == (MEDIUM_STORAGE if disk else MEDIUM_CPU)
    engine.hooks.take_events = lambda: events  # type: ignore[method-assign]
    assert router.holds(request)[0] == "", "the store was not asked for what is local"


@pytest.mark.parametrize("how", ["reset", "epoch", "copied again"])
def test_a_router_forgets_at_once_what_cannot_be_loaded(how: str) -> None:
    """vLLM's AllBlocksCleared is missing where its own cache is not reset, and the daemon that ended had a store."""
    engine = Engine(publish=True, credits=[7, 8, 9])
    router = Router(engine)
    engine.link.stored.append(Stored(save_id=saved(engine), memory=[7, 8], disk=[9]))
    request = engine.side.requests["r"].request
    assert router.holds(request) == ["CPU", "CPU", "STORAGE"]
    if how == "reset":
        engine.side.reset()
    elif how == "epoch":
        engine.link.epoch = None
        engine.step()
    else:
        assert engine.side.events is not None
        describe, names = engine.side.events.describe, request.names(0, 3)
        for at in (0, 2):
            engine.side.events.begin(99, at, names[at], describe(request, range(at, at + 1), 0))
        engine.link.stored.append(Stored(save_id=99, memory=[2], disk=[0]))
    assert router.holds(request) == (["STORAGE", "CPU", "CPU"] if how == "copied again" else ["", "", ""])


def test_the_oldest_lifetime_ends_where_too_many_blocks_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvprefetch.connector.engine.events.MAX_ANNOUNCED", 2)
    engine = Engine(publish=True, credits=[7, 8, 9])
    engine.link.stored.append(Stored(save_id=saved(engine), memory=[7, 8, 9]))
    assert Router(engine).holds(engine.side.requests["r"].request) == ["", "CPU", "CPU"]


def loaded(engine: Engine, *, disk: int | None, local: int = 0, blocks: int = 3, **fields: Any) -> Any:
    """A request with a just dispatched load of blocks [local, blocks)."""
    request = engine.add("hit", blocks * BLOCK + 1, local=local * BLOCK, **fields)
    hint = engine.daemon.hint("hit")
    if disk is not None:
        engine.daemon.flags.set_disk(hint.flag, disk)
    engine.daemon.stage("hit", blocks)
    tokens, _ = engine.match(request)
    assert tokens == (blocks - local) * BLOCK
    engine.allocate(request, tokens)
    return request


@asks_for_sources
@pytest.mark.parametrize(
    ("disk", "sources"),
    [
        (0, {"HOST": 3 * BLOCK}),
        (2, {"HOST": BLOCK, "DISK": 2 * BLOCK}),
        (3, {"DISK": 3 * BLOCK}),
        (None, {"EXTERNAL_UNSPECIFIED": 3 * BLOCK}),
        (9, {"DISK": 3 * BLOCK}),
    ],
)
def test_hit_sources_tell_disk_from_memory_and_always_add_up(disk: int | None, sources: dict[str, int]) -> None:
    """vLLM reports a sum that differs as unspecified. Nothing is guessed that the daemon has not reported."""
    engine = Engine()
    request = loaded(engine, disk=disk)
    found = engine.hooks.get_external_cache_hit_sources(request, 3 * BLOCK)
    assert {source.name: tokens for source, tokens in found.items()} == sources


@asks_for_sources
def test_the_source_of_another_request_s_load_is_not_used() -> None:
    engine = Engine()
    assert engine.side.disk_tokens(engine.add("first", BLOCK + 1)) is None
    loaded(engine, disk=3)
    other = engine.add("other", BLOCK + 1)
    sources = engine.hooks.get_external_cache_hit_sources(other, BLOCK)
    assert {source.name: tokens for source, tokens in sources.items()} == {"EXTERNAL_UNSPECIFIED": BLOCK}
    assert engine.daemon.flag("hit").state == FlagState.CLAIMED
