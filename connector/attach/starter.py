"""Starts the daemon where none listens: `start_daemon`, for engines of one user.

The daemon is no child of the engine's process: it outlives that while another engine is attached, and vLLM ends a
process that hangs with all its children.  A process group of its own keeps Ctrl-C from it.  It ends after its last
engine (`exit_idle_s`).  Of daemons that start at once one gets the control socket, and the others end.  Its log goes to
a file of the user's, which outlives both.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

from ...shmring.wire.control_socket import find, sockets, user_folder

AGAIN_S = 60.0  # between two starts
CHECK_S = 60.0
LOG_BYTES = 16 << 20  # a log that is larger at a start is put aside
WORDS_BYTES = 1 << 16  # of its end
COMMAND = (sys.executable, "-m", "kvprefetch.daemon")
# Where neither the options nor the environment say otherwise. Each daemon of a machine needs a metrics port of its own.
_DEFAULTS = {"EXIT_IDLE_S": "10", "LOG_LEVEL": "warning", "METRICS_PORT": "0", "DISK": "auto"}
# The daemon serves engines on all GPUs, and is not the systemd service that the engine may be.
_NOT_INHERITED = ("CUDA_VISIBLE_DEVICES", "NOTIFY_SOCKET", "RUNTIME_DIRECTORY", "WATCHDOG_USEC", "WATCHDOG_PID")
# vLLM binds the threads of an engine on CPUs to one core each, with which the daemon does not start.
_LAUNCH = (
    "import os,sys;os.fork() and os._exit(0);os.setpgid(0,0);"
    "len(os.sched_getaffinity(0))<2 and os.sched_setaffinity(0,range(os.cpu_count()));"
    "os.execv(sys.argv[1],sys.argv[1:])"
)
_GAVE_WAY = "another daemon"  # words of one that found the socket or the disk in use

log = logging.getLogger("vllm.kvprefetch.daemon")


class Starter:
    """Starts `kvprefetchd serve` with these options, at `socket` or where the user's own daemon listens.

    `start` is for one thread, the link's.
    """

    def __init__(self, options: Mapping[str, Any], socket: str | None) -> None:
        """Have the daemon's own command check the options, and the machine where no daemon answers, for a second.

        Raises ValueError, in one line.
        """
        self._again_s = time.monotonic()
        self._options = list[str]()
        for key, value in {**options, **({} if socket is None else {"socket": socket})}.items():
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            self._options.append(f"--{key.replace('_', '-')}={text}")
        defaults = {f"KVPREFETCHD_{key}": value for key, value in _DEFAULTS.items()}
        self._environ = {**defaults, **{key: os.environ[key] for key in os.environ.keys() - _NOT_INHERITED}}
        self._alive: int | None = None  # a pipe whose other end the daemon has
        self._told = ""  # the last words of a daemon that ended, logged last
        there = find([socket] if socket is not None else sockets()).sock
        if there is not None:
            there.close()
        machine = ["--start"] if there is None else []  # nothing needs to start now
        checked = subprocess.run(
            [*COMMAND, "check-config", "--json", *machine, *self._options],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_S,
            check=False,
        )
        if checked.returncode:
            said = (checked.stderr.splitlines() or ["it said nothing"])[-1].strip().removeprefix("kvprefetchd: ")
            raise ValueError(f"kv_connector_extra_config: start_daemon: {said}")
        keys = json.loads(checked.stdout)["keys"]
        self.socket = str(keys["socket"]["value"])
        self.disk = str(keys["disk"]["value"] or "none, in memory alone")
        self.log = log_file(self.socket)
        self._since = 0  # where the daemon's part of it begins

    def __str__(self) -> str:
        return f"socket {self.socket}, disk {self.disk}, log {self.log}"

    def start(self) -> bool:
        """Start a daemon, unless one is starting or ending, or one was started less than AGAIN_S ago.

        Return whether one is there.
        """
        if self._alive is not None:
            poll = select.poll()  # an engine may have too many descriptors for select
            poll.register(self._alive, select.POLLIN)
            if not poll.poll(0):
                return True
            os.close(self._alive)
            self._alive = None
            if (said := last_words(self.log, self._since)) != _GAVE_WAY:
                text = "kvprefetch: its daemon has ended: %s; the engine serves on, and starts it again. Its log: %s"
                log.log(logging.INFO if said == self._told else logging.ERROR, text, said, self.log)
                self._told = said
        now_s = time.monotonic()
        if now_s < self._again_s:
            return False
        self._again_s = now_s + AGAIN_S
        command = [sys.executable, "-I", "-S", "-c", _LAUNCH, *COMMAND, "serve", *self._options]
        ours, theirs = os.pipe()
        try:
            with self._opened() as output:
                null, same = subprocess.DEVNULL, subprocess.STDOUT
                launcher = subprocess.Popen(
                    command, env=self._environ, stdin=null, stdout=output, stderr=same, pass_fds=(theirs,)
                )
                launcher.wait()
        except OSError as error:
            os.close(ours)
            log.error("kvprefetch: its daemon cannot be started: %s", error)
            return False
        finally:
            os.close(theirs)
        self._alive = ours
        log.info("kvprefetch: no daemon listens: starting one, which ends after its last engine: %s", self)
        return True

    def _opened(self) -> IO[bytes]:
        """Open the log to append to it; put one that is large aside."""
        os.makedirs(os.path.dirname(self.log), 0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if os.path.getsize(self.log) > LOG_BYTES:
                os.replace(self.log, f"{self.log}.1")
        file = open(self.log, "ab", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600))  # noqa: SIM115
        self._since = file.tell()
        return file


def log_file(socket: str) -> str:
    """Return the log of the daemon at `socket` that an engine starts: of a user without a home, beside the socket."""
    folder = user_folder("STATE")
    with contextlib.suppress(OSError):
        os.makedirs(folder, 0o700, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        folder = os.path.dirname(socket)
    return os.path.join(folder, f"{os.path.splitext(os.path.basename(socket))[0]}.log")


def last_words(path: str, since: int) -> str:
    """Return why the daemon that logged from byte `since` on ended, as far as it says so itself."""
    try:
        with open(path, "rb") as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - WORDS_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"
    found = [line.removeprefix("kvprefetchd: ").strip() for line in lines if line.startswith("kvprefetchd: ")]
    if reasons := [said for said in found if _GAVE_WAY not in said]:
        return reasons[-1]
    return _GAVE_WAY if found else "it was stopped or killed, or it crashed, and says no reason"
