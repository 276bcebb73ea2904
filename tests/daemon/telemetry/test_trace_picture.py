"""`kvprefetchd explain`: one request's trace as a picture, and a sentence that says where its time went."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.daemon.telemetry import trace_picture
from kvprefetch.daemon.telemetry.events import Ending
from tests.support.command import kvprefetchd
from tests.support.log_lines import problems

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()

LINE: dict[str, Any] = {
    "ts": "2026-11-21T07:30:00.000000Z", "level": "info", "event": "request.done", "run_id": "5d1c0a7be2f4",
    "engine": "3f2a91c04d11", "epoch": 5, "request_id": "cmpl-7", "outcome": "loaded", "prompt_tokens": 2081,
    "hint_blocks": 65, "local_blocks": 2, "found_blocks": 64, "loaded_blocks": 62, "kv_groups": 1,
    "bytes": 8126464, "bytes_disk": 0, "bytes_memory": 8126464, "taken_back": 0,
    "store_unavailable": False, "arrived_ms": 0.0, "adopted_ms": 0.4, "hint_seen_ms": 0.21,
    "looked_up_ms": 1.32, "first_byte_ms": 14.1, "last_byte_ms": 96.4, "visited_ms": 71.0, "claimed_ms": 97.2,
    "loaded_ms": 99.9, "ended_ms": 100.4, "exposed_ms": 26.2, "unseen_ms": 0.8,
    "missing_blocks": 0, "recompute_ms": None, "spared_ms": None,
    "announced_ms": None, "announced_blocks": 0, "announced_staged": 0,
    "session_gap_ms": None,
    "hidden_fraction": 0.7359, "answered_ms": 96.4, "medium": "memory", "store_bytes_s": 99000000, "hour_bytes_s": None,
    "room_ms": 0.0, "failed": None, "named_by": None, "owners": "",
    "cause": "places",
    "traceparent": None,
}  # fmt: skip


NEVER: dict[str, Any] = dict.fromkeys(
    ("first_byte_ms", "last_byte_ms", "answered_ms", "claimed_ms", "loaded_ms", "hidden_fraction")
)
MISSED = {"outcome": "miss", "found_blocks": 0, "loaded_blocks": 0, "bytes": 0, **NEVER}
# A miss that was answered while the engine's step went on.
STEP = {**MISSED, "visited_ms": 0.3, "looked_up_ms": 5.3, "ended_ms": 812.4, "exposed_ms": 812.0, "unseen_ms": 807.0}
explain = partial(kvprefetchd, "explain")


def test_the_line_used_here_is_one_that_the_daemon_could_write() -> None:
    assert problems(LINE) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            "Of look-up and transfer, which took 96.2 ms, the queue hid 74 %. The scheduler waited 26.2 ms for it: "
            "25.4 ms for the other fetches.",
        ),
        (
            {"visited_ms": None, "claimed_ms": 250.0, "loaded_ms": 253.0, "exposed_ms": 0.0, "hidden_fraction": 1.0},
            "The scheduler did not wait: look-up and transfer took 96.2 ms of the 250 ms that it queued in the engine.",
        ),
        (
            {"loaded_ms": 900.0},
            "Of look-up and transfer, which took 96.2 ms, the queue hid 74 %. The scheduler waited 26.2 ms for it: "
            "25.4 ms for the other fetches. Most of the time, 803 ms, was the engine's step that copied it, its "
            "computing included.",
        ),
        (
            {"bytes": 0, "first_byte_ms": None, "last_byte_ms": None, "visited_ms": None, "claimed_ms": 30.0,
             "loaded_ms": 31.0, "exposed_ms": 0.0, "hidden_fraction": 1.0},
            "The scheduler did not wait: the look-up (its blocks were staged already) took 1.11 ms of the 30.0 ms that "
            "it queued in the engine.",
        ),
        (
            {**MISSED, "found_blocks": 2, "visited_ms": None, "exposed_ms": 0.0},
            "The store had nothing beyond what the engine held itself, and it was recomputed. The scheduler did not "
            "wait for it.",
        ),
        (
            {**MISSED, "found_blocks": 2, "store_unavailable": True, "looked_up_ms": 2000.0, "visited_ms": 1.0,
             "ended_ms": 2001.0, "exposed_ms": 2000.0},
            "The store did not answer, and it was recomputed. The scheduler waited 2000 ms for it: 1999 ms for the "
            "look-up.",
        ),
        (
            {**MISSED, "outcome": "timed_out", "visited_ms": 5.0, "ended_ms": 5005.0, "exposed_ms": 5000.0},
            "The engine's patience ended before its blocks came, and it was recomputed. The scheduler waited 5000 ms "
            "for it: 5000 ms for a fetch that was not over.",
        ),
        (
            {**MISSED, "outcome": "recomputed", "found_blocks": 4, "visited_ms": 1.3, "looked_up_ms": 1.4,
             "ended_ms": 4.4, "exposed_ms": 3.1, "missing_blocks": 2, "recompute_ms": 9.0},
            "It did not load, because the engine had nothing to take yet, and expected to recompute sooner than to "
            "wait. The scheduler waited 3.10 ms for it: 3.00 ms for a fetch that was not over. It waited no longer for "
            "all: recomputing 2 missing blocks would cost 9.00 ms.",
        ),
        (
            {"visited_ms": 0.5, "claimed_ms": 3498.0, "loaded_ms": 3600.0, "exposed_ms": 9.5, "hidden_fraction": 0.9},
            "Of look-up and transfer, which took 96.2 ms, the queue hid 90 %. The scheduler waited 9.50 ms for it: "
            "8.68 ms for its first fetch, 0.82 ms for the look-up. For 3488 ms more the engine's places or tokens went "
            "to others.",
        ),
        (
            {**STEP, "announced_ms": 184.0, "announced_blocks": 720, "announced_staged": 719},
            "The store had nothing beyond what the engine held itself, and it was recomputed. Its answer, a miss, came "
            "5.00 ms after the scheduler had asked. The scheduler came back after 812 ms, when its step had ended: the "
            "request waited for the engine, not for the store. It was announced 184 ms before it arrived: 719 of 720 "
            "blocks were there.",
        ),
        (
            {"adopted_ms": 24.0, "exposed_ms": 0.0},
            "The scheduler did not wait: look-up and transfer took 96.2 ms of the 71.0 ms that it queued in the "
            "engine. Its hint came 24.0 ms before the scheduler had it.",
        ),
        (
            {"visited_ms": 90.0, "claimed_ms": 300.0, "loaded_ms": 310.0, "exposed_ms": 210.0, "unseen_ms": 203.6},
            "Of look-up and transfer, which took 96.2 ms, the queue hid 74 %. Its answer came 6.40 ms after the "
            "scheduler had asked. The scheduler came back after 210 ms, when its step had ended: the request waited "
            "for the engine, not for the store.",
        ),
    ],
)  # fmt: skip
def test_the_sentence_says_where_the_time_went(changes: dict[str, Any], expected: str) -> None:
    assert trace_picture.sentence({**LINE, **changes}) == expected


def test_bytes_of_several_kv_groups_are_said_to_be_so() -> None:
    """They are more than the prefix's blocks have: each group has blocks of its own."""
    assert not any("KV groups" in line for line in trace_picture.headline({**LINE, "kv_groups": 1}))
    assert "7.8 MiB fetched for 2 KV groups: 7.8 MiB from memory" in "\n".join(
        trace_picture.headline({**LINE, "kv_groups": 2})
    )


