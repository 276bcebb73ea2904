"""Figures of a point, made from raw requests: each the median over rounds, with the least and the greatest. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.lab.passes import percentile

Passed = Mapping[str, Any]
"""A pass as the result keeps it (benchmarks/bench/served.py)."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Median, least and greatest over rounds."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values))

    def below(self, other: Figure) -> bool:
        """Whether every round of this was below every round of the other."""
        return self.high < other.low


def ttft_s(passed: Passed) -> list[float]:
    """Time to first token of each request."""
    requests = passed["requests"]
    return [first - at for first, at in zip(requests["first_token_s"], requests["arrival_s"], strict=True)]


def after_wait_s(passed: Passed) -> list[float]:
    """Of requests that came while another one held the only place: their time to first token after it was free."""
    return [ttft - waited for ttft, waited in zip(ttft_s(passed), passed["requests"]["waited_s"], strict=True)]


def free_place_s(passed: Passed, places: int) -> float:
    """Seconds of places, summed, that were free while requests waited: without a first token, yet arrived.

    A request runs from its first token to its end, so its own prefill counts as free; compare with the ideal.
    """
    requests = passed["requests"]
    changes = []
    for arrived, first, ended in zip(
        requests["arrival_s"], requests["first_token_s"], requests["finished_s"], strict=True
    ):
        changes += [(arrived, 1, 0), (first, -1, 1), (ended, 0, -1)]
    waiting = running = 0
    total = before = 0.0
    for at, more_waiting, more_running in sorted(changes):
        total += min(waiting, max(0, places - running)) * (at - before)
        waiting, running, before = waiting + more_waiting, running + more_running, at
    return total


def per_round(passed: Passed, setting: Mapping[str, Any], block_bytes: int) -> dict[str, float]:
    """All figures of one pass that it has; see FIGURES for their names and units."""
    times = ttft_s(passed)
    count = len(times)
    found = {
        "mean_s": statistics.fmean(times),
        "p50_s": percentile(times, 0.5),
        "p99_s": percentile(times, 0.99),
        "requests_s": count / passed["total_s"],
        "engine_cpu_s": passed["engine_cpu_s"] / count,
        "other_cpu_s": passed["other_cpu_s"] / count,
    }
    if passed["requests"]["cached_tokens"]:
        found["cached_tokens"] = statistics.fmean(passed["requests"]["cached_tokens"])
    if passed["requests"]["waited_s"]:
        found["wait_s"] = statistics.fmean(passed["requests"]["waited_s"])
        found["after_wait_s"] = statistics.fmean(after_wait_s(passed))
    else:
        found["free_places_s"] = free_place_s(passed, setting["places"] * setting["engines"]) / count
    if passed["link_bytes"] is not None:
        found["store_bytes"] = passed["link_bytes"] / count
    if (daemon := passed["daemon"]) is not None:
        pairs = zip(daemon["fetched_bytes"], daemon["loaded_blocks"], strict=True)
        bound = sum(max(0, fetched - blocks * block_bytes) for fetched, blocks in pairs)
        found["wasted_bytes"] = daemon.get("unused_bytes", bound) / count
        if daemon["hidden"]:
            found["hidden"] = statistics.fmean(daemon["hidden"])
        if daemon["transfer_s"]:
            found["transfer_s"] = statistics.fmean(daemon["transfer_s"])
        if daemon.get("announced_s"):  # results of before have none
            found["announced_s"] = statistics.fmean(daemon["announced_s"])
            found["announced_staged"] = daemon["announced_staged"] / daemon["announced_blocks"]
    return found | {name: value for name, value in passed.get("counts", {}).items() if name in FIGURES}


