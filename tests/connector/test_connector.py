"""The class vLLM sees: registration, start-up refusals, roles, and what happens to errors inside."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvprefetch.connector as package

base = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")

import vllm  # noqa: E402
from transformers import LlamaConfig  # noqa: E402
from vllm.v1 import kv_cache_interface as kinds  # noqa: E402

from kvprefetch import __version__  # noqa: E402
from kvprefetch.connector.attach import hellos  # noqa: E402
from kvprefetch.connector.connector import KVPrefetchConnector  # noqa: E402
from kvprefetch.connector.engine import geometry  # noqa: E402
from kvprefetch.connector.identity.start import start_of  # noqa: E402
from kvprefetch.connector.words import config as configuration  # noqa: E402
from kvprefetch.connector.words.metadata import KVPrefetchMetadata, OfReset  # noqa: E402
from kvprefetch.kv.hashing import BlockHasher  # noqa: E402
from tests.connector.test_fingerprint import write_model  # noqa: E402

SCHEDULER, WORKER = base.KVConnectorRole.SCHEDULER, base.KVConnectorRole.WORKER


HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
FULL = kinds.FullAttentionSpec(block_size=32, **HEADS)
WINDOW = kinds.SlidingWindowSpec(block_size=32, **HEADS, sliding_window=64)
CHUNKS = kinds.ChunkedLocalAttentionSpec(block_size=32, **HEADS, attention_chunk_size=64)
MAMBA = kinds.MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
CACHE = {
    "block_size": 32, "prefix_match_unit": None, "enable_prefix_caching": True, "prefix_caching_hash_algo": "sha256",
}  # fmt: skip
SINK = kinds.SinkFullAttentionSpec(block_size=32, **HEADS, sink_len=4)
HOST = kinds.HiSparseHotSpec(block_size=32, page_size=4096, blocks_per_request=2)


def kv_cache_config(specs: list[Any] | None = None, blocks: int = 16) -> Any:
    return kinds.KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[kinds.KVCacheTensor(blocks * 4096, ["layer"], blocks * 4096, 4096)],
        kv_cache_groups=[kinds.KVCacheGroupSpec(["layer"], one) for one in specs or [FULL]],
        prefix_cache_retention_interval=0,
    )


def vllm_config(socket: Path, *, role: str = "kv_both", policy: str = "recompute", **changes: Any) -> Any:
    extra = {"socket": str(socket), **changes.pop("extra", {})}
    parallel = {
        "prefill_context_parallel_size": 1, "decode_context_parallel_size": 1, "world_size": 1, "rank": 0,
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, "nnodes": 1,
        "nnodes_within_dp": 1, "distributed_executor_backend": "mp", "enable_fault_tolerance": False,
        "enable_eplb": False,         **changes.pop("parallel", {}),
    }  # fmt: skip
    model = {
        "is_encoder_decoder": False, "model": "org/tiny", "max_model_len": 512, "dtype": torch.float32,
        "quantization": None, "hf_config": LlamaConfig(), "multimodal_config": None, "revision": None,
        "hf_config_path": None, "architecture": "LlamaForCausalLM", "trust_remote_code": False, "hf_overrides": {},
        "enable_sleep_mode": False, "served_model_name": "tiny-served", **changes.pop("model", {}),
    }  # fmt: skip
    cache = {**CACHE, "cache_dtype": "auto", **changes.pop("cache", {})}
    return SimpleNamespace(
        model_config=SimpleNamespace(**model, get_total_num_kv_heads=lambda: 1),
        parallel_config=SimpleNamespace(**parallel),
        scheduler_config=SimpleNamespace(max_num_seqs=4, async_scheduling=False),
        cache_config=SimpleNamespace(**cache),
        kernel_config=SimpleNamespace(enable_jit_warmup=True),
        aux_output_config=SimpleNamespace(enabled=False),
        lora_config=None,
        kv_transfer_config=SimpleNamespace(
            engine_id="engine", kv_connector_extra_config=extra, kv_load_failure_policy=policy,
            is_kv_consumer=role != "kv_producer", is_kv_producer=role != "kv_consumer",
        ),
        speculative_config=changes.pop("speculative_config", None),
        kv_events_config=changes.pop("kv_events_config", None),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        compilation_config=SimpleNamespace(static_forward_context={}),
        instance_id=f"{2**62}",  # in 2116: no file is newer
        **changes,
    )  # fmt: skip


def test_importing_the_package_imports_neither_vllm_nor_torch() -> None:
    """It is imported in processes that never use the connector."""
    code = "import sys, kvprefetch.connector; print([m for m in ('vllm', 'torch') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_registering_twice_and_importing_by_path() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    package.register()
    package.register()
    assert KVConnectorFactory.get_connector_class_by_name("KVPrefetchConnector") is KVPrefetchConnector
    assert package.KVPrefetchConnector is KVPrefetchConnector
    with pytest.raises(AttributeError, match="Nothing"):
        package.Nothing  # noqa: B018


FULL_ONLY = "KV groups are served beside full attention only: groups="
EAGLE = {"speculative_config": SimpleNamespace(use_eagle_block_drop=lambda: True)}


def refused(reason: str, changes: dict[str, Any], cache: Any = None, *marks: Any) -> Any:
    return pytest.param(reason, changes, cache or kv_cache_config(), marks=marks)


REFUSED = [
    refused("of this kind, outside the prefix cache, .*=1 kv_cache_spec=HiSparse", {}, kv_cache_config([FULL, HOST])),
    # vLLM cannot make one group of these, so nothing is advised.
    refused(
        f"{FULL_ONLY}1 kinds=window$",
        {},
        kv_cache_config([WINDOW]),
        pytest.mark.shows("saved, then loaded: tokens equal", "sliding windows alone", refused=True),
    ),
    refused(f"{FULL_ONLY}2 kinds=chunk,window$", {}, kv_cache_config([WINDOW, CHUNKS])),
    refused(
        f"{FULL_ONLY}1 kinds=state$",
        {},
        kv_cache_config([MAMBA]),
        pytest.mark.shows("saved, then loaded: tokens equal", "Mamba", refused=True),
    ),
    refused(
        "has no drafts: group=1 kind=chunk",
        EAGLE,
        kv_cache_config([FULL, CHUNKS]),
        pytest.mark.shows("EAGLE drafts", "full attention and chunks", refused=True),
    ),
    refused("of this kind is not served: kv_cache_spec=SinkFullAttentionSpec$", {}, kv_cache_config([SINK])),
    refused(
        "enable_prefix_caching=False",
        {"cache": {"enable_prefix_caching": False}},
        None,
        pytest.mark.shows("prefix caching off", refused=True),
    ),
    refused(
        "encoder-decoder",
        {"model": {"is_encoder_decoder": True}},
        None,
        pytest.mark.shows("saved, then loaded: tokens equal", "encoder-decoder", refused=True),
    ),
    refused("wait_timeout_ms", {"extra": {"wait_timeout_ms": -5}}),
]


@pytest.mark.parametrize(("reason", "changes", "cache"), REFUSED)
@pytest.mark.parametrize("role", [SCHEDULER, WORKER])
def test_what_cannot_be_served_is_refused_at_start_in_one_line(
    tmp_path: Path, reason: str, changes: dict[str, Any], cache: Any, role: Any
) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        KVPrefetchConnector(vllm_config(tmp_path / "s", **changes), role, cache)
    assert "\n" not in str(caught.value)


def test_a_daemon_that_cannot_start_is_said_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM captures graphs it asks the class first; without them the scheduler's side says it."""
    (tmp_path / "structlog.py").write_text("raise ModuleNotFoundError(name='structlog')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    extra = {"start_daemon": True, "socket": str(tmp_path / "s")}
    with pytest.raises(ValueError, match="start_daemon: structlog is not installed here"):
        KVPrefetchConnector.requires_piecewise_for_cudagraph(extra)
    assert not KVPrefetchConnector.requires_piecewise_for_cudagraph({**extra, "mode": "off"})


def test_the_incarnation_is_the_same_in_every_process_and_new_at_every_start(tmp_path: Path) -> None:
    first, again = vllm_config(tmp_path / "a"), vllm_config(tmp_path / "b")
    assert start_of(first) == start_of(again)
    again.instance_id = "124"
    assert start_of(first).incarnation != start_of(again).incarnation
    again.instance_id = "124_dp1"  # of Ray's data parallelism
    assert start_of(again).configured_ns == 124


@pytest.mark.parametrize(
    ("changes", "loads", "saves"),
    [
        ({}, True, True),
        ({"role": "kv_producer"}, False, True),
        ({"role": "kv_consumer"}, True, False),
        ({"extra": {"key_format": "vllm"}}, True, True),
    ],
)
def test_roles_decide_what_is_done(tmp_path: Path, changes: dict[str, Any], loads: bool, saves: bool) -> None:
    connector = KVPrefetchConnector(vllm_config(tmp_path / "s", **changes), SCHEDULER, kv_cache_config())
    assert connector.link is not None
    hello = connector.link.hello().scheduler
    connector.shutdown()
    assert hello is not None
    assert (hello.loads, hello.saves, hello.max_blocks) == (loads, saves, 16)
    assert hello.upstream_keys is ("extra" in changes)


def test_a_hello_names_the_epochs_that_are_live_when_it_is_said(tmp_path: Path) -> None:
    connector = KVPrefetchConnector(vllm_config(tmp_path / "s"), SCHEDULER, kv_cache_config())
    link, side = connector.link, connector.scheduler_side
    assert link is not None
    assert side is not None
    said = [link.hello().scheduler]
    side.live_epochs = lambda: (7,)  # type: ignore[method-assign]
    said.append(link.hello().scheduler)
    connector.shutdown()
    assert [each.live_epochs for each in said if each is not None] == [[], [7]]


def test_ranks_that_step_together_are_known(tmp_path: Path) -> None:
    for ranks, together in ((1, False), (2, True)):
        config = vllm_config(tmp_path / "s", parallel={"data_parallel_size": ranks})
        assert geometry.of_engine(config, kv_cache_config()).lockstep is together


def test_saves_that_nobody_else_will_find_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's fast hashes begin with a random number in each process, unless the environment sets a seed."""

    def warned(algorithm: str) -> bool:
        caplog.clear()
        config = vllm_config(tmp_path / "s", cache={"prefix_caching_hash_algo": algorithm})
        with caplog.at_level(logging.WARNING, "vllm.kvprefetch"):
            KVPrefetchConnector(config, SCHEDULER, kv_cache_config()).shutdown()
        return f"{algorithm} begins with a random number" in caplog.text

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert not warned("sha256_cbor")
    assert warned("xxhash")
    # With a seed the hash is really made, which needs a package that is not everywhere.
    monkeypatch.setattr(hellos, "start_and_probe", lambda algorithm: ("00", "00"))
    assert not warned("xxhash")


def test_every_engine_says_how_it_hashes_also_with_several_hashes_a_block(tmp_path: Path) -> None:
    """So prompts can be hashed for it: SchedulerInfo's start and probe are those of kv/hashing.py."""
    window = kinds.SlidingWindowSpec(64, **HEADS, sliding_window=128)
    settings = configuration.load({"wait_policy": "timeout", "socket": "/s"})
    for specs in ([FULL], [FULL, window]):
        config, cache = vllm_config(tmp_path / "s"), kv_cache_config(specs)
        numbers = geometry.of_engine(config, cache)
        assert numbers.block_tokens == len(specs) * numbers.groups.hash_tokens
        said = hellos.of_scheduler(config, start_of(config), numbers, settings).scheduler
        assert said is not None
        assert said.models == ["org/tiny", "tiny-served"]
        assert said.settings == f"vllm={vllm.__version__} kvprefetch={__version__} load_mode=auto wait_policy=timeout"
        start, probe = bytes.fromhex(said.hash_start), bytes.fromhex(said.hash_probe)
        assert len(BlockHasher(said.hash_algorithm, start, said.hash_tokens, probe)(range(97))) == 3 * 32


def test_mode_off_does_nothing(tmp_path: Path) -> None:
    for role in (SCHEDULER, WORKER):
        connector = KVPrefetchConnector(vllm_config(tmp_path / "s", extra={"mode": "off"}), role, kv_cache_config())
        assert connector.link is None
        connector.register_kv_caches({})
        assert connector.get_num_new_matched_tokens(SimpleNamespace(), 0) == (0, False)
        assert connector.build_connector_meta(SimpleNamespace()) == KVPrefetchMetadata()
        assert connector.reset_cache() is None
        assert connector.request_finished_all_groups(SimpleNamespace(), ([],)) == (False, None)


def test_without_a_daemon_every_call_answers_nothing(tmp_path: Path) -> None:
    """In vLLM's order; has_pending_push_work must not keep an idle engine stepping."""
    from .fakes import Request
    from .reports import Blocks, scheduled_output

    connector = KVPrefetchConnector(vllm_config(tmp_path / "s"), SCHEDULER, kv_cache_config())
    request = Request("r", 100)
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.update_state_after_alloc(request, Blocks([]), 0)
    meta = connector.build_connector_meta(scheduled_output([(request, 100)]))
    assert meta == KVPrefetchMetadata(weights=OfReset(computes=True))
    assert not connector.has_pending_push_work()
    assert connector.reset_cache() is True
    assert connector.link is not None
    hello = connector.link.hello()
    assert hello.scheduler is not None
    assert (hello.scheduler.reset_generation, len(hello.scheduler.weights)) == (1, 32), "a later daemon hears of it"
    assert connector.requires_kv_delivery is False
    assert connector.request_finished_all_groups(request, ([],)) == (False, None)
    connector.shutdown()


def test_an_error_inside_is_logged_and_answers_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not in update_state_after_alloc: there the engine counts on the blocks being filled."""
    connector = KVPrefetchConnector(vllm_config(tmp_path / "s"), SCHEDULER, kv_cache_config())
    monkeypatch.setattr(connector, "scheduler_side", SimpleNamespace(take_loads=lambda _: KVPrefetchMetadata()))
    with caplog.at_level(logging.ERROR, "vllm.kvprefetch"):
        connector.on_new_request(SimpleNamespace())
        assert connector.get_num_new_matched_tokens(SimpleNamespace(), 0) == (0, False)
        assert connector.build_connector_meta(SimpleNamespace()) == KVPrefetchMetadata()
        assert connector.has_pending_push_work() is False
        assert connector.reset_cache() is False
    assert sum("failed; the engine goes on" in record.message for record in caplog.records) == 6
    with pytest.raises(AttributeError):
        connector.update_state_after_alloc(SimpleNamespace(), SimpleNamespace(blocks=()), 32)
    connector.shutdown()


def worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: dict[str, Any] | None = None, **changes: Any
) -> KVPrefetchConnector:
    """A worker's connector with its cache, and a model in tmp_path. `broken`: of the configuration."""
    import vllm.distributed

    monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_rank", lambda: 0)
    config = vllm_config(tmp_path / "s", **changes)
    config.model_config.model = str(write_model(tmp_path / "tiny"))
    vars(config).update(broken or {})
    connector = KVPrefetchConnector(config, WORKER, kv_cache_config())
    connector.register_kv_caches({"layer": torch.zeros(16, 1, 32, 32, dtype=torch.float32)})
    return connector


def test_the_worker_registers_its_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Block bytes from the tensors, keys from the configuration; and a step without work does nothing."""
    with caplog.at_level(logging.INFO, "vllm.kvprefetch"):
        connector = worker(tmp_path, monkeypatch)
        assert connector.link is not None
        shape = connector.link.hello().worker
    assert shape is not None
    found = re.fullmatch(r"tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@fp:([0-9a-f]{32})@", shape.key_prefixes[0])
    assert found is not None
    assert shape.block_bytes == 4096
    shared, *_ = [text for text in caplog.messages if "stored KV is shared" in text]
    assert {"weights", "layers", "layout", "tp_shards"} <= set(re.findall(r" (\w+)=", shared))
    connector.bind_connector_metadata(KVPrefetchMetadata())
    connector.start_load_kv(None)
    connector.wait_for_save()
    assert connector.get_finished(set()) == (None, None)
    assert connector.get_block_ids_with_load_errors() == set()
    assert connector.build_connector_worker_meta() is None
    connector.shutdown()


def test_an_engine_whose_kv_is_not_known_has_keys_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here its weights; and a part that the running rank should know."""
    with caplog.at_level(logging.WARNING, "vllm.kvprefetch"):
        for why, broken in (
            ("load_format=dummy", {"load_config": SimpleNamespace(load_format="dummy", download_dir=None)}),
            ("AttributeError", {"compilation_config": None}),
        ):
            connector = worker(tmp_path, monkeypatch, broken)
            assert connector.link is not None
            shape = connector.link.hello().worker
            assert shape is not None
            start = connector.link.hello().incarnation
            assert shape.key_prefixes[0] == f"tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@fp:{start}@"
            assert any("is not known" in record.message and why in record.message for record in caplog.records)
            connector.shutdown()
