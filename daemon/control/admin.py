"""Questions and commands of users: status of engines and store, the mode, prompts to announce, values to remove."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

from ...kv.keys import owner
from ...shmring.wire.admin import (
    Announce,
    AnnounceStep,
    Engine,
    EngineQuery,
    Reload,
    Remove,
    Removed,
    Report,
    SetMode,
    StatQuery,
    StatusQuery,
    WhyQuery,
)
from ...shmring.wire.codec import Message
from ...shmring.wire.records import ProtocolError
from ..engine import index
from ..engine.epoch import Epoch
from ..work.calls import Call, CallKind
from . import report
from .epochs import Epochs, Shared

_UNKNOWN = ": its engine left or shares by its name alone, or many requests came since, or another question is open."
MAX_NAMED, MAX_SHOWN = 16, 128  # engines in an answer, and characters of a model's name
Query = StatusQuery | StatQuery
Command = SetMode | Reload | Remove
Reply = Callable[[Message], object]


class Admin:
    """Serves each user for that user's engines. `uid` is the user's id; None is an operator, for all engines."""

    def __init__(self, shared: Shared, epochs: Epochs) -> None:
        self._shared, self._epochs = shared, epochs
        self._busy: set[int | None] = set()  # users with a removal, or a question to the store: others wait behind it
        self._reloading: list[Reply] = []

    def answer(self, query: Query, uid: int | None, now_ns: int) -> Message:
        if isinstance(query, StatusQuery):
            count = len(self._epochs.all)
            return report.status(self._shared, self._epochs.attached(uid), count, uid, now_ns)
        return report.segments(self._epochs.attached(uid), now_ns)

    def command(self, command: Command, uid: int | None, reply: Reply) -> None:
        """Carry out a command, and reply now or later. Raises ProtocolError for one that the user may not give."""
        if isinstance(command, Remove):
            self._remove(command, uid, reply)
        elif uid is not None:
            raise ProtocolError(f"only root and the daemon's own user may do this: uid={uid}")
        elif isinstance(command, Reload):
            self._reloading.append(reply)
            os.kill(os.getpid(), signal.SIGHUP)
        else:
            before = self._shared.mode
            self._epochs.switch(command.mode)
            reply(Report(ok=True, text=f"mode: {command.mode} (was {before})"))

    def reloaded(self, report: Report) -> None:
        """Answer all who asked for a reload."""
        while self._reloading:
            self._reloading.pop()(report)

    def engine(self, query: EngineQuery, uid: int | None) -> Engine | Report:
        """Return the one engine of this user's that the query fits, or why there is none."""
        epochs = self._epochs.attached(uid)
        fits = [each for each in epochs if not query.model or query.model in each.engine.models]
        if query.dp_rank is not None:
            fits = [each for each in fits if each.engine.engine_id.endswith(f"_dp{query.dp_rank}")]
        fits = _named(fits, query.engine)
        if len(fits) == 1:
            return _shown(fits[0])
        given = {"engine": query.engine, "model": query.model, "dp_rank": query.dp_rank}
        named = " ".join(f"{name}={value!r}" for name, value in given.items() if value not in ("", None))
        attached = ", ".join(sorted(map(_names, epochs))[:MAX_NAMED]) or "none"
        attached += f" and {len(epochs) - MAX_NAMED} more" if len(epochs) > MAX_NAMED else ""
        wanted = named or "name one, by engine or model"
        return Report(ok=False, text=f"not one engine but {len(fits)}: {wanted}; attached: {attached}")

    def announce(self, order: Announce, uid: int | None, fd: int, reply: Callable[[AnnounceStep], bool]) -> None:
        """Hand a prompt to the engine that it is announced to; `fd`: a memfd with its digests, which stays open."""
        for epoch in self._epochs.attached(uid):
            if epoch.engine.engine_id == order.engine and epoch.number == order.epoch and not epoch.broken:
                hashes = b"" if order.session else _digests(fd, order.hashes * order.hash_bytes)
                epoch.announce(order, hashes, reply)
                return
        text = f"this engine is not attached any more: engine={order.engine!r} epoch={order.epoch}"
        reply(AnnounceStep(number=order.number, outcome="rejected", reason=text))

    def why(self, query: WhyQuery, uid: int | None, asker: int, reply: Reply) -> None:
        """Say later what keeps engines of one user from KV that others of that stored. `asker`: the id of who asks."""
        fits = [e for e in self._epochs.attached(uid) if query.engine in (e.engine.engine_id, *e.engine.models)]
        whose = fits[0].engine.owner if fits else owner(asker, shared=self._shared.config.namespaces == "shared")
        ours = [index.entry_of(each.engine, each.parts.ranks.prefixes[0][0]) for each in fits]
        seen = reversed(fits[0].parts.lacked) if fits else ()
        lacked = next((each for each in seen if each[0] == query.request), None)
        if uid in self._busy or (query.request and (lacked is None or ours[0] is None)):
            reply(Report(ok=False, text=f"Why the store lacks blocks of it is not known{_UNKNOWN}"))
            return

        def answered(said: list[str] | BaseException) -> None:
            self._busy.discard(uid)
            text = "\n".join(said) if isinstance(said, list) else f"The store does not say why: {said}."
            reply(Report(ok=isinstance(said, list), text=text))

        self._busy.add(uid)
        mine = [each for each in ours if each is not None and each.prefix.startswith(whose)]
        run = partial(index.explain, self._shared.store, whose, mine, query.engine, lacked)
        self._shared.pools.start(Call(CallKind.LOOK_UP, run, answered))

    def _remove(self, command: Remove, uid: int | None, reply: Reply) -> None:
        """Remove the values of these keys; a user other than an operator may name those of its own engines."""
        error = ""
        mine = owner(uid, shared=self._shared.config.namespaces == "shared") if uid is not None else ""
        if uid is not None and not mine:
            error = f'with namespaces = "shared" only root and the daemon\'s user may remove values: uid={uid}'
        elif other := next((key for key in command.keys if not key.startswith(mine)), ""):
            error = f"only root and the daemon's user may remove another user's values: uid={uid} key={other!r}"
        elif uid in self._busy:
            error = f"another removal or question of this user is running: uid={uid}"
        if error:
            reply(Report(ok=False, text=error))
            return

        def removed(result: tuple[int, int] | BaseException) -> None:
            self._busy.discard(uid)
            if isinstance(result, BaseException):
                reply(Report(ok=False, text=f"the store removed nothing: {result}"))
            else:
                reply(Removed(removed=result[0], failed=result[1]))

        self._busy.add(uid)
        self._shared.pools.start(Call(CallKind.SAVE, partial(self._shared.store.remove, command.keys), removed))


