"""An engine with ranks on several nodes is refused at its start, where vLLM collects the workers' metadata."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvprefetch.connector.connector import KVPrefetchConnector
from kvprefetch.connector.engine import refusals
from kvprefetch.connector.words.metadata import KVPrefetchNode

from .test_connector import kv_cache_config, vllm_config


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The scheduler's connector, and a worker's that vLLM made as the engine's only one."""
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(refusals, "check_ranks", lambda config: None)  # no process groups here; tests/e2e has some
    config = vllm_config(tmp_path / "d.sock", parallel={"distributed_executor_backend": "ray", "world_size": 2})
    worker = KVPrefetchConnector(config, KVConnectorRole.WORKER, kv_cache_config())
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker)
    scheduler = KVPrefetchConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config())
    with contextlib.closing(scheduler.link):  # type: ignore[type-var]
        yield scheduler, worker


def test_a_rank_on_another_node_ends_the_start_in_one_line(
    sides: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray places ranks anywhere; the configuration does not say where."""
    scheduler, worker = sides
    here = worker.get_handshake_metadata()
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("6ab24b07-6a4b-4a6b-9f8a-5a3a3f1f7f11\n")
    with monkeypatch.context() as patch:
        patch.setattr(refusals, "BOOT_ID", boot_id)
        patch.setattr("socket.gethostname", lambda: "elsewhere")
        there = worker.get_handshake_metadata()
    with pytest.raises(ValueError, match=r"one daemon: pp_rank=1 tp_rank=0 is on .*=elsewhere, .*=ray \(g") as caught:
        scheduler.set_xfer_handshake_metadata_pp_aware({(1, 0): there, (0, 0): here})
    assert "\n" not in str(caught.value)
    assert not scheduler.link.running, "nobody looks for a daemon any more"


def test_a_node_that_cannot_be_named_is_not_refused(
    sides: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, worker = sides
    with monkeypatch.context() as patch:
        patch.setattr(refusals, "BOOT_ID", tmp_path / "nowhere")
        unknown = worker.get_handshake_metadata()
    assert unknown.boot_id == ""
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): unknown})


class Others(KVConnectorHandshakeMetadata):
    """Handshake metadata of another connector's workers."""


class Other:
    """A child that takes its own metadata only, as NIXL's."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return Others()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        assert all(isinstance(each, Others) for each in metadata.values())


@pytest.mark.parametrize("guard", [True, False])
def test_p34_a_child_says_nothing_of_its_own_and_takes_what_others_say(
    sides: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, guard: bool
) -> None:
    """MultiConnector hands its first child's metadata to every child, pipeline stages included."""
    ours = {"scheduler": sides[0], "worker": sides[1]}
    multi = {role: MultiConnector.__new__(MultiConnector) for role in ours}
    for role, connector in multi.items():
        connector._connectors = [ours[role], Other()]
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", multi["worker"] if guard else ours["worker"])
    said = multi["worker"].get_handshake_metadata()
    assert isinstance(said, Others if guard else KVPrefetchNode)
    with contextlib.nullcontext() if guard else pytest.raises(AssertionError):
        multi["scheduler"].set_xfer_handshake_metadata_pp_aware({(0, 0): said, (1, 0): said})
    with pytest.raises(ValueError, match="pp_rank > 0"):
        KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware(ours["scheduler"], {(1, 0): said})
