"""Store keys of one rank, and its share of the saves among ranks with the same keys.

    [cache_prefix@]model@tp_rank:R@pcp0@dcp0@pp_rank:Q@group:0@[fp:FINGERPRINT@]HASH

Without the fingerprint's part this is, byte for byte, the key of vLLM's MooncakeStoreConnector.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankKeys:
    """`prefix` + the hash's hex digits is a key of vLLM's own connector.

    `replicas` ranks hold the same bytes under the same keys; this one fills the save slots with
    slot % replicas == replica_index.
    """

    prefix: str
    replicas: int
    replica_index: int

    def of(self, fingerprint: str) -> str:
        """Return the prefix of keys that only engines with this fingerprint (hex digits) have."""
        return f"{self.prefix}fp:{fingerprint}@"

    def saves(self, slot: int) -> bool:
        """Whether this rank copies the block that goes through this slot."""
        return slot % self.replicas == self.replica_index


def rank_keys(
    *, model: str, tp_rank: int, tp_size: int, pp_rank: int, kv_heads: int, cache_prefix: str = ""
) -> RankKeys:
    """Keys of one rank for KV-cache group 0, without context parallelism.

    `model`: path or name as configured; `kv_heads`: of the whole model, 1 for a pure MLA cache, which is the same on
    every tensor-parallel rank.  With fewer KV heads than ranks, tp_size // kv_heads neighbours hold the same heads.
    """
    replicas = max(1, tp_size // kv_heads)
    name = model.rstrip("/").split("/")[-1]
    namespace = f"{cache_prefix}@" if cache_prefix else ""
    prefix = f"{namespace}{name}@tp_rank:{tp_rank // replicas}@pcp0@dcp0@pp_rank:{pp_rank}@group:0@"
    return RankKeys(prefix, replicas, tp_rank % replicas)
