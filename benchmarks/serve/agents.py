"""`make bench-agents`: sessions of coding agents in engines of this process, to rank them on real engines.

A pass takes seconds, so there are ten rounds or more.  The mean follows the machine: steps 15 % slower raise it by a
third.  So passes of two variants are compared in pairs of like speed, the median step that admits a request; and what
is counted is no time of the machine's: tokens recomputed that the store has, and bytes fetched in vain.

Each pass has a new engine, to which a session's first request is its first; so where sessions are named (__main__.py)
the means of requests that came back are compared, too.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from benchmarks.bench import variants
from benchmarks.bench.figures import ttft_s
from benchmarks.bench.served import Requests, Served
from benchmarks.serve.__main__ import BLOCK, Run, main, seeded
from benchmarks.serve.sessions import Line, of_requests
from tests.lab.engine import Engine, EngineSpec
from tests.lab.passes import Pass
from tests.lab.template import Template

DEFAULTS = {"variants": f"{variants.LOCAL},{variants.SESSIONS},{variants.ON_DEMAND}", "rounds": 10, "minutes": 40.0}
PAIRED = (
    (variants.OURS, variants.ON_DEMAND),
    (variants.SESSIONS, variants.ON_DEMAND),
    (variants.SESSIONS, variants.LOCAL),
)
WATCH = "benchmarks.serve.watch"
# What is kept of `request.done` where the engine ceased to wait, to judge it.
VERDICT = (
    "request_id", "outcome", "missing_blocks", "recompute_ms", "exposed_ms", "loaded_blocks", "looked_up_ms",
    "visited_ms", "first_byte_ms", "last_byte_ms", "ended_ms",
)  # fmt: skip
PASS_S = 240.0
ALIKE = 0.03  # steps 3 % longer raise the mean by a tenth
Passed = Mapping[str, Any]


class Here(Engine):
    """An engine that serves as the HTTP server does."""

    @property
    def pids(self) -> list[int]:
        return [self.scheduler_pid]

    def serve(self, prompts: list[list[int]], tokens: list[int], at_once: int) -> None:
        """Serve all of them, so many at a time."""
        self.run(prompts, max_tokens=tokens, concurrency=at_once, timeout_s=PASS_S)


def recomputed_tokens(cached_tokens: Sequence[int], lines: Iterable[tuple[int, Line]]) -> int:
    """Count the tokens that the store had for a request, by the daemon's `request.done`, and the engine computed."""
    return sum(max(0, BLOCK * line["found_blocks"] - cached_tokens[number]) for number, line in lines)


def least_wait_s(waits_s: Sequence[float], fetches: Sequence[tuple[float, int]], bytes_per_s: float) -> float:
    """Return the sum of max(W, F) over requests: `waits_s` with all KV local, and when each came and what it fetched.

    The link sends in the order of arrivals.
    """
    sent = total = 0.0
    for wait_s, (came_s, size) in zip(waits_s, fetches, strict=True):
        sent = max(sent, came_s) + size / bytes_per_s if size else sent
        total += max(wait_s, sent - came_s if size else 0.0)
    return total


class InProcess(Run):
    """A run whose servers are engines of this process."""

    def run(self) -> None:
        with Template(self._spec.environment()) as self._template:
            super().run()

    def _server(self, spec: EngineSpec) -> Here:
        return Here(spec, template=self._template)

    def _replayed(self, server: Any, variant: str, pace: float) -> tuple[Served, list[str], dict[str, Any]]:
        calls, lines = self._slice.calls, len(self._daemon.records("request.done"))
        server.call(f"{WATCH}:begin")
        result: Pass = server.run(
            self._prompts,
            max_tokens=[each.output_tokens for each in calls],
            arrivals_s=[each.at_s * pace for each in calls],
            sessions=self.sessions if variant == variants.SESSIONS else None,
            timeout_s=PASS_S,
        )
        watched = server.call(f"{WATCH}:end")
        by_name = {name.rpartition("-")[0]: wait_s for name, wait_s in watched["waits_s"].items()}
        waits_s = [by_name[each.request_id] for each in result.requests]
        requests = Requests()
        for number, each in enumerate(result.requests):
            requests.prompt.append(number)
            requests.arrival_s.append(round(each.arrival_s, 5))
            requests.first_token_s.append(round(each.arrival_s + each.ttft_s, 5))
            requests.finished_s.append(round(each.finished_s or 0.0, 5))
            requests.cached_tokens.append(each.cached_tokens)
        served = Served(requests, total_s=round(result.total_s, 4), steps=result.steps)
        served.tokens = dict(enumerate(result.tokens))
        self._daemon.wait_record("request.done", count=lines + len(calls), timeout_s=2)
        names = [each.request_id for each in result.requests]
        ended = list(of_requests(names, self._daemon.records("request.done")[lines:]))
        counts = {
            "admission_s": round(statistics.median(watched["admission_s"]), 5),
            "waiting_s": round(sum(waits_s), 3),
            "noticed_s": round(sum(line["exposed_ms"] for _, line in ended) / 1e3, 3),
            "recomputed_tokens": recomputed_tokens(requests.cached_tokens, ended),
        }
        fetches = {number: line["bytes"] for number, line in ended}
        verdicts = [{name: line[name] for name in VERDICT} for _, line in ended if line["missing_blocks"]]
        waits = {"waits_s": waits_s, "fetches": [fetches.get(number, 0) for number in range(len(calls))]}
        return served, names, {"counts": counts, "verdicts": verdicts, **waits}


