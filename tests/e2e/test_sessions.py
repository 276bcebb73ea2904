"""A session of a real engine: its KV is staged when it comes back."""

from __future__ import annotations

import time

from tests.e2e.conftest import Site, whole_blocks
from tests.lab.engine import Engine
from tests.lab.prompts import make_prompts

PAUSE_S = 2.0
[WHOLE] = make_prompts(1, 900, seed=57)
TURNS = [WHOLE[:tokens] for tokens in range(300, 900, 140)]  # no whole number of blocks
TOKENS = 8


def test_a_session_that_comes_back_finds_its_prompt_staged(site: Site, plain: Engine) -> None:
    """Each turn saves a part of its prompt, which staging never had before the pause.

    What one that does not come back costs: tests/daemon/engine/test_session_calls.py, where no minute is waited for.
    """
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
        site.fresh(engine)
        time.sleep(PAUSE_S)
    fetched = [int(each["fetched_blocks"]) for each in site.daemon.records("announcement.done")]
    assert sum(fetched) > 0, "what the turns before saved"
    site.assert_idle()
    engine.stop()