def test_it_says_how_often_the_room_went_to_others() -> None:
    heads = ["\n".join(trace_picture.headline({**LINE, "taken_back": times})) for times in (0, 1, 2)]
    assert "more urgent" not in heads[0]
    assert "its room went to more urgent requests once" in heads[1]
    assert "its room went to more urgent requests 2 times" in heads[2]


@pytest.mark.parametrize("ending", Ending)
def test_every_outcome_has_a_sentence_and_nothing_breaks_it(ending: Ending) -> None:
    bare = {"event": "request.done", "ts": "x", "outcome": ending.value}
    whole, other_types = {**LINE, "outcome": ending.value}, {**bare, "exposed_ms": "?", "visited_ms": [1]}
    for record in (whole, bare, other_types, {**bare, "hint_blocks": math.nan, "bytes": 1e999, "loaded_ms": 10**400}):
        assert trace_picture.explain(record).rstrip().endswith(".")


@pytest.mark.parametrize(
    ("outcome", "last_byte_ms", "name"),
    [
        ("loaded", None, "staged, not yet taken"), ("aborted", 96.4, "staged, not yet taken"), ("miss", None, None),
        ("aborted", None, None), ("timed_out", None, "fetch not over"), ("recomputed", None, "fetch not over"),
    ],
)  # fmt: skip
def test_only_what_was_staged_is_drawn_as_staged(outcome: str, last_byte_ms: float | None, name: str | None) -> None:
    times = dict.fromkeys(("first_byte_ms", "last_byte_ms", "answered_ms"), last_byte_ms)
    record = {**LINE, "outcome": outcome, **times}
    after = {"staged, not yet taken", "fetch not over"}
    assert [span.name for span in trace_picture.spans(record) if span.name in after] == ([name] if name else [])