FIGURES = {
    "mean_s": "TTFT mean, s",
    "p50_s": "TTFT p50, s",
    "p99_s": "TTFT p99, s",
    "requests_s": "requests/s",
    "hidden": "hidden fraction",
    "store_bytes": "store MB a request",
    "wasted_bytes": "wasted MB a request",
    "engine_cpu_s": "CPU of the engine, s a request",
    "other_cpu_s": "CPU of all else, s a request",
    "free_places_s": "places free while requests wait, s a request",
    "cached_tokens": "tokens not computed, a request",
    "wait_s": "W: wait for the place, s",
    "after_wait_s": "TTFT after the place was free, s",
    "transfer_s": "hint to last byte, s",
    "announced_s": "announced before the arrival, s",
    "announced_staged": "share of announced blocks staged at arrival",
    "returning_s": "TTFT mean of turns that came back, s",
    "staged_share": "share of their stored blocks that was staged at arrival",
    "expired_bytes": "MB announced in vain, in all",
    "between_s": "time between tokens mean, s",
    "between_p99_s": "time between tokens p99, s",
    "recomputed_tokens": "tokens computed that the store had, a request",
    "steps_waited": "steps begun before the request's own, since its arrival",
    "late_launches": "steps launched late, of 100",
    "idle_s": "device idle for want of a launch, s",
    "wrong_blocks": "wrong blocks",
    "oracle_share": "share of the engine's CPU that wrote and compared blocks",
}


def point_figures(point: Mapping[str, Any], block_bytes: int) -> dict[str, dict[str, Figure]]:
    """By variant, then by name: each figure over the point's rounds."""
    rounds: dict[str, list[dict[str, float]]] = {}
    for passed in point["passes"]:
        rounds.setdefault(passed["variant"], []).append(per_round(passed, point["setting"], block_bytes))
    return {
        variant: {
            name: Figure.of([each[name] for each in several]) for name in several[0] if all(name in e for e in several)
        }
        for variant, several in rounds.items()
    }


def _pairs(point: Mapping[str, Any], mine: str, other: str) -> list[tuple[float, float]]:
    """Each request's time to first token with both, the mean of rounds; none without passes of both."""
    means = []
    for variant in (mine, other):
        rounds = [ttft_s(passed) for passed in point["passes"] if passed["variant"] == variant]
        means.append([statistics.fmean(times) for times in zip(*rounds, strict=True)])
    return list(zip(*means, strict=True)) if all(means) else []


def mean_ratio(point: Mapping[str, Any], mine: str, other: str) -> Figure | None:
    """The mean time to first token with `mine` over that with `other`.

    Least and greatest are the ends of its 95 % interval over requests, each of which was served by both.
    """
    if not (pairs := _pairs(point, mine, other)):
        return None
    us, they = (statistics.fmean(times) for times in zip(*pairs, strict=True))
    squares = sum((mine_s - us / they * other_s) ** 2 for mine_s, other_s in pairs)
    reach = 1.96 * math.sqrt(squares / len(pairs) / max(1, len(pairs) - 1)) / they
    return Figure(us / they, us / they - reach, us / they + reach)


def paired_ratio(point: Mapping[str, Any], mine: str, other: str) -> Figure | None:
    """The median over requests of the time to first token with `mine` over that with `other`.

    Least and greatest are the ends of its 95 % interval, by order statistics. None without passes of both.
    """
    if not (pairs := _pairs(point, mine, other)):
        return None
    ratios = sorted(us / they for us, they in pairs)
    half, reach = (len(ratios) - 1) / 2, 0.98 * math.sqrt(len(ratios))
    low, high = max(0, math.floor(half - reach)), min(len(ratios) - 1, math.ceil(half + reach))
    return Figure(statistics.median(ratios), ratios[low], ratios[high])


def exposed_bound_s(wait_s: float, fetch_s: float) -> float:
    """The least of a fetch that a request notices when it waits for a place anyway: max(0, F - W)."""
    return max(0.0, fetch_s - wait_s)


def token_differences(passes: Sequence[tuple[str, object, Mapping[int, Sequence[int]]]]) -> tuple[int, dict[str, int]]:
    """Compare tokens of equal prompts, as far as both answers go.

    Each pass: variant, name of its set of prompts, tokens by prompt. Returns the number of comparisons, and by variant
    how many answers differ from the first variant's.
    """
    first: dict[tuple[object, int], Sequence[int]] = {}
    compared, different = 0, dict[str, int]()
    for variant, name, answers in sorted(passes, key=lambda each: each[0] != passes[0][0]):
        for prompt, tokens in answers.items():
            known = first.setdefault((name, prompt), tokens)
            if known is not tokens:
                compared += 1
                both = min(len(known), len(tokens))
                if list(known[:both]) != list(tokens[:both]):
                    different[variant] = different.get(variant, 0) + 1
    return compared, different
