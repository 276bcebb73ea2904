"""What tests of a daemon with a GPU of host memory start it with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.daemon.conftest import starter
from tests.daemon.engine.near import Start, daemon_with
from tests.support.auditor import Auditor


@pytest.fixture
def start(auditor: Auditor) -> Iterator[Start]:
    yield from starter(daemon_with)
