"""Runs any piece: variants take turns, rounds after a warm-up, within a budget of minutes."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from benchmarks.bench import figures, variants
from benchmarks.bench.served import Served
from benchmarks.bench.setting import SETS, Pace, Setting

Say = Callable[[str], None]
Points = Sequence[tuple[float, Setting]]


class Bed(Protocol):
    """What serves the requests of points that are equally far from the store: engines, started and driven somehow."""

    @property
    def limited_link(self) -> bool: ...

    def engines(self, settings: Sequence[Setting]) -> contextlib.AbstractContextManager[None]:
        """Have the engines of these points inside the block, warmed up."""

    def pace(self, setting: Setting) -> Pace:
        """Measure the machine at this point."""

    def serve(self, variant: str, setting: Setting, pace: Pace, number: int) -> Served:
        """Serve one pass with the prompts of set `number`."""


MakeBed = Callable[[Sequence[Setting], Sequence[str]], contextlib.AbstractContextManager[Bed]]


class Budget:
    """Rounds that fit: pure but for the time that it is given, in seconds."""

    def __init__(self, begun_s: float, seconds: float, points: int) -> None:
        self._begun_s, self._seconds, self._points = begun_s, seconds, points
        self._done = 0

    def fits(self, now_s: float, round_s: float, points: int) -> bool:
        """Whether one more round of `points` points, which takes about `round_s`, ends in their share of the time."""
        until_s = self._begun_s + self._seconds * (self._done + points) / self._points
        return now_s + round_s <= until_s

    def end(self, points: int) -> None:
        """These points are done; the next ones have their share, and what is left of this one."""
        self._done += points


def built(setting: Setting) -> tuple[object, ...]:
    """What engines are started anew for."""
    return (setting.places, setting.spare, setting.engines, setting.preset)


def unexpected(variant: str, setting: Setting, served: Served) -> Iterator[str]:
    """What a pass should not have: other hits than the store has, or KV that an earlier pass had staged."""
    if setting.shared or variant not in {*variants.PATIENT, variants.RECOMPUTED}:
        return
    hits = 0 if variant == variants.RECOMPUTED else setting.hit_tokens
    if seen := set(served.requests.cached_tokens) - {hits}:
        yield f"requests with {sorted(seen)} tokens of their prompt not computed instead of {hits}"
    if served.daemon is not None:
        fetched, wanted = sum(served.daemon.fetched_bytes), setting.requests * setting.fetched_bytes
        if fetched < wanted:
            yield f"{fetched} bytes were fetched instead of {wanted}"


class Runner:
    """One piece's run. `result` is whole at any moment: what was measured so far."""

    def __init__(self, points: Points, chosen: Sequence[str], rounds: int, seconds: float, say: Say) -> None:
        self._points, self._chosen, self._rounds, self._say = list(points), list(chosen), rounds, say
        self._seconds = seconds
        self._tokens: list[tuple[str, object, Mapping[int, Sequence[int]]]] = []
        self.result: dict[str, Any] = {
            "rounds": {"wanted": rounds, "done": rounds},
            "left_out": {},
            "points": [],
            "tokens": {"compared": 0, "different": {}},
            "problems": [],
        }

    def run(self, make_bed: MakeBed, lmcache: Any = None) -> None:
        """Measure all points; `lmcache` is the interpreter with LMCache, if there is one."""
        budget = Budget(time.monotonic(), self._seconds, len(self._points))
        for _, group in itertools.groupby(self._points, lambda each: each[1].far):
            some = list(group)
            runs = [each for each in self._chosen if self._runs(each, some, lmcache)]
            with make_bed([setting for _, setting in some], runs) as bed:
                for _, alike in itertools.groupby(some, lambda each: built(each[1])):
                    self._measure(bed, list(alike), runs, budget)
        compared, different = figures.token_differences(self._tokens)
        self.result["tokens"] = {"compared": compared, "different": different}
        if different:
            self._problem(f"other tokens than {self._tokens[0][0]}: {different}")

    def _runs(self, variant: str, some: Points, lmcache: Any) -> bool:
        for at, setting in some:
            if why_not := variants.left_out(variant, setting, lmcache):
                self.result["left_out"].setdefault(variant, {})[f"{at:g}"] = why_not
                self._say(f"left out: {variant}: {why_not}")
                return False
        return True

    def _problem(self, line: str) -> None:
        self.result["problems"].append(line)
        self._say(f"WARNING: {line}")

    def _measure(self, bed: Bed, some: Points, runs: Sequence[str], budget: Budget) -> None:
        """Rounds over points that share their engines."""
        with bed.engines([setting for _, setting in some]):
            points = []
            for at, setting in some:
                pace = bed.pace(setting)
                self._say(
                    f"point {at:g}: a place is held for {pace.place_s:.2f} s, a fetch takes {pace.fetch_s:.3f} s; "
                    f"{pace.proportions or 'this machine computes'}"
                )
                points.append((pace, {"at": at, "setting": asdict(setting), "pace": asdict(pace), "passes": []}))
            self.result["points"] += [point for _, point in points]
            sets = itertools.count()
            for number in range(self._rounds):
                begun = time.monotonic()
                for (at, setting), (pace, point) in zip(some, points, strict=True):
                    self._round(bed, setting, pace, point, runs, number, next(sets) % SETS)
                    self._say(f"point {at:g}: round {number + 1} of {self._rounds} done")
                now = time.monotonic()
                if number + 1 < self._rounds and not budget.fits(now, now - begun, len(some)):
                    done = self.result["rounds"]
                    done["done"] = min(done["done"], number + 1)
                    self._say(f"{self._rounds - number - 1} rounds dropped: they would not end in time (--minutes)")
                    break
            budget.end(len(some))

    def _round(
        self, bed: Bed, setting: Setting, pace: Pace, point: dict[str, Any], runs: Sequence[str], number: int, of: int
    ) -> None:
        for variant in runs[:: -1 if number % 2 else 1]:  # so that a drift of the machine meets all
            served = bed.serve(variant, setting, pace, of)
            point["passes"].append({"variant": variant, "round": number, "set": of, **served.kept()})
            self._tokens.append((variant, (setting.prompt_tokens, setting.hit, setting.shared, of), served.tokens))
            times = served.requests.ttft_s
            self._say(
                f"  {variant:24} mean {sum(times) / len(times):.3f}  max {max(times):.3f}  total {served.total_s:.1f} s"
                f"  CPU {served.engine_cpu_s:.1f} + {served.other_cpu_s:.1f} s"
                + (f"  (others used {served.others_cores:.1f} cores)" if served.others_cores > 0.2 else "")
            )
            for line in unexpected(variant, setting, served):
                self._problem(f"{variant} at {point['at']:g}: {line}")
