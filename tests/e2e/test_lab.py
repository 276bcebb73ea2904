"""The lab measures what it says: requests come and end as a test wants."""

from __future__ import annotations

from tests.lab.engine import Engine
from tests.lab.prompts import make_prompts


def test_a_user_pauses_between_an_answer_and_the_next_request(plain: Engine) -> None:
    result = plain.run(make_prompts(4, 64, seed=7), max_tokens=4, concurrency=1, pauses_s=[0.0, 0.3, 0.0, 0.0])
    ends = [each.finished_s or 0.0 for each in result.requests]
    gaps = [each.arrival_s - end for each, end in zip(result.requests[1:], ends, strict=False)]
    assert gaps[1] >= 0.3
    assert min(gaps) >= 0.0
