"""Defects planted in what several KV groups need: each must be found by the random schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvprefetch.connector import saves
from kvprefetch.connector.claims import Claims
from kvprefetch.connector.prefix_cache import PrefixCache
from kvprefetch.connector.worker import WorkerSide
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.shmring.wire.records import Saved, encode_saved
from tests.scheduler.engine import Engine
from tests.scheduler.schedules import explore
from tests.scheduler.shape import Site
from tests.scheduler.test_plantings import finds
from tests.scheduler.test_schedules_groups import LAYOUTS, loads_where_the_local_prefix_grew

pytestmark = pytest.mark.stress  # hundreds of whole schedules; test_plantings.py is in the default run


def layout(name: str) -> dict[str, Any]:
    groups, retention = LAYOUTS[name]
    return {"groups": groups, "retention": retention}


@pytest.mark.parametrize("name", ["window", "window and chunk"])
def test_slots_read_as_if_nothing_more_were_local_are_found(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The slot table is of the prefix as hinted; of each group another part may be local by now."""

    whole = Groups.spans

    def from_the_begin(self: Groups, *tokens: int) -> list[range]:
        return [range(sum(map(len, whole(self, *tokens))))]

    monkeypatch.setattr(Groups, "spans", from_the_begin)
    with pytest.raises(AssertionError, match="holds other bytes"):
        loads_where_the_local_prefix_grew(site, name)


def test_a_shorter_window_than_the_daemons_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides take the order of the slots from the same rules."""
    whole = Group.first

    def shorter(self: Group, tokens: Any) -> Any:
        return whole(self, tokens) + (self.kind is Kind.WINDOW)

    monkeypatch.setattr(Group, "first", shorter)
    finds(site, "holds other bytes|not done by every rank", queue=2, **layout("window"))


def test_a_failed_load_that_vllm_does_not_hear_of_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerSide, "failed_requests", lambda self: set())
    finds(site, "tokens differ|is not as computed", queue=2, load_mode="async", **layout("window"))


def test_blocks_of_a_failed_load_named_to_vllm_are_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ends the engine: it cannot tell whose they are."""
    original: Any = WorkerSide.__init__

    def of_one_group(self: WorkerSide, *parts: Any) -> None:
        *others, groups = parts
        original(self, *others, replace(groups, groups=groups.groups[:1]))

    monkeypatch.setattr(WorkerSide, "__init__", of_one_group)
    with pytest.raises(RuntimeError, match="invalid_block_ids"):
        explore(site, 10, queue=2, load_mode="async", **layout("chunk"))


def test_a_load_that_vllm_does_not_wait_for_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it fails, nobody can take it back."""
    original = Claims.match

    def hasty(self: Claims, state: Any, *args: Any, **kwargs: Any) -> Any:
        reply = original(self, state, *args, **kwargs)
        if state.answer is not None:
            state.answer = state.answer._replace(asynchronous=False)
        return reply[0], False

    def prepare(engine: Engine) -> None:
        assert engine.oracle is not None
        engine.oracle.fail_synchronous = True
        engine.oracle.fail_next = set(range(engine.shape.ranks))

    monkeypatch.setattr(Claims, "match", hasty)
    finds(site, "tokens differ|is not as computed", queue=3, drafts=False, prepare=prepare, **layout("window"))


def test_blocks_that_vllm_has_given_up_and_that_are_saved_are_found(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a window vLLM's table has its null block."""
    monkeypatch.setattr(saves, "NULL_BLOCK", -1)
    finds(site, "is not as computed", queue=2, decode=True, **{**layout("window"), "retention": None})


def test_a_block_stored_under_another_groups_name_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(saved: Saved) -> bytes:
        names = [name[:-1] + bytes([1 - name[-1]]) for name in saved.names]
        return encode_saved(saved._replace(names=names))

    monkeypatch.setattr("kvprefetch.connector.saves.encode_saved", swapped)
    finds(site, "stored value is wrong|holds other bytes", queue=1, **layout("window"))


def test_a_finished_requests_block_that_is_anothers_by_now_is_found(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also another group's: a block id belongs to one group at a time."""
    monkeypatch.setattr(PrefixCache, "holds", lambda self, block_id, digest: True)
    finds(site, "is not as computed", queue=2, **layout("two windows"))
