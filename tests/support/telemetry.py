"""What tests of telemetry share: a picture of a certain age, and servers: ours, and one that answers anything."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvprefetch.daemon.telemetry import metrics
from kvprefetch.daemon.telemetry.board import Picture
from kvprefetch.daemon.telemetry.web import MetricsServer
from tests.lab.process import free_ports


def get(port: int, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
    """Return status and body, also of an error."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def picture(
    beat_age_s: float = 0.0, *, calls: dict[str, float] | None = None, alive: bool = True, **status: Any
) -> Picture:
    """Return what a daemon shows whose loop had its last heartbeat so long ago; `calls`: ages of those in flight."""
    now_ns = time.monotonic_ns()
    calls_ns = {call: now_ns - int(age_s * 1e9) for call, age_s in (calls or {}).items()}
    shown = {"phase": "serving", "store_open": True, "store_answering": True, "calls_ns": calls_ns, **status}
    return Picture(shown, now_ns - int(beat_age_s * 1e9), alive)


@contextmanager
def served(look: Callable[[], Picture] = picture) -> Iterator[int]:
    """The port of the daemon's HTTP server, which shows this picture."""
    (port,) = free_ports(1)
    server = MetricsServer("127.0.0.1", port, look, metrics.Metrics())
    try:
        yield port
    finally:
        server.close()


@contextmanager
def answering(answer: bytes, *, close: bool = True) -> Iterator[str]:
    """host:port of what gives everyone this answer, and then hangs up or stays."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                client.recv(1000)
                client.sendall(answer)
                if close:
                    client.close()
                else:
                    kept.append(client)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for client in kept:
            client.close()


def sample(made: metrics.Metrics, name: str, **labels: str) -> float | None:
    """The value of a sample, by its whole name."""
    for family in text_string_to_metric_families(made.text().decode()):
        for each in family.samples:
            if each.name == metrics.PREFIX + name and each.labels == labels:
                return float(each.value)
    return None
