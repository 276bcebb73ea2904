"""Serves metrics, health and the status page over HTTP from the daemon's picture, on threads of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from ..config.model import ConfigError, Taken
from . import overview, status_page
from .board import Picture

MAX_CLIENTS = 64  # at a time; each has a thread
REQUEST_S = 5.0  # from a client's connection until its whole request is there, and then for it to take the answer
TICK_S = 0.1  # how often the server looks for its end, and for requests that are late
ROOM_S = 1.0  # for the thread of a client that makes room to end


class MetricsServer:
    """Serves metrics and health on (address, port) until closed. Raises ConfigError when it cannot be bound, Taken
    when another process listens there."""

    def __init__(self, address: str, port: int, look: Callable[[], Picture]) -> None:
        try:
            self._server = _Server(address, port, look)
        except (OSError, OverflowError, TypeError, ValueError) as error:  # the last two: not a name
            kind = Taken if getattr(error, "errno", None) == errno.EADDRINUSE else ConfigError
            raise kind(
                f"metrics_port: cannot be bound: {getattr(error, 'strerror', None) or error}: "
                f"metrics_address={address!r} metrics_port={port}; another one, or 0 for no metrics"
            ) from None
        serve = partial(self._server.serve_forever, TICK_S)
        threading.Thread(target=serve, name="metrics", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Runs a thread for each of up to MAX_CLIENTS clients.

    A client without a whole request has REQUEST_S, and goes sooner where a further one comes, the oldest first.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CLIENTS  # with Python's five the sixth client waits a second

    def __init__(self, address: str, port: int, look: Callable[[], Picture]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._room = threading.BoundedSemaphore(MAX_CLIENTS)
        self._incomplete: dict[socket.socket, float] = {}  # when they connected, the oldest first
        self._lock = threading.Lock()
        self._look = look
        super().__init__((address, port), _Handler)

    def page(self, path: str) -> tuple[int, str, bytes]:
        """Return (status, content type, body) of a path."""
        picture = self._look()
        if path == "/":
            return 200, "text/html; charset=utf-8", status_page.page(picture)
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, picture.metrics
        health = picture.health()
        if path == "/status.json":
            said = overview.as_status(picture.status, health).model_dump_json(indent=2)
            return 200, "application/json", said.encode() + b"\n"
        body = json.dumps(dataclasses.asdict(health)).encode() + b"\n"
        if path == "/healthz":
            return 200 if health.healthy else 503, "application/json", body
        if path == "/readyz":
            return 200 if health.ready else 503, "application/json", body
        return 404, "text/plain", b"/ /status.json /metrics /healthz /readyz\n"

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks the name service for our name

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(TICK_S)  # no descriptor is left: do not spin
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self._hang_up(time.monotonic(), most=1)
            if not self._room.acquire(timeout=ROOM_S):  # all requests are whole: their answers are under way
                self.shutdown_request(request)
                return
        with self._lock:
            self._incomplete[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be had
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def service_actions(self) -> None:
        """Called every TICK_S."""
        self._hang_up(time.monotonic() - REQUEST_S)

    def completed(self, request: socket.socket) -> None:
        """Note that the whole request of this client is there."""
        with self._lock:
            self._incomplete.pop(request, None)

    def _ended(self, request: socket.socket) -> None:
        self.completed(request)
        self._room.release()

    def _hang_up(self, before_s: float, most: int = MAX_CLIENTS) -> None:
        """Hang up on clients without a whole request that connected before, on the oldest first; their threads end."""
        with self._lock:
            for late in [each for each, since in self._incomplete.items() if since < before_s][:most]:
                del self._incomplete[late]
                with contextlib.suppress(OSError):  # it has left
                    late.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: the client has left, or could not be served."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S
    server_version = "kvprefetchd"

    def do_GET(self) -> None:
        self.server.completed(self.connection)
        status, content_type, body = self.server.page(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in status_page.HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a scrape is no event."""
