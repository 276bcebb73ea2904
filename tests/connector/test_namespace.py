"""Which engines share a namespace of the store, and what an engine's log says of it."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvprefetch.connector.identity import checkpoint, namespace
from kvprefetch.connector.identity.namespace import Namespace, fingerprinted, rank_keys
from kvprefetch.connector.identity.start import Start
from tests.connector.test_fingerprint import media, model_config, running, write_model

START, ANOTHER = "1" * 32, "2" * 32
PREFIX = "tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"


def where(folder: Path, *, start: str = START, tp_rank: int = 0, known: Any = None, **changes: Any) -> Namespace:
    """Of a rank of two that hold the same KV head."""
    config: Any = SimpleNamespace(
        model_config=model_config(folder, **changes),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        speculative_config=None,
    )
    keys = rank_keys(model="org/tiny", tp_rank=tp_rank, replicas=(2,))

    def runs() -> dict[str, str]:
        if isinstance(known, Exception):
            raise known
        return running() if known is None else known

    return fingerprinted(config, keys, runs, Start("engine", start, time.time_ns()))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_the_prefix_ends_with_the_digest_of_what_the_fingerprint_says(model: Path) -> None:
    found = where(model)
    assert re.fullmatch(re.escape(PREFIX) + "fp:[0-9a-f]{32}@", found.prefixes[0])
    assert {"weights", "config", "dtype", "kv_dtype", "layers", "layout", "attention"} <= found.fingerprint.keys()
    assert found.unknown == ""
    assert where(model, start=ANOTHER) == found, "a later start finds it"
    assert where(model, tp_rank=1) == found, "of ranks with the same bytes each has it"


def test_without_a_fingerprint_a_start_has_a_namespace_of_its_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its ranks share it, or those that hold the same bytes could not take turns; nobody else does."""
    right = where(model).prefixes
    (model / "model.safetensors").unlink()
    first = where(model)
    assert "there are no weights to read" in first.unknown
    assert first.prefixes == where(model, tp_rank=1).prefixes == (f"{PREFIX}fp:{START}@",)
    assert where(model, start=ANOTHER).prefixes == (f"{PREFIX}fp:{ANOTHER}@",) != right
    write_model(model)
    assert where(model).prefixes == right
    for broken in ({"known": AttributeError("no such field")}, {"hf_overrides": lambda config: config}):
        assert where(model, **broken).prefixes == first.prefixes
    monkeypatch.setattr(checkpoint, "sample", lambda files: (_ for _ in ()).throw(OSError("gone")))
    assert where(model).prefixes == first.prefixes


CURES: dict[str, dict[str, Any]] = {
    "start without it, or install its code as a package": {},
    "give it as JSON": {"hf_overrides": lambda config: config},
    "give the option as JSON": {"hf_overrides": {"width": object()}},
    "load from files": {"model_weights": "s3://bucket/model"},
    "serve the model from files that this process can read": {
        "multimodal_config": media(mm_encoder_fp8_scale_path="/nowhere/scales.json")
    },
    "start the engine anew": {},
    "download it again": {},
}


@pytest.mark.parametrize("cure", CURES)
def test_the_log_names_the_cure_of_its_cause(model: Path, cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable or a plugin is not cured by other files."""
    if cure.startswith("start without"):
        monkeypatch.setenv("VLLM_ROUND_TO_THREE_BITS", "1")
    if cure.startswith("start the engine"):
        monkeypatch.setattr(time, "time_ns", lambda: 0)
    if cure.startswith("download"):
        (model / "model.safetensors").write_bytes(b"half")
    found = where(model, **CURES[cure]).unknown
    assert [each for each in CURES if each in found] == [cure]


def test_the_log_says_once_who_shares_what_is_stored(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = rank_keys(model="tiny", tp_rank=0)
    with caplog.at_level(logging.DEBUG, "vllm.kvprefetch"):
        for found in (where(model), where(model, known=ValueError("why")), namespace.Namespace(keys.prefixes, {})):
            for first_rank in (True, False):
                namespace.log_sharing(found, first_rank=first_rank)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == ["INFO", "WARNING", "INFO", "WARNING"]
    known, unknown, _, upstreams = (text for _, text in said)
    assert "weights=" in known
    assert "not known: ValueError: why. If that must stay," in unknown
    assert f"keys that begin with {PREFIX} shares the stored KV, and nothing checks" in upstreams
    assert not any("\n" in text for _, text in said)
