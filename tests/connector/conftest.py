"""Fixtures of the tests that drive our connector by vLLM's real scheduler, and of the tests of the link."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .played_daemon import Server
    from .real import RealEngine


@pytest.fixture(autouse=True)
def _logs_reach_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that builds vLLM's configuration also sets up its logging, which keeps lines from the root logger."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def make(checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Builds engines for which the test plays the daemon; no error may stay inside the connector unseen."""
    from kvprefetch.connector import connector

    from .real import RealEngine

    swallowed: list[str] = []
    monkeypatch.setattr(connector.log, "exception", lambda *values: swallowed.append(traceback.format_exc()))

    def construct(kind: type[RealEngine] = RealEngine, **options: Any) -> RealEngine:
        return kind(checkpoint_folder, **options)

    yield construct
    assert swallowed == []


@pytest.fixture
def quick_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link retries and beats at once."""
    from kvprefetch.connector.attach import link

    for name, seconds in (("RETRY_S", 0.01), ("FINAL_RETRY_S", 0.05), ("BEAT_S", 0.02)):
        monkeypatch.setattr(link, name, seconds)


@pytest.fixture
def server(tmp_path: Path, quick_link: None) -> Iterator[Server]:
    """A control socket on which the test plays the daemon."""
    from .played_daemon import Server

    with contextlib.closing(Server(tmp_path / "d.sock")) as made:
        yield made
