"""What tests of a daemon with fake GPUs start it with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.daemon.conftest import starter
from tests.daemon.engine.near import Start, daemon_with
from tests.support import fakecuda
from tests.support.auditor import Auditor


@pytest.fixture
def start(auditor: Auditor) -> Iterator[Start]:
    yield from starter(daemon_with)


@pytest.fixture
def gpus() -> Iterator[fakecuda.Machine]:
    """The machine of this process, with faults that a test plants and that end with it."""
    machine = fakecuda.machine()
    yield machine
    machine.mend()
