"""Fixtures of the scheduler tests: one real store and one real daemon for all schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.lab.checkpoint import TINY, TINY_TP2, make_checkpoint
from tests.lab.control import Reader
from tests.lab.daemon import Daemon
from tests.lab.store import Store
from tests.support.auditor import Auditor

if TYPE_CHECKING:  # they import vLLM; without it this folder's files are skipped, and this one is imported all the same
    from tests.scheduler.shape import Site


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Staging for 32 blocks of one rank or 16 of two, 8 or 4 of them for saves: loads and saves compete for it."""
    from kvprefetch.connector.attach import link
    from tests.scheduler.model import BLOCK_BYTES
    from tests.scheduler.shape import Site, use_models

    auditor = Auditor()
    models = tmp_path_factory.mktemp("models")
    use_models(make_checkpoint(models, TINY_TP2), make_checkpoint(models, TINY))
    with (
        Store(memory="64 MB", local_buffer="32MB", lease_ms=2000) as store,
        Reader(store.config) as reader,
        Daemon(mooncake_config=store.config, staging=f"{32 * BLOCK_BYTES}") as daemon,
    ):
        with pytest.MonkeyPatch.context() as patch:
            # A lost daemon is looked for at once.
            patch.setattr(link, "RETRY_S", 0.02)
            yield Site(daemon, reader, auditor)
        assert daemon.sigterm() == 0
    auditor.assert_nothing_left()
