"""A picture for each piece, as a small SVG: what is drawn is computed first, and named in the file by a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench.figures import exposed_bound_s, point_figures
from benchmarks.bench.hiding import hiding
from benchmarks.bench.variants import LOCAL, RECOMPUTED

# Okabe and Ito's colours, which colour-blind readers can tell apart; what loads nothing is black and grey.
COLORS = {
    LOCAL: "black",
    RECOMPUTED: "#999999",
    "upstream-sync": "#CC79A7",
    "upstream-async": "#D55E00",
    "lmcache": "#F0E442",
    "lmcache-eager": "#E69F00",
    "kvprefetch-on-demand": "#56B4E9",
    "kvprefetch": "#009E73",
    "kvprefetch-wait": "#0072B2",
}
BOUND = "bound: max(0, F - W)"
# Steps of the bound's curve.
CURVE = 40


@dataclass(slots=True)
class Line:
    """Points (x, y, least, greatest)."""

    points: list[tuple[float, float, float, float]] = field(default_factory=list)


@dataclass(slots=True)
class Drawing:
    """What a picture shows."""

    title: str
    x: str
    y: str
    logarithmic: bool
    ticks: list[float]
    lines: dict[str, Line] = field(default_factory=dict)

    def add(self, name: str, x: float, y: float, low: float, high: float) -> None:
        self.lines.setdefault(name, Line()).points.append((round(x, 4), round(y, 4), round(low, 4), round(high, 4)))

    @property
    def digest(self) -> str:
        """Names what is drawn."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def drawing(result: Mapping[str, Any]) -> Drawing:
    """What the result's picture shows: the mean time to first token, or for waits the part of a fetch left over."""
    block_bytes = result["block_bytes"]
    behind = any(hiding(point, block_bytes) for point in result["points"])
    y = "part of the fetch that the request notices (1: all)" if behind else "time to first token, mean, s"
    ticks = [point["at"] for point in result["points"]]
    made = Drawing(result["question"], result["axis"], y, result["logarithmic"], ticks)
    for point in result["points"]:
        if behind:
            for variant, each in hiding(point, block_bytes).items():
                x = each.wait_s / each.fetch_s
                if x < ticks[0] / 2:
                    continue  # hardly anybody waited: the table has it, a logarithmic axis has no room for it
                low, middle, high = (
                    value / each.fetch_s for value in (each.exposed.low, each.exposed.middle, each.exposed.high)
                )
                made.add(variant, x, middle, low, high)
            continue
        for variant, figures in point_figures(point, block_bytes).items():
            mean = figures["mean_s"]
            made.add(variant, point["at"], mean.middle, mean.low, mean.high)
    if behind:
        xs = [x for line in made.lines.values() for x, *_ in line.points]
        for step in range(CURVE + 1):
            x = min(xs) * (max(xs) / min(xs)) ** (step / CURVE)
            bound = exposed_bound_s(x, 1.0)
            made.add(BOUND, x, bound, bound, bound)
    return made


def draw(made: Drawing, path: Path) -> None:
    """Write the SVG; equal drawings give equal bytes with one version of matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": made.title, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        axes = figure.subplots()
        for name, line in made.lines.items():
            xs, ys, lows, highs = zip(*sorted(set(line.points)), strict=True)
            if name == BOUND:
                axes.plot(xs, ys, color="black", linestyle=":", linewidth=1.2, label=name)
                continue
            dashes = "--" if name == LOCAL else "-"
            spread = [
                [y - low for y, low in zip(ys, lows, strict=True)],
                [h - y for y, h in zip(ys, highs, strict=True)],
            ]
            axes.errorbar(
                xs, ys, yerr=spread, color=COLORS.get(name), linestyle=dashes, linewidth=1.3, marker=".", label=name
            )
        if made.logarithmic:
            if min(made.ticks) > 0:
                axes.set_xscale("log")
            else:
                axes.set_xscale("symlog", linthresh=min(each for each in made.ticks if each > 0))
        axes.set_xticks(made.ticks, [f"{each:g}" for each in made.ticks])
        axes.minorticks_off()
        axes.set_xlabel(made.x)
        axes.set_ylabel(made.y, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, which="major", alpha=0.25)
        axes.set_title(made.title, fontsize=9)
        axes.legend(frameon=False, fontsize=8)
        metadata = {"Date": None, "Creator": None, "Description": f"sha256 of what is drawn: {made.digest}"}
        figure.savefig(path, format="svg", metadata=metadata)
