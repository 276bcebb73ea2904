"""The screen of `kvprefetchd top`: one frame from two answers of the daemon. The only importer of rich."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NoReturn

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...shmring.wire.admin import Status, StatusQuery
from ..telemetry import overview
from ..telemetry.pretty import printable
from .client import Unavailable, ask


def live(socket: Path, interval_s: float) -> NoReturn:
    """Until Ctrl-C. Raises Unavailable when no daemon answers at the start; later it may be restarting."""
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
    """Headline, rates, a table of engines, a table of the slowest requests."""
    parts: list[RenderableType] = [
        Text(overview.headline(status), style="" if status.store_open else "red"),
        *map(Text, overview.store(status)),
        *([Text(printable(status.disk_fault), style="red")] if status.disk_fault else []),
        Text(overview.pace(rates)),
        Text(),
    ]
    if status.engines:
        engines = Table(expand=True, box=None, padding=(0, 1, 0, 0))
        for i, name in enumerate(overview.COLUMNS):
            if i == 0:  # the one that may be cut short on a narrow terminal
                engines.add_column(name.lower(), no_wrap=True, ratio=1, min_width=8)
            else:
                wide = max(len(name), *(len(overview.row(engine)[i]) for engine in status.engines))
                engines.add_column(name.lower(), justify="right", no_wrap=True, min_width=wide)
        for engine in status.engines:
            engines.add_row(*map(Text, overview.row(engine)))
        parts.append(engines)
    elif not status.engine_count:
        parts.append(Text("no engine is attached", style="dim"))
    parts += [Text(line, style="dim") for line in (*overview.others(status), *overview.namespaces(status))]
    if status.slowest:
        table = Table(
            expand=True,
            box=None,
            padding=(0, 1, 0, 0),
            title="waited longest in the last five minutes",
            title_justify="left",
        )
        rows = overview.slowest(status)
        for i, name in enumerate(("waited", "outcome", "fetched", "ended", "engine", "request")):
            if name in ("engine", "request"):  # these share what is left, and may be cut short
                table.add_column(name, no_wrap=True, ratio=2 if name == "request" else 1, min_width=8)
            else:
                table.add_column(name, no_wrap=True, min_width=max(len(name), *(len(cells[i]) for cells in rows)))
        for cells in rows:
            table.add_row(*map(Text, cells))
        parts += [Text(), table]
    return Group(*parts)
