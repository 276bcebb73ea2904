"""The words and tables of the results, made from the JSONs alone. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.bench.figures import FIGURES, Figure, point_figures
from benchmarks.bench.hiding import hiding, least_mean_s
from benchmarks.bench.variants import LOCAL, ON_DEMAND, OURS, RECOMPUTED, SESSIONS, ours

Result = Mapping[str, Any]
MEGABYTES = {"store_bytes", "wasted_bytes", "expired_bytes"}
LEAST = "max(W, F)"  # stands for a variant
# Other programs kept less than this busy on a quiet machine: interrupts and the kernel's own threads.
DISTURBED_CORES = 0.2


def number(value: float) -> str:
    """Three figures, without an exponent."""
    return (
        f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 0.01 or value == 0 else f"{value:.4f}"
    )


def spread(figure: Figure, *, scale: float = 1.0) -> str:
    """Median, and least to greatest where they differ."""
    middle, low, high = (number(value / scale) for value in (figure.middle, figure.low, figure.high))
    return middle if low == high else f"{middle} ({low}–{high})"


def variants_of(result: Result) -> list[str]:
    """All variants that ran, in the order of their first pass."""
    return list(dict.fromkeys(each["variant"] for point in result["points"] for each in point["passes"]))


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def heading(*cells: str) -> list[str]:
    return [row(*cells), row(*("---" for _ in cells))]


def means(result: Result) -> list[str]:
    """A row for each point, a column for each variant: mean time to first token, and its ratio to the ideal.

    Before them the mean of max(W, F), where a point has one.
    """
    names, least = variants_of(result), [least_mean_s(point) for point in result["points"]]
    bounded = any(least)
    lines = heading(result["axis"], *(["max(W, F), s"] if bounded else []), *(f"{name}, s" for name in names))
    for point, bound in zip(result["points"], least, strict=True):
        figures = point_figures(point, result["block_bytes"])
        ideal = figures.get(LOCAL)
        cells = ["" if bound is None else spread(bound)] if bounded else []
        for name in names:
            if name not in figures:
                cells.append("")
                continue
            mean = figures[name]["mean_s"]
            ratio = "" if ideal is None or name == LOCAL else f", {mean.middle / ideal['mean_s'].middle:.2f} ×"
            cells.append(f"{spread(mean)}{ratio}")
        lines.append(row(f"{point['at']:g}", *cells))
    return lines


def reading(result: Result) -> list[str]:
    """Say where ours is ahead of each other variant by more than the spread, where behind, and where neither.

    Before that the ratio of the means: the geometric mean over points, and the least and the greatest.
    """
    if _comes_behind(result):
        return _hidden_reading(result)
    mine = _mine(result)
    if mine is None:
        return []
    lines = []
    bases = (("the ideal's mean", LOCAL), ("the mean of max(W, F)", LEAST))
    if parts := [f"{span(ratios)} × {name}" for name, base in bases if (ratios := _ratios(result, mine, base))]:
        lines.append(f"* {mine}: {', '.join(parts)}.")
    for other in variants_of(result):
        if other in (LOCAL, mine) or (ours(other) and other not in (ON_DEMAND, OURS)):
            continue
        said: dict[str, list[str]] = {"ahead": [], "**behind**": [], "within the spread": [], "measured once": []}
        for point in result["points"]:
            us, they = _mean_s(result, point, mine), _mean_s(result, point, other)
            if us is not None and they is not None:
                ran = [each["variant"] for each in point["passes"]]
                compared = "ahead" if us.below(they) else "**behind**" if they.below(us) else "within the spread"
                once = min(ran.count(mine), ran.count(other)) < 2  # so the spread is not known
                said["measured once" if once else compared].append(f"{point['at']:g}")
        if ratios := _ratios(result, mine, other):
            parts = [f"{text} at {', '.join(points)}" for text, points in said.items() if points]
            lines.append(f"* {mine} against {other}: {over_points(ratios, 'its mean')}; {'; '.join(parts)}.")
    return lines


def overview(results: Iterable[tuple[str, Result]]) -> list[str]:
    """A row for each piece, with its day: ours over the ideal, max(W, F) and other variants."""
    others = ("upstream-async", ON_DEMAND)
    lines = heading("piece", "points", "the ideal's mean", "max(W, F)", *others)
    hidden = []
    for day, result in results:
        link = f"[{result['piece']}](benchmarks/{day}/README.md#{result['piece']})"
        if _comes_behind(result):
            hidden += ["", f"{link}:", "", *_hidden_reading(result)]
            continue
        mine = _mine(result)
        ratios = {base: _ratios(result, mine, base) if mine else [] for base in (LOCAL, LEAST, *others)}
        spans = [span(ratios[base]) if ratios[base] else "" for base in (LOCAL, LEAST)]
        peers = [over_points(ratios[other]).replace(" ×", "") if ratios[other] else "" for other in others]
        lines.append(row(link, f"{len(result['points'])}", *(each.replace(" to ", "–") for each in (*spans, *peers))))
    return lines + hidden


def over_points(ratios: Sequence[float], of: str = "") -> str:
    """The geometric mean, and least and greatest."""
    middle = " ".join(filter(None, (f"{statistics.geometric_mean(ratios):.2f} ×", of)))
    return middle if len(ratios) < 2 else f"{middle} ({min(ratios):.2f} to {max(ratios):.2f})"


def span(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def _comes_behind(result: Result) -> bool:
    """Whether requests come behind another, so that W and F are known of each."""
    return any(hiding(point, result["block_bytes"]) for point in result["points"])


def _mine(result: Result) -> str | None:
    ran = variants_of(result)
    return next((name for name in (SESSIONS, OURS, *ran) if name in ran and ours(name)), None)


def _ratios(result: Result, mine: str, other: str) -> list[float]:
    """The mean of `mine` over that of `other`, for each point that has both."""
    pairs = [(_mean_s(result, point, mine), _mean_s(result, point, other)) for point in result["points"]]
    return [us.middle / they.middle for us, they in pairs if us is not None and they is not None]


def _mean_s(result: Result, point: Mapping[str, Any], variant: str) -> Figure | None:
    if variant == LEAST:
        return least_mean_s(point)
    return point_figures(point, result["block_bytes"]).get(variant, {}).get("mean_s")


def _hidden_reading(result: Result) -> list[str]:
    names = [name for name in variants_of(result) if name not in (LOCAL, RECOMPUTED)]
    lines = []
    for name in names:
        overs = [
            each[name].over_bound
            for point in result["points"]
            if name in (each := hiding(point, result["block_bytes"]))
        ]
        lines.append(f"* {name}: the time to first token is {min(overs):.2f} to {max(overs):.2f} of the bound's.")
    return lines


def provenance(result: Result) -> list[str]:
    """What was run, on what, and all that a reader should know before trusting it."""
    ran, rounds = result["machine"], result["rounds"]
    packages = ", ".join(f"{name} {version}" for name, version in ran["versions"].items())
    others = [each["others_cores"] for point in result["points"] for each in point["passes"]]
    disturbed = sum(cores > DISTURBED_CORES for cores in others)
    lines = [
        f"`{result['command']}`, {result['begun']}, {result['seconds'] / 60:.1f} minutes; {rounds['done']} of "
        f"{rounds['wanted']} rounds; {ran['cores']} cores ({ran['cpu']}), {ran['memory_gib']} GiB, Linux "
        f"{ran['kernel']}, Python {ran['python']}; {packages}; load before {ran['load_at_start']:g}, at the end "
        f"{result['load_at_end']:g}; other programs used more than {DISTURBED_CORES} cores in {disturbed} of "
        f"{len(others)} passes; tokens: {result['tokens']['compared']} answers compared, "
        f"{sum(result['tokens']['different'].values())} differ.",
    ]
    reasons: dict[str, list[str]] = {}
    for name, points in result["left_out"].items():
        for at, why in points.items():
            reasons.setdefault(f"{name} ({why})", []).append(at)
    lines += [f"Left out: {name} at {', '.join(at)}." for name, at in reasons.items()]
    lines += [f"Problem: {line}." for line in result["problems"]]
    return lines


def section(result: Result) -> list[str]:
    """The beginning of a piece on its day's page: its question, the picture of its means, and what they say."""
    name = result["piece"]
    picture = f"![Chart of {name}]({name}.svg)"
    return [f"## {name}", "", result["question"], "", picture, "", *reading(result), "", f"[Raw]({name}.json).", ""]


