"""Defects planted on purpose: each must be found, or the random schedules prove nothing.

One is in the default run, to show that its schedules can fail.  Each of the others is up to a hundred whole schedules;
tests/connector/test_pitfalls*.py plant defects of each kind in the default run.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis.errors import FlakyFailure
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from kvprefetch.connector.engine import compat
from kvprefetch.connector.identity.namespace import RankKeys
from kvprefetch.connector.identity.updates import Updates
from kvprefetch.connector.request import loads, request_state, saves
from kvprefetch.connector.request.slack import Slack
from kvprefetch.connector.scheduler.prefix_cache import PrefixCache
from kvprefetch.connector.scheduler.scheduler import SchedulerSide
from kvprefetch.connector.worker.worker import WorkerSide
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.shmring.wire.records import Saved, encode_saved
from tests.scheduler.model import BLOCK
from tests.scheduler.schedules import explore
from tests.scheduler.shape import Site
from tests.scheduler.test_schedules_groups import LAYOUTS, ROOM, STATES, WITH_STATES, loads_where_the_local_prefix_grew
from tests.scheduler.workers import Rank

EXAMPLES = 100


def finds(site: Site, finding: str, **options: Any) -> None:
    """The random schedules fail, and for the reason planted."""
    with pytest.raises((AssertionError, FlakyFailure)) as caught:
        explore(site, EXAMPLES, **options)
    # The text of vLLM's own assertions is in their source line only.
    assert re.search(finding, "".join(traceback.format_exception(caught.value)))


@pytest.mark.stress
@pytest.mark.parametrize("queue", [1, 3])
def test_a_saved_range_too_long_by_one_block_is_found(site: Site, monkeypatch: pytest.MonkeyPatch, queue: int) -> None:
    original = saves.Saves.storable_blocks

    def longer(self: saves.Saves, state: Any, *args: Any) -> int:
        return min(original(self, state, *args) + 1, len(state.request.block_hashes))

    monkeypatch.setattr(saves.Saves, "storable_blocks", longer)
    finds(site, "is not as computed", queue=queue)


class _WithPlaceholders:
    """A request that takes placeholders for tokens."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.all_token_ids = [*request.all_token_ids, *[0] * request.num_output_placeholders]
        self.num_tokens = len(self.all_token_ids)
        self.block_hashes = list(request.block_hashes)
        self.block_hashes += get_request_block_hasher(BLOCK, sha256)(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


@pytest.mark.stress
def test_placeholders_counted_as_tokens_are_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's pull request 27644 shows it: under async scheduling the counts run ahead of the tokens."""
    original = saves.Saves.plan

    def counting(self: saves.Saves, epoch: Any, state: Any, *args: Any) -> Any:
        request = state.request
        state.request = _WithPlaceholders(request)
        try:
            return original(self, epoch, state, *args)
        finally:
            state.request = request

    monkeypatch.setattr(saves.Saves, "plan", counting)
    finds(site, "before its tokens exist", queue=2, decode=True)


@pytest.mark.stress
def test_blocks_given_away_while_a_step_in_flight_uses_them_are_found(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads are copied while that step runs: vLLM defers the end of such blocks where there is a connector."""
    monkeypatch.setattr(Slack, "overlaps", lambda self, output: self.allowed and not compat.changes_blocks(output))
    monkeypatch.setattr(AsyncScheduler, "_request_blocks_can_be_freed", lambda self, request: True)
    finds(site, "an overlapping load fills blocks of a step in flight", queue=2)


@pytest.mark.stress
def test_slots_released_when_one_of_two_ranks_copied_are_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    original = loads.Loads.acknowledge

    def hasty(self: loads.Loads, counts: dict[int, int], failed: set[int]) -> Any:
        return original(self, dict.fromkeys(counts, 2), failed)

    monkeypatch.setattr(loads.Loads, "acknowledge", hasty)
    finds(site, "given back before they were copied", queue=3, ranks=2, load_mode="async")


@pytest.mark.stress
def test_a_save_put_before_its_copy_is_done_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    original = WorkerSide.save

    def hasty(self: WorkerSide, meta: Any) -> None:
        original(self, meta)
        for batch in self._running:
            self._report.saves.update(batch.report.saves)
            batch.report.saves.clear()

    monkeypatch.setattr(WorkerSide, "save", hasty)
    finds(site, "stored value is wrong", queue=2)


@pytest.mark.stress
def test_an_aborted_load_that_is_never_reported_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerSide, "received", lambda self: self._collect())
    monkeypatch.setattr("tests.scheduler.engine.DRAIN_S", 1.0)
    finds(site, "does not come to rest", queue=2, load_mode="async")


@pytest.mark.stress
def test_old_weights_stored_after_a_reset_are_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves that were copied before the reset and acknowledged after it must be dropped."""
    original = saves.Saves.reset

    def lenient(self: saves.Saves, generation: int) -> None:
        with monkeypatch.context() as planted:
            planted.setattr(saves.Saves, "drop", lambda self: None)
            original(self, generation)

    monkeypatch.setattr(saves.Saves, "reset", lenient)
    monkeypatch.setattr(saves, "encode_saved", lambda saved: encode_saved(saved._replace(reset_generation=1 << 20)))
    finds(site, "stored value is wrong", queue=3)


@pytest.mark.stress
def test_requests_that_outlive_a_reset_and_are_saved_are_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_state.RequestState, "tainted", property(lambda self: False, lambda self, value: None))
    finds(site, "is not as computed", queue=2)


@pytest.mark.stress
def test_orders_of_before_an_update_that_are_done_after_it_are_found(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Updates, "hold", lambda self, step: True)
    finds(site, "is not as computed|holds other bytes|stored value is wrong", queue=2)


@pytest.mark.stress
def test_kv_of_before_an_update_that_is_saved_behind_it_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is the new weights', and vLLM's own cache has the old ones' KV, as nobody reset it."""
    monkeypatch.setattr(SchedulerSide, "reset", lambda self: self.resets.begin())
    finds(site, "is not as computed|holds other bytes|stored value is wrong", queue=2)


@pytest.mark.stress
def test_a_slot_that_each_rank_leaves_to_the_other_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankKeys, "saves", lambda self, slot: slot % self.replicas == 0)
    finds(site, "save that was not ordered|stored value is wrong", queue=2, ranks=2, one_head=True)


