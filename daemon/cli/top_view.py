"""The view of `kvprefetchd top`: one frame from two answers of the daemon. The only importer of rich."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...shmring.wire.admin import Status, StatusQuery
from ..telemetry import overview
from ..telemetry.pretty import printable
from .client import Unavailable, ask


def live(socket: Path, interval_s: float) -> NoReturn:
    """Show frames until Ctrl-C. Raises Unavailable when no daemon answers at the start; later it may be restarting."""
    before, since = ask(socket, StatusQuery(), Status), time.monotonic()
    with Live(frame(before, overview.rates(None, before, 0)), screen=True, auto_refresh=False) as shown:
        while True:
            time.sleep(interval_s)
            try:
                now, at = ask(socket, StatusQuery(), Status), time.monotonic()
            except Unavailable as error:
                shown.update(Text(str(error), style="red"), refresh=True)
                continue
            shown.update(frame(now, overview.rates(before, now, at - since)), refresh=True)
            before, since = now, at


def frame(status: Status, rates: overview.Rates) -> RenderableType:
    """Return headline, rates, a table of engines, and a table of the slowest requests."""
    parts: list[RenderableType] = [
        Text(overview.headline(status), style="" if status.store_open else "red"),
        *map(Text, overview.store(status)),
        *([Text(printable(status.disk_fault), style="red")] if status.disk_fault else []),
        Text(overview.pace(rates)),
        Text(),
    ]
    if status.engines:
        names = [name.lower() for name in overview.COLUMNS]
        parts.append(_table(names, map(overview.row, status.engines), {"engine": 1}, "right"))
    elif not status.engine_count:
        parts.append(Text("no engine is attached", style="dim"))
    parts += [Text(line, style="dim") for line in (*overview.others(status), *overview.namespaces(status))]
    if status.slowest:
        names = ["waited", "outcome", "fetched", "ended", "engine", "request"]
        table = _table(names, overview.slowest(status), {"engine": 1, "request": 2}, "left")
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
