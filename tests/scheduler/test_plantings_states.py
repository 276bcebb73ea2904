"""Defects planted in what states need: each must be found by the random schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvprefetch.connector.prefix_cache import PrefixCache
from kvprefetch.connector.saves import Saves
from kvprefetch.connector.worker import WorkerSide
from kvprefetch.kv.groups import Group, Kind
from kvprefetch.shmring.wire.records import Saved, encode_saved
from tests.scheduler.model import BLOCK
from tests.scheduler.shape import Site
from tests.scheduler.test_plantings import finds
from tests.scheduler.test_schedules_groups import STATES, WITH_STATES
from tests.scheduler.workers import Rank

pytestmark = pytest.mark.stress  # hundreds of whole schedules; test_plantings.py is in the default run

Offers = Mapping[str, Sequence[tuple[int, int, int]]]


def layout(name: str) -> dict[str, Any]:
    groups, retention = STATES[name]
    return {"groups": groups, "retention": retention, "drafts": False, **WITH_STATES}


def step(output: Any, offers: Offers, scheduled: Any) -> Any:
    """A step of vLLM's with other offers, or other requests."""
    tables = output.kv_connector_block_state.get_block_ids
    state = SimpleNamespace(boundary_state_offloads=offers, get_block_ids=tables)
    return SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[Saves, Offers], Offers]) -> None:
    """Let a change of vLLM's offers reach the connector."""
    original = Saves.plan_step

    def changed(self: Saves, session: Any, output: Any, cache: Any) -> Any:
        offers = change(self, output.kv_connector_block_state.boundary_state_offloads)
        return original(self, session, step(output, offers, output.num_scheduled_tokens), cache)

    monkeypatch.setattr(Saves, "plan_step", changed)


def test_a_state_stored_as_that_of_the_block_before_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def earlier(_: Saves, offers: Offers) -> Offers:
        return {
            name: [(group, block, tokens - BLOCK) for group, block, tokens in each if tokens > BLOCK]
            for name, each in offers.items()
        }

    plant(monkeypatch, earlier)
    finds(site, "is not as computed", queue=2, **layout("state"))


def test_a_state_saved_a_step_after_its_offer_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then vLLM may have given its block to another request, of the few that there are."""
    kept: dict[int, Offers] = {}

    def later(saves: Saves, offers: Offers) -> Offers:
        before = kept.get(id(saves), {})
        kept[id(saves)] = offers
        return before

    plant(monkeypatch, later)
    finds(site, "is not as computed|before its tokens exist", queue=2, blocks=6, **layout("state"))


def test_a_state_that_rests_on_a_failed_load_or_on_old_weights_is_found(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Saves.plan_step

    def trusting(self: Saves, session: Any, output: Any, cache: Any) -> Any:
        tainted = [state for state in self.unsaved.values() if state.tainted]
        for state in tainted:
            state.tainted = False
        offers = output.kv_connector_block_state.boundary_state_offloads
        orders = [*original(self, session, step(output, offers, {}), cache)]
        for state in tainted:
            state.tainted = True
        return [*orders, *original(self, session, step(output, {}, output.num_scheduled_tokens), cache)]

    monkeypatch.setattr(Saves, "plan_step", trusting)
    finds(site, "is not as computed|stored value is wrong", queue=3, **layout("state"))


def test_a_state_that_waited_and_is_anothers_by_now_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "holds", lambda self, block_id, digest: True)
    # States wait where a step saves much and the daemon has not given slots back yet.
    finds(site, "is not as computed", queue=2, settled=False, budget=64, **layout("two states"))


def test_a_prefix_that_is_loaded_without_its_state_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides take the slots from the same rules."""
    whole = Group.first

    def without(self: Group, tokens: Any) -> Any:
        return whole(self, tokens) + (self.kind is Kind.STATE)

    monkeypatch.setattr(Group, "first", without)
    finds(site, "holds other bytes|not done by every rank|tokens differ", queue=2, **layout("state"))


def test_a_state_stored_under_another_groups_name_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(saved: Saved) -> bytes:
        names = [name[:-1] + bytes([(0, 2, 1)[name[-1]]]) for name in saved.names]
        return encode_saved(saved._replace(names=names))

    monkeypatch.setattr("kvprefetch.connector.saves.encode_saved", swapped)
    finds(site, "stored value is wrong|holds other bytes", queue=1, **layout("two states"))


def test_a_state_whose_load_failed_unheard_of_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerSide, "failed_requests", lambda self: set())
    finds(site, "tokens differ|is not as computed", queue=2, load_mode="async", **layout("state"))


def test_states_of_accepted_drafts_that_are_not_put_at_the_ends_of_blocks_are_found(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect of vLLM's worker: the schedules accept drafts across ends of blocks whose states are used."""
    monkeypatch.setattr(Rank, "move_state", lambda self, group, table, source, target: None)
    finds(site, "tokens differ|is not as computed", queue=2, **{**layout("state"), "drafts": True})
