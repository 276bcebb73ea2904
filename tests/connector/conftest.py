"""Fixtures of the tests that drive our connector by vLLM's real scheduler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .real import RealEngine


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def make(checkpoint_folder: Path) -> Callable[..., RealEngine]:
    """Builds engines whose daemon is played by the test."""
    from .real import RealEngine

    def construct(**options: Any) -> RealEngine:
        return RealEngine(checkpoint_folder, **options)

    return construct
