"""What the wait for a place hides of a fetch, and the least that it can leave over: max(W, F). Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.bench.figures import Figure, exposed_bound_s, per_round, ttft_s
from benchmarks.bench.variants import LOCAL


@dataclass(frozen=True, slots=True)
class Hiding:
    """One variant at one point: W, F, and over rounds what a request noticed of its fetch; seconds.

    `base_s`: from the moment the place is free to the first token, all KV local.
    """

    wait_s: float
    fetch_s: float
    base_s: float
    exposed: Figure

    @property
    def bound_s(self) -> float:
        return exposed_bound_s(self.wait_s, self.fetch_s)

    @property
    def over_bound(self) -> float:
        """The time to first token over the least that is possible: max(W, F), and what the ideal computes."""
        return (self.wait_s + self.base_s + self.exposed.middle) / (self.wait_s + self.base_s + self.bound_s)


def hiding(point: Mapping[str, Any], block_bytes: int) -> dict[str, Hiding]:
    """By variant but the ideal; empty where no request came behind another. F is measured where our daemon logs it."""
    rounds: dict[str, list[dict[str, float]]] = {}
    for passed in point["passes"]:
        rounds.setdefault(passed["variant"], []).append(per_round(passed, point["setting"], block_bytes))
    if LOCAL not in rounds or "after_wait_s" not in rounds[LOCAL][0]:
        return {}
    base = statistics.median(each["after_wait_s"] for each in rounds[LOCAL])
    fetches = [each["transfer_s"] for several in rounds.values() for each in several if "transfer_s" in each]
    fetch = statistics.median(fetches) if fetches else point["pace"]["fetch_s"]
    return {
        variant: Hiding(
            wait_s=statistics.median(each["wait_s"] for each in several),
            fetch_s=fetch,
            base_s=base,
            exposed=Figure.of([each["after_wait_s"] - base for each in several]),
        )
        for variant, several in rounds.items()
        if variant != LOCAL
    }


def least_mean_s(point: Mapping[str, Any]) -> Figure | None:
    """The mean time to first token if each request only waits for the later of its place and its KV: max(W, F).

    W is that of the ideal in the same round. F: the link sends the prompts' KV one after the other, as requests arrive.
    None where requests do not arrive at given times, share KV or a link with other engines, or load nothing.
    """
    setting = point["setting"]
    if (
        setting["arrivals"] not in ("open", "burst")
        or setting["far"] != "link"
        or setting["shared"]
        or setting["engines"] > 1
        or not setting["hit"]
        or "pace" not in point
    ):
        return None
    ideals = [passed for passed in point["passes"] if passed["variant"] == LOCAL]
    fetch_s = setting["hit"] * point["pace"]["fetch_s"]
    return Figure.of([_least_mean_s(passed, fetch_s) for passed in ideals]) if ideals else None


def _least_mean_s(ideal: Mapping[str, Any], fetch_s: float) -> float:
    times = ttft_s(ideal)
    compute_s, sent_s, least = min(times), 0.0, []
    for arrived_s, ttft in sorted(zip(ideal["requests"]["arrival_s"], times, strict=True)):
        sent_s = max(sent_s, arrived_s) + fetch_s
        least.append(max(ttft, sent_s - arrived_s + compute_s))
    return statistics.fmean(least)
