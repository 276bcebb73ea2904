"""What the processes of one engine start say of it: the same, whatever vLLM changes in its configuration meanwhile."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")

import vllm.distributed

from kvprefetch.connector.attach import hellos
from kvprefetch.connector.connector import KVPrefetchConnector
from kvprefetch.shmring.wire.attach import Hello
from tests.connector.test_connector import SCHEDULER, WORKER, kv_cache_config, vllm_config
from tests.connector.test_fingerprint import write_model
from tests.support.waiting import eventually


@pytest.mark.parametrize("key_format", ["fingerprint", "vllm"])
def test_p38_what_vllm_changes_after_it_made_the_connectors_changes_no_hello(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key_format: str
) -> None:
    """The engine core runs the configuration's __post_init__ again, and a reload of weights names other files."""
    monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_rank", lambda: 0)
    config = vllm_config(tmp_path / "s", extra={"key_format": key_format})
    config.model_config.model = str(write_model(tmp_path / "tiny"))
    config.instance_id = str(time.time_ns())

    def said(change: Callable[[Any], object]) -> list[Hello]:
        mine = copy.deepcopy(config)
        made = [KVPrefetchConnector(mine, role, kv_cache_config()) for role in (WORKER, SCHEDULER)]
        change(mine)
        made[0].register_kv_caches({"layer": torch.zeros(16, 1, 32, 32, dtype=torch.float32)})
        try:
            return [each.link.hello() for each in made if each.link is not None]
        finally:
            for each in made:
                each.shutdown()

    def change(config: Any) -> None:
        config.instance_id = str(time.time_ns())
        config.kv_transfer_config.engine_id += "_dp0"
        config.model_config.model = str(tmp_path / "no such model")
        config.parallel_config = config.cache_config = None

    worker, scheduler = found = said(lambda config: None)
    assert worker.incarnation == scheduler.incarnation
    assert said(change) == found
    monkeypatch.setattr(hellos, "as_made", lambda config: config)
    with pytest.raises(AttributeError):
        said(change)


def test_files_that_change_while_the_engine_starts_are_seen_whatever_vllm_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They may have been read before or after the change, so the KV is nobody else's."""
    monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_rank", lambda: 0)
    config = vllm_config(tmp_path / "s")
    config.instance_id = str(time.time_ns())
    eventually(lambda: time.time_ns() > int(config.instance_id) + 20_000_000, what="the file system's clock")
    config.model_config.model = str(write_model(tmp_path / "tiny"))
    connector = KVPrefetchConnector(config, WORKER, kv_cache_config())
    eventually(lambda: time.time_ns() > int(config.instance_id) + 100_000_000, what="a later time")
    config.instance_id = str(time.time_ns())
    connector.register_kv_caches({"layer": torch.zeros(16, 1, 32, 32, dtype=torch.float32)})
    assert connector.link is not None
    with caplog.at_level(logging.WARNING, "vllm.kvprefetch"):
        connector.link.hello()
    assert any("changed after the engine began to load" in record.message for record in caplog.records)
    connector.shutdown()
