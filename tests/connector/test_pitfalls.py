"""Pitfalls of loading and configuration, and that docs/PITFALLS.md accounts for all of them."""

from __future__ import annotations

import ast
import gc
import json
import os
import re
import sys
import threading
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import structlog
import torch
from prometheus_client import Counter, Gauge, Histogram
from vllm.config import PoolerConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs

from kvprefetch.connector.connector import KVPrefetchConnector
from kvprefetch.connector.engine import refusals
from kvprefetch.connector.identity import namespace
from kvprefetch.connector.words.stats import KVPrefetchStats
from kvprefetch.daemon.engine import transfers
from kvprefetch.daemon.store import client
from kvprefetch.daemon.store.client import Store
from kvprefetch.daemon.store.errors import ErrorClass, classify
from kvprefetch.daemon.store.joining import Joined
from kvprefetch.shmring.wire.attach import WorkerInfo
from tests.lab.checkpoint import TINY, make_checkpoint
from tests.support.descriptors import targets

from . import test_connector, test_fingerprint, test_namespace
from .fakes import fails_with
from .test_stats import transfer

ROOT = Path(__file__).resolve().parents[2]
COUNT = 41
Patch = pytest.MonkeyPatch


def test_p19_as_a_child_the_statistics_need_a_name_and_metrics(monkeypatch: Patch) -> None:
    """MultiConnector looks the class up by its name, which importing it registers; its statistics need metrics."""

    def check() -> None:
        stats = MultiConnector.build_kv_connector_stats({"KVPrefetchConnector": {"loads": 1}})
        assert stats is not None
        assert isinstance(stats.data["KVPrefetchConnector"], KVPrefetchStats)
        made: list[Any] = []

        def kind(**options: Any) -> Any:
            made.append(options)
            return SimpleNamespace(labels=lambda *values: SimpleNamespace(inc=lambda value: None))

        config: Any = SimpleNamespace(kv_transfer_config=transfer(True))
        types: Any = dict.fromkeys((Counter, Gauge, Histogram), kind)
        metrics = MultiConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
        metrics.observe({"KVPrefetchConnector": {"loads": 1}}, 0)
        assert made

    with monkeypatch.context() as patch:
        patch.delitem(KVConnectorFactory._registry, "KVPrefetchConnector")
        with pytest.raises(ValueError, match="KVPrefetchConnector"):
            check()
    fails_with(check, monkeypatch, KVPrefetchConnector, "build_prom_metrics", classmethod(lambda cls, *args: None))


