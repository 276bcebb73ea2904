"""Starts the daemon where none listens: `start_daemon`, for engines of one user.

The daemon is no child of the engine's process: it outlives that while another engine is attached, and vLLM ends a
process that hangs with all its children.  A process group of its own keeps Ctrl-C from it.  It ends after its last
engine (`exit_idle_s`).  Of daemons that start at once one gets the control socket, and the others end.  Its log goes to
the log of the engine that started it, and nowhere after that engine's end.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

AGAIN_S = 60.0  # between two starts
CHECK_S = 60.0
COMMAND = (sys.executable, "-m", "kvprefetch.daemon")
# Where neither the options nor the environment say otherwise. Each daemon of a machine needs a metrics port of its own.
_DEFAULTS = {"EXIT_IDLE_S": "10", "LOG_LEVEL": "warning", "METRICS_PORT": "0"}
# The daemon serves engines on all GPUs, and is not the systemd service that the engine may be.
_NOT_INHERITED = ("CUDA_VISIBLE_DEVICES", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
# vLLM binds the threads of an engine on CPUs to one core each, with which the daemon does not start.
_LAUNCH = (
    "import os,sys;os.fork() and os._exit(0);os.setpgid(0,0);"
    "len(os.sched_getaffinity(0))<2 and os.sched_setaffinity(0,range(os.cpu_count()));"
    "os.execv(sys.argv[1],sys.argv[1:])"
)
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

log = logging.getLogger("vllm.kvprefetch.daemon")


class Starter:
    """Starts `kvprefetchd serve` with these options at a socket; `start` is for one thread, the link's."""

    def __init__(self, options: Mapping[str, Any], socket: str) -> None:
        """Have the daemon's own command check the options, for half a second. Raises ValueError, in one line."""
        self._path, self._again_s = socket, time.monotonic()
        self._options = list[str]()
        for key, value in {**options, "socket": socket}.items():
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            self._options.append(f"--{key.replace('_', '-')}={text}")
        defaults = {f"KVPREFETCHD_{key}": value for key, value in _DEFAULTS.items()}
        self._environ = {**defaults, **{key: os.environ[key] for key in os.environ.keys() - _NOT_INHERITED}}
        self._reader: threading.Thread | None = None  # it lives as long as the daemon
        self._said = self._told = ""  # the last words of a daemon that ended: not logged yet, and logged last
        self._ended_s = 0.0
        checked = subprocess.run(
            [*COMMAND, "check-config", *self._options],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHECK_S,
            check=False,
        )
        if checked.returncode:
            said = _line((checked.stderr.splitlines() or [b"it said nothing"])[-1])
            raise ValueError(f"kv_connector_extra_config: start_daemon: {said}")

    def start(self) -> None:
        """Start a daemon, unless one is starting or ending, or one was started less than AGAIN_S ago."""
        if self._reader is not None and self._reader.is_alive():
            return
        now_s = time.monotonic()
        if self._said and now_s < self._ended_s + AGAIN_S:  # one that ended before that gave way to another daemon
            text = "kvprefetch: its daemon has ended; the engine serves on, and starts it again. The last words: %s"
            log.log(logging.INFO if self._said == self._told else logging.ERROR, text, self._said)
            self._said, self._told = "", self._said
        if now_s < self._again_s:
            return
        self._again_s = now_s + AGAIN_S
        command = [sys.executable, "-I", "-S", "-c", _LAUNCH, *COMMAND, "serve", *self._options]
        try:
            launcher = subprocess.Popen(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            self._said, self._ended_s = str(error), now_s
            return
        launcher.wait()
        log.info("kvprefetch: no daemon at %s: starting one, which ends after its last engine", self._path)
        self._reader = threading.Thread(target=self._read, args=(launcher.stdout,), name="kvprefetchd-log", daemon=True)
        self._reader.start()

    def _read(self, output: IO[bytes]) -> None:
        """Log the daemon's lines until it ends; its last words tell why it did not start."""
        said = "it said nothing"
        with output:
            for raw in output:
                line = _line(raw)
                try:
                    record = json.loads(line)
                    level, event = _LEVELS[record["level"]], record["event"]
                except (ValueError, LookupError, TypeError):
                    said = line
                else:
                    if event != "daemon.failed":  # its last words say the same
                        log.log(level, "kvprefetchd: %s", line)
        self._said, self._ended_s = said, time.monotonic()


def _line(raw: bytes) -> str:
    return raw.decode(errors="replace").strip().removeprefix("kvprefetchd: ")
