"""Store keys of one rank, byte for byte those of vLLM's MooncakeStoreConnector, and which rank puts which chunk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankKeys:
    """`prefix` + the hash's hex digits is a key.

    Of `put_factor` ranks that hold the same bytes, this one puts the chunks i with i % put_factor == put_turn.
    """

    prefix: str
    put_factor: int
    put_turn: int


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
