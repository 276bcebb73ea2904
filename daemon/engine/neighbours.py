"""Tells engines of one namespace what the others store, so that it is no known miss to them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..planning.negative import NegativeCache


class NegativeCaches:
    """The negative caches of all engines. What one engine stores is no plain miss to others of a namespace of its.

    A lasting miss stays its engine's own: a value may be foreign to one engine only.
    """

    def __init__(self) -> None:
        self._namespaces: dict[NegativeCache, frozenset[str]] = {}

    def join(self, namespaces: Collection[str]) -> NegativeCache:
        """Return the cache of a new engine with keys in these namespaces."""
        cache = NegativeCache()
        self.move(cache, namespaces)
        return cache

    def move(self, cache: NegativeCache, namespaces: Collection[str]) -> None:
        """Note that an engine has keys in these namespaces from now on."""
        self._namespaces[cache] = frozenset(namespaces)

    def leave(self, cache: NegativeCache) -> None:
        """Forget an engine."""
        del self._namespaces[cache]

    def stored(self, by: NegativeCache, digests: Sequence[bytes], now_ns: int) -> None:
        """Tell the engine that stored these digests, and its neighbours."""
        mine = self._namespaces[by]
        for cache, theirs in self._namespaces.items():
            if not mine.isdisjoint(theirs):
                cache.stored(digests, now_ns)