def test_p22_a_value_of_another_size_is_a_miss_and_a_prefix_keeps_deployments_apart(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """vLLM's keys name neither ranks nor dtype nor weights: engines that differ meet the same key."""

    def fetched(size: int) -> list[ErrorClass]:
        """The result of a get of a 64-byte block from a value of `size` bytes."""
        settings: Any = SimpleNamespace(enable_ssd_offload=False, private=True)
        store = Store(settings, structlog.get_logger())
        store.adopt(Joined(SimpleNamespace(batch_get_into=lambda *_: [size], get_size=lambda key: size)))
        rank = WorkerInfo(block_bytes=64, key_prefixes=["model@"], replicas=1, replica_index=0)
        places: dict[str, Any] = {"addresses": lambda slot: [0], "sum_addresses": lambda slot: [0], "sum_bytes": 0}
        staging: Any = SimpleNamespace(block_bytes=[64], quarantined=set(), **places)
        return transfers.fetch(store, transfers.RankLayout.of([rank], staging), [(b"digest\0", 0)])

    def check() -> None:
        assert fetched(64) == [ErrorClass.OK]
        assert fetched(128) == [ErrorClass.FOREIGN]
        assert fetched(32) == [ErrorClass.FOREIGN]

    check()
    monkeypatch.setattr(client, "classify_get", lambda client, keys, sizes, codes: [classify(code) for code in codes])
    with pytest.raises(AssertionError):
        check()

    def prefixes(*engines: dict[str, Any]) -> int:
        """Number of different prefixes of these engines."""
        return len({test_namespace.where(model, **engine).prefixes for engine in engines})

    model = test_fingerprint.write_model(tmp_path / "model")
    unlike: tuple[dict[str, Any], ...] = ({}, {"dtype": "float16"}, {"known": test_fingerprint.running(isa="vec")})
    assert prefixes(*unlike) == len(unlike)
    monkeypatch.setattr(namespace, "with_fingerprint", lambda prefix, digits: prefix)
    assert prefixes(*unlike) == 1


def test_p23_what_cannot_be_served_is_refused_at_start(tmp_path: Path, monkeypatch: Patch) -> None:
    """Groups, specs, context parallelism, encoder-decoders, another vLLM."""

    def check() -> None:
        for reason, changes, cache in (each.values for each in test_connector.REFUSED):
            with pytest.raises(ValueError, match=reason):
                KVPrefetchConnector(test_connector.vllm_config(tmp_path / "s", **changes), test_connector.WORKER, cache)

    check()
    monkeypatch.setattr(refusals, "check", lambda *args: None)
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_rank", lambda: 0)
    with pytest.raises(pytest.fail.Exception):
        check()


def held() -> tuple[list[str], list[str]]:
    """Descriptors and threads of this process."""
    return sorted(targets("self")), sorted(thread.name for thread in threading.enumerate())


def test_p28_importing_opens_nothing(monkeypatch: Patch) -> None:
    """vLLM imports the class in its API server and logger processes as well: every module's body is run once more."""
    gc.collect()  # what earlier tests left must not go away meanwhile
    before = held()
    for path in sorted((ROOT / "connector").rglob("*.py")):
        inside = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        spec = spec_from_file_location(f"kvprefetch.{inside}_again", path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        spec.loader.exec_module(module)
        assert held() == before, path.name
    planted = os.memfd_create("planted")
    assert held() != before
    os.close(planted)


# --- docs/PITFALLS.md -----------------------------------------------------------------------------------------------


def rows(text: str) -> dict[int, tuple[str, str]]:
    """Number -> (the pitfall, its tests)."""
    found = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    assert len({number for number, _, _ in found}) == len(found), "a number stands twice"
    return {int(number): (pitfall.strip(), answer.strip()) for number, pitfall, answer in found}


def test_all_pitfalls_are_accounted_for() -> None:
    """Each by tests that exist, at least one of them named after it."""
    table = rows((ROOT / "docs" / "PITFALLS.md").read_text())
    assert set(table) == set(range(1, COUNT + 1))
    for number, (pitfall, answer) in table.items():
        tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", answer)
        assert pitfall
        assert tests, f"pitfall {number} has no test"
        for path, name in tests:
            assert name in functions(ROOT / path), f"{path}::{name} does not exist"
        own = [name for _, name in tests if re.match(r"test_p\d\d_", name)]
        assert own
        assert all(name.startswith(f"test_p{number:02}_") for name in own)


def test_every_pitfall_test_here_stands_in_the_table() -> None:
    text = (ROOT / "docs" / "PITFALLS.md").read_text()
    for path in sorted(Path(__file__).parent.glob("test_pitfalls*.py")):
        for name in functions(path):
            if re.match(r"test_p\d\d_", name):
                assert f"`tests/connector/{path.name}::{name}`" in text


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_p29_where_vllm_turns_prefix_caching_off_nothing_is_served(tmp_path: Path, monkeypatch: Patch) -> None:
    """Its scheduler takes a connector's hits all the same: loads end an engine that pools over all tokens, and give
    other tokens with MLA on a CPU without AMX: its kernels compute whole prompts only.
    """
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    llama = make_checkpoint(tmp_path, TINY)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 512})
    )

    def served(model: Path, **options: Any) -> bool:
        config = EngineArgs(
            model=str(model), skip_tokenizer_init=True, max_model_len=512, **options
        ).create_engine_config()
        try:
            refusals.check(config, test_connector.kv_cache_config())
        except ValueError as error:
            return "enable_prefix_caching=False" not in str(error)
        return True

    def check() -> None:
        pooling = {"runner": "pooling", "convert": "embed"}
        assert served(llama)
        assert served(llama, **pooling, pooler_config=PoolerConfig(seq_pooling_type="LAST"))
        assert not served(llama, **pooling, pooler_config=PoolerConfig(seq_pooling_type="MEAN"))
        assert not served(tmp_path)

    fails_with(check, monkeypatch, refusals, "check", lambda *args: None)
