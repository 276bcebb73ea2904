"""Resets of one engine: after each, its keys name other weights, so that no KV of older weights is ever found again."""

from __future__ import annotations

import hashlib
import logging
import uuid
from pathlib import Path
from typing import NamedTuple

from .link import Link
from .session import SchedulerSession

MAX_NAME_BYTES = 4096

log = logging.getLogger("vllm.kvprefetch")


class Weights(NamedTuple):
    """The weights since reset number `generation`. `id`: 32 hex digits of the engine's keys, "" since its start."""

    generation: int = 0
    id: str = ""


class Resets:
    """`current` is replaced as a whole: the link's thread reads it for a hello.  `generation` is its number.

    `weights_file`: its text names the weights, if the text has changed by the time of a reset.  Engines with the same
    name and checkpoint share what they store.  Without a name the KV is the engine's own until its next reset or start.
    """

    def __init__(self, link: Link[SchedulerSession], weights_file: str | None = None) -> None:
        self.current, self.generation = Weights(), 0
        self._link, self._file = link, Path(weights_file) if weights_file else None
        self._name = self._read()
        self._sent: tuple[int, Weights] | None = None

    def begin(self) -> None:
        """The weights are others from now on."""
        before, self._name = self._name, self._read()
        named = self._name if self._name != before else b""
        ident = hashlib.blake2b(named, digest_size=16).hexdigest() if named else uuid.uuid4().hex
        self.generation += 1
        self.current = Weights(self.generation, ident)
        log.info(
            "kvprefetch: reset %d: later KV has the weights %s, %s",
            self.generation,
            ident,
            f"named {named.decode(errors='replace')!r}" if named else "which no other engine has",
        )

    def tell(self, session: SchedulerSession | None) -> None:
        """Send the last reset to the daemon, once in a session, without waiting for the answer."""
        if session is None or self._sent == (session.epoch, self.current):
            return
        if self._link.send_reset(*self.current):
            self._sent = session.epoch, self.current

    def _read(self) -> bytes:
        """Return the file's text; nothing where there is none yet, it cannot be read, or is too long for a name."""
        if self._file is None:
            return b""
        try:
            with self._file.open("rb") as file:
                name = file.read(MAX_NAME_BYTES + 1).strip()
        except FileNotFoundError:
            return b""
        except OSError as error:
            log.warning("kvprefetch: weights_file cannot be read: %s: weights_file=%s", error.strerror, self._file)
            return b""
        if len(name) > MAX_NAME_BYTES:
            log.warning(
                "kvprefetch: weights_file is too long: weights_file=%s max_bytes=%d", self._file, MAX_NAME_BYTES
            )
            return b""
        return name
