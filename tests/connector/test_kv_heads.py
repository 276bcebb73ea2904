"""Ranks with one key hold the same KV heads in every layer of its group, as vLLM's own loader gives them to ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

vllm = pytest.importorskip("vllm.config")

from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.layers import linear  # noqa: E402
from vllm.v1 import kv_cache_interface as kinds  # noqa: E402

from kvprefetch.connector.engine import groups  # noqa: E402
from kvprefetch.connector.identity import fingerprint, namespace  # noqa: E402
from kvprefetch.connector.identity.start import Start  # noqa: E402

QUERY_HEADS = 48
SIZES: dict[str, Any] = {"block_size": 32, "head_size": 4, "dtype": torch.float32}


class Owner(torch.nn.Module):
    """A layer of attention beside its projection, as models have them."""

    def __init__(self, qkv: torch.nn.Module | None) -> None:
        super().__init__()
        self.attn = torch.nn.Identity()
        if qkv is not None:
            self.qkv_proj = qkv


class Adapted(torch.nn.Module):
    """A projection with an adapter around it."""

    def __init__(self, qkv: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = qkv


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    with vllm.set_current_vllm_config(vllm.VllmConfig()):
        yield


def projection(rank: int, ranks: int, total: int) -> linear.QKVParallelLinear:
    """vLLM's own, after its loader: each row of the weight is the number of its head."""
    with mock.patch.object(parallel_state, "_TP", SimpleNamespace(rank_in_group=rank, world_size=ranks)):
        layer = linear.QKVParallelLinear(8, 4, QUERY_HEADS, total, bias=False, params_dtype=torch.float32)
        layer.weight.data.fill_(-1)
        weight = torch.arange(total).repeat_interleave(4).float()[:, None].expand(total * 4, 8).contiguous()
        layer.weight_loader(layer.weight, weight, "k")
    return layer


def heads_of(layer: linear.QKVParallelLinear) -> tuple[int, ...]:
    found = layer.weight.data[layer.num_heads * 4 : (layer.num_heads + layer.num_kv_heads) * 4, 0]
    return tuple(sorted({int(each) for each in found}))


