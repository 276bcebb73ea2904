"""``kvprefetchd serve`` as a child process: started, awaited by its ``daemon.ready`` line, read, stopped or killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvprefetch.daemon.telemetry import board
from tests.lab import process
from tests.support import auditor

START_TIMEOUT_S = 60.0
Record = dict[str, Any]


class DaemonError(RuntimeError):
    """The daemon ended or was not ready in time; the message ends with what it printed."""


class Daemon:
    """A daemon; use as a context manager. It joins ``mooncake_config`` or runs the embedded store."""

    def __init__(
        self,
        *,
        staging: str = "64MB",
        mooncake_config: Path | None = None,
        memory: str | None = None,
        disk: str | None = None,
        socket: Path | None = None,
        extra: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        # A socket's path may have 107 bytes, which a folder in the checkout does not promise.
        self._folder = Path(tempfile.mkdtemp(prefix="kvl-"))
        self.socket = socket if socket is not None else self._folder / "kvprefetchd.sock"
        auditor.SOCKETS.add(self.socket)
        self.argv = [sys.executable, "-m", "kvprefetch.daemon", "serve", "--socket", str(self.socket)]
        self.argv += ["--staging", staging]
        if mooncake_config is not None:
            self.argv += ["--mooncake-config", str(mooncake_config)]
        if memory is not None:
            self.argv += ["--memory", memory]
        if disk is not None:
            self.argv += ["--disk", disk]
        if "--metrics-port" not in extra:
            self.argv += ["--metrics-port", "0"]  # the default port is one per machine
        self.argv += extra
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._records: list[Record] = []
        self._faults: list[str] = []
        self.faulty = False
        """Whether a test planted a fault: without it, `close` raises for one (`engine.fault`)."""
        self._ended = False

    def __enter__(self) -> Daemon:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        """Start it and wait for ``daemon.ready``; may be called again after it ended."""
        self.launch()
        if self.wait_record("daemon.ready", timeout_s=START_TIMEOUT_S) is None:
            raise DaemonError(f"no daemon.ready from {' '.join(self.argv)}\n" + "\n".join(self.lines[-40:]))

    def launch(self) -> None:
        """Start it without waiting; for tests of starts that fail (then :meth:`wait_exit`)."""
        auditor.KILLED.discard(self.socket)
        with self._changed:
            self._lines, self._records, self._ended = [], [], False
        self._process = subprocess.Popen(
            process.bound_to_parent(self.argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self._env, process.PARENT_VARIABLE: str(os.getpid())},
            cwd=process.REPO,
            **process.OWN_GROUP,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), name="daemon-log", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """End it, with everything it started, and remove the socket's folder."""
        if self._process is not None:
            if process.reap(self._process, term_s=15.0):
                # A daemon that was killed leaves its picture to its successor, which there is none of at this socket.
                self.picture.unlink(missing_ok=True)
            self._collect()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._faults and not self.faulty:
            raise DaemonError("a fault of the daemon's, which no test planted\n" + "\n".join(self._faults))

    @property
    def pid(self) -> int:
        """Pid of the daemon."""
        if self._process is None:
            raise DaemonError("the daemon is not running")
        return self._process.pid

    @property
    def lines(self) -> list[str]:
        """Everything it printed so far."""
        with self._changed:
            return list(self._lines)

    def records(self, event: str | None = None) -> list[Record]:
        """Its log so far, one dict per JSON line; only those of ``event`` if given."""
        with self._changed:
            return [each for each in self._records if event is None or each.get("event") == event]

    def forget(self) -> None:
        """Drop what it printed so far."""
        with self._changed:
            self._lines.clear()
            self._records.clear()

    def wait_record(self, event: str, *, count: int = 1, timeout_s: float = 10.0) -> Record | None:
        """Wait for the ``count``-th log record of ``event``; None if it did not come or the daemon ended."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = [each for each in self._records if each.get("event") == event]
                if len(found) >= count:
                    return found[count - 1]
                if self._ended or not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return None

    def sigterm(self, timeout_s: float = 40.0) -> int:
        """Ask it to stop, wait, and return its exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return self.wait_exit(timeout_s)

    def sigkill(self) -> None:
        """SIGKILL the daemon's process alone: what it started has to notice by itself."""
        auditor.KILLED.add(self.socket)
        os.kill(self.pid, signal.SIGKILL)
        self.wait_exit()

    @property
    def picture(self) -> Path:
        """The shared memory with what it shows of itself."""
        return Path(f"/dev/shm{board.name_of(self.socket)}")

    def wait_exit(self, timeout_s: float = 20.0) -> int:
        """Wait for its end; returns the exit code."""
        if self._process is None:
            raise DaemonError("the daemon is not running")
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DaemonError(f"still running after {timeout_s} s\n" + "\n".join(self.lines[-40:])) from None
        self._collect()
        return code

    def _collect(self) -> None:
        # A program it left behind may hold the pipe open: then the log ends here all the same.
        if self._reader is not None:
            self._reader.join(2.0)

    def _read(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        with child.stdout as output, contextlib.suppress(ValueError, OSError):
            for raw in output:
                line = raw.decode(errors="replace").rstrip("\n")
                with self._changed:
                    self._lines.append(line)
                    with contextlib.suppress(ValueError):
                        record = json.loads(line)
                        if isinstance(record, dict):
                            self._records.append(record)
                            if record.get("event") == "engine.fault":
                                self._faults.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
