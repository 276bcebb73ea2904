"""The view of `kvprefetchd top`: one frame from two answers of the daemon. The only importer of rich."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...client.control import Unavailable, look
from ...shmring.wire.admin import Status
from ..telemetry import overview
from ..telemetry.pretty import printable


def live(socket: Path, interval_s: float) -> None:
    """Show frames until Ctrl-C. Raises Unavailable when no daemon answers at the start; later it may restart.

    Raises BrokenPipeError once the terminal is gone.
    """
    now, at = look(socket, ids=True), time.monotonic()
    try:
        with Live(frame(now, overview.rates(None, now, 0)), screen=True, auto_refresh=False) as shown:
            while True:
                time.sleep(interval_s)
                before, since = now, at
                try:
                    now, at = look(socket, ids=True), time.monotonic()
                    shown.update(frame(now, overview.rates(before, now, at - since)), refresh=True)
                except Unavailable as error:
                    shown.update(Text(str(error), style="red"), refresh=True)
    except OSError:
        raise BrokenPipeError from None


def frame(status: Status, rates: overview.Rates) -> RenderableType:
    """Return headline, rates, a table of engines, and a table of the slowest requests."""
    parts: list[RenderableType] = [
        Text(overview.headline(status), style="" if status.store_open else "red"),
        *(Text(printable(line), style="red") for line in status.problems),
        *map(Text, overview.store(status)),
        Text(overview.pace(rates)),
        *map(Text, (*overview.known_rates(status), *overview.slow_causes(status))),
        Text(),
    ]
    if status.engines:
        columns = [name.lower() for name in overview.COLUMNS]
        parts.append(_table(columns, map(overview.row, status.engines), {"engine": 1}, "right"))
    elif not status.engine_count:
        parts.append(Text("no engine is attached", style="dim"))
    parts += [Text(line, style="dim") for line in (*overview.others(status), *overview.names(status))]
    parts += [Text(line, style="red") for line in overview.refused(status)]
    if slowest := overview.slowest(status):
        columns = ["waited", "outcome", "cause", "fetched", "ended", "engine", "request"]
        table = _table(columns, slowest, {"engine": 1, "request": 2}, "left")
        table.title, table.title_justify = "waited longest in the last five minutes", "left"
        parts += [Text(), table]
    return Group(*parts)


def _table(
    names: Sequence[str], rows: Iterable[Sequence[str]], ratios: Mapping[str, int], justify: JustifyMethod
) -> Table:
    """Return a table. A narrow terminal cuts the columns that have a ratio, and no others; they share the rest."""
    cells = [list(row) for row in rows]
    table = Table(expand=True, box=None, padding=(0, 1, 0, 0))
    for i, name in enumerate(names):
        if name in ratios:
            table.add_column(name, no_wrap=True, ratio=ratios[name], min_width=8)
        else:
            width = max(len(name), *(len(row[i]) for row in cells))
            table.add_column(name, justify=justify, no_wrap=True, min_width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    return table
