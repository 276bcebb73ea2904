"""Namespace of a rank's blocks in the store: what stands before the hash in their keys, and what it stands for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from . import fingerprint
from .keys import RankKeys

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger("vllm.kvprefetch")


class Namespace(NamedTuple):
    """`fingerprint` is empty in a namespace of vLLM's own keys. `unknown`: why there is no fingerprint."""

    prefix: str
    fingerprint: dict[str, str]
    unknown: str = ""


def fingerprinted(
    vllm_config: VllmConfig, keys: RankKeys, running: Callable[[], Mapping[str, str]], start: str
) -> Namespace:
    """Return the namespace that only engines with equal KV share. Reads the model's files.

    `running` returns the part of the fingerprint that the rank knows.  Where it or the rest cannot be had, the
    namespace is that of one engine start, all ranks of which have the same `start` (32 hex digits), and of nobody else.
    """
    try:
        found = fingerprint.fitting({**running(), **fingerprint.of_model(vllm_config)})
        return Namespace(keys.of(fingerprint.digest(found)), found)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        shown = why.encode("ascii", "replace").decode()[:64]
        return Namespace(keys.of(start), {"start": start, "unknown": shown}, why)


def vllms_own(keys: RankKeys) -> Namespace:
    """Return the namespace that vLLM's MooncakeStoreConnector uses, which no fingerprint keeps others out of."""
    return Namespace(keys.prefix, {})


def say(where: Namespace, *, first_rank: bool) -> None:
    """Tell the engine's operator who shares its stored KV. Ranks agree as a rule, so the others say less."""
    if where.unknown:
        log.log(
            logging.WARNING if first_rank else logging.INFO,
            "kvprefetch: no other start of an engine finds the KV that this one stores, because what decides its bytes "
            "is not known: %s. Serve the model from files that this process can read; or, where every engine with this "
            'model name has the same KV, set key_format to "vllm"',
            where.unknown,
        )
    elif first_rank and where.fingerprint:
        said = " ".join(f"{name}={value}" for name, value in sorted(where.fingerprint.items()))
        log.info("kvprefetch: stored KV is shared with engines that have all of this: %s", said)
    elif first_rank:
        log.warning(
            'kvprefetch: key_format is "vllm": stored KV is shared with every engine whose keys begin with %s, and '
            "nothing checks that its KV is the same: give each kind of engine (weights, configuration, dtype, layout, "
            "parallel split) a cache_prefix of its own",
            where.prefix,
        )