# --- what several KV groups and states need --------------------------------------------------------------------------


def layout(name: str) -> dict[str, Any]:
    states: dict[str, Any] = {"drafts": False, **WITH_STATES} if name in STATES else {}
    groups, retention = {**LAYOUTS, **STATES}[name]
    return {"groups": groups, "retention": retention, **ROOM.get(name, {}), **states}


@pytest.mark.stress
def test_a_failed_load_that_vllm_does_not_hear_of_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerSide, "failed_requests", lambda self: set())
    finds(site, "tokens differ|is not as computed", queue=2, load_mode="async", **layout("state and window"))


@pytest.mark.stress
@pytest.mark.parametrize(("name", "others"), [("state and window", (0, 2, 1)), ("compressed", (1, 0, 2, 3, 4))])
def test_a_block_stored_under_another_groups_name_is_found(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str, others: tuple[int, ...]
) -> None:
    def swapped(saved: Saved) -> bytes:
        names = [name[:-1] + bytes([others[name[-1]]]) for name in saved.names]
        return encode_saved(saved._replace(names=names))

    monkeypatch.setattr(saves, "encode_saved", swapped)
    finds(site, "stored value is wrong|holds other bytes", queue=1, **layout(name))


@pytest.mark.stress
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


@pytest.mark.stress
@pytest.mark.parametrize(("name", "kind"), [("compressed", Kind.WINDOW), ("state and window", Kind.STATE)])
def test_a_prefix_that_is_loaded_without_a_block_of_its_window_or_its_state_is_found(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str, kind: Kind
) -> None:
    """Both sides take the slots, and their order, from the same rules."""
    whole = Group.first

    def shorter(self: Group, tokens: Any) -> Any:
        return whole(self, tokens) + (self.kind is kind)

    monkeypatch.setattr(Group, "first", shorter)
    finds(
        site,
        "holds other bytes|not done by every rank|tokens differ|not those that the groups' rules name",
        queue=2,
        **layout(name),
    )


@pytest.mark.stress
def test_blocks_of_a_failed_load_named_to_vllm_are_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ends the engine: it cannot tell whose they are."""
    original: Any = WorkerSide.__init__

    def of_one_group(self: WorkerSide, *parts: Any) -> None:
        *others, groups = parts
        original(self, *others, replace(groups, groups=groups.groups[:1]))

    monkeypatch.setattr(WorkerSide, "__init__", of_one_group)
    with pytest.raises(RuntimeError, match="invalid_block_ids"):
        explore(site, 10, queue=2, load_mode="async", **layout("chunk"))


@pytest.mark.stress
def test_blocks_that_vllm_has_given_up_and_that_are_saved_are_found(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a window vLLM's table has its null block."""
    monkeypatch.setattr(saves, "NULL_BLOCK", -1)
    finds(site, "is not as computed", queue=2, decode=True, **{**layout("window"), "retention": None})


@pytest.mark.stress
def test_a_state_saved_a_step_after_its_offer_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then vLLM may have given its block to another request, of the few that there are."""
    original, kept = saves.Saves.plan_step, dict[int, Any]()

    def later(self: saves.Saves, epoch: Any, output: Any, *rest: Any) -> Any:
        state, before = output.kv_connector_block_state, kept.get(id(self), {})
        kept[id(self)] = state.boundary_state_offloads
        late = SimpleNamespace(boundary_state_offloads=before, get_block_ids=state.get_block_ids)
        step = SimpleNamespace(num_scheduled_tokens=output.num_scheduled_tokens, kv_connector_block_state=late)
        return original(self, epoch, step, *rest)

    monkeypatch.setattr(saves.Saves, "plan_step", later)
    finds(site, "is not as computed|before its tokens exist", queue=2, blocks=6, **layout("state"))


@pytest.mark.stress
def test_states_of_accepted_drafts_that_are_not_put_at_the_ends_of_blocks_are_found(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect of vLLM's worker: the schedules accept drafts across ends of blocks whose states are used."""
    monkeypatch.setattr(Rank, "move_state", lambda self, group, table, source, target: None)
    finds(site, "tokens differ|is not as computed", queue=2, **{**layout("state"), "drafts": True})
