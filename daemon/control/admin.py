"""What is ordered of a running daemon: blocks staged ahead for an engine, or a namespace removed.

`epochs` are those of the engines that the ordering user may steer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...shmring.wire.admin import Purge, Report, Warm
from ...shmring.wire.codec import Message
from ..engine.epoch import Epoch
from ..store.buckets import Removal
from ..store.client import Store
from ..store.namespaces import Namespaces, name_of
from ..work.calls import Call, Kind
from ..work.pools import Pools

Reply = Callable[[Message], None]


def warm(epochs: Sequence[Epoch], order: Warm, reply: Reply) -> None:
    """Stage blocks ahead for the one engine that the order names. Raises ProtocolError for one that is too large."""
    named = _named(epochs, order.engine)
    if len(named) == 1:
        named[0].warm(order, reply)
        return
    attached = ", ".join(sorted(each.engine_id for each in epochs)) or "none"
    wanted = f"engine={order.engine!r}" if order.engine else "name one with --engine"
    reply(Report(ok=False, text=f"not one engine but {len(named)}: {wanted}; attached: {attached}"))


class Purges:
    """Removes namespaces, for operators and for their users."""

    def __init__(self, store: Store, pools: Pools, namespaces: Namespaces) -> None:
        self._store, self._pools, self._namespaces = store, pools, namespaces
        # Users with a purge on its way: each may have one, since saves wait behind it, those of others too.
        self._running: set[int | None] = set()

    def start(
        self,
        every: Sequence[Epoch],
        epochs: Sequence[Epoch],
        order: Purge,
        uid: int | None,
        reply: Reply,
    ) -> None:
        """Remove every value of the order's namespaces, and of those of the engine that it names.

        `every`: all epochs of the daemon.  The user `uid`, None for an operator, may name namespaces of its own.
        Once its values are gone a namespace belongs to nobody, unless an engine uses it or attached with it meanwhile.
        """
        named = _named(epochs, order.engine) if order.engine else []
        mine = {known.name for known in self._namespaces.known(order.prefixes) if known.uid == uid}
        error = ""
        if order.engine and len({epoch.engine_id for epoch in named}) != 1:
            found = "several engines have" if named else "no attached engine has"
            error = f"{found} an id that begins so: engine={order.engine!r}"
        elif uid is not None and (others := sorted({*map(name_of, order.prefixes)} - mine)):
            error = f"only root and the daemon's own user may remove what is another's: uid={uid}: {', '.join(others)}"
        elif uid in self._running:
            error = f"another purge of this user is running: uid={uid}"
        if error:
            reply(Report(ok=False, text=error))
            return
        prefixes = sorted({*order.prefixes, *(prefix for epoch in named for prefix in epoch.shape.key_prefixes)})
        in_use = {name for epoch in every for name in epoch.namespaces}
        free = [known for known in self._namespaces.known(prefixes) if known.name not in in_use]

        def purged(result: Removal | BaseException) -> None:
            self._running.discard(uid)
            removal = Removal(False, 0) if isinstance(result, BaseException) else result
            if removal:
                self._namespaces.free(free)
            if removal == (True, 0):
                said = "there was no key"
            else:
                said = "every key is gone" if removal else "not confirmed: time was up, or the store did not answer"
                said += f"; {removal.keys} removed"
            reply(Report(ok=removal.gone, text=f"{said}: {', '.join(prefixes)}"))

        if uid is not None:
            self._running.add(uid)
        remove = partial(self._store.remove_matching, prefixes, order.timeout_ms / 1e3)
        self._pools.start(Call(Kind.SAVE, remove, purged))


def _named(epochs: Sequence[Epoch], engine: str) -> list[Epoch]:
    """Those with this id, else those whose id begins so: `top` may show the start of one. All for ""."""
    return [each for each in epochs if each.engine_id == engine] or [
        each for each in epochs if each.engine_id.startswith(engine)
    ]