Table = Callable[[Result], "tuple[list[str], Collection[str]] | None"]


def details(results: Sequence[Result], date: str, first: Table = lambda _: None) -> list[str]:
    """The page of one day: all figures of all its pieces.

    `first`: the first table of those that have their own, and the figures in it, which the second one leaves out.
    """
    lines = [
        f"# Benchmark of {date}",
        "",
        "Generated by `python -m benchmarks.report`. Medians over rounds (least–greatest).",
        "",
    ]
    for result in results:
        lines += [*section(result), *[line for part in provenance(result) for line in (part, "")]]
        own = first(result)
        table, shown = own or ([] if _comes_behind(result) else means(result), ())
        lines += [*table, ""] if table else []
        columns = [
            name
            for name in FIGURES
            if name not in shown
            and any(
                name in each
                for point in result["points"]
                for each in point_figures(point, result["block_bytes"]).values()
            )
        ]
        lines += heading(result["axis"], "variant", *(FIGURES[name] for name in columns))
        for point in result["points"]:
            for variant, figures in point_figures(point, result["block_bytes"]).items():
                cells = [
                    spread(figures[name], scale=1e6 if name in MEGABYTES else 1.0) if name in figures else ""
                    for name in columns
                ]
                lines.append(row(f"{point['at']:g}", variant, *cells))
        lines.append("")
    return lines
