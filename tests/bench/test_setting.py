"""The loads of `make bench`: prompts, arrivals, and what of it the store has."""

from __future__ import annotations

import itertools
import statistics

import pytest

from benchmarks.bench import pieces
from benchmarks.bench.setting import BLOCK, MODEL, SETS, Pace, Setting, blocks_of, plan, prompts, stored

PACE = Pace(place_s=0.5, step_s=0.005, fetch_s=0.2)


def test_prompts_are_seeded_and_sets_differ() -> None:
    setting = Setting(requests=4, prompt_tokens=200)
    assert prompts(setting, 0) == prompts(setting, 0)
    starts = {tuple(each[:BLOCK]) for number in range(SETS) for each in prompts(setting, number)}
    assert len(starts) == 4 * SETS, "no prompt begins as another does"


@pytest.mark.parametrize(("hit", "tokens"), [(0, 0), (0.09, 0), (0.5, 320), (1, 640)])
def test_the_store_has_full_blocks_of_a_share(hit: float, tokens: int) -> None:
    """At least one token of a prompt is always computed."""
    setting = Setting(requests=2, prompt_tokens=641, hit=hit)
    assert setting.hit_tokens == tokens
    assert Setting(prompt_tokens=640).hit_tokens == 640 - BLOCK
    assert blocks_of(stored(setting, 0)) == 2 * tokens // BLOCK


def test_eight_requests_share_their_first_part() -> None:
    shared = prompts(Setting(requests=16, prompt_tokens=640, shared=0.5), 0)
    assert len({tuple(each[:320]) for each in shared}) == 2
    assert len({tuple(each[320 : 320 + BLOCK]) for each in shared}) == 16
    assert blocks_of(shared) == 2 * 5 + 16 * 5


def test_an_open_loop_s_rate_is_a_share_of_capacity() -> None:
    """Two places, half a second each: four requests a second at most, so 0.5 of it is two. Gaps are unlike."""
    made = plan(Setting(level=0.5, requests=200, prompt_tokens=80), PACE, 0)
    assert made.arrivals_s is not None
    gaps = [after - before for before, after in itertools.pairwise(made.arrivals_s)]
    assert 200 / made.arrivals_s[-1] == pytest.approx(2.0, rel=0.02)
    assert statistics.stdev(gaps) == pytest.approx(0.5, rel=0.2)
    assert min(gaps) > 0


def test_bursts_come_at_once_and_leave_time_to_serve_them() -> None:
    made = plan(Setting(arrivals="burst", level=4, requests=8, prompt_tokens=80), PACE, 0)
    assert made.arrivals_s == [0.0] * 4 + [pytest.approx(4 / (0.7 * 4))] * 4


def test_a_closed_loop_s_users_are_shared_out_among_engines() -> None:
    made = plan(Setting(arrivals="closed", level=8, requests=8, prompt_tokens=80), PACE, 0)
    parts = [made.of_engine(number, 4) for number in range(4)]
    assert [part.users for part in parts] == [2] * 4
    assert sorted(name for part in parts for name in part.names) == list(range(8))
    assert parts[1].prompts == [made.prompts[1], made.prompts[5]]


def test_users_pause_for_a_share_of_the_place_s_time() -> None:
    """A place is held for half a second; the passes of all variants have the same pauses, and each engine its own."""
    setting = Setting(arrivals="closed", level=2, requests=400, prompt_tokens=80, pause=0.4)
    made = plan(setting, PACE, 0)
    assert made.pauses_s is not None
    assert plan(setting, PACE, 1).pauses_s == made.pauses_s
    assert statistics.mean(made.pauses_s) == pytest.approx(0.2, rel=0.05)
    assert 0.1 <= min(made.pauses_s) < 0.11
    assert 0.29 < max(made.pauses_s) <= 0.3
    assert made.of_engine(1, 2).pauses_s == made.pauses_s[1::2]
    assert made.arrivals_s == [0.0] + [pytest.approx(0.2)] * 399, "the second user begins a mean pause later"
    assert set(plan(setting.but(pause=0), PACE, 0).pauses_s or ()) == {0.0}


@pytest.mark.parametrize("level", [0.1, 1, 10])
def test_a_request_comes_level_fetches_before_the_place_is_free(level: float) -> None:
    """The one before it holds the place long enough, and is over before the next pair comes."""
    setting = Setting(arrivals="behind", level=level, requests=3, places=1, output_tokens=(8, 8), prompt_tokens=80)
    made = plan(setting, PACE, 0)
    assert made.names == [-1, 0, -1, 1, -1, 2]
    assert made.arrivals_s is not None
    for pair in range(3):
        holder, measured = made.arrivals_s[2 * pair : 2 * pair + 2]
        free = holder + made.outputs[2 * pair] * PACE.step_s
        assert free - measured == pytest.approx(level * PACE.fetch_s)
        assert measured > holder
        if pair < 2:
            assert made.arrivals_s[2 * pair + 2] > free + PACE.fetch_s + 8 * PACE.step_s


def test_the_link_makes_a_fetch_a_share_of_the_place() -> None:
    setting = Setting(fetch=0.3)
    assert 8e-6 * setting.whole_bytes / setting.rate_mbit(0.5) == pytest.approx(0.15)
    assert Setting(link_mbit=40).rate_mbit(0.5) == 40


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("piece", pieces.PIECES.values(), ids=lambda piece: piece.name)
def test_each_piece_s_points_can_be_served(piece: pieces.Piece, quick: bool) -> None:
    """Prompts and answers fit into the model, and points of unlike set-ups do not take turns."""
    settings = [setting for _, setting in piece.settings(quick=quick)]
    assert all(each.prompt_tokens + each.output_tokens[1] < MODEL.positions for each in settings)
    assert [each.far for each in settings] == sorted((each.far for each in settings), key=["link", "disk"].index)
    assert len({str(each) for each in settings}) == len(settings), "each point is another one"


def test_unknown_pieces_are_named() -> None:
    with pytest.raises(ValueError, match="no such piece: hid: choose from hide, prompt"):
        pieces.chosen(["hid"])
    assert [each.name for each in pieces.chosen([])] == list(pieces.PIECES)
