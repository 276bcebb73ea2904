"""The cost of steps from their begin and end: prefill per token beside a step's own time, also when they overlap."""

from __future__ import annotations

import math
import random

import pytest

from kvprefetch.connector.engine.steps import StepTimes

DECODE_NS, TOKEN_NS = 8_000_000, 50_000


def run(steps: StepTimes, tokens: list[int], *, overlap: bool = False, noise: float = 0.0) -> None:
    """Steps one after the other; with `overlap` each is scheduled when the one before it starts to execute."""
    rng = random.Random(1)
    now = 10**9
    if overlap:
        steps.began(now, tokens[0], executed=True)
    for index, count in enumerate(tokens):
        if not overlap:
            steps.began(now, count, executed=True)
        elif index + 1 < len(tokens):
            steps.began(now, tokens[index + 1], executed=True)
        now += int((DECODE_NS + count * TOKEN_NS) * (1 + noise * rng.uniform(-1, 1)))
        steps.ended(now)
        if not overlap:
            now += 10**9  # between two steps of an idle engine


@pytest.mark.parametrize("overlap", [False, True])
def test_a_token_costs_what_it_adds_to_a_step(overlap: bool) -> None:
    steps = StepTimes()
    run(steps, [0] * 20 + [2048, 0, 700, 0, 0, 1500, 0], overlap=overlap)
    assert steps.prefill_ns(1000) == pytest.approx(1000 * TOKEN_NS, rel=0.05)


def test_short_prefills_between_noisy_steps_do_not_hide_long_ones() -> None:
    """The tail of a hit is a few tokens: its step's noise must not be taken for the price of a token."""
    steps = StepTimes()
    run(steps, [0] * 20 + [2048, 2048] + [0, 28] * 300, noise=0.2)
    assert steps.prefill_ns(1000) == pytest.approx(1000 * TOKEN_NS, rel=0.3)


def test_nothing_is_known_at_first_and_empty_steps_teach_nothing() -> None:
    steps = StepTimes()
    assert (steps.decode_ns, steps.prefill_ns(10), steps.prefill_ns(0)) == (0.0, math.inf, math.inf)
    steps.began(0, 0, executed=False)
    steps.ended(10**9)
    assert (steps.decode_ns, steps.prefill_ns(10), steps.prefill_ns(0)) == (0.0, math.inf, math.inf)


def prefill(steps: StepTimes, now_s: int, tokens: int, token_ns: float, *, typical: bool) -> None:
    steps.began(now_s * 10**9, tokens, executed=True, typical=typical)
    steps.ended(now_s * 10**9 + DECODE_NS + int(tokens * token_ns))


def test_steps_that_load_tell_the_price_of_a_token_until_another_does() -> None:
    steps = StepTimes()
    run(steps, [0] * 20)
    decode_ns = steps.decode_ns
    for second in range(8):
        prefill(steps, 100 + second, 28, 2 * TOKEN_NS, typical=False)
    assert steps.prefill_ns(1) == pytest.approx(2 * TOKEN_NS, rel=0.05)
    prefill(steps, 110, 2000, TOKEN_NS / 2, typical=False)
    assert steps.prefill_ns(1) == pytest.approx(TOKEN_NS / 2, rel=0.1), "many tokens say more than few"
    prefill(steps, 111, 64, TOKEN_NS, typical=True)
    prefill(steps, 112, 2000, 2 * TOKEN_NS, typical=False)
    assert steps.prefill_ns(1) == pytest.approx(TOKEN_NS)
    assert steps.decode_ns == pytest.approx(decode_ns), "they are no part of a step that only decodes"


def test_a_few_tokens_tell_no_price() -> None:
    """Noise may hide them, and recomputing would look free."""
    steps = StepTimes()
    run(steps, [0] * 20)
    for typical in (False, True):
        prefill(steps, 100 + typical, 16, 0, typical=typical)
        assert steps.prefill_ns(1) == math.inf


def test_ends_that_never_come_or_come_too_often_do_no_harm() -> None:
    steps = StepTimes()
    steps.ended(5)
    for now in range(200):
        steps.began(now, 1, executed=True)
    for now in range(200, 400):
        steps.ended(now)
    run(steps, [0] * 50)
    assert steps.decode_ns == pytest.approx(DECODE_NS, rel=0.05)
