"""The daemon's status page: HTML without scripts, for people without a dashboard. It says no more than /metrics."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence

from ... import __version__
from . import overview
from .board import Picture
from .pretty import printable

REFRESH_S = 5
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.well { color: light-dark(#1a6b2d, #7bd88f); } .ill { color: light-dark(#a4161a, #ff8b8b); }
div { overflow-x: auto; }
table { border-collapse: collapse; white-space: nowrap; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8886; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
"""
_OF_ENGINES = ("model", "mode")
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def page(picture: Picture) -> bytes:
    """Return the page of the last published second. Names of models and engines come from elsewhere: all is escaped."""
    health = picture.health()
    status = overview.as_status(picture.status, health)
    word = "ready" if health.ready else "not ready" if health.healthy else "hangs: only a restart helps"
    up = overview.duration(status.uptime_s)
    engines = [[*overview.row(each), *(str(each.get(name, "?")) for name in _OF_ENGINES)] for each in status.engines]
    endings = [[outcome, f"{count:.0f}"] for outcome, count in status.outcomes.items() if count]
    parts = [
        _tag("h1", f"kvprefetchd {__version__}"),
        f'<p class="{"well" if health.ready else "ill"}">{_escaped(f"{word}, {health.phase}, up {up}")}</p>',
        *(f'<p class="ill">{_escaped(problem)}</p>' for problem in health.problems),
        *(_tag("p", line) for line in (*overview.store(status), *overview.known_rates(status))),
        _tag("h2", "Engines"),
        _table([*overview.COLUMNS, *map(str.upper, _OF_ENGINES)], engines, "no engine is attached"),
        _tag("h2", "Requests since the start"),
        _table(["OUTCOME", "REQUESTS"], endings, "none has ended"),
        '<p><a href="metrics">metrics</a> · <a href="readyz">readyz</a> · <a href="healthz">healthz</a></p>',
    ]
    head = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="{REFRESH_S}">'
        f'<meta name="viewport" content="width=device-width"><title>{_escaped(f"kvprefetchd: {word}")}</title>'
        f"<style>{STYLE}</style>"
    )
    return "\n".join([head, *parts, ""]).encode()


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], otherwise: str) -> str:
    """Return a table, or the words `otherwise` where it has no row."""
    body = ["<tr>" + "".join(_tag("td", cell) for cell in row) for row in rows]
    head = "<tr>" + "".join(_tag("th", name.lower()) for name in columns)
    return "\n".join(["<div><table>", head, *body, "</table></div>"]) if body else _tag("p", otherwise)


def _tag(name: str, text: str) -> str:
    return f"<{name}>{_escaped(text)}</{name}>"


def _escaped(text: str) -> str:
    return html.escape(printable(text))