def _named(epochs: Sequence[Epoch], engine: str) -> list[Epoch]:
    """Return the epochs with this engine id, else those with an id that begins so, as `top` may show it; all for ""."""
    return [each for each in epochs if each.engine.engine_id == engine] or [
        each for each in epochs if each.engine.engine_id.startswith(engine)
    ]


def _names(epoch: Epoch) -> str:
    """Return an engine's id, and its model's names as an announcement may have them."""
    models = ", ".join(
        repr(each) if len(each) < MAX_SHOWN else f"{each[:MAX_SHOWN]!r}…" for each in epoch.engine.models
    )
    return f"{epoch.engine.engine_id} (model {models})"


def _shown(epoch: Epoch) -> Engine:
    groups, scheduler = epoch.engine.groups, epoch.engine.scheduler
    return Engine(
        engine=epoch.engine.engine_id,
        epoch=epoch.number,
        block_tokens=groups.unit_tokens,
        block_bytes=epoch.memory.block_bytes * len(groups),
        max_blocks=scheduler.max_blocks,
        hash_tokens=groups.hash_tokens,
        hash_algorithm=scheduler.hash_algorithm,
        hash_start=scheduler.hash_start,
        hash_probe=scheduler.hash_probe,
    )


def _digests(fd: int, size: int) -> bytes:
    """Return the bytes of a memfd, which no read waits for. Raises ProtocolError for another file, or another size."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ProtocolError("the digests of an announcement come in a memfd") from None
    if (found := os.pread(fd, size + 1, 0)) and len(found) == size:
        return found
    raise ProtocolError(f"the digests of an announcement have another size: bytes={len(found)} expected={size}")
