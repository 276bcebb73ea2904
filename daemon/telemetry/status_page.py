"""The status page: HTML without scripts, for people without a dashboard. It shows what `top` does, without requests."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence

from kvprefetch import __version__

from . import overview
from .board import Picture
from .pretty import printable

REFRESH_S = 5
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.well { color: light-dark(#1a6b2d, #7bd88f); } .ill { color: light-dark(#a4161a, #ff8b8b); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8886; }
th:first-child, td:first-child { padding-left: 0; text-align: left; white-space: normal; }
@media (max-width: 72rem) {
  .engines tr { display: flex; flex-wrap: wrap; border-bottom: 1px solid #8886; padding: .3rem 0; }
  .engines tr:first-child { display: none; }
  .engines td { padding: 0 1rem 0 0; border: 0; }
  .engines td::before { content: attr(title) " "; opacity: .7; }
  .engines td:first-child { flex-basis: 100%; }
}
"""
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
    described = (
        *overview.others(status),
        *overview.names(status),
        *overview.waiting(status),
        *overview.refused(status),
    )
    endings = [[outcome, f"{count:.0f}"] for outcome, count in status.outcomes.items() if count]
    parts = [
        _tag("h1", f"kvprefetchd {__version__}"),
        f'<p class="{"well" if health.ready else "ill"}">{_escaped(f"{word}, {health.phase}, up {up}")}</p>',
        *(f'<p class="ill">{_escaped(problem)}</p>' for problem in health.problems),
        *(_tag("p", line) for line in overview.traffic(status)),
        _tag("h2", "Engines"),
        _table("engines", overview.COLUMNS, map(overview.row, status.engines), "no engine is attached"),
        *(_tag("p", line) for line in described),
        _tag("h2", "Requests since the start"),
        _table("endings", ["OUTCOME", "REQUESTS"], endings, "none has ended"),
        '<p><a href="metrics">metrics</a> · <a href="readyz">readyz</a> · <a href="healthz">healthz</a></p>',
    ]
    head = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="{REFRESH_S}">'
        f'<meta name="viewport" content="width=device-width"><title>{_escaped(f"kvprefetchd: {word}")}</title>'
        f"<style>{STYLE}</style>"
    )
    return "\n".join([head, *parts, ""]).encode()


def _table(kind: str, columns: Sequence[str], rows: Iterable[Sequence[str]], otherwise: str) -> str:
    """Return a table of this class, or the words `otherwise` where it has no row. A narrow window shows the titles."""
    names = [name.lower() for name in columns]
    cells = ([f'<td title="{name}">{_escaped(cell)}' for name, cell in zip(names, row, strict=True)] for row in rows)
    body = ["<tr>" + "".join(row) for row in cells]
    head = "<tr>" + "".join(_tag("th", name) for name in names)
    return "\n".join([f'<table class="{kind}">', head, *body, "</table>"]) if body else _tag("p", otherwise)


def _tag(name: str, text: str) -> str:
    return f"<{name}>{_escaped(text)}</{name}>"


def _escaped(text: str) -> str:
    return html.escape(printable(text))
