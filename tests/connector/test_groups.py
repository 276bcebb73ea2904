"""The rules that vLLM's KV groups get, and the groups that are refused."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import pytest
import torch

kinds = pytest.importorskip("vllm.v1.kv_cache_interface")

from kvprefetch.connector.engine import groups  # noqa: E402
from kvprefetch.daemon.store.zeros import holed  # noqa: E402
from kvprefetch.kv.groups import Group, Groups, Kind  # noqa: E402
from kvprefetch.shmring.wire import attach  # noqa: E402

HEADS = {"block_size": 32, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
FULL = kinds.FullAttentionSpec(**HEADS)
MLA = kinds.MLAAttentionSpec(**HEADS)
WINDOW = kinds.SlidingWindowSpec(**HEADS, sliding_window=100)
MLA_WINDOW = kinds.SlidingWindowMLASpec(**HEADS, sliding_window=100)
CHUNK = kinds.ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=128)
AGAIN = dataclasses.replace(MLA_WINDOW, bounded_replay=True)
RING = kinds.CircularBufferSpec(**{**HEADS, "block_size": 8})
STATE = kinds.MambaSpec(block_size=32, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")

HOT = kinds.HiSparseHotSpec(block_size=32, page_size=4096, blocks_per_request=2)


class OwnRing(kinds.CircularBufferSpec):  # type: ignore[name-defined]
    """Of a model that brings its own kind."""


def cache(*specs: Any, eagle: tuple[int, ...] = ()) -> Any:
    """vLLM's configuration of groups with these layers."""
    made = [kinds.KVCacheGroupSpec([f"l{i}"], spec, is_eagle_group=i in eagle) for i, spec in enumerate(specs)]
    return kinds.KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=made)


def uniform(*specs: Any) -> Any:
    return kinds.UniformTypeKVCacheSpecs(
        block_size=specs[0].block_size, kv_cache_specs={f"layer.{i}": spec for i, spec in enumerate(specs)}
    )


@pytest.mark.parametrize("spec", [FULL, MLA, uniform(FULL, MLA)])
def test_one_group_of_full_attention_may_draft(spec: Any) -> None:
    found = groups.of_engine(cache(spec), 32, drafts=True)
    assert (found.groups, found.partial) == ((Group(Kind.FULL, 32, drafts=True),), True)


@pytest.mark.parametrize(
    ("specs", "rules"),
    [
        ((FULL, WINDOW), (Group(Kind.FULL, 32), Group(Kind.WINDOW, 32, 100))),
        ((MLA, MLA_WINDOW), (Group(Kind.FULL, 32), Group(Kind.WINDOW, 32, 100))),
        ((FULL, CHUNK), (Group(Kind.FULL, 32), Group(Kind.CHUNK, 32, 128))),
        ((FULL, STATE, STATE), (Group(Kind.FULL, 32), Group(Kind.STATE, 32), Group(Kind.STATE, 32))),
        ((FULL, WINDOW, STATE), (Group(Kind.FULL, 32), Group(Kind.WINDOW, 32, 100), Group(Kind.STATE, 32))),
        ((uniform(FULL, MLA), uniform(WINDOW, WINDOW)), (Group(Kind.FULL, 32), Group(Kind.WINDOW, 32, 100))),
        # Outside the prefix cache: no rules, and no drafts where these alone have a drafter's KV.
        ((AGAIN, MLA, RING, WINDOW), (Group(Kind.FULL, 32), Group(Kind.WINDOW, 32, 100))),
        ((uniform(AGAIN, AGAIN), uniform(RING), MLA), (Group(Kind.FULL, 32),)),
        # vLLM retains these tokens below the window for drafts, and gives a load blocks for them.
        (
            (FULL, dataclasses.replace(WINDOW, extra_retained_tokens=3)),
            (Group(Kind.FULL, 32), Group(Kind.WINDOW, 32, 103)),
        ),
    ],
)
def test_groups_get_the_rules_of_their_layers(specs: tuple[Any, ...], rules: tuple[Group, ...]) -> None:
    assert groups.of_engine(cache(*specs), 32, drafts=False) == Groups(rules, 32)


def test_ranks_that_share_tokens_make_blocks_longer_where_they_do() -> None:
    """As vLLM counts: a drafter's layers may be whole on each rank."""
    draft = dataclasses.replace(WINDOW, dcp_sharded=False)
    for specs, lengths in (((FULL,), [128]), ((uniform(MLA, MLA), draft), [128, 32])):
        found = groups.of_engine(cache(*specs), min(lengths), drafts=False, shards=4)
        assert [each.block_tokens for each in found.groups] == lengths
    for length, hash_tokens in ((32, 32), (64, 64), (256, 128)):
        state = dataclasses.replace(STATE, block_size=length)
        with pytest.raises(ValueError, match="inside a block of states"):
            groups.of_engine(cache(FULL, state), hash_tokens, drafts=False, shards=4)
    groups.of_engine(cache(FULL, dataclasses.replace(STATE, block_size=128)), 128, drafts=False, shards=4)


