"""The cost of steps from their begin and end: prefill per token beside a step's own time, also when they overlap."""

from __future__ import annotations

import random

import pytest

from kvprefetch.connector.steps import UNMEASURED_PREFILL_NS, StepTimes

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


def test_nothing_is_known_at_first_and_empty_or_loading_steps_teach_nothing() -> None:
    steps = StepTimes()
    assert (steps.step_ns, steps.prefill_ns(10)) == (0.0, 10 * UNMEASURED_PREFILL_NS)
    steps.began(0, 0, executed=False)
    steps.ended(10**9)
    steps.began(10**9, 500, executed=True, typical=False)
    steps.ended(9 * 10**9)
    assert (steps.step_ns, steps.prefill_ns(10)) == (0.0, 10 * UNMEASURED_PREFILL_NS)


def test_ends_that_never_come_or_come_too_often_do_no_harm() -> None:
    steps = StepTimes()
    steps.ended(5)
    for now in range(200):
        steps.began(now, 1, executed=True)
    for now in range(200, 400):
        steps.ended(now)
    run(steps, [0] * 50)
    assert steps.step_ns == pytest.approx(DECODE_NS, rel=0.05)
