"""Fixtures of the tests that drive our connector by vLLM's real scheduler."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .real import RealEngine


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def make(checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RealEngine]]:
    """Builds engines whose daemon is played by the test; no error may stay inside the connector unseen."""
    from kvprefetch.connector import connector

    from .real import RealEngine

    swallowed: list[str] = []
    monkeypatch.setattr(connector.log, "exception", lambda *values: swallowed.append(traceback.format_exc()))

    def construct(**options: Any) -> RealEngine:
        return RealEngine(checkpoint_folder, **options)

    yield construct
    assert swallowed == []
