"""Namespace of a rank's blocks in the store: the key prefix, and the fingerprint behind it."""

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
    """`fingerprint` is empty for vLLM's own keys. `unknown`: the reason why there is no fingerprint."""

    prefix: str
    fingerprint: dict[str, str]
    unknown: str = ""


def fingerprinted(
    vllm_config: VllmConfig, keys: RankKeys, running: Callable[[], Mapping[str, str]], start: str
) -> Namespace:
    """Return the namespace that only engines with equal KV share. Reads the model's files.

    `running` returns the rank's part of the fingerprint.  On an error in it or in the rest, the namespace belongs to
    this engine start alone: `start` (32 hex digits) is the same on all its ranks.
    """
    try:
        found = fingerprint.fitting({**running(), **fingerprint.of_model(vllm_config)})
        return Namespace(keys.of(fingerprint.digest(found)), found)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        shown = why.encode("ascii", "replace").decode()[:64]
        return Namespace(keys.of(start), {"start": start, "unknown": shown}, why)


def vllms_own(keys: RankKeys) -> Namespace:
    """Return the namespace of vLLM's MooncakeStoreConnector, where no fingerprint keeps other engines out."""
    return Namespace(keys.prefix, {})


def log_sharing(where: Namespace, *, first_rank: bool) -> None:
    """Log which engines share this one's stored KV. Ranks nearly always agree, so the others log less."""
    if where.unknown:
        log.log(
            logging.WARNING if first_rank else logging.INFO,
            "kvprefetch: no other engine start finds the KV that this one stores, because its fingerprint is not known"
            ": %s. Serve the model from files that this process can read; or, if every engine with this model name has "
            'the same KV, set key_format to "vllm"',
            where.unknown,
        )
    elif first_rank and where.fingerprint:
        text = " ".join(f"{name}={value}" for name, value in sorted(where.fingerprint.items()))
        log.info("kvprefetch: stored KV is shared with engines that have all of this: %s", text)
    elif first_rank:
        log.warning(
            'kvprefetch: key_format is "vllm": every engine with keys that begin with %s shares the stored KV, and '
            "nothing checks that its KV is the same: give each kind of engine (weights, configuration, dtype, layout, "
            "parallel split) a cache_prefix of its own",
            where.prefix,
        )
