"""Tell systemd about the daemon: readiness, reloads, status, watchdog.

The protocol is sd_notify(3)'s: one datagram of NAME=value lines to $NOTIFY_SOCKET. Without that variable every call
does nothing. Written here because it is this short; the alternative is a C library bound for three calls.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping


class Notifier:
    """Speaks to the service manager. The watchdog is fed by `beat`, which belongs on the loop that does the work."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Takes the variables out of the environment, so that no child speaks in our name."""
        address = environ.pop("NOTIFY_SOCKET", "")
        period_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if address else None
        # systemd's own advice is half the period; a third leaves room for a turn of the loop that takes long.
        ours = period_us.isdigit() and pid in ("", str(os.getpid()))
        self._beat_ns = int(period_us) * 1000 // 3 if ours else 0
        self._beat_at_ns = 0
        self._status = ""

    def ready(self, status: str) -> None:
        self._status = status
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Until the next `ready`."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        """What `systemctl status` shows; sent when it changes."""
        if status != self._status:
            self._status = status
            self._send(f"STATUS={status}")

    def beat(self, now_ns: int) -> None:
        """Feed the watchdog, when one is set and a third of its period is over."""
        if self._beat_ns and now_ns - self._beat_at_ns >= self._beat_ns:
            self._beat_at_ns = now_ns
            self._send("WATCHDOG=1")

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()

    def _send(self, *lines: str) -> None:
        if self._sock is None:
            return
        try:
            self._sock.sendto("\n".join(lines).encode(), socket.MSG_DONTWAIT, self._address)
        except OSError:
            pass  # nobody listens, or its queue is full: the daemon's work does not depend on it
