"""One word for what made a request slow, and the sentence of `explain`."""

from __future__ import annotations

from typing import Any

import pytest

from kvprefetch.daemon.telemetry import causes
from kvprefetch.daemon.telemetry.causes import Cause
from tests.daemon.telemetry.test_trace_picture import LINE, MISSED
from tests.support.mutants import mutants

# Asked early, it waited for its fetch.
FETCHED = {**LINE, "visited_ms": 0.5, "exposed_ms": 96.7}
MB = 1 << 20
SLOW = {"store_bytes_s": 1.2 * MB, "hour_bytes_s": 96 * MB}
HOUR = "its last hour 96 MiB/s"
QUICK = {**LINE, "visited_ms": 12.0, "claimed_ms": 15.0, "loaded_ms": 20.0, "exposed_ms": 3.0}
VAIN = {
    **MISSED,
    "outcome": "recomputed",
    "found_blocks": 64,
    "visited_ms": 0.5,
    "exposed_ms": 900.0,
    "ended_ms": 901.0,
}


EXAMPLES: list[tuple[dict[str, Any], str]] = [
    ({**FETCHED, **SLOW}, f"the link was slow: the store gave 1.2 MiB/s; {HOUR}."),
    ({**FETCHED, **SLOW, "medium": "disk"}, f"the disk was slow: the store gave 1.2 MiB/s; {HOUR}."),
    ({**LINE, **VAIN, **SLOW, "store_bytes_s": 0}, f"the link was slow: nothing came in time; {HOUR}."),
    (
        {**FETCHED, "hour_bytes_s": 96 * MB},
        "the transfer took long at the store's usual pace: the store gave 94.4 MiB/s; its last hour 96 MiB/s.",
    ),
    (
        {**FETCHED, "bytes": 1000, "room_ms": 80.0},
        "staging was too small: its next fetch waited 80.0 ms for slots, or staging has room for 64 of its 65 "
        "blocks.",
    ),
    (
        {**LINE, **MISSED, "found_blocks": 64, "failed": "transfer", "owners": "10.0.0.2:17"},
        "a storage node did not deliver: 10.0.0.2:17.",
    ),
    (
        {**LINE, **MISSED, "store_unavailable": True, "visited_ms": 1.0, "looked_up_ms": 2e3, "exposed_ms": 2e3},
        "the store's master was slow or away: the look-up ended after 1999 ms.",
    ),
    (
        {**LINE, "visited_ms": None, "claimed_ms": 800.0},
        "the engine's places or tokens went to other requests for 800 ms.",
    ),
    (
        {**LINE, "visited_ms": None, "claimed_ms": 800.0, "found_blocks": 65},
        "the engine's places or tokens went to other requests for 800 ms.",
    ),
    (
        {**LINE, "visited_ms": 90.0, "answered_ms": 96.4, "claimed_ms": 900.0, "exposed_ms": 810.0},
        "the engine's step of other requests, a long prefill, went on for 804 ms.",
    ),
    (
        {**LINE, "loaded_ms": 897.2, "found_blocks": 40},
        "the engine computed for 800 ms: 25 blocks of it were nowhere.",
    ),
    (
        {**LINE, "loaded_ms": 897.2, "found_blocks": 65, "loaded_blocks": 63},
        "all of it was there: its copy, and the step that did it, took 800 ms.",
    ),
    ({**LINE, **MISSED}, "65 blocks of it were nowhere."),
    ({**LINE, **MISSED, "failed": "lease"}, "the store lost its blocks between look-up and fetch: their lease ended."),
    ({**LINE, **MISSED, **SLOW, "medium": "disk", "failed": "overdue", "store_bytes_s": None},
     f"the disk was slow: nothing came in time; {HOUR}."),
    ({**FETCHED, "failed": "corrupt"}, "values in the store were of another size, or corrupt."),
    ({**FETCHED, "hint_seen_ms": 95.0, "looked_up_ms": 95.5, "visited_ms": 0.1, "exposed_ms": 97.1},
     "the daemon read its hint after 94.9 ms; it is short of CPU."),
    (
        {**LINE, **MISSED, "failed": "overdue", "medium": "disk", "owners": "10.0.0.2:17"},
        "a storage node did not deliver: 10.0.0.2:17.",
    ),
    (
        {**LINE, **MISSED, "failed": "transfer", "medium": "memory"},
        "a storage node did not deliver: its name is not known.",
    ),
    (
        {**LINE, **MISSED, "failed": "lease", "medium": "disk"},
        "the store lost its blocks between look-up and fetch: their lease ended.",
    ),
    (
        {**LINE, **MISSED, "visited_ms": 1.0, "looked_up_ms": 801.0, "exposed_ms": 800.0},
        "the store's master was slow or away: the look-up ended after 800 ms.",
    ),
    (  # the breaker is open: nobody asks
        {**LINE, **MISSED, "store_unavailable": True, "visited_ms": 0.1, "exposed_ms": 1.3},
        "the store's master was slow or away: the look-up ended after 1.11 ms.",
    ),
    (
        {**LINE, **VAIN, "outcome": "aborted", "looked_up_ms": 900.0},
        "the store's master was slow or away: the look-up ended after 900 ms.",
    ),
    (
        {**LINE, **VAIN, "exposed_ms": 10.0, "ended_ms": 10.5},
        "the transfer took long at the store's usual pace: the store gave 94.4 MiB/s.",
    ),
    ({**QUICK, "failed": "corrupt"}, "values in the store were of another size, or corrupt."),
    (
        {**FETCHED, "hint_blocks": 64, "failed": "transfer", "owners": "10.0.0.2:17"},
        "a storage node did not deliver: 10.0.0.2:17.",
    ),
    (  # 153 ms for places, of which half count
        {**FETCHED, "claimed_ms": 250.0},
        "the transfer took long at the store's usual pace: the store gave 94.4 MiB/s.",
    ),
    (
        {**FETCHED, "room_ms": 80.0},  # no room, but its own bytes took as long
        "the transfer took long at the store's usual pace: the store gave 94.4 MiB/s.",
    ),
    (
        {**FETCHED, "room_ms": 80.0, "store_bytes_s": None, "hour_bytes_s": 96 * MB},
        "staging was too small: its next fetch waited 80.0 ms for slots, or staging has room for 64 of its 65 blocks.",
    ),
    (
        {**LINE, "visited_ms": None, "exposed_ms": 0.0, "claimed_ms": 800.0},
        "the engine's places or tokens went to other requests for 800 ms.",
    ),
    (
        {**LINE, "loaded_ms": 897.2, "found_blocks": 20},
        "the engine computed for 800 ms: 45 blocks of it were nowhere.",
    ),
    (
        {**LINE, "loaded_ms": 897.2, "found_blocks": 20},
        "the engine computed for 800 ms: 45 blocks of it were nowhere.",
    ),
    (
        {**LINE, "loaded_ms": 897.2, "found_blocks": 60},
        "the engine computed for 800 ms: 5 blocks of it were nowhere.",
    ),
]  # fmt: skip
WITHOUT: list[dict[str, Any]] = [
    QUICK,
    {**QUICK, "hint_blocks": 64, "failed": "lease"},  # it was fetched again
    {**LINE, "outcome": "reset"},
    {**LINE, **MISSED, "outcome": "aborted", "ended_ms": 2.0},
]


