"""Runs kvprefetchd on GPUs of host memory: `python -m tests.support.device_daemon TOTAL_BYTES FAIL GATE HANG serve`.

FAIL: the methods of the first GPU that fail, separated by commas, or `-`.  HANG: the methods that do not return while
the file GATE exists.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvprefetch.daemon.cli.main import main
from tests.lab.daemon import Daemon
from tests.support import host_device


def with_device(
    daemon: Daemon, total_bytes: int = 64 << 20, fail: str = "-", gate: str | Path = "-", hang: str = "copy"
) -> Daemon:
    """Let a daemon that has not started yet find such GPUs."""
    at = daemon.argv.index("kvprefetch.daemon")
    daemon.argv[at : at + 1] = ["tests.support.device_daemon", str(total_bytes), fail, str(gate), hang]
    return daemon


def run(arguments: list[str]) -> Any:
    devices = host_device.install(int(arguments[0]))
    devices.device.fail.update(arguments[1].split(","))
    devices.device.gate = Path(arguments[2]) if arguments[2] != "-" else None
    devices.device.hang = set(arguments[3].split(","))
    sys.argv[1:] = arguments[4:]
    return main()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