def alike(passes: Sequence[Passed], variant: str, beside: str) -> Iterator[tuple[Passed, Passed]]:
    """Yield pairs of passes of both variants whose speeds differ by ALIKE at most, each pass in one pair."""
    left = [each for each in passes if each["variant"] == beside]
    for mine in (each for each in passes if each["variant"] == variant):
        apart = [abs(other["counts"]["admission_s"] / mine["counts"]["admission_s"] - 1) for other in left]
        if apart and min(apart) <= ALIKE:
            yield mine, left.pop(apart.index(min(apart)))


def pairs(passes: Sequence[Passed], variant: str, beside: str, *, back: bool = False) -> list[float]:
    """Return variant / another one, means to the first token, of passes of like speed.

    `back`: of requests that came back alone, where they were measured.
    """

    def mean_s(passed: Mapping[str, Any]) -> float:
        mean = statistics.fmean(ttft_s(passed))
        return float(passed["counts"].get("returning_s", mean)) if back else mean

    return [mean_s(ours) / mean_s(other) for ours, other in alike(passes, variant, beside)]


def over_least(point: Mapping[str, Any], variant: str) -> list[float]:
    """Return requests waiting x s of a variant over that of max(W, F), of passes of like speed."""
    bytes_per_s = point["setting"]["link_mbit"] * 125_000
    return [
        sum(mine["waits_s"])
        / least_wait_s(
            ideal["waits_s"],
            list(zip(mine["requests"]["arrival_s"], mine["fetches"], strict=True)),
            bytes_per_s,
        )
        for mine, ideal in alike(point["passes"], variant, variants.LOCAL)
    ]


def summary(result: Mapping[str, Any]) -> Iterator[str]:
    """Say what ranks: the paired means, and the counts of each pass."""
    for point in result["points"]:
        live = any("returning_s" in each["counts"] for each in point["passes"])
        for (variant, beside), back in product(PAIRED, (False, True) if live else (False,)):
            if ratios := pairs(point["passes"], variant, beside, back=back):
                yield (
                    f"at {point['at']:g} of capacity: mean{' of returning requests' if back else ''} of {variant} / "
                    f"{beside} in {len(ratios)} pairs of like speed: median {statistics.median(ratios):.2f}, "
                    f"{min(ratios):.2f} to {max(ratios):.2f}"
                )
        for name in dict.fromkeys(each["variant"] for each in point["passes"]):
            if variants.ours(name) and (ratios := over_least(point, name)):
                yield (
                    f"at {point['at']:g} of capacity: requests waiting x s of {name} / max(W, F): "
                    f"median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
                )
            counts = [
                {**each["counts"], "vain_bytes": (each["daemon"] or {}).get("unused_bytes", 0)}
                for each in point["passes"]
                if each["variant"] == name
            ]
            yield f"  {name:22} " + ", ".join(
                f"{key} {statistics.median(each[key] for each in counts):g} ({min(each[key] for each in counts):g} to "
                f"{max(each[key] for each in counts):g})"
                for key in counts[0]
                if all(key in each for each in counts)
            )


if __name__ == "__main__":
    seeded("benchmarks.serve.agents")
    sys.exit(main(["agents", *sys.argv[1:]], make=InProcess, defaults=DEFAULTS, ranks=summary))
