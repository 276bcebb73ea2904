"""Store keys of one rank, and which of the blocks with these keys this rank saves.

    [cache_prefix@]model@tp_rank:R@pcp0@dcp0@pp_rank:Q@group:0@[fp:FINGERPRINT@]HASH

All but the part with the fingerprint is, byte for byte, the key of vLLM's MooncakeStoreConnector.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankKeys:
    """`prefix` + the hash's hex digits is a key of vLLM's own connector.

    Of `put_factor` ranks that hold the same bytes, and so have the same keys, this one saves what goes through the save
    slots with slot % put_factor == put_turn.
    """

    prefix: str
    put_factor: int
    put_turn: int

    def of(self, fingerprint: str) -> str:
        """Return the prefix of keys that only engines with this fingerprint (hex digits) have."""
        return f"{self.prefix}fp:{fingerprint}@"

    def saves(self, slot: int) -> bool:
        """Whether the block that goes through this slot is this rank's to copy."""
        return slot % self.put_factor == self.put_turn


def rank_keys(
    *, model: str, tp_rank: int, tp_size: int, pp_rank: int, kv_heads: int, mla: bool, cache_prefix: str = ""
) -> RankKeys:
    """Keys of one rank for KV-cache group 0, without context parallelism.

    `model` is the model's path or name as configured, `kv_heads` the model's total KV heads.  A pure MLA cache is the
    same on every tensor-parallel rank; with fewer KV heads than ranks, tp_size // kv_heads neighbours hold the same
    heads.
    """
    factor = tp_size if mla else max(1, tp_size // kv_heads)
    name = model.rstrip("/").split("/")[-1]
    namespace = f"{cache_prefix}@" if cache_prefix else ""
    prefix = f"{namespace}{name}@tp_rank:{tp_rank // factor}@pcp0@dcp0@pp_rank:{pp_rank}@group:0@"
    return RankKeys(prefix, factor, tp_rank % factor)
