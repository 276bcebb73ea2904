"""What an operator orders of a running daemon: blocks staged ahead for an engine, or a namespace removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from ..shmring.messages import Message, Purge, Report, Warm
from .engine.session import EngineSession
from .pools import Pools
from .store.buckets import Removal
from .store.client import Store

Reply = Callable[[Message], None]


def warm(sessions: Sequence[EngineSession], order: Warm, reply: Reply) -> None:
    """Stage blocks ahead for the one engine that the order names. Raises ProtocolError for one that is too large."""
    named = _named(sessions, order.engine)
    if len(named) == 1:
        named[0].warm(order, reply)
        return
    attached = ", ".join(sorted(each.engine_id for each in sessions)) or "none"
    wanted = f"engine={order.engine!r}" if order.engine else "name one with --engine"
    reply(Report(ok=False, text=f"not one engine but {len(named)}: {wanted}; attached: {attached}"))


def purge(sessions: Sequence[EngineSession], store: Store, pools: Pools, order: Purge, reply: Reply) -> None:
    """Remove every value of the order's namespaces, and of those of the engine that it names."""
    named = _named(sessions, order.engine) if order.engine else []
    if order.engine and len({session.engine_id for session in named}) != 1:
        found = "several engines have" if named else "no attached engine has"
        reply(Report(ok=False, text=f"{found} an id that begins so: engine={order.engine!r}"))
        return
    prefixes = sorted({*order.prefixes, *(prefix for session in named for prefix in session.shape.key_prefixes)})

    def purged(future: Future[Removal]) -> None:
        removal = future.result() if future.exception() is None else Removal(False, 0)
        if removal == (True, 0):
            said = "there was no key"
        else:
            said = "every key is gone" if removal else "not confirmed: time was up, or the store did not answer"
            said += f"; {removal.keys} removed"
        reply(Report(ok=removal.gone, text=f"{said}: {', '.join(prefixes)}"))

    pools.save(partial(store.remove_matching, prefixes, order.timeout_ms / 1e3), purged)


def _named(sessions: Sequence[EngineSession], engine: str) -> list[EngineSession]:
    """Those with this id, else those whose id begins so: `top` may show the start of one. All for ""."""
    return [each for each in sessions if each.engine_id == engine] or [
        each for each in sessions if each.engine_id.startswith(engine)
    ]
