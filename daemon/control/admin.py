"""Questions and commands of users: status of engines and store, the mode, blocks to warm, values to remove."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...kv.keys import owner
from ...shmring.wire.admin import Remove, Removed, Report, SetMode, StatQuery, StatusQuery, Warm
from ...shmring.wire.codec import Message
from ...shmring.wire.records import ProtocolError
from ..engine.epoch import Epoch
from ..work.calls import Call, Kind
from . import report
from .epochs import Epochs, Shared

Query = StatusQuery | StatQuery
Command = SetMode | Warm | Remove
Reply = Callable[[Message], None]


class Admin:
    """Serves each user for that user's engines. `uid` is the user's id; None is an operator, for all engines."""

    def __init__(self, shared: Shared, epochs: Epochs) -> None:
        self._shared, self._epochs = shared, epochs
        # Users with a running removal. Each may have one, since saves of all users wait behind it.
        self._removing: set[int | None] = set()

    def answer(self, query: Query, uid: int | None, now_ns: int) -> Message:
        if isinstance(query, StatusQuery):
            count = len(self._epochs.attached())
            return report.status(self._shared, self._epochs.attached(uid), count, uid, now_ns)
        return report.segments(self._epochs.attached(uid), now_ns)

    def command(self, command: Command, uid: int | None, reply: Reply) -> None:
        """Carry out a command, and reply now or later. Raises ProtocolError for one that the user may not give."""
        if isinstance(command, Warm):
            self._warm(command, uid, reply)
        elif isinstance(command, Remove):
            self._remove(command, uid, reply)
        elif uid is not None:
            raise ProtocolError(f"only root and the daemon's own user may do this: uid={uid}")
        else:
            before = self._shared.mode
            self._epochs.switch(command.mode)
            reply(Report(ok=True, text=f"mode: {command.mode} (was {before})"))

    def _warm(self, command: Warm, uid: int | None, reply: Reply) -> None:
        """Warm blocks for the one engine that the command names. Raises ProtocolError for too many blocks."""
        epochs = self._epochs.attached(uid)
        named = _named(epochs, command.engine)
        if len(named) == 1:
            named[0].warm(command, reply)
            return
        attached = ", ".join(sorted(each.engine.engine_id for each in epochs)) or "none"
        wanted = f"engine={command.engine!r}" if command.engine else "name one with --engine"
        reply(Report(ok=False, text=f"not one engine but {len(named)}: {wanted}; attached: {attached}"))

    def _remove(self, command: Remove, uid: int | None, reply: Reply) -> None:
        """Remove the values of these keys; a user other than an operator may name those of its own engines."""
        error = ""
        mine = owner(uid, shared=self._shared.config.namespaces == "shared") if uid is not None else ""
        if uid is not None and not mine:
            error = f'with namespaces = "shared" only root and the daemon\'s user may remove values: uid={uid}'
        elif other := next((key for key in command.keys if not key.startswith(mine)), ""):
            error = f"only root and the daemon's user may remove another user's values: uid={uid} key={other!r}"
        elif uid in self._removing:
            error = f"another removal of this user is running: uid={uid}"
        if error:
            reply(Report(ok=False, text=error))
            return

        def removed(result: tuple[int, int] | BaseException) -> None:
            self._removing.discard(uid)
            if isinstance(result, BaseException):
                reply(Report(ok=False, text=f"the store removed nothing: {result}"))
            else:
                reply(Removed(removed=result[0], failed=result[1]))

        self._removing.add(uid)
        self._shared.pools.start(Call(Kind.SAVE, partial(self._shared.store.remove, command.keys), removed))


def _named(epochs: Sequence[Epoch], engine: str) -> list[Epoch]:
    """Return the epochs with this engine id, else those with an id that begins so, as `top` may show it; all for ""."""
    return [each for each in epochs if each.engine.engine_id == engine] or [
        each for each in epochs if each.engine.engine_id.startswith(engine)
    ]
