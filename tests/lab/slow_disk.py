"""Makes a disk slow: every open of a file for reading takes a while, one after the other, as on a disk with one head.

A process holds a write lease (``fcntl(2)``, F_SETLEASE) on each file. A reader waits inside ``open`` until that process
gives the lease up, which it does after the delay. The reader needs no change, and nobody needs privileges.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from pathlib import Path

from tests.lab import process
from tests.lab.programs import Programs

_POLL_S = 0.005
_UP = "slow disk is up"


class SlowDisk(Programs):
    """Slows the files under ``folder`` that match ``pattern`` while it is entered.

    One open takes ``delay_s``, and waiting readers get through one after the other. The kernel ends each wait after
    ``/proc/sys/fs/lease-break-time`` (45 s). Files that appear later, or are open elsewhere, stay fast.
    """

    name, start_timeout_s = "slow-disk", 20.0

    def __init__(self, folder: Path, delay_s: float, pattern: str = "*.bucket") -> None:
        super().__init__()
        self.folder, self.delay_s, self.pattern = folder, delay_s, pattern

    def _start(self, scratch: Path) -> None:
        argv = [sys.executable, "-m", "tests.lab.slow_disk", str(self.folder), self.pattern, str(self.delay_s)]
        self._processes.append(process.spawn(argv, log=self._log))
        self._wait(self._processes[0], "slow disk", self._log, lambda: _UP in process.tail(self._log))

    @property
    def opens(self) -> int:
        """How many opens were delayed so far."""
        return self._log.read_text().count("opened")

    @property
    def _log(self) -> Path:
        assert self._scratch is not None
        return self._scratch / "log"


def available(folder: Path) -> str | None:
    """Why the files of ``folder`` cannot be slowed here, or None if they can."""
    probe = folder / f".lease-{os.getpid()}"
    probe.write_bytes(b"x")
    fd = os.open(probe, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return f"no file leases in {folder}: {error.strerror}"
    finally:
        os.close(fd)
        probe.unlink()
    return None


def _main(folder: Path, pattern: str, delay_s: float) -> None:
    process.die_with_parent()
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # says that a lease is wanted back; F_GETLEASE says of which file
    held: dict[int, Path] = {}
    for path in folder.rglob(pattern):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        held[fd] = path
    if not held:
        sys.exit(f"no {pattern} under {folder}")
    print(f"{_UP}: {len(held)} files", flush=True)
    let_through: set[int] = set()
    while True:
        for fd, path in held.items():
            if fd in let_through:
                # The lease comes back when the reader has closed the file.
                try:
                    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
                except BlockingIOError:
                    continue
                let_through.discard(fd)
            elif fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_WRLCK:
                time.sleep(delay_s)
                print(f"opened {path.name}", flush=True)
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
                let_through.add(fd)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