@pytest.mark.parametrize(("line", "expected"), EXAMPLES)
def test_the_cause_has_a_sentence(line: dict[str, Any], expected: str) -> None:
    assert causes.sentence(line) == f"Cause: {expected}"


@pytest.mark.parametrize("line", WITHOUT)
def test_what_was_quick_or_says_nothing_has_no_cause(line: dict[str, Any]) -> None:
    assert causes.cause(line) is None
    assert causes.sentence(line) == ""


def test_every_condition_is_needed() -> None:
    """A planted defect per condition of the judgement: an example above then has another sentence."""
    lines = [line for line, _ in EXAMPLES] + WITHOUT
    right = list(map(causes.sentence, lines))
    planted = list(mutants(causes, ("_cause", "_of_fetch", "_parts")))
    unseen = [what for what, mutant in planted if judged(mutant, lines) == right]
    assert unseen == []
    assert len(planted) > 40


def judged(mutant: Any, lines: list[dict[str, Any]]) -> list[Any] | None:
    """Return what a module with a defect says; None where it fails."""
    try:
        return list(map(mutant.sentence, lines))
    except Exception:
        return None


@pytest.mark.parametrize(
    ("field", "reasons", "cause"),
    [
        ("failed", ("transfer", "under_way", "overdue"), Cause.NODE),
        ("failed", ("lease", "lookup_again", "miss", "retry"), Cause.LEASE),
        ("failed", ("corrupt", "foreign"), Cause.VALUE),
        ("failed", ("no_room",), Cause.STAGING),
        ("failed", ("transient",), Cause.MASTER),
    ],
)
def test_every_reason_of_a_miss_has_its_cause(field: str, reasons: tuple[str, ...], cause: Cause) -> None:
    assert {causes.cause({**LINE, **MISSED, field: reason}) for reason in reasons} == {cause.value}


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_words(cause: Cause) -> None:
    assert causes.label(cause.value) == cause.label
    assert causes.label("of\x1banother release") == "of\N{REPLACEMENT CHARACTER}another release"
