"""Keys, and which of the ranks that hold the same bytes saves them, against upstream's own classes and a removal."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvprefetch.connector.namespace import RankKeys, rank_keys
from kvprefetch.daemon.store import removal

data = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data")

DIGEST = bytes(range(32))


def upstream(
    *, tp_rank: int, tp_size: int, pp_rank: int, kv_heads: int, mla: bool, cache_prefix: str, model: str
) -> Any:
    """Key of DIGEST and the chunks (of 64) this rank puts, as MooncakeStoreWorker computes them."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    common = {"block_size": 32, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    spec = MLAAttentionSpec(**common) if mla else FullAttentionSpec(**common)
    group = SimpleNamespace(kv_cache_spec=spec)
    worker = SimpleNamespace(
        dcp_size=1, tp_size=tp_size, tp_rank=tp_rank, num_kv_head=kv_heads, hash_block_size=32, _kv_cache_groups=[group]
    )
    factor = MooncakeStoreWorker._spec_tp_replication_factor(worker, spec)
    worker._group_tp_replication_factors = (factor,)
    metadata = data.KeyMetadata(
        model_name=model.rstrip("/").split("/")[-1],
        tp_rank=tp_rank,
        pcp_rank=0,
        dcp_rank=0,
        pp_rank=pp_rank,
        cache_prefix=cache_prefix,
    )
    (db,) = MooncakeStoreWorker._build_token_databases(worker, metadata, None)
    # put_step_rank as in KVCacheStoreSendingThread (worker.py: (self.tp_rank + g_idx) % put_step)
    chunks = db.process_tokens(64 * 32, [DIGEST] * 64, put_step=factor, put_step_rank=tp_rank % factor)
    return db.key_for(DIGEST), [start // 32 for start, _, _ in chunks]


@pytest.mark.parametrize("cache_prefix", ["", "prod"])
@pytest.mark.parametrize(
    ("tp_size", "kv_heads", "mla"), [(1, 8, False), (2, 2, False), (8, 2, False), (4, 1, False), (4, 1, True)]
)
def test_keys_equal_upstreams(tp_size: int, kv_heads: int, mla: bool, cache_prefix: str) -> None:
    """TP1, TP2, fewer KV heads than ranks, and MLA: byte-equal keys, each put once, and by as many ranks as upstream.

    Which of these ranks it is decides nothing: they hold the same bytes. Here it goes by the slot, there by the chunk.
    """
    slots = range(64)
    for pp_rank in (0, 1):
        put: list[str] = []
        theirs: list[str] = []
        for tp_rank in range(tp_size):
            rank: dict[str, Any] = {"tp_rank": tp_rank, "tp_size": tp_size, "pp_rank": pp_rank, "kv_heads": kv_heads}
            rank |= {"model": "org/Tiny-8B/", "cache_prefix": cache_prefix}
            ours = rank_keys(**rank)
            key, chunks = upstream(**rank, mla=mla)
            assert ours.prefix + DIGEST.hex() == key
            mine = [slot for slot in slots if ours.saves(slot)]
            assert len(mine) == len(chunks)
            put += [f"{ours.prefix}{slot}" for slot in mine]
            theirs += [f"{key.removesuffix(DIGEST.hex())}{chunk}" for chunk in chunks]
        assert sorted(put) == sorted(theirs)
        assert len(set(put)) == len(put)


def test_a_removal_takes_the_keys_of_one_fingerprint_of_all_ranks_and_no_others() -> None:
    """Of the keys of vLLM's format too, which are those of earlier releases."""

    def keys(tp_rank: int) -> RankKeys:
        return rank_keys(model="m", tp_rank=tp_rank, tp_size=2, pp_rank=0, kv_heads=2, cache_prefix="a.b")

    one, other = "1" * 32, "2" * 32
    stored = {
        "vllm": [keys(rank).prefix + DIGEST.hex() for rank in (0, 1)],
        "one": [keys(rank).of(one) + DIGEST.hex() for rank in (0, 1)],
        "other": [keys(rank).of(other) + DIGEST.hex() for rank in (0, 1)],
    }
    for name, prefix in (("vllm", keys(0).prefix), ("one", keys(0).of(one)), ("other", keys(1).of(other))):
        _, pattern = removal.patterns([prefix])
        taken = [key for all_of in stored.values() for key in all_of if re.fullmatch(pattern, key)]
        assert taken == stored[name]