class Rank:
    """One rank of an engine whose groups' layers have these numbers of KV heads; -1: of MLA."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        wide: int,
        layers: Sequence[Sequence[int]],
        *,
        draft: Sequence[int] = (),
        adapted: bool = False,
        known: bool = True,
        upstream_keys: bool = False,
    ) -> None:
        made: list[Owner] = []
        drafts: list[Owner] = []
        context, members = {}, []
        self.heads: list[list[tuple[int, ...]]] = []
        for group, totals in enumerate(layers):
            specs: dict[str, Any] = {}
            self.heads.append([])
            for at, total in enumerate(totals):
                qkv = None if total < 0 else projection(rank, ranks, total)
                owner = Owner(Adapted(qkv) if adapted and qkv is not None else qkv)
                (drafts if group in draft else made).append(owner)
                context[f"{group}.{at}"] = owner.attn
                self.heads[-1].append(() if qkv is None else heads_of(qkv))
                each = {**SIZES, "num_kv_heads": 1 if qkv is None else qkv.num_kv_heads}
                full = kinds.MLAAttentionSpec if qkv is None else kinds.FullAttentionSpec
                specs[f"{group}.{at}"] = (
                    kinds.SlidingWindowSpec(**each, sliding_window=64) if group and qkv is not None else full(**each)
                )
            spec = specs[f"{group}.0"]
            if len(set(totals)) > 1:
                spec = kinds.UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)
            members.append(kinds.KVCacheGroupSpec(list(specs), spec))
        cache = kinds.KVCacheConfig(4, [], members)
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(model="org/model", get_total_num_kv_heads=lambda: wide),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=ranks,
                pipeline_parallel_size=1,
                prefill_context_parallel_size=1,
                decode_context_parallel_size=1,
                rank=rank,
            ),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            compilation_config=SimpleNamespace(static_forward_context=context),
        )
        model, drafter = torch.nn.ModuleList(made), torch.nn.ModuleList(drafts) if drafts else None
        runner = SimpleNamespace(get_model=lambda: model, get_draft_model=lambda: drafter)
        worker = SimpleNamespace(model_runner=runner) if known else None
        self.keys = namespace.keys_of(config, cache, rank, "", worker, upstream_keys=upstream_keys)
        rules = groups.of_engine(cache, 32, drafts=False)
        with mock.patch.object(fingerprint, "of_model", return_value={}):
            where = namespace.fingerprinted(
                config,
                self.keys,
                lambda: fingerprint.of_engine(config, cache, rules=rules, replicas=self.keys.replicas, layout=""),
                Start("", "", 0),
            )
        assert not where.unknown
        self.prefixes = where.prefixes
        self.shown = where.fingerprint


def engine(ranks: int, wide: int, layers: Sequence[Sequence[int]], **options: Any) -> list[Rank]:
    return [Rank(rank, ranks, wide, layers, **options) for rank in range(ranks)]


CASES = {
    "MiMo-V2-Flash as published": (8, 4, [[4], [8, 8, 8]], [4, 8]),
    "the same in one group": (8, 4, [[4, 8]], [8]),
    "MiMo-V2-Flash, were it the other way": (8, 8, [[8], [4]], [8, 8]),
    "equal heads": (8, 4, [[4], [4, 4]], [4, 4]),
    "one head": (4, 1, [[1], [2]], [1, 2]),
    "heads that no rank divides": (12, 4, [[4, 6]], [12]),
    "groups that no number divides": (12, 2, [[4], [6]], [12, 12]),
    "more heads than ranks": (2, 4, [[4], [8]], [2, 2]),
    "the wide number of MLA, and a draft with heads": (4, 1, [[-1], [4]], [1, 4]),
    "MLA alone": (4, 1, [[-1, -1]], [1]),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_with_one_key_hold_the_same_heads(name: str) -> None:
    """The last number of a case: how many parts of each group have keys of their own."""
    ranks, wide, layers, parts = CASES[name]
    found = engine(ranks, wide, layers, draft=[1] if "draft" in name else [])
    for group, expected in enumerate(parts):
        assert len({each.prefixes[group] for each in found}) == expected
        by_key: dict[str, list[list[tuple[int, ...]]]] = {}
        for each in found:
            by_key.setdefault(each.prefixes[group], []).append(each.heads[group])
        assert all(heads == [heads[0]] * len(heads) for heads in by_key.values())
    together = [each.keys for each in found if each.prefixes == found[0].prefixes]
    assert sorted(each.replica_index for each in together) == [*range(together[0].replicas)], "each slot is filled once"


def test_engines_with_other_numbers_of_ranks_share_what_is_equal() -> None:
    """Twice as many ranks hold the same heads twice; whole keys are equal where all heads are, and only there."""
    for wide, layers in ((4, [[4], [8]]), (4, [[4, 8]]), (2, [[2], [2]])):
        few, many = engine(8, wide, layers), engine(16, wide, layers)
        for group in range(len(layers)):
            held = {each.prefixes[group]: each.heads[group] for each in few}
            assert {each.prefixes[group]: each.heads[group] for each in many} == held


@pytest.mark.parametrize("layers", [[[8]], [[8], [8]]])
def test_engines_whose_ranks_have_equal_heads_of_their_own_share(layers: list[list[int]]) -> None:
    """Two ranks of eight heads, on both: rank by rank, whether the projections are found, and with adapters or not."""
    first, *others = (
        [each.prefixes for each in engine(2, 8, layers, **options)]
        for options in ({}, {}, {"known": False}, {"adapted": True})
    )
    assert first[0] != first[1]
    assert all(each == first for each in others)


@pytest.mark.parametrize("wide", [1, 2, 4])
def test_where_the_heads_are_not_known_no_rank_is_a_replica(wide: int) -> None:
    found = engine(4, wide, [[wide], [wide]], known=False)
    assert len({each.prefixes for each in found}) == 4
    assert {each.keys.replicas for each in found} == {1}


def test_a_projection_with_an_adapter_around_it_is_known() -> None:
    plain, adapted = (engine(4, 2, [[2], [4]], adapted=adapted) for adapted in (False, True))
    assert [each.prefixes for each in plain] == [each.prefixes for each in adapted]


# What keys had for a fingerprint while one number counted for all layers: by ranks, that number, and the layers' own.
BEFORE: dict[tuple[int, int, str], str] = {
    (1, 2, "2"): "3822b399b40f6a9a83a28746271a9fce",
    (4, 2, "2"): "1a529a2f190e615d66a02cf68e7c0b1f",
    (4, 2, "2,2 2"): "2255be0c469f4c4882c42f8d036df381",
    (2, 4, "4 4"): "64e6ee72a620df477c167727f8ca40e0",
    (8, 4, "4 4"): "a0ccdb92e1d18ba1acf6876a59b0c9a8",
    (4, 1, "-1"): "81d0f8c4dc3aeec0c29620792bdd3a44",
    (4, 1, "1"): "7db53a2a72c2dfb7d0a12fe6c711fc3a",
    (8, 4, "4 8"): "a0ccdb92e1d18ba1acf6876a59b0c9a8",
    (8, 4, "4,8"): "c1d122e538ab0bed6c88ceed797645e6",
    (4, 1, "1 2"): "dd938d295c481db944af781f55fe2d75",
    (12, 4, "4,6"): "c1d122e538ab0bed6c88ceed797645e6",
    (4, 1, "-1 4"): "42e53204dd9ae5f81a36afb42e0d9920",
}


@pytest.mark.parametrize(("case", "digits"), BEFORE.items())
def test_equal_heads_keep_the_keys_of_before_and_ambiguous_ones_are_not_found(
    case: tuple[int, int, str], digits: str
) -> None:
    ranks, wide, layers = case
    totals = [[int(total) for total in group.split(",")] for group in layers.split(" ")]
    equal = len({total for group in totals for total in group}) == 1
    for each in engine(ranks, wide, totals):
        assert all((f"@fp:{digits}@" in prefix) is equal for prefix in each.prefixes)


@pytest.mark.parametrize("name", CASES)
def test_upstream_s_keys_are_refused_by_name_where_they_would_mix_ranks(name: str) -> None:
    """They are byte for byte upstream's otherwise (test_keys.py)."""
    ranks, wide, layers, _ = CASES[name]
    if name in {"MiMo-V2-Flash, were it the other way", "equal heads", "more heads than ranks", "MLA alone"}:
        assert engine(ranks, wide, layers, upstream_keys=True)
        return
    with pytest.raises(
        ValueError, match=r'key_format "vllm" cannot serve this model: .* model=org/model ranks='
    ) as all_:
        engine(ranks, wide, layers, upstream_keys=True)
    assert "\n" not in str(all_.value)