@pytest.mark.parametrize(
    ("words", "specs"),
    [
        ("layers of one KV group differ", (FULL, uniform(WINDOW, dataclasses.replace(WINDOW, sliding_window=50)))),
        ("mamba_cache_mode=none", (FULL, dataclasses.replace(STATE, mamba_cache_mode="none"))),
        ("kv_cache_spec=CrossAttentionSpec", (FULL, kinds.CrossAttentionSpec(**HEADS))),
        ("group=1 kv_cache_spec=HiSparseHotSpec$", (FULL, HOT)),
        ("group=0 kv_cache_spec=OwnRing$", (OwnRing(**{**HEADS, "block_size": 8}), FULL)),
        ("must divide .*block_tokens=12 unit_tokens=32$", (FULL, dataclasses.replace(RING, block_size=12))),
        ("kv_cache_spec=RSWASpec", (FULL, kinds.RSWASpec(**HEADS, rswa_window=8))),
        ("no multiple of the hash block: group=1 block_tokens=48", (FULL, dataclasses.replace(WINDOW, block_size=48))),
        (
            "inside a block of states .*block_tokens=64 hash_tokens=32",
            (FULL, dataclasses.replace(STATE, block_size=64)),
        ),
        ("window_tokens=100 unit_tokens=32", (FULL, dataclasses.replace(CHUNK, attention_chunk_size=100))),
    ],
)
def test_groups_without_rules_are_refused_in_one_line(words: str, specs: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        groups.of_engine(cache(*specs), 32, drafts=False)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("specs", "flagged", "drafted"),
    [
        ((FULL, WINDOW), (), (True, True)),  # vLLM flags none: it drops the last block of all
        ((FULL, STATE), (), (True, False)),  # drafters have no states
        ((FULL, WINDOW), (0,), (True, False)),
        ((FULL, FULL, WINDOW), (1,), (True, True, False)),  # equal groups are looked up as one
        ((FULL, WINDOW, WINDOW, STATE), (2,), (False, True, True, False)),
        ((AGAIN, FULL), (), (True,)),
        ((AGAIN, FULL), (0,), (False,)),
    ],
)
def test_groups_have_drafts_as_vllm_decides_it(
    specs: tuple[Any, ...], flagged: tuple[int, ...], drafted: tuple[bool, ...]
) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    config = cache(*specs, eagle=flagged)
    managers = KVCacheManager(config, 1 << 10, 32, 32, use_eagle=True).coordinator.single_type_managers
    theirs = [(managers[number].use_eagle, specs[number]) for number in config.prefix_cacheable_group_ids]
    assert tuple(drops and spec is not STATE for drops, spec in theirs) == drafted
    found = groups.of_engine(config, 32, drafts=True)
    assert tuple(rule.drafts for rule in found.groups) == drafted


# --- what layers write of a value -------------------------------------------------------------------------------------

mamba = pytest.importorskip("vllm.model_executor.layers.mamba.mamba_utils")
Calculator, Copied = mamba.MambaStateShapeCalculator, mamba.MambaStateCopyFuncCalculator
BF16, FP32 = torch.bfloat16, torch.float32
PAGE, DRAFTS = 1 << 20, 2  # bytes, tokens
CONV = {"intermediate_size": 1024, "conv_kernel": 4, "tp_world_size": 1}
# Bytes of three rows of the convolution, of its rows for drafted tokens, and of the state.
ROWS, DRAFTED, TEMPORAL = 3 * 1280 * 2, DRAFTS * 1280 * 2, 8 * 64 * 128 * 4


def mamba2(num_spec: int) -> Any:
    heads = {"num_heads": 8, "head_dim": 64, "n_groups": 1, "state_size": 128}
    return Calculator.mamba2_state_shape(**CONV, **heads, num_spec=num_spec)


def states(kind: str, shapes: Any, dtypes: Any, *, drafts: int = 0) -> list[list[int]]:
    """What layers with such states are said to write of a page."""
    spec = kinds.MambaSpec(
        block_size=32, shapes=shapes, dtypes=dtypes, mamba_type=kinds.MambaAttentionBackendEnum[kind]
    )
    return groups.written(cache(FULL, spec), {"l0": [(0, PAGE)], "l1": [(0, PAGE)]}, PAGE, drafts=drafts)


