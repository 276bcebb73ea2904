"""Fixtures for tests against a real daemon process with a real embedded store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.daemon import Daemon
from tests.support.auditor import Auditor
from tests.support.fake_engine import FakeEngine
from tests.support.log_lines import problems

# Tests with these start a daemon with a store.
DAEMONS = {"serve", "shared_daemon"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if DAEMONS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.store)


@pytest.fixture(autouse=True)
def _engines_are_closed() -> Iterator[None]:
    yield
    while FakeEngine.made:
        FakeEngine.made.pop().close()


@pytest.fixture
def auditor() -> Iterator[Auditor]:
    """What a test starts must be gone at its end."""
    auditor = Auditor()
    yield auditor
    auditor.assert_nothing_left()


def keeps_to_the_catalogue(daemon: Daemon) -> None:
    """Check that docs/EVENTS.md describes every line that a daemon wrote."""
    found = {problem for record in daemon.records() for problem in problems(record)}
    assert not found, "\n".join(sorted(found))


def starter(make: Callable[..., Daemon]) -> Iterator[Callable[..., Daemon]]:
    """Yield, for a fixture, a function that starts what `make` makes; stop all of it at the end."""
    started: list[Daemon] = []

    def start(*args: Any, **options: Any) -> Daemon:
        daemon = make(*args, **options)
        started.append(daemon)
        daemon.start()
        return daemon

    yield start
    for daemon in started:
        daemon.close()
        keeps_to_the_catalogue(daemon)


@pytest.fixture
def serve(auditor: Auditor) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons that are stopped at the end of the test."""
    yield from starter(lambda **options: Daemon(**{"memory": "64MiB", "staging": "1MiB", **options}))


@pytest.fixture
def patched(serve: Callable[..., Daemon], tmp_path: Path) -> Callable[..., Daemon]:
    """Starts a daemon in which this code runs first."""

    def start(code: str, **options: Any) -> Daemon:
        (tmp_path / "sitecustomize.py").write_text(code)
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        return serve(env={"PYTHONPATH": path}, **options)

    return start


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    """One daemon for the tests of a module that neither stop it nor fill it."""
    with Daemon(memory="64MiB", staging="1MiB") as daemon:
        yield daemon
        assert daemon.sigterm(30) == 0
        keeps_to_the_catalogue(daemon)
