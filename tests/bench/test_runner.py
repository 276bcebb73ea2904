"""The runner, with a bed that only says what it would have served; the real bed: tests/bench/test_bench.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from benchmarks.bench.runner import Runner, unexpected
from benchmarks.bench.served import Daemon, Requests, Served
from benchmarks.bench.setting import Pace, Setting

SMALL = Setting(requests=2, prompt_tokens=200)


class Bed:
    """Serves nothing; `log` has what was asked. `wrong` gives other tokens, `failing` fails at its second pass."""

    limited_link = True

    def __init__(self, wrong: str = "", failing: str = "") -> None:
        self.log: list[str] = []
        self.wrong, self.failing = wrong, failing

    @contextlib.contextmanager
    def made(self, settings: Sequence[Setting], variants: Sequence[str]) -> Iterator[Bed]:
        self.log.append(f"bed {settings[0].far} {','.join(variants)}")
        yield self

    @contextlib.contextmanager
    def engines(self, settings: Sequence[Setting]) -> Iterator[None]:
        self.log.append(f"engines {len(settings)}")
        yield

    def pace(self, setting: Setting) -> Pace:
        return Pace(0.5, 0.005, 0.2)

    def serve(self, variant: str, setting: Setting, pace: Pace, number: int) -> Served:
        if variant == self.failing and f"{variant} {setting.level:g} {1 - number}" in self.log:
            raise RuntimeError("the engine died")
        self.log.append(f"{variant} {setting.level:g} {number}")
        hits = 0 if variant == "recomputed" else setting.hit_tokens
        columns = Requests([0, 1], [0.0, 0.1], [0.5, 0.5], [1.0, 1.0], [hits, hits], [])
        return Served(columns, total_s=1.0, tokens={0: [1, 2], 1: [3, 9 if variant == self.wrong else 4]})


def run(
    bed: Bed, points: Sequence[tuple[float, Setting]], *variants: str, rounds: int = 2, seconds: float = 60
) -> Runner:
    runner = Runner(points, variants, rounds, seconds, lambda _: None)
    runner.run(bed.made)
    return runner


def levels(*levels: float) -> list[tuple[float, Setting]]:
    return [(level, SMALL.but(level=level)) for level in levels]


def test_variants_take_turns_and_prompts_are_never_those_of_the_pass_before() -> None:
    bed = Bed()
    result = run(bed, levels(1, 2), "local", "kvprefetch").result
    assert bed.log[2:] == [
        *("local 1 0", "kvprefetch 1 0", "local 2 1", "kvprefetch 2 1"),
        *("kvprefetch 1 0", "local 1 0", "kvprefetch 2 1", "local 2 1"),
    ]
    assert [point["at"] for point in result["points"]] == [1, 2]
    assert [(each["variant"], each["round"]) for each in result["points"][0]["passes"]] == [
        *(("local", 0), ("kvprefetch", 0), ("kvprefetch", 1), ("local", 1)),
    ]
    assert result["rounds"] == {"wanted": 2, "done": 2}
    assert result["tokens"] == {"compared": 2 * 2 * 4 - 4, "different": {}}


def test_engines_start_anew_where_places_or_memory_differ_alone() -> None:
    bed = Bed()
    run(bed, [(1, SMALL), (2, SMALL.but(level=2)), (3, SMALL.but(spare=9))], "local")
    assert [each for each in bed.log if each.startswith("engines")] == ["engines 2", "engines 1"]


def test_other_tokens_are_a_problem() -> None:
    result = run(Bed(wrong="kvprefetch"), levels(1), "local", "kvprefetch").result
    assert result["tokens"]["different"] == {"kvprefetch": 2}
    assert result["problems"] == ["other tokens than local: {'kvprefetch': 2}"]


def test_rounds_that_do_not_fit_are_dropped_and_the_result_says_so() -> None:
    """One round is always measured."""
    result = run(Bed(), levels(1), "local", rounds=5, seconds=0).result
    assert result["rounds"] == {"wanted": 5, "done": 1}


def test_a_failure_keeps_what_was_measured() -> None:
    bed = Bed(failing="kvprefetch")
    runner = Runner(levels(1, 1), ["local", "kvprefetch"], 1, 60, lambda _: None)
    with pytest.raises(RuntimeError, match="the engine died"):
        runner.run(bed.made)
    assert [each["variant"] for each in runner.result["points"][0]["passes"]] == ["local", "kvprefetch"]
    assert [each["variant"] for each in runner.result["points"][1]["passes"]] == ["local"]


def test_variants_that_cannot_read_the_store_are_left_out_with_the_reason() -> None:
    bed = Bed()
    points = [(1, SMALL), (0, SMALL.but(far="disk"))]
    result = run(bed, points, "local", "upstream-async", "lmcache", "kvprefetch").result
    assert [each for each in bed.log if each.startswith("bed")] == [
        "bed link local,upstream-async,kvprefetch",
        "bed disk local,kvprefetch",
    ]
    assert result["left_out"]["upstream-async"] == {"0": "the slow disk is the daemon's own"}
    assert "--lmcache-python" in result["left_out"]["lmcache"]["1"]


def test_unexpected_hits_are_a_problem() -> None:
    class Cold(Bed):
        def serve(self, variant: str, setting: Setting, pace: Pace, number: int) -> Served:
            served = super().serve(variant, setting, pace, number)
            served.requests.cached_tokens = [0, setting.hit_tokens]
            return served

    assert run(Cold(), levels(1), "local", rounds=1).result["problems"] == [
        "local at 1: requests with [0] tokens of their prompt not computed instead of 192"
    ]
    assert run(Cold(), levels(1), "kvprefetch", rounds=1).result["problems"] == [], "adaptive may recompute"


def test_kv_that_was_staged_before_is_a_problem() -> None:
    """Whatever is not fetched in the pass makes the variant look better than it is."""
    served = Served(
        Requests(cached_tokens=[192, 192]), total_s=1.0, daemon=Daemon(fetched_bytes=[SMALL.fetched_bytes, 0])
    )
    [line] = unexpected("kvprefetch-wait", SMALL, served)
    assert line == f"{SMALL.fetched_bytes} bytes were fetched instead of {2 * SMALL.fetched_bytes}"
    served.daemon = Daemon(fetched_bytes=[SMALL.fetched_bytes] * 2)
    assert list(unexpected("kvprefetch-wait", SMALL, served)) == []
