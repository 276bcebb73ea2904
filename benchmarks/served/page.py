"""The tables of the results of `make bench-served`, made from the JSONs alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bench.figures import Figure, paired_ratio, point_figures
from benchmarks.bench.page import Result, heading, row, span, spread, variants_of
from benchmarks.bench.variants import LOCAL, ON_DEMAND, OURS
from benchmarks.served.pieces import LOADS, WORDS

UPSTREAM = "upstream-async"


def details(result: Result) -> list[str]:
    """A row for each point and variant; times in ms. Ratios are to `local`, those of pairs to on demand."""
    lines = heading(
        result["axis"],
        "fetch : prefill : step",
        "variant",
        *("mean, ms", "p50, ms", "p99, ms", "each request / on demand, median (95 %)"),
        *("between tokens, mean, ms", "p99, ms", "recomputed tokens", "steps waited", "late launches, %"),
    )
    for point in result["points"]:
        figures = point_figures(point, result["block_bytes"])
        for variant, each in figures.items():
            ideal = figures.get(LOCAL) if variant != LOCAL else None
            pairs = paired_ratio(point, variant, ON_DEMAND) if variant == OURS else None
            lines.append(
                row(
                    f"{point['at']:g}",
                    point["pace"]["proportions"].rpartition("= ")[2],
                    variant,
                    *(_ms(each[name], ideal[name] if ideal else None) for name in ("mean_s", "p50_s", "p99_s")),
                    "" if pairs is None else spread(pairs),
                    *(_ms(each[name], ideal[name] if ideal else None) for name in ("between_s", "between_p99_s")),
                    *(spread(each[name]) for name in ("recomputed_tokens", "steps_waited", "late_launches")),
                )
            )
    return lines


def overview(results: Sequence[tuple[str, Result]]) -> list[str]:
    """A row for each piece by load, with its day: ours over others at all points, and the spread of `local`."""
    lines = heading(
        "piece",
        "points",
        "TTFT / `local`",
        "p99 / `local`",
        "TTFT / `upstream-async`",
        "/ on demand, paired, 95 % below",
        "between tokens / `local`",
        "p99",
        "spread of `local`, %",
    )
    for day, result in results:
        if result["axis"] != LOADS:
            continue
        points = [(point, point_figures(point, result["block_bytes"])) for point in result["points"]]
        points = [(point, figures) for point, figures in points if OURS in figures and LOCAL in figures]
        pairs = [each.high for point, _ in points if (each := paired_ratio(point, OURS, ON_DEMAND))]
        locals_s = [figures[LOCAL]["mean_s"] for _, figures in points]
        name = result["piece"]
        lines.append(
            row(
                f"[{name}](benchmarks/{day}/README.md#{name})",
                f"{len(points)}",
                *(_span(_ratios(points, figure, LOCAL)) for figure in ("mean_s", "p99_s")),
                _span(_ratios(points, "mean_s", UPSTREAM)),
                _span(pairs),
                *(_span(_ratios(points, figure, LOCAL)) for figure in ("between_s", "between_p99_s")),
                f"{100 * max(((each.high - each.low) / each.middle for each in locals_s), default=0):.1f}",
            )
        )
    return lines


def front(results: Sequence[Result]) -> list[str]:
    """README's rows: each machine of the presets that was run, ours over upstream's connector and over on demand."""
    lines = []
    for result in results:
        if result["piece"] in WORDS and {OURS, UPSTREAM, ON_DEMAND} <= set(variants_of(result)):
            points = [(point, point_figures(point, result["block_bytes"])) for point in result["points"]]
            loads = span([each["at"] for each in result["points"]])
            ours = (_span(_ratios(points, "mean_s", other)) for other in (UPSTREAM, ON_DEMAND))
            lines.append(row(f"{WORDS[result['piece']]}, its time modelled, at {loads} of its capacity", *ours))
    return lines


def _ratios(points: Sequence[tuple[Any, Mapping[str, Mapping[str, Figure]]]], name: str, other: str) -> list[float]:
    return [each[OURS][name].middle / each[other][name].middle for _, each in points if other in each]


def _span(ratios: Sequence[float]) -> str:
    return span(ratios).replace(" to ", "–") if ratios else ""


def _ms(figure: Figure, ideal: Figure | None) -> str:
    """In ms, with four digits, the spread over rounds, and the ratio to the ideal's."""
    middle, low, high = (1e3 * each for each in (figure.middle, figure.low, figure.high))
    said = f"{middle:.4g}" if low == high else f"{middle:.4g} ({low:.4g}–{high:.4g})"
    return said if ideal is None else f"{said}, {figure.middle / ideal.middle:.3f} ×"
