"""Namespace of a rank's blocks in the store: the prefix of their keys, and the fingerprint behind it.

    [cache_prefix@]model@tp_rank:R@pcp0@dcp0@pp_rank:Q@group:G@[fp:FINGERPRINT@]HASH

Without the fingerprint's part this is, byte for byte, the key of vLLM's MooncakeStoreConnector.  The daemon adds the
parts for the engine's user and for its weights since a reset (daemon/store/keys.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from . import fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger("vllm.kvprefetch")

_TP_RANK, _FIRST_GROUP = "@tp_rank:", "@group:0@"


@dataclass(frozen=True)
class RankKeys:
    """`prefix` + the hash's hex digits is a key of vLLM's own connector, of a block of KV group 0.

    `tp_ranks`: that keys of each group name.  `replicas` ranks hold the same bytes of all groups under the same keys;
    this one fills the save slots with slot % replicas == replica_index.
    """

    prefix: str
    replicas: int
    replica_index: int
    tp_ranks: tuple[int, ...] = (0,)

    def of(self, fingerprint: str) -> str:
        """Return the prefix of keys that only engines with this fingerprint (hex digits) have."""
        return f"{self.prefix}fp:{fingerprint}@"

    def saves(self, slot: int) -> bool:
        """Whether this rank copies the block that goes through this slot."""
        return slot % self.replicas == self.replica_index


def rank_keys(
    *, model: str, tp_rank: int, pp_rank: int, replicas: Sequence[int] = (1,), cache_prefix: str = ""
) -> RankKeys:
    """Keys of one rank, without context parallelism.

    `model`: path or name as configured; `replicas`: for each KV group the number of neighbouring ranks that hold the
    same bytes.  One number is a multiple of the other where they differ.
    """
    name = model.rstrip("/").split("/")[-1]
    namespace = f"{cache_prefix}@" if cache_prefix else ""
    tp_ranks = tuple(tp_rank // each for each in replicas)
    prefix = f"{namespace}{name}{_TP_RANK}{tp_ranks[0]}@pcp0@dcp0@pp_rank:{pp_rank}{_FIRST_GROUP}"
    return RankKeys(prefix, min(replicas), tp_rank % min(replicas), tp_ranks)


def of_group(prefix: str, group: int, tp_rank: int) -> str:
    """Return the prefix of another group's keys, with that group's rank, from that of group 0."""
    before, _, rest = prefix.rpartition(_FIRST_GROUP)
    name, _, ranks = before.rpartition(_TP_RANK)
    return f"{name}{_TP_RANK}{tp_rank}{ranks[ranks.index('@') :]}@group:{group}@{rest}"


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
        return Namespace(keys.of(start), {}, " ".join(f"{type(error).__name__}: {error}".split())[:400])


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