def test_rows_of_the_convolution_for_drafted_tokens_may_be_unwritten() -> None:
    """Three rows are left in any case, as many as vLLM copies after a step that accepted all drafts."""
    found = states("MAMBA2", mamba2(DRAFTS), (BF16, FP32), drafts=DRAFTS)[1]
    assert found == [0, ROWS, ROWS + DRAFTED, ROWS + DRAFTED + TEMPORAL]


def test_where_rows_are_the_inner_dimension_written_bytes_stand_between_those_of_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mamba, "is_conv_state_dim_first", lambda: True)
    shapes = mamba2(DRAFTS)
    assert shapes[0] == (1280, 5)
    assert states("MAMBA2", shapes, (BF16, FP32), drafts=DRAFTS)[1] == [0, ROWS + DRAFTED + TEMPORAL]


@pytest.mark.parametrize("ring", [False, True])
def test_p36_bytes_that_vllm_may_leave_unwritten_are_not_said_to_be_written(
    ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value as a prompt leaves it: without the guard its right zeros are taken for a lost page."""
    shapes: Any = mamba2(DRAFTS)
    dtypes: Any = (BF16, FP32)
    if ring:
        shapes, dtypes = (*shapes, (8, 16, 64)), (*dtypes, BF16)
    value = bytearray(PAGE)
    for begin, count in ((0, ROWS), (ROWS + DRAFTED, TEMPORAL)):
        value[begin : begin + count] = b"\x11" * count
    at = ctypes.addressof(ctypes.c_char.from_buffer(value))

    def lost(drafts: int) -> bool:
        return bool(holed([at], [PAGE], [tuple(states("MAMBA2", shapes, dtypes, drafts=drafts)[1])]))

    assert not lost(DRAFTS)
    if not ring:
        assert lost(0)
    monkeypatch.setattr(groups, "_STATE_PARTS", {"MAMBA2": 3})
    assert lost(DRAFTS) == ring
    monkeypatch.setattr(groups, "_state", lambda *_: [(0, PAGE - 64)])
    assert lost(DRAFTS)


def test_of_each_kind_of_state_as_many_parts_are_written_as_vllm_copies() -> None:
    copied = {
        "MAMBA1": Copied.mamba1_state_copy_func(),
        "MAMBA2": Copied.mamba2_state_copy_func(),
        "GDN_ATTN": Copied.gated_delta_net_state_copy_func(),
        "SHORT_CONV": Copied.short_conv_state_copy_func(),
        "LINEAR": Copied.linear_attention_state_copy_func(),
    }
    assert len(copied["GDN_ATTN"]) == len(Copied.kda_state_copy_func()), "Kimi's layers have the same kind"
    for kind, functions in copied.items():
        assert states(kind, ((8, 64),) * 3, (FP32,) * 3)[1] == [0, len(functions) * 2048]
    assert states("LINEAR", ((4, 64, 64),), (FP32,), drafts=DRAFTS)[1] == [0, 4 * 64 * 64 * 4], "no convolution"
    assert states("CUSTOM", ((8, 64),), (FP32,))[1] == [], "nobody knows"


def test_of_layers_that_share_anothers_kv_nothing_is_said_and_neighbours_are_one_stretch() -> None:
    """vLLM adds them to the group of the layer whose KV they read, without a specification of their own."""
    config = cache(uniform(FULL, MLA), WINDOW)
    config.kv_cache_groups[0].layer_names = ["layer.0", "layer.1", "reader"]
    places = {"layer.0": [(0, 64), (64, 64)], "layer.1": [(128, 64)], "reader": [(0, 64)], "l1": [(0, 64), (128, 64)]}
    assert groups.written(config, places, 256, drafts=0) == [[0, 192], [0, 64, 128, 192]]
    assert groups.written(config, {**places, "l1": [(0, 192)]}, 192, drafts=0) == []


def test_of_more_stretches_than_a_hello_takes_the_longest_are_said() -> None:
    most = attach.MAX_BORDERS // 2
    lengths = [128] + [32] * most + [64]
    places = [(256 * i, length) for i, length in enumerate(lengths)]
    size = 256 * len(places)
    first, second = groups.written(cache(FULL, WINDOW), {"l0": [(0, size)], "l1": places}, size, drafts=0)
    assert first == [0, size]
    assert (len(second), second[:2], second[-2:]) == (attach.MAX_BORDERS - 2, [0, 128], [size - 256, size - 192])
    hello = {"block_bytes": size, "key_prefixes": ["a@", "b@"], "replicas": 1, "replica_index": 0}
    attach.WorkerInfo.model_validate({**hello, "written": [first, second]})
