"""Serves metrics, health and the status page over HTTP, on threads of its own."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from waitress import wasyncore
from waitress.channel import HTTPChannel
from waitress.server import create_server
from waitress.task import WSGITask

from ..config.model import ConfigError, Taken
from . import overview, status_page
from .board import Picture
from .metrics import Metrics

MAX_CLIENTS = 64  # at a time
QUIET_S = 5  # without a byte, then a connection is closed
KEPT_S = 0.5  # the metrics, for all who ask: their text costs milliseconds
TICK_S = 1.0  # how often the server looks for those


class _Task(WSGITask):  # type: ignore[misc]
    """The one request of a connection: what a client sends behind it costs nothing."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.set_close_on_finish()


class _Channel(HTTPChannel):  # type: ignore[misc]
    """A client, which has no thread before its request is whole. Where there are too many, the oldest such one goes."""

    task_class = _Task

    def __init__(self, server: Any, *arguments: Any, **more: Any) -> None:
        super().__init__(server, *arguments, **more)
        if len(server.active_channels) > MAX_CLIENTS:
            next((each for each in server.active_channels.values() if not each.requests), self).handle_close()


class MetricsServer:
    """Serves metrics and health on (address, port) until closed. Raises ConfigError when it cannot be bound, Taken
    when another process listens there."""

    def __init__(self, address: str, port: int, look: Callable[[], Picture], metrics: Metrics) -> None:
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
        except (OSError, OverflowError, TypeError, ValueError) as error:  # the last two: not a name
            sock.close()
            kind = Taken if getattr(error, "errno", None) == errno.EADDRINUSE else ConfigError
            raise kind(
                f"metrics_port: cannot be bound: {getattr(error, 'strerror', None) or error}: "
                f"metrics_address={address!r} metrics_port={port}; another one, or 0 for no metrics"
            ) from None
        logging.getLogger("waitress").setLevel(logging.CRITICAL)  # a client that leaves is no event
        self._look, self._metrics, self._closing = look, metrics, False
        self._text, self._made_s = b"", -KEPT_S
        self._sockets: dict[int, Any] = {}
        self._server = create_server(
            self._answer,
            map=self._sockets,
            sockets=[sock],
            threads=1,  # it alone shows the ages in the metrics
            connection_limit=2 * MAX_CLIENTS,
            channel_timeout=QUIET_S,
            cleanup_interval=1,
            max_request_body_size=4096,
            max_request_header_size=16 << 10,
            outbuf_overflow=16 << 20,  # an answer stays in memory
            ident="kvprefetchd",
            expose_tracebacks=False,
            asyncore_use_poll=True,
        )
        self._server.channel_class = _Channel
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.trigger.pull_trigger(self._end)  # which the thread calls: only then it closes the trigger
        self._thread.join()

    def _end(self) -> None:
        self._closing = True

    def _run(self) -> None:
        while not self._closing:
            wasyncore.loop(TICK_S, use_poll=True, map=self._sockets, count=1)
        self._server.task_dispatcher.shutdown()
        wasyncore.close_all(self._sockets)

    def _answer(self, environ: dict[str, Any], start: Callable[[str, list[tuple[str, str]]], Any]) -> Iterable[bytes]:
        """The WSGI application."""
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            status, content_type, body = self._page(environ["PATH_INFO"])
        else:
            status, content_type, body = 405, "text/plain", b"only GET and HEAD\n"
        headers = {"Content-Type": content_type, "Content-Length": str(len(body)), **status_page.HEADERS}
        start(f"{status} {HTTPStatus(status).phrase}", list(headers.items()))
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _page(self, path: str) -> tuple[int, str, bytes]:
        """Return (status, content type, body) of a path."""
        picture = self._look()
        if path == "/":
            return 200, "text/html; charset=utf-8", status_page.page(picture)
        health = picture.health()
        if path == "/metrics":
            if (now := time.monotonic()) - self._made_s > KEPT_S:
                self._metrics.show_health(health)
                self._text, self._made_s = self._metrics.text(), now
            return 200, CONTENT_TYPE_LATEST, self._text
        if path == "/status.json":
            said = overview.as_status(picture.status, health).model_dump_json(indent=2)
            return 200, "application/json", said.encode() + b"\n"
        body = json.dumps(dataclasses.asdict(health)).encode() + b"\n"
        if path == "/healthz":
            return 200 if health.healthy else 503, "application/json", body
        if path == "/readyz":
            return 200 if health.ready else 503, "application/json", body
        return 404, "text/plain", b"/ /status.json /metrics /healthz /readyz\n"
