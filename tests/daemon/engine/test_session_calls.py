"""Sessions of one epoch, with the real planner: what is staged and asked for in their pauses, and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from kvprefetch.daemon.engine.sessions import MARGIN_NS, OWN_GAPS, TRIES, UNKNOWN_NS
from kvprefetch.daemon.engine.transfers import Found
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.work.calls import CallKind
from kvprefetch.kv.groups import Groups
from kvprefetch.shmring.wire.records import NO_SESSION, FlagState, session_digest
from tests.daemon.engine.epochs import SECOND_NS, Engine, Pools, digest, later_weights, make_epoch
from tests.daemon.engine.test_groups import GROUPS
from tests.support.engine_side import ONE_GROUP

AGENT = session_digest("agent")
GAP_NS = 20 * SECOND_NS


class Setup(Engine):
    """An epoch with twelve staging slots, and a store that has every block. Prompts are letters."""

    def __init__(self, groups: Groups = ONE_GROUP, *, sessions: bool = True) -> None:
        self.now, self.pools, self.asked, self.fetched = SECOND_NS, Pools(), list[str](), list[str]()
        self.keys = 0
        own: Any = {"groups": groups, "sessions": sessions, "chunk_blocks": 8}
        super().__init__(make_epoch(None, self.pools, lambda: self.now, **own))

    def serve(self) -> None:
        """Start all that may start, and end each call well."""
        while True:
            if self.pools.calls:
                run: Any = self.pools.calls[-1].run
                if self.pools.calls[-1].kind is CallKind.LOOK_UP:
                    self.asked += ["".join(chr(name[0]) for name in names) for names in run.args[2]]
                    self.pools.end([Found(b"\1" * len(names), bytes(len(names))) for names in run.args[2]])
                else:
                    self.fetched.append("".join(chr(name[0]) for name, _ in run.args[2]))
                    self.pools.end([ErrorClass.OK] * len(run.args[2]))
            elif self.epoch.owes:
                self.epoch.drain(0)
            elif not any(self.epoch.start_fetch(lane, ahead=ahead) for ahead in (False, True) for lane in Lane):
                return

    def wait(self, duration_ns: int) -> None:
        """Let this time go by, as a daemon that looks ten times a second."""
        until = self.now + duration_ns
        while self.now < until:
            self.now = min(until, self.now + SECOND_NS // 10)
            self.epoch.tick(self.now)
            self.serve()

    def come(self, prompt: str, session: bytes = AGENT) -> dict[str, Any]:
        """Serve a request; return the fields of its line."""
        self.keys += 1
        key = self.keys % 8, self.keys
        self.hint([digest(name) for name in prompt], key=key, session=session)
        self.serve()
        assert self.epoch.channel.table.flag(key[0]).state == FlagState.READY
        self.cancel(key)
        line = self.epoch.parts.recent[-1][1]
        self.asked.clear()
        self.fetched.clear()
        return line

    def learn(self) -> None:
        for _ in range(OWN_GAPS):
            self.come("abc")
            self.wait(GAP_NS)

    def fill(self) -> None:
        """Let others take all of staging."""
        self.come("zyxwvu", NO_SESSION)
        self.come("tsrqpo", NO_SESSION)

    def total(self, name: str) -> dict[str, float]:
        self.epoch.numbers()
        return self.epoch.counters.metrics.totals(name)


@pytest.mark.parametrize("groups", [ONE_GROUP, GROUPS], ids=["one", "several"])
def test_what_staging_lost_is_there_again_when_the_session_comes_back(groups: Groups) -> None:
    setup = Setup(groups)
    setup.learn()
    setup.come("abc")
    setup.fill()
    setup.wait(GAP_NS - MARGIN_NS - SECOND_NS)
    assert setup.fetched == [], "it is not due yet"
    setup.wait(SECOND_NS)
    assert set("".join(setup.fetched)) == set("abc")
    setup.wait(MARGIN_NS)
    line = setup.come("abc")
    assert (line["announced_blocks"], line["announced_staged"], line["bytes"]) == (3, 3, 0)
    assert line["session_gap_ms"] == GAP_NS / 1e6
    assert setup.come("abcd")["bytes"] == 4096 * len(groups), "what is new, of each group"
    assert setup.total("announcements")["used"] >= 1
    setup.leave()


def test_a_session_that_never_comes_back_costs_one_fetch_and_is_asked_for_no_longer_than_it_may_come() -> None:
    setup = Setup()
    setup.learn()
    setup.come("abc")
    setup.fill()
    announced = sum(setup.total("announcements").values())
    setup.wait(10 * GAP_NS)
    assert "".join(setup.fetched) == "abc"
    assert setup.total("announcements")["expired"] == 1
    assert sum(setup.total("announcements").values()) - announced <= TRIES
    assert (setup.epoch.gauges()["announcements_open"], setup.epoch.gauges()["blocks_ahead"]) == (0, 0)
    setup.asked.clear()
    setup.wait(10 * GAP_NS)
    assert setup.asked == []
    assert setup.epoch.gauges()["sessions"] == 1
    setup.leave()


def test_leases_are_kept_in_a_pause_and_a_request_s_question_goes_first() -> None:
    setup = Setup()
    setup.come("abc")
    setup.wait(SECOND_NS)
    assert setup.asked == [], "its look-up was less than half a lease ago"
    setup.wait(UNKNOWN_NS)
    assert set(setup.asked) == {"abc"}, "staged blocks, too: they may lose their room"
    assert 10 <= len(setup.asked) <= 13, "twice a lease of ten seconds"
    assert setup.epoch.numbers()["kept_blocks"] == 3 * len(setup.asked)
    setup.come("def", AGENT)
    setup.pools.calls.clear()
    setup.now += SECOND_NS
    setup.hint([digest("g")], key=(7, 100))
    setup.epoch.tick(setup.now)
    [call] = setup.pools.calls
    run: Any = call.run
    assert run.args[2] == [[digest("g") + b"\0"]]
    setup.leave()


def test_another_prompt_of_the_session_ends_its_announcement() -> None:
    setup = Setup()
    setup.learn()
    setup.come("abc")
    setup.wait(GAP_NS)
    assert setup.epoch.gauges()["announcements_open"] == 1
    setup.come("xyz")
    setup.wait(SECOND_NS // 10)
    assert setup.epoch.gauges()["announcements_open"] == 0
    setup.leave()


def test_other_weights_and_another_mode_end_it() -> None:
    setup = Setup()
    setup.learn()
    setup.epoch.reset(later_weights())
    setup.asked.clear()
    setup.wait(GAP_NS)
    assert (setup.asked, setup.epoch.gauges()["sessions"]) == ([], 0)
    setup.learn()
    setup.come("abc")
    setup.fill()
    setup.epoch.switch("off")
    setup.asked.clear()
    setup.wait(GAP_NS)
    assert (setup.fetched, setup.asked) == ([], [])
    setup.leave()


def test_with_sessions_off_nothing_is_known_of_them() -> None:
    setup = Setup(sessions=False)
    setup.learn()
    assert setup.come("abc")["session_gap_ms"] is None
    setup.wait(10 * GAP_NS)
    assert (setup.asked, setup.fetched, setup.epoch.gauges()["sessions"]) == ([], [], 0)
    setup.leave()
