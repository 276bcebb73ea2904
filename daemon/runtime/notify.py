"""Notify systemd of the daemon's state: ready, reloading, stopping, a line of status, and the watchdog.

The protocol is that of sd_notify(3): one datagram of NAME=value lines to $NOTIFY_SOCKET.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping

INDEX_US = 120_000_000  # for a start without a disk, as TimeoutStartSec= of our unit
VALUE_US = 1000  # of the index: 30 us from memory, 280 us from a cold disk on a busy machine of two cores


class Notifier:
    """Sends notifications; without $NOTIFY_SOCKET none. Call `tick` on the loop that does the work: it is watched."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Remove the variables from the environment, so that no child notifies in our name."""
        address = environ.pop("NOTIFY_SOCKET", "")
        period_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if address else None
        # systemd advises half the period; a third leaves room for a turn of the loop that takes long.
        ours = period_us.isdigit() and pid in ("", str(os.getpid()))
        self._period_ns = int(period_us) * 1000 // 3 if ours else 0
        self._fed_ns = 0
        self._status = ""

    def indexing(self, values: int) -> None:
        """Ask for the time to read the index of so many values.

        Mooncake holds the interpreter's lock meanwhile, so nothing can be sent until it is done.
        """
        wanted_us = INDEX_US + values * VALUE_US
        self._send(f"EXTEND_TIMEOUT_USEC={wanted_us}", f"STATUS=reading the disk's index: values={values}")

    def ready(self, status: str) -> None:
        self._status = status
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Announce a reload, which lasts until the next `ready`."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        """Show a line in `systemctl status`; sent when it changes."""
        if status != self._status:
            self._status = status
            self._send(f"STATUS={status}")

    def tick(self, now_ns: int) -> None:
        """Feed the watchdog, when one is set and a third of its period is over."""
        if self._period_ns and now_ns - self._fed_ns >= self._period_ns:
            self._fed_ns = now_ns
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
            pass  # systemd does not listen, or its queue is full; the daemon works on