def test_bars_lie_on_one_scale_and_keep_to_their_width() -> None:
    lines = trace_picture.picture({**LINE, "loaded_ms": None})
    bars = {line[: line.index("  ")]: line[line.index(" ms  ") + 5 :] for line in lines[1:]}
    assert len(bars["the other fetches"]) <= trace_picture.WIDTH
    assert bars["scheduler waits"].endswith("█")
    assert len(bars["scheduler waits"]) == trace_picture.WIDTH, "the last part ends the scale"
    assert len(bars["in the engine's queue"]) == len(bars["scheduler waits"].rstrip("█")), "one begins where one ends"


def test_what_the_scheduler_did_for_others_is_drawn_apart() -> None:
    """Little of it is not drawn: it is the time that a record takes."""
    names = ("scheduler waits", "scheduler elsewhere")
    found = [
        span for span in trace_picture.spans({**LINE, "visited_ms": 30.0, "exposed_ms": 20.0}) if span.name in names
    ]
    assert found == [("scheduler waits", 30.0, 50.0), ("scheduler elsewhere", 50.0, 97.2)]
    assert [span.name for span in trace_picture.spans({**LINE, "exposed_ms": 22.0}) if span.name in names] == [names[0]]


def test_the_step_that_a_missed_request_waited_for_is_drawn() -> None:
    (span,) = [span for span in trace_picture.spans({**LINE, **STEP}) if span.name == trace_picture.UNSEEN]
    assert (span.start_ms, span.end_ms) == (5.3, 812.3)
    picture = trace_picture.picture({**LINE, **STEP})
    assert any(line.startswith(trace_picture.UNSEEN) and line.endswith("█") for line in picture)


def test_a_request_is_found_by_its_id_or_a_part_of_it(tmp_path: Path) -> None:
    names = ["cmpl-1", "cmpl-12", "chat-9"]
    log = tmp_path / "log"
    log.write_text("noise\n" + "".join(json.dumps({**LINE, "request_id": name}) + "\n" for name in names))
    assert "request cmpl-1 of" in explain("cmpl-1", str(log)).stdout, "the whole id wins over a part of another"
    assert "request chat-9 of" in explain("chat", str(log)).stdout
    several = explain("cmpl", str(log))
    assert several.returncode == 69
    assert "2 requests have 'cmpl' in their id: cmpl-1, cmpl-12" in several.stderr
    many = explain("c", given="".join(json.dumps({**LINE, "request_id": f"c{i}"}) + "\n" for i in range(9)))
    assert many.stderr.endswith("more than 5 requests have 'c' in their id: c0, c1, c2, c3, c4, …\n")
    none = explain("nobody", given=log.read_text())
    assert none.returncode == 69
    assert "no request.done line in standard input has 'nobody' in its id" in none.stderr
    assert f"in {log} has 'nobody'" in explain("nobody", str(log)).stderr


def test_a_line_of_the_release_before_is_drawn_as_one_of_now() -> None:
    """Its outcome and one of its times had other names."""
    line = {**LINE, "outcome": "local_gap"}
    former = {name.replace("visited_ms", "asked_ms"): value for name, value in {**line, "outcome": "evicted"}.items()}
    assert (
        explain("cmpl-7", given=json.dumps(former) + "\n").stdout
        == explain("cmpl-7", given=json.dumps(line) + "\n").stdout
    )


def test_a_request_hinted_twice_is_shown_twice() -> None:
    lines = [{**LINE, "outcome": "local_gap", "loaded_blocks": 0}, LINE]
    shown = explain("cmpl-7", given="".join(json.dumps(line) + "\n" for line in lines)).stdout
    assert re.findall(r"d11: (\w+)", shown) == ["local_gap", "loaded"]


def test_the_readme_s_example_is_what_the_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = README.split("## One request explained\n")[1].split("\n## ")[0]
    commands = re.findall(r"^\$ kvprefetchd (.*)\n((?:(?!\$ |```).*\n)*)", section, re.MULTILINE)
    assert [command.split()[0] for command, _ in commands] == ["tail", "explain"]
    (tmp_path / "kvprefetchd.log").write_text(json.dumps(LINE) + "\n")
    for command, expected in commands:
        result = kvprefetchd(*command.split())
        assert result.stdout.strip() == expected.strip(), f"what `kvprefetchd {command}` prints has changed"
