"""`Client`: what a program asks of a running daemon."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvprefetch.daemon.door.envelope import Answered, Prefetch
from kvprefetch.shmring.wire.admin import Reload, Report, SetMode, Status
from kvprefetch.shmring.wire.checks import TTL_MS, Mode

from .control import TIMEOUT_S, Unavailable, ask, find_socket, look
from .door import Announced, Door

LOOK_S = 0.2


@dataclass(frozen=True)
class Health:
    """Whether the daemon is `well`, as it was asked for, and why not. `status` is None where no daemon answers.

    `problems` may also name faults that leave it well.
    """

    well: bool
    problems: tuple[str, ...]
    status: Status | None


class Client:
    """Asks the daemon behind a control socket: by default the one that an engine of this user finds.

    Each call connects anew, and any thread may call.
    """

    def __init__(self, socket: str | os.PathLike[str] | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.socket = find_socket() if socket is None else Path(socket)
        self._timeout_s = timeout_s

    def status(self, *, wait_s: float = 0.0, slowest: bool = False) -> Status:
        """Return what the daemon shows of itself, and wait so long for one that starts. Raises Unavailable.

        `alive` is False in the status of a daemon that died.  `slowest`: with the requests that waited longest.
        """
        return self._seen(lambda status: status.alive, wait_s, slowest)

    def health(self, *, engines: int = 0, wait_s: float = 0.0, alive: bool = False) -> Health:
        """Say whether engines can count on the daemon, and so many of them are attached; wait so long for that.

        `alive` asks instead whether it works or may recover by itself: otherwise only a restart helps.
        """

        def well(status: Status) -> bool:
            return (status.healthy if alive else status.ready) and status.engine_count >= engines

        try:
            seen = self._seen(well, wait_s)
        except Unavailable as error:
            return Health(False, (str(error),), None)
        few = f"fewer than {engines}; an engine that is not attached says why in its own log"
        return Health(well(seen), (*seen.problems, *([few] if seen.engine_count < engines else [])), seen)

    def prefetch(self, prompts: Sequence[Prefetch], *, engine: str = "", ttl_ms: int = TTL_MS) -> Announced:
        """Announce up to 64 prompts in one message, and return after the store's look-up, half a second at most.

        `engine` (an id, or its start) and `ttl_ms` hold for prompts that do not say it themselves.  Raises Busy where
        the door takes no more prompts of this user for a second, and Unavailable where no door answers, or where it
        refuses all of the message.
        """
        payloads = [{"engine": engine, "ttl_ms": ttl_ms, **prompt.model_dump(exclude_unset=True)} for prompt in prompts]
        return Announced(Door(self.socket, self._timeout_s), payloads)

    def mode(self, mode: Mode) -> Report:
        """Switch the daemon, as the command does; only root and its own user may. Raises Unavailable."""
        return ask(self.socket, SetMode(mode=mode), Report, self._timeout_s)

    def reload(self) -> Report:
        """Let the daemon read its configuration and open its log's file again; `ok`: it took it over. As `mode`."""
        return ask(self.socket, Reload(), Report, self._timeout_s)

    def _seen(self, enough: Callable[[Status], bool], wait_s: float, ids: bool = False) -> Status:
        """Look until the status is `enough`, for `wait_s` at most; return what was seen last. Raises Unavailable."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                seen = look(self.socket, ids=ids, timeout_s=self._timeout_s)
                if enough(seen) or time.monotonic() >= deadline:
                    return seen
            except Unavailable:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(LOOK_S)


class AsyncClient:
    """The same for asyncio: each call is one of a `Client` on a thread. A cancelled one ends there by itself."""

    def __init__(self, socket: str | os.PathLike[str] | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._client = Client(socket, timeout_s=timeout_s)

    async def status(self, *, wait_s: float = 0.0, slowest: bool = False) -> Status:
        return await asyncio.to_thread(self._client.status, wait_s=wait_s, slowest=slowest)

    async def health(self, *, engines: int = 0, wait_s: float = 0.0, alive: bool = False) -> Health:
        return await asyncio.to_thread(self._client.health, engines=engines, wait_s=wait_s, alive=alive)

    async def prefetch(self, prompts: Sequence[Prefetch], *, engine: str = "", ttl_ms: int = 5_000) -> Announced:
        return await asyncio.to_thread(self._client.prefetch, prompts, engine=engine, ttl_ms=ttl_ms)

    async def wait(self, sent: Announced, timeout_s: float = math.inf) -> list[Answered]:
        """As `Announced.wait`, which would stop the event loop."""
        return await asyncio.to_thread(sent.wait, timeout_s)

    async def mode(self, mode: Mode) -> Report:
        return await asyncio.to_thread(self._client.mode, mode)

    async def reload(self) -> Report:
        return await asyncio.to_thread(self._client.reload)
