"""Defects planted on purpose: each must be found, or the random schedules prove nothing.

One is in the default run, to show that its schedules can fail.  Each of the others is up to a hundred whole schedules;
tests/connector/test_pitfalls*.py plant defects of each kind in the default run.
"""

from __future__ import annotations

import re
import traceback
from typing import Any

import pytest
from hypothesis.errors import FlakyFailure
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

from kvprefetch.connector import loads, request_state, saves
from kvprefetch.connector.namespace import RankKeys
from kvprefetch.connector.worker import WorkerSide
from kvprefetch.shmring.wire.records import encode_saved
from tests.scheduler.engine import Engine
from tests.scheduler.model import BLOCK
from tests.scheduler.schedules import explore
from tests.scheduler.shape import Site

EXAMPLES = 100


def finds(site: Site, finding: str, **options: Any) -> None:
    """The random schedules fail, and for the reason planted."""
    with pytest.raises((AssertionError, FlakyFailure)) as caught:
        explore(site, EXAMPLES, **options)
    # The text of vLLM's own assertions is in their source line only.
    assert re.search(finding, "".join(traceback.format_exception(caught.value)))


@pytest.mark.parametrize("queue", [1, pytest.param(3, marks=pytest.mark.stress)])
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

    def counting(self: saves.Saves, session: Any, state: Any, *args: Any) -> Any:
        request = state.request
        state.request = _WithPlaceholders(request)
        try:
            return original(self, session, state, *args)
        finally:
            state.request = request

    monkeypatch.setattr(saves.Saves, "plan", counting)
    finds(site, "before its tokens exist", queue=2, decode=True)


@pytest.mark.stress
def test_slots_released_when_one_of_two_ranks_copied_are_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    original = loads.Loads.acknowledge

    def hasty(self: loads.Loads, counts: dict[int, int], failed: set[int]) -> Any:
        return original(self, dict.fromkeys(counts, 2), failed)

    monkeypatch.setattr(loads.Loads, "acknowledge", hasty)
    finds(site, "given back before they were copied", queue=3, ranks=2, load_mode="async")


@pytest.mark.stress
def test_a_load_that_fails_after_the_answer_is_found(site: Site) -> None:
    """A synchronous load cannot be taken back once steps are in flight: the token computed on it is delivered."""

    def prepare(engine: Engine) -> None:
        assert engine.oracle is not None
        engine.oracle.fail_synchronous = True
        engine.oracle.fail_next = set(range(engine.shape.ranks))

    finds(site, "tokens differ|is not as computed", queue=3, load_mode="sync", drafts=False, prepare=prepare)


@pytest.mark.stress
def test_a_save_put_before_its_copy_is_done_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    original = WorkerSide.save

    def hasty(self: WorkerSide, meta: Any) -> None:
        original(self, meta)
        if self._running and self._running[-1].saves:
            self._running[-1].saves, saves_ = [], self._running[-1].saves
            self._report.saves.update(dict.fromkeys(saves_, 1))

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
        original(self, generation)
        self._generation = 0

    monkeypatch.setattr(saves.Saves, "reset", lenient)
    monkeypatch.setattr(saves, "encode_saved", lambda saved: encode_saved(saved._replace(reset_generation=1 << 20)))
    finds(site, "stored value is wrong", queue=3)


@pytest.mark.stress
def test_requests_that_outlive_a_reset_and_are_saved_are_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_state.RequestState, "tainted", property(lambda self: False, lambda self, value: None))
    finds(site, "is not as computed", queue=2)


@pytest.mark.stress
def test_a_slot_that_each_rank_leaves_to_the_other_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankKeys, "saves", lambda self, slot: slot % self.replicas == 0)
    finds(site, "save that was not ordered|stored value is wrong", queue=2, ranks=2, one_head=True)
