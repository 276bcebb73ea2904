"""The tables of the results of `make bench-served`, made from the JSONs alone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.bench.figures import Figure, mean_ratio, paired_ratio, point_figures
from benchmarks.bench.hiding import least_mean_s
from benchmarks.bench.page import Result, heading, row, spread
from benchmarks.bench.variants import LOCAL, ON_DEMAND, OURS, RECOMPUTED
from benchmarks.served.pieces import LOADS, WORDS

UPSTREAM = "upstream-async"
Figures = Mapping[str, Mapping[str, Figure]]
PROPORTIONS = "fetch : prefill : step"
TIMES = {
    "mean_s": "TTFT mean, ms",
    "p50_s": "p50, ms",
    "p99_s": "p99, ms",
    "between_s": "between tokens, mean, ms",
    "between_p99_s": "p99, ms",
}
COUNTS = {
    "cached_tokens": "tokens not computed",
    "recomputed_tokens": "computed though stored",
    "steps_waited": "steps waited",
    "late_launches": "late launches, %",
    "wrong_blocks": "wrong blocks",
}
# Ours over others; the first two are of means, the third one is a median.
RATIOS: dict[str, tuple[str, Callable[[Mapping[str, Any], str, str], Figure | None]]] = {
    LOCAL: ("mean / `local` (95 %)", mean_ratio),
    UPSTREAM: ("mean / `upstream-async` (95 %)", mean_ratio),
    ON_DEMAND: ("each / on demand, median (95 %)", paired_ratio),
}
README_VARIANTS = {
    LOCAL: "all KV local",
    RECOMPUTED: "recomputed",
    UPSTREAM: "vLLM's Mooncake connector",
    ON_DEMAND: "kvprefetch on demand",
    OURS: "kvprefetch",
}


def details(result: Result) -> tuple[list[str], list[str]]:
    """A row for each point and variant, and the names of the figures in it. Times of tokens also over `local`'s."""
    ratios = (words for words, _ in RATIOS.values())
    lines = heading(result["axis"], PROPORTIONS, "variant", *TIMES.values(), *ratios, *COUNTS.values())
    for point, figures in _points(result):
        for variant, each in figures.items():
            ideal = figures.get(LOCAL) if variant != LOCAL else None
            times = [_ms(each[name], ideal[name] if ideal and name != "mean_s" else None) for name in TIMES]
            compared = [_ratio(point, variant, other) for other in RATIOS]
            counts = [spread(each[name]) if name in each else "" for name in COUNTS]
            lines.append(row(f"{point['at']:g}", _proportions(point), variant, *times, *compared, *counts))
    return lines, [*TIMES, *COUNTS]


def overview(results: Sequence[tuple[str, Result]]) -> list[str]:
    """A row for each point of the pieces by load, with its day: ours over others, and the spread of `local`."""
    lines = heading(
        "piece",
        "load",
        PROPORTIONS,
        *(words for words, _ in RATIOS.values()),
        "mean / max(W, F)",
        "p99 / `local`",
        "between tokens / `local`",
        "p99",
        "spread of `local`, %",
    )
    for day, result in results:
        name = result["piece"]
        for point, figures in _points(result):
            if result["axis"] != LOADS or not {OURS, LOCAL} <= set(figures):
                continue
            mine, ideal, least = figures[OURS], figures[LOCAL], least_mean_s(point)
            over = [f"{mine[each].middle / ideal[each].middle:.2f}" for each in ("p99_s", "between_s", "between_p99_s")]
            lines.append(
                row(
                    f"[{name}](benchmarks/{day}/README.md#{name})",
                    f"{point['at']:g}",
                    _proportions(point),
                    *(_ratio(point, OURS, other) for other in RATIOS),
                    "" if least is None else f"{mine['mean_s'].middle / least.middle:.2f}",
                    *over,
                    f"{100 * (ideal['mean_s'].high - ideal['mean_s'].low) / ideal['mean_s'].middle:.1f}",
                )
            )
    return lines


def front(results: Sequence[Result]) -> list[str]:
    """README's table: a row for each load of each machine that was run, a column for each variant."""
    rows = []
    for result in results:
        for point, figures in _points(result) if result["piece"] in WORDS else ():
            means = (
                _ms(figures[name]["mean_s"]).partition(" ")[0] if name in figures else "" for name in README_VARIANTS
            )
            compared = (_ratio(point, OURS, other) for other in (LOCAL, UPSTREAM))
            rows.append(row(WORDS[result["piece"]], f"{point['at']:g}", _proportions(point), *means, *compared))
    if not rows:
        return []
    last = ("kvprefetch / local (95 %)", "/ vLLM's connector (95 %)")
    first = ("mean time to first token, ms; steps take a modelled time", "share of capacity with all KV local")
    return [*heading(*first, PROPORTIONS, *README_VARIANTS.values(), *last), *rows]


def _points(result: Result) -> Iterator[tuple[Mapping[str, Any], Figures]]:
    return ((point, point_figures(point, result["block_bytes"])) for point in result["points"])


def _proportions(point: Mapping[str, Any]) -> str:
    return str(point["pace"]["proportions"].rpartition("= ")[2])


def _ratio(point: Mapping[str, Any], variant: str, other: str) -> str:
    """The ratio and its interval; to other connectors only of ours."""
    if variant == other or (variant != OURS and other != LOCAL):
        return ""
    found = RATIOS[other][1](point, variant, other)
    return "" if found is None else f"{found.middle:.2f} ({found.low:.2f}–{found.high:.2f})"


def _ms(figure: Figure, ideal: Figure | None = None) -> str:
    """In ms, with four digits, the spread over rounds, and the ratio to the ideal's."""
    middle, low, high = (1e3 * each for each in (figure.middle, figure.low, figure.high))
    said = f"{middle:.4g}" if low == high else f"{middle:.4g} ({low:.4g}–{high:.4g})"
    return said if ideal is None else f"{said}, {figure.middle / ideal.middle:.3f} ×"
