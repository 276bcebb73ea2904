"""Defects planted in what several KV groups and states need: each must be found by the random schedules."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvprefetch.connector import saves
from kvprefetch.connector.prefix_cache import PrefixCache
from kvprefetch.connector.saves import Saves
from kvprefetch.connector.worker import WorkerSide
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.shmring.wire.records import Saved, encode_saved
from tests.scheduler.schedules import explore
from tests.scheduler.shape import Site
from tests.scheduler.test_plantings import finds
from tests.scheduler.test_schedules_groups import (
    LAYOUTS,
    ROOM,
    STATES,
    WITH_STATES,
    loads_where_the_local_prefix_grew,
)
from tests.scheduler.workers import Rank

pytestmark = pytest.mark.stress  # hundreds of whole schedules


def layout(name: str) -> dict[str, Any]:
    states: dict[str, Any] = {"drafts": False, **WITH_STATES} if name in STATES else {}
    groups, retention = {**LAYOUTS, **STATES}[name]
    return {"groups": groups, "retention": retention, **ROOM.get(name, {}), **states}


def test_a_failed_load_that_vllm_does_not_hear_of_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerSide, "failed_requests", lambda self: set())
    finds(site, "tokens differ|is not as computed", queue=2, load_mode="async", **layout("state and window"))


@pytest.mark.parametrize(("name", "others"), [("state and window", (0, 2, 1)), ("compressed", (1, 0, 2, 3, 4))])
def test_a_block_stored_under_another_groups_name_is_found(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str, others: tuple[int, ...]
) -> None:
    def swapped(saved: Saved) -> bytes:
        names = [name[:-1] + bytes([others[name[-1]]]) for name in saved.names]
        return encode_saved(saved._replace(names=names))

    monkeypatch.setattr("kvprefetch.connector.saves.encode_saved", swapped)
    finds(site, "stored value is wrong|holds other bytes", queue=1, **layout(name))


@pytest.mark.parametrize(
    ("name", "options"),
    # States wait where a step saves much and the daemon has not given slots back yet.
    [("two windows", {}), ("two states", {"settled": False, "budget": 64})],
)
def test_a_block_that_waited_and_is_anothers_by_now_is_found(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """Also another group's: a block id belongs to one group at a time."""
    monkeypatch.setattr(PrefixCache, "holds", lambda self, block_id, digest: True)
    finds(site, "is not as computed", queue=2, **{**layout(name), **options})


@pytest.mark.parametrize("name", ["window and chunk", "compressed"])
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


@pytest.mark.parametrize(("name", "kind"), [("compressed", Kind.WINDOW), ("state and window", Kind.STATE)])
def test_a_prefix_that_is_loaded_without_a_block_of_its_window_or_its_state_is_found(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str, kind: Kind
) -> None:
    """Both sides take the slots, and their order, from the same rules."""
    whole = Group.first

    def shorter(self: Group, tokens: Any) -> Any:
        return whole(self, tokens) + (self.kind is kind)

    monkeypatch.setattr(Group, "first", shorter)
    finds(site, "holds other bytes|not done by every rank|tokens differ", queue=2, **layout(name))


def test_blocks_of_a_failed_load_named_to_vllm_are_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ends the engine: it cannot tell whose they are."""
    original: Any = WorkerSide.__init__

    def of_one_group(self: WorkerSide, *parts: Any) -> None:
        *others, groups = parts
        original(self, *others, replace(groups, groups=groups.groups[:1]))

    monkeypatch.setattr(WorkerSide, "__init__", of_one_group)
    with pytest.raises(RuntimeError, match="invalid_block_ids"):
        explore(site, 10, queue=2, load_mode="async", **layout("chunk"))


def test_blocks_that_vllm_has_given_up_and_that_are_saved_are_found(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a window vLLM's table has its null block."""
    monkeypatch.setattr(saves, "NULL_BLOCK", -1)
    finds(site, "is not as computed", queue=2, decode=True, **{**layout("window"), "retention": None})


def test_a_state_saved_a_step_after_its_offer_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then vLLM may have given its block to another request, of the few that there are."""
    original, kept = Saves.plan_step, dict[int, Any]()

    def later(self: Saves, session: Any, output: Any, cache: Any) -> Any:
        state, before = output.kv_connector_block_state, kept.get(id(self), {})
        kept[id(self)] = state.boundary_state_offloads
        late = SimpleNamespace(boundary_state_offloads=before, get_block_ids=state.get_block_ids)
        step = SimpleNamespace(num_scheduled_tokens=output.num_scheduled_tokens, kv_connector_block_state=late)
        return original(self, session, step, cache)

    monkeypatch.setattr(Saves, "plan_step", later)
    finds(site, "is not as computed|before its tokens exist", queue=2, blocks=6, **layout("state"))


def test_states_of_accepted_drafts_that_are_not_put_at_the_ends_of_blocks_are_found(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect of vLLM's worker: the schedules accept drafts across ends of blocks whose states are used."""
    monkeypatch.setattr(Rank, "move_state", lambda self, group, table, source, target: None)
    finds(site, "tokens differ|is not as computed", queue=2, **{**layout("state"), "drafts": True})
