"""kvprefetchd with a GPU of host memory: `python -m tests.support.device_daemon TOTAL_BYTES FAIL serve …`.

FAIL names the methods that fail, with commas in between, or is `-`.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.lab.daemon import Daemon
from kvprefetch.daemon.cli import main
from tests.support import host_device


def with_device(daemon: Daemon, total_bytes: int = 64 << 20, fail: str = "-") -> Daemon:
    """Let this daemon, which is not started yet, find such a GPU."""
    at = daemon.argv.index("kvprefetch.daemon")
    daemon.argv[at : at + 1] = ["tests.support.device_daemon", str(total_bytes), fail]
    return daemon


def run(arguments: list[str]) -> Any:
    devices = host_device.install(int(arguments[0]))
    devices.device.fail.update(arguments[1].split(","))
    sys.argv[1:] = arguments[2:]
    return main()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
