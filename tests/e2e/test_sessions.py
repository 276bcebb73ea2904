"""A session of a real engine: its KV is staged when it comes back, and costs little when it does not."""

from __future__ import annotations

import time

from tests.e2e.conftest import Site, whole_blocks
from tests.lab.engine import Engine
from tests.lab.prompts import make_prompts
from tests.support.auditor import ask_daemon
from tests.support.waiting import eventually

PAUSE_S = 3.0
[WHOLE] = make_prompts(1, 900, seed=57)
TURNS = [WHOLE[:tokens] for tokens in range(300, 900, 97)]  # no whole number of blocks
TOKENS = 8


def test_a_session_that_comes_back_finds_its_prompt_staged_and_one_that_does_not_costs_one_fetch(
    site: Site, plain: Engine
) -> None:
    """Each turn saves a part of its prompt, which staging never had before the pause."""
    engine = site.engine(extra={"cache_prefix": "sessions"})
    right = plain.run(TURNS, max_tokens=TOKENS).tokens
    for turn, prompt in enumerate(TURNS):
        before = len(site.daemon.records("request.done"))
        served = engine.run([prompt], max_tokens=TOKENS, request_options={"session_id": "agent"})
        assert served.tokens == [right[turn]]
        assert site.daemon.wait_record("request.done", count=before + 1) is not None
        line = site.daemon.records("request.done")[before]
        if turn > 1:  # from the second one on a gap is known
            stored = whole_blocks(TURNS[turn - 1]) // 32
            assert (line["announced_blocks"], line["announced_staged"]) == (stored, stored)
            assert (line["found_blocks"], line["bytes"]) == (stored, 0)
            assert line["session_gap_ms"] > 1e3 * PAUSE_S
        told = len(site.daemon.records("announcement.done"))
        site.fresh(engine)
        time.sleep(PAUSE_S)
    fetched = [int(each["fetched_blocks"]) for each in site.daemon.records("announcement.done")]
    assert sum(fetched) > 0, "what the turns before saved"

    def given_up() -> bool:
        (shown,) = ask_daemon(site.daemon.socket).engines
        return shown["announcements_open"] == 0 and len(site.daemon.records("announcement.done")) > told

    eventually(given_up, 60, what="the end of what no request came for")
    in_vain = site.daemon.records("announcement.done")[told:]
    assert {each["outcome"] for each in in_vain} == {"expired"}
    assert sum(int(each["fetched_blocks"]) for each in in_vain) <= whole_blocks(TURNS[-1]) // 32
    site.assert_idle()
    engine.stop()
