"""The view of `kvprefetchd top`: one frame from two answers of the daemon. The only importer of rich."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from rich.console import Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvprefetch.client.control import Unavailable, look

from ...shmring.wire.admin import Status
from ..telemetry import overview

LEGEND = (
    "q quit   h this legend   s sort by the next column   r the other way round   / show what contains … (Enter, Esc)",
    "",
    "PEND requests that have not ended   FETCH fetches in flight   PINNED blocks that requests hold",
    "IDLE staged blocks that nobody holds   FREE empty slots   SAVES saves that run or wait   HINTS hints read",
    "HIT share of the blocks looked up that were there   HIDDEN share of look-up and transfer that made nobody wait",
    "WASTED share of the fetched blocks that no request loaded",
    "DROP hints that found no room   BAD records that were skipped",
    "waited: how long the scheduler had room for the request and waited; cause: docs/EVENTS.md",
)


@dataclass(frozen=True)
class View:
    """What the keys chose. `sort`: a column of the engines' table, -1 for the daemon's order; `typing`: of `only`."""

    sort: int = -1
    reverse: bool = False
    only: str = ""
    typing: bool = False
    legend: bool = False
    over: bool = False

    def press(self, key: str) -> View:
        if self.typing:
            if key in "\r\n":
                return replace(self, typing=False)
            if key == "\x1b":
                return replace(self, typing=False, only="")
            only = self.only[:-1] if key in "\b\x7f" else self.only + (key if key.isprintable() else "")
            return replace(self, only=only)
        change: dict[str, dict[str, Any]] = {
            "q": {"over": True},
            "h": {"legend": not self.legend},
            "s": {"sort": (self.sort + 2) % (len(overview.COLUMNS) + 1) - 1},
            "r": {"reverse": not self.reverse},
            "/": {"typing": True, "only": ""},
        }
        return replace(self, **change.get(key, {}))

    def rows(self, rows: Iterable[Sequence[str]], names: Iterable[str]) -> list[Sequence[str]]:
        """Return the engines' rows that contain `only`, they or their line of `names`, as the view sorts them."""
        paired = zip(rows, names, strict=True)
        kept = [row for row, name in paired if self.only.lower() in " ".join((*row, name)).lower()]
        if self.sort >= 0:
            kept.sort(key=lambda row: _order(row[self.sort]))
        return kept[::-1] if self.reverse else kept

    def line(self) -> str:
        """Say what is chosen."""
        by = f"sorted by {overview.COLUMNS[self.sort]}" if self.sort >= 0 else "in order of attachment"
        only = f"   only: {self.only}{'_' if self.typing else ''}" if self.only or self.typing else ""
        return f"{by}{', reversed' if self.reverse else ''}{only}   (h: legend, q: quit)"


def _order(cell: str) -> tuple[float, str]:
    number = cell.partition(" ")[0]
    return (float(number) if number.isdecimal() else -1.0, cell)


def live(socket: Path, interval_s: float) -> None:
    """Show frames until q or Ctrl-C. Raises Unavailable when no daemon answers at the start; later it may restart.

    Raises BrokenPipeError once the terminal is gone.
    """
    now = look(socket, ids=True)
    at, view, rates = time.monotonic(), View(), overview.rates(None, now, 0)
    try:
        with _keys() as keys, Live(frame(now, rates, view), screen=True, auto_refresh=False) as shown:
            while not view.over:
                if pressed := keys(max(0.0, at + interval_s - time.monotonic())):
                    view = reduce(View.press, pressed, view)
                else:
                    before, since, at = now, at, time.monotonic()
                    try:
                        now = look(socket, ids=True)
                    except Unavailable as error:
                        shown.update(Text(str(error), style="red"), refresh=True)
                        continue
                    rates = overview.rates(before, now, at - since)
                shown.update(frame(now, rates, view), refresh=True)
    except (EOFError, OSError, termios.error):
        raise BrokenPipeError from None


def _no_keys(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _read_keys(fd: int, seconds: float) -> str:
    """Return the keys that came. Raises EOFError, or OSError, where the terminal is gone."""
    if not select.select([fd], [], [], seconds)[0]:
        return ""
    if not (keys := os.read(fd, 64)):
        raise EOFError
    return keys.decode(errors="ignore")


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits so many seconds for keys, and returns those that came."""
    fd = sys.stdin.fileno()
    if not os.isatty(fd):
        yield _no_keys
        return
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield lambda seconds: _read_keys(fd, seconds)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def frame(status: Status, rates: overview.NodeRates, view: View = View()) -> RenderableType:
    """Return headline, rates, a table of engines, and a table of the slowest requests."""
    parts: list[RenderableType] = [
        *(
            Text(line, style="" if status.ready and line == overview.headline(status) else "red")
            for line in overview.heading(status)
        ),
        *map(Text, overview.traffic(status, rates)),
        Text(view.line(), style="dim"),
        *(Text(line, style="dim") for line in LEGEND if view.legend),
        Text(),
    ]
    names = overview.names(status)
    if rows := view.rows(map(overview.row, status.engines), names):
        columns = [name.lower() for name in overview.COLUMNS]
        parts.append(_table(columns, rows, {"engine": 1}, "right"))
    elif not status.engine_count:
        parts.append(Text("no engine is attached", style="dim"))
    shown = tuple(f"{row[0]}: " for row in rows)
    parts += [Text(line, style="dim") for line in overview.others(status)]
    parts += [Text(line, style="dim") for line in names if line.startswith(shown)]
    parts += [Text(line, style="red") for line in (*overview.waiting(status), *overview.refused(status))]
    if slowest := [row for row in overview.slowest(status) if view.only.lower() in " ".join(row).lower()]:
        columns = ["waited", "outcome", "cause", "fetched", "ended", "engine", "request"]
        table = _table(columns, slowest, {"engine": 1, "request": 2}, "left")
        table.title, table.title_justify = "waited longest lately", "left"
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
