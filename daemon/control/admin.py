"""Questions and commands of users: status of engines and store, the mode, blocks to warm, namespaces to purge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...shmring.wire.admin import NamespacesQuery, Purge, Report, SetMode, StatQuery, StatusQuery, Warm
from ...shmring.wire.codec import Message
from ...shmring.wire.records import ProtocolError
from ..engine.epoch import Epoch
from ..store.namespaces import name_of
from ..store.removal import Removal
from ..work.calls import Call, Kind
from . import report
from .epochs import Epochs, Shared

Query = StatusQuery | StatQuery | NamespacesQuery
Command = SetMode | Warm | Purge
Reply = Callable[[Message], None]


class Admin:
    """Serves each user for that user's engines. `uid` is the user's id; None is an operator, for all engines."""

    def __init__(self, shared: Shared, epochs: Epochs) -> None:
        self._shared, self._epochs = shared, epochs
        # Users with a running purge. Each may have one, since saves of all users wait behind it.
        self._purging: set[int | None] = set()

    def answer(self, query: Query, uid: int | None, now_ns: int) -> Message:
        if isinstance(query, StatusQuery):
            return report.status(self._shared, self._epochs.attached(uid), len(self._epochs.attached()))
        if isinstance(query, StatQuery):
            return report.segments(self._epochs.attached(uid), now_ns)
        return self._shared.namespaces.page(uid, query.after)

    def command(self, command: Command, uid: int | None, reply: Reply) -> None:
        """Carry out a command, and reply now or later. Raises ProtocolError for one that the user may not give."""
        if isinstance(command, Warm):
            self._warm(command, uid, reply)
        elif isinstance(command, Purge):
            self._purge(command, uid, reply)
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

    def _purge(self, command: Purge, uid: int | None, reply: Reply) -> None:
        """Remove every value of the command's namespaces, and of those of the engine that it names.

        A user may name namespaces of its own. Once its values are gone a namespace belongs to nobody, unless an engine
        uses it or attached with it meanwhile.
        """
        namespaces = self._shared.namespaces
        named = _named(self._epochs.attached(uid), command.engine) if command.engine else []
        mine = {known.name for known in namespaces.known(command.prefixes) if known.uid == uid}
        error = ""
        if command.engine and len({epoch.engine.engine_id for epoch in named}) != 1:
            found = "several engines have" if named else "no attached engine has"
            error = f"{found} an id that begins so: engine={command.engine!r}"
        elif uid is not None and (others := sorted({*map(name_of, command.prefixes)} - mine)):
            names = ", ".join(others)
            error = f"only root and the daemon's user may remove another user's namespace: uid={uid}: {names}"
        elif uid in self._purging:
            error = f"another purge of this user is running: uid={uid}"
        if error:
            reply(Report(ok=False, text=error))
            return
        prefixes = sorted({*command.prefixes, *(prefix for epoch in named for prefix in epoch.ranks.key_prefixes)})
        in_use = {name for epoch in self._epochs.attached() for name in epoch.engine.namespaces}
        free = [known for known in namespaces.known(prefixes) if known.name not in in_use]

        def purged(result: Removal | BaseException) -> None:
            self._purging.discard(uid)
            removal = Removal(False, 0) if isinstance(result, BaseException) else result
            if removal:
                namespaces.free(free)
            if removal == (True, 0):
                text = "there was no key"
            else:
                text = "every key is gone" if removal else "not confirmed: time was up, or the store did not answer"
                text += f"; {removal.keys} removed"
            reply(Report(ok=removal.gone, text=f"{text}: {', '.join(prefixes)}"))

        if uid is not None:
            self._purging.add(uid)
        remove = partial(self._shared.store.remove_matching, prefixes, command.timeout_ms / 1e3)
        self._shared.pools.start(Call(Kind.SAVE, remove, purged))


def _named(epochs: Sequence[Epoch], engine: str) -> list[Epoch]:
    """Return the epochs with this engine id, else those with an id that begins so, as `top` may show it; all for ""."""
    return [each for each in epochs if each.engine.engine_id == engine] or [
        each for each in epochs if each.engine.engine_id.startswith(engine)
    ]
