"""The lab measures what it says: requests come and end as a test wants, and tokens depend on every block."""

from __future__ import annotations

from tests.e2e.conftest import BLOCK
from tests.lab.engine import Engine
from tests.lab.prompts import make_prompts


def test_the_end_of_the_answer_depends_on_the_first_block(plain: Engine) -> None:
    """Prompts that differ in their first block only: else a wrong block could go unseen."""
    [prompt] = make_prompts(1, 300, seed=2)
    [other] = make_prompts(1, BLOCK, seed=3)
    tokens = plain.run([prompt, other + prompt[BLOCK:]]).tokens
    assert tokens[0] != tokens[1]


def test_a_user_pauses_between_an_answer_and_the_next_request(plain: Engine) -> None:
    result = plain.run(make_prompts(4, 64, seed=7), max_tokens=4, concurrency=1, pauses_s=[0.0, 0.3, 0.0, 0.0])
    ends = [each.finished_s or 0.0 for each in result.requests]
    gaps = [each.arrival_s - end for each, end in zip(result.requests[1:], ends, strict=False)]
    assert gaps[1] >= 0.3
    assert min(gaps) >= 0.0
