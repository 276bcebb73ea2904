"""The printed tables and JSON figures of simulated runs, policies side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.simulate.events import NS
from benchmarks.simulate.run import Result

IDEAL, BASELINE = "local", "no-prefetch"
HEAD = (
    f"{'':12}{'hidden':>7}{'wasted':>18}{'deadline':>9}{'given up':>9}{'TTFT p50':>12}{'/local':>9}{'/none':>8}"
    f"{'TTFT p99':>12}{'/local':>9}{'/none':>8}{'served':>8}{'aborted':>8}{'CPU':>7}"
)


def table(results: Sequence[Result]) -> list[str]:
    """Return one scenario's lines; `/local` and `/none` are ratios to everything local and to no prefetch."""
    by_policy = {result.policy: result for result in results}
    ideal, baseline = by_policy.get(IDEAL), by_policy.get(BASELINE)
    lines = [HEAD]
    for result in results:
        line = f"{result.policy:12}{_number(result.hidden_fraction, '.3f'):>7}"
        wasted_gb = result.node.wasted * result.block_bytes / 1e9
        line += f"{f'{wasted_gb:,.1f} GB {result.wasted_share:4.1%}':>18}"
        line += f"{result.client.deadline_misses:>9}{result.client.given_up:>9}"
        for fraction in (0.5, 0.99):
            value = result.ttft_s(fraction)
            line += f"{f'{value:.3f} s':>12}{_ratio(value, ideal, fraction):>9}{_ratio(value, baseline, fraction):>8}"
        line += f"{result.finished:>8}{result.aborted:>8}{f'{result.cpu_s:.0f} s':>7}"
        lines.append(line)
        if len(result.ttft_ns) > 1:
            for priority in sorted(result.ttft_ns):
                p50, p99 = (result.ttft_s(fraction, priority) for fraction in (0.5, 0.99))
                lines.append(f"    priority {priority:2}: p50 {p50:.3f} s, p99 {p99:.3f} s")
    return lines


def figures(result: Result) -> dict[str, object]:
    """Return one result's figures for JSON."""
    return {
        "scenario": result.scenario,
        "policy": result.policy,
        "requests": result.arrived,
        "finished": result.finished,
        "aborted": result.aborted,
        "hidden_fraction": _finite(result.hidden_fraction),
        "fetched_bytes": result.node.fetched * result.block_bytes,
        "wasted_bytes": result.node.wasted * result.block_bytes,
        "deadline_misses": result.client.deadline_misses,
        "given_up": result.client.given_up,
        "stopped": result.client.stopped,
        "partial_loads": result.client.partial,
        "look_up_timeouts": result.node.look_up_timeouts,
        "taken_back": result.node.taken_back,
        "ttft_mean_s": _finite(result.mean_ttft_s),
        "ttft_p50_s": _finite(result.ttft_s(0.5)),
        "ttft_p99_s": _finite(result.ttft_s(0.99)),
        "simulated_s": result.end_ns / NS,
        "events": result.events,
        "cpu_s": result.cpu_s,
    }


def _ratio(value: float, to: Result | None, fraction: float) -> str:
    return "-" if to is None else _number(value / to.ttft_s(fraction), ".2f")


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else f"{value:{form}}"


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else value
