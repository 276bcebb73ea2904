"""Keys of `key_format` "vllm", and which of the ranks with equal bytes saves them, against upstream's own classes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvprefetch.connector.engine.groups import served
from kvprefetch.connector.identity import namespace

data = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data")

from tests.connector.test_connector import kv_cache_config, vllm_config  # noqa: E402

DIGEST = bytes(range(32))


def upstream(config: Any, cache: Any, tp_rank: int, pp_rank: int, cache_prefix: str) -> list[tuple[str, list[int]]]:
    """For each group the key of DIGEST and the chunks (of 64) this rank puts, as MooncakeStoreWorker computes them."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker

    worker = SimpleNamespace(
        dcp_size=config.parallel_config.decode_context_parallel_size,
        pcp_size=config.parallel_config.prefill_context_parallel_size,
        pp_size=config.parallel_config.pipeline_parallel_size,
        tp_size=config.parallel_config.tensor_parallel_size,
        tp_rank=tp_rank,
        num_kv_head=config.model_config.get_total_num_kv_heads(),
        hash_block_size=32,
        _kv_cache_groups=cache.kv_cache_groups,
    )
    steps = [
        MooncakeStoreWorker._spec_tp_replication_factor(worker, group.kv_cache_spec) for group in cache.kv_cache_groups
    ]
    vars(worker)["_group_tp_replication_factors"] = steps
    metadata = data.KeyMetadata(
        model_name=config.model_config.model.rstrip("/").split("/")[-1],
        tp_rank=tp_rank,
        pcp_rank=config.parallel_config.rank // worker.tp_size % worker.pcp_size,
        dcp_rank=tp_rank % worker.dcp_size,
        pp_rank=pp_rank,
        cache_prefix=cache_prefix,
    )
    found = []
    databases = vars(worker)["token_dbs"] = MooncakeStoreWorker._build_token_databases(worker, metadata, None)
    MooncakeStoreWorker._init_lookup_key_prefixes(worker)
    for group, (db, step) in enumerate(zip(databases, steps, strict=True)):
        # put_step_rank as in KVCacheStoreSendingThread (worker.py: (self.tp_rank + g_idx) % put_step)
        chunks = db.process_tokens(64 * 32, [DIGEST] * 64, put_step=step, put_step_rank=(tp_rank + group) % step)
        found.append((db.key_for(DIGEST), [start // 32 for start, _, _ in chunks]))
        assert db.key_for(DIGEST).removesuffix(f"@{DIGEST.hex()}") in vars(worker)["_lookup_key_prefixes"][group]
    return found


def groups_of(kinds: str) -> list[Any]:
    """Layers of full attention (F), windows (W), MLA (M) and its windows (m), states (S), and a wrapped M and m (U).

    Outside the prefix cache: windows that vLLM computes again after a hit (a), rings (r).
    """
    from vllm.v1 import kv_cache_interface as vllm

    heads = {"block_size": 32, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    made = {
        "F": vllm.FullAttentionSpec(**heads),
        "W": vllm.SlidingWindowSpec(**heads, sliding_window=64),
        "M": vllm.MLAAttentionSpec(**heads),
        "m": vllm.SlidingWindowMLASpec(**heads, sliding_window=64),
        "S": vllm.MambaSpec(block_size=32, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align"),
    }
    made["a"] = dataclasses.replace(made["m"], bounded_replay=True)
    made["r"] = vllm.CircularBufferSpec(**{**heads, "block_size": 8})
    made["U"] = vllm.UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": made["M"], "b": made["M"]})
    return [made[kind] for kind in kinds]


@pytest.mark.parametrize("cache_prefix", ["", "prod"])
@pytest.mark.parametrize(
    ("tp_size", "kv_heads", "kinds", "dcp_size"),
    [
        (1, 8, "F", 1), (2, 2, "F", 1), (8, 2, "F", 1), (4, 1, "F", 1), (4, 1, "M", 1), (4, 8, "U", 1),
        (1, 1, "FWS", 1), (4, 4, "FSS", 1), (4, 2, "FWW", 1), (4, 8, "Mm", 1), (4, 8, "UmM", 1),
        (4, 2, "FS", 1), (2, 2, "MS", 1), (2, 8, "MW", 1), (4, 1, "SF", 1), (8, 2, "MFS", 1),
        (2, 1, "F", 2), (8, 2, "F", 4), (4, 1, "M", 2), (4, 1, "U", 4), (4, 1, "MS", 2), (8, 1, "FM", 4),
        (4, 1, "arMa", 1), (4, 2, "rSFS", 1),
    ],
)  # fmt: skip
def test_keys_equal_upstreams(tp_size: int, kv_heads: int, kinds: str, dcp_size: int, cache_prefix: str) -> None:
    """TP1, TP2, fewer KV heads than ranks, MLA, groups, DCP: byte-equal keys, each copied by as many ranks as upstream.

    Which of these ranks it is decides nothing: they hold the same bytes. Here it goes by the slot, there by the chunk.
    Where unlike numbers of ranks hold a group's bytes, more ranks copy a block than upstream's, and the daemon puts it
    once.
    """
    slots = range(64)
    cache = served(kv_cache_config(groups_of(kinds)))
    for pp_rank in (0, 1):
        put: list[str] = []
        theirs: list[str] = []
        for tp_rank in range(tp_size):
            parallel = {"tensor_parallel_size": tp_size, "pipeline_parallel_size": 2, "rank": pp_rank * tp_size}
            parallel["decode_context_parallel_size"] = dcp_size
            config = vllm_config(Path("s"), model={"model": "org/Tiny-8B/"}, parallel=parallel)
            config.model_config.get_total_num_kv_heads = lambda: kv_heads
            ours = namespace.keys_of(config, cache, tp_rank, cache_prefix, upstream_keys=True)
            for group, (key, chunks) in enumerate(upstream(config, cache, tp_rank, pp_rank, cache_prefix)):
                prefix = ours.prefixes[group]
                assert prefix + DIGEST.hex() == key
                mine = [slot for slot in slots if slot % ours.replicas == ours.replica_index]
                assert len(mine) >= len(chunks)
                put += [f"{prefix}{slot}" for slot in mine]
                theirs += [f"{key.removesuffix(DIGEST.hex())}{chunk}" for chunk in chunks]
        assert sorted(set(put)) == sorted(theirs)
        assert len(set(put)) == len(put) or (dcp_size == 1 and ("S" in kinds or kinds == "MW"))


def test_each_rank_of_prefill_context_parallelism_has_upstreams_key() -> None:
    """Where upstream counts ranks right; elsewhere ours have their own keys, and upstream's format is refused."""
    cache, sizes = kv_cache_config(groups_of("M"), 1), {"tensor_parallel_size": 2, "prefill_context_parallel_size": 2}
    for rank in range(4):
        config = vllm_config(Path("s"), model={"model": "org/Tiny-8B/"}, parallel={**sizes, "rank": rank})
        ours = namespace.keys_of(config, cache, rank % 2, "", upstream_keys=True)
        ((key, _),) = upstream(config, cache, rank % 2, 0, "")
        assert ours.prefixes[0] + DIGEST.hex() == key
    for more in ({"decode_context_parallel_size": 4}, {"pipeline_parallel_size": 2}):
        found = list[str]()
        for rank in range(4 * more.get("pipeline_parallel_size", 1)):
            config = vllm_config(Path("s"), parallel={**sizes, **more, "rank": rank})
            found += namespace.keys_of(config, cache, rank % 2, "").prefixes
            with pytest.raises(
                ValueError, match=r"counts wrong: prefill_context_parallel_size=2 .*leave key_format out"
            ):
                namespace.keys_of(config, cache, rank % 2, "", upstream_keys=True)
        # Of MLA all ranks hold the same bytes, but for the tokens that context parallelism divides.
        assert len(set(found)) == 4
        assert more.keys() == {"pipeline_parallel_size"} or [each.partition("@dcp")[2][0] for each in found] == [
            "0",
            "2",
            "1",
            "3",
        ]
