"""Which vLLM is served: tried series, newer ones that have what we use, and the reasons for the others."""

from __future__ import annotations

import ast
import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

vllm = pytest.importorskip("vllm")

from vllm.config import KVTransferConfig, SpeculativeConfig  # noqa: E402
from vllm.distributed import kv_events  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: E402
from vllm.v1 import kv_cache_interface, request  # noqa: E402
from vllm.v1.core import kv_cache_manager, kv_cache_utils  # noqa: E402

import kvprefetch.connector as package  # noqa: E402
from kvprefetch.connector import releases  # noqa: E402
from kvprefetch.connector.connector import KVPrefetchConnector  # noqa: E402
from tests.connector.test_connector import SCHEDULER, WORKER, kv_cache_config, vllm_config  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
NEXT = "0.34.0"


@pytest.fixture(autouse=True)
def _no_verdict_is_remembered() -> Iterator[None]:
    yield
    releases.verdict.cache_clear()


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0+cu129", "0.33.1"])
def test_a_tried_release_is_served_without_a_word(version: str) -> None:
    assert releases.verdict(version) == ""


@pytest.mark.parametrize("version", ["0.30.2", "0.9.1", "0.1.dev1+g1234567", "unknown"])
def test_an_older_release_is_refused_in_one_line(version: str) -> None:
    with pytest.raises(
        ValueError, match=rf"too old: vllm={re.escape(version)} min=0\.31 max=0\.33 \(install"
    ) as caught:
        releases.verdict(version)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [NEXT, "1.0.0", "0.33.1.dev12+g1234567"])
def test_a_newer_release_with_all_that_is_used_is_served_with_a_warning(version: str) -> None:
    warning = releases.verdict(version)
    assert f"no test has run this vLLM: vllm={version} tried=0.31 to 0.33" in warning


def test_the_installed_release_has_all_that_the_connector_uses() -> None:
    """`make test-vllm-versions` runs this with each series, `make vllm-names` the same look with the newest release."""
    assert ".".join(vllm.__version__.split(".")[:2]) in releases.TRIED
    assert releases.lacks() == []
    keys = {each.name for each in dataclasses.fields(KVTransferConfig)}
    of_0_31 = (
        {"kv_buffer_size", "kv_ip", "kv_parallel_size", "kv_rank"} if vllm.__version__.startswith("0.31.") else set()
    )
    assert keys - of_0_31 == releases.TRANSFER_KEYS


class Request:
    """Another one: what vLLM's constructor assigns it only reads."""

    def __init__(self, like: Request) -> None:
        self.block_hashes = like.all_token_ids  # type: ignore[attr-defined]


def with_queue(self: object, request: object, queue: object) -> None: ...


CHANGES: list[tuple[object, str, Any, str]] = [
    (base.KVConnectorBase_V1, "on_new_request", with_queue, "hook on_new_request: parameters self, request, queue"),
    (base.KVConnectorBase_V1, "handle_preemptions", None, "hook handle_preemptions: missing"),
    (KVPrefetchConnector, "__abstractmethods__", frozenset({"flush"}), "hook flush: not known here"),
    (base, "SupportsHMA", None, "base.SupportsHMA: missing"),
    (request, "Request", Request, "request.Request.all_token_ids: missing"),
    (kv_cache_manager.KVCacheManager, "get_computed_blocks", None, "KVCacheManager.get_computed_blocks: missing"),
    (SpeculativeConfig, "use_eagle_block_drop", with_queue, "use_eagle_block_drop: parameters self, request, queue"),
    (kv_cache_utils, "to_event_extra_keys", None, "kv_cache_utils.to_event_extra_keys: missing"),
    (kv_cache_utils, "hash_block_tokens", lambda function, kind, *, parent: None, "hash_block_tokens: parameters"),
    (kv_events, "BlockStored", Request, "BlockStored.parent_block_hash: missing"),
    (kv_cache_interface, "SlidingWindowMLASpec", None, "kv_cache_interface.SlidingWindowMLASpec: missing"),
]


@pytest.mark.parametrize(("owner", "name", "changed", "finding"), CHANGES, ids=[change[1] for change in CHANGES])
def test_a_newer_release_that_differs_is_refused_with_the_difference(
    owner: object, name: str, changed: Any, finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changed is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, changed)
    with pytest.raises(ValueError, match=rf"differs .*vllm=0\.34\.0 .*{re.escape(finding)}") as caught:
        releases.verdict(NEXT)
    assert "\n" not in str(caught.value)


def test_the_class_is_not_even_imported_with_a_vllm_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks for it, and its imports might fail: the reason would be lost in a traceback."""
    monkeypatch.setattr(vllm, "__version__", "0.30.0")
    monkeypatch.delitem(vars(package), "connector")
    with pytest.raises(ValueError, match=r"vllm=0\.30\.0"):
        _ = package.KVPrefetchConnector
    assert "connector" not in vars(package)


def test_only_the_scheduler_warns_of_a_release_that_no_test_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", NEXT)
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_rank", lambda: 0)
    with caplog.at_level(logging.WARNING):
        for role in (WORKER, SCHEDULER):
            KVPrefetchConnector(vllm_config(tmp_path / "s"), role, kv_cache_config()).shutdown()
    assert ["no test has run" in line.getMessage() for line in caplog.records].count(True) == 1


def test_what_is_read_of_requests_and_configurations_is_in_the_table() -> None:
    """By the names that the connector gives to these objects."""
    listed = {name.partition("(")[0] for names in releases.USED.values() for name in names.split()}
    given = {"request", "vllm_config", "parallel", "kv_cache_config", "output", "connector_output", "transfer", "model"}
    read = set()
    for path in (ROOT / "connector").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            whole = ast.unparse(node.value)
            owner = whole.rpartition(".")[2]
            if (owner in given or owner.endswith("_config")) and whole not in {"self._config", "model"}:
                read.add(node.attr)
    assert len(read) > 40
    assert read <= listed | {"to_dict"}, "what `transformers` offers aside"


def test_what_is_imported_is_in_the_table() -> None:
    """At run time: what is imported for types alone may be absent."""
    found = set()
    for path in (ROOT / "connector").rglob("*.py"):
        waiting: list[ast.AST] = [ast.parse(path.read_text())]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
                waiting += ast.iter_child_nodes(node)
    listed = {f"{owner}.{name.partition('(')[0]}" for owner, names in releases.USED.items() for name in names.split()}
    assert len(found) > 20
    assert found - listed - set(releases.USED) == {"vllm.v1.metrics.cache_hit_source.CacheHitSource"}, "not in 0.31"
