"""One plot per scenario: the distribution of the time to first token, with a line per policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.simulate.events import NS
from benchmarks.simulate.run import Result, Scenario

POINTS = 160
# Okabe and Ito's colours, which colour-blind readers can tell apart; the baselines are black and grey.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
_BASELINES = {"local": ("black", "-"), "no-prefetch": ("#666666", "--"), "recompute": ("#999999", ":")}


def plot(scenario: Scenario, results: Sequence[Result], path: Path) -> None:
    """Write an SVG of some ten kilobytes; equal results give equal bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": scenario.name, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        colors = iter(_COLORS)
        for result in results:
            values = sorted(each for part in result.ttft_ns.values() for each in part)
            if not values:
                continue
            color, dashes = _BASELINES.get(result.policy) or (next(colors), "-")
            shares = [index / (POINTS - 1) for index in range(POINTS)]
            times = [max(1e-4, values[round(share * (len(values) - 1))] / NS) for share in shares]
            axes.plot(times, shares, color=color, linestyle=dashes, linewidth=1.4, label=result.policy)
        axes.set_xscale("log")
        axes.set_xlabel("time to first token, s")
        axes.set_ylabel("share of requests")
        axes.set_ylim(0, 1)
        axes.grid(visible=True, which="major", alpha=0.25)
        axes.set_title(f"{scenario.name}: {scenario.shows}", fontsize=9)
        axes.legend(frameon=False, fontsize=8)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
