"""Saves beside loads that never stop: a real daemon and a real storage node behind 1 Gbit/s. Needs root."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.daemon.traffic import Traffic
from tests.lab.daemon import Daemon
from tests.lab.link import LimitedLink, available
from tests.lab.store import Store


def test_saves_keep_a_fifth_of_the_link_while_loads_never_stop(serve: Callable[..., Daemon]) -> None:
    """Of what both move; the bounds leave room for a busy machine.

    tests/daemon/work/test_link_share.py has other sizes.
    """
    if why_not := available():
        pytest.skip(why_not)
    with LimitedLink() as link, Store(memory="1 GB", link=link) as store:
        env = {"MC_TCP_BIND_ADDRESS": link.host_ip}
        daemon = serve(memory=None, staging="64MB", mooncake_config=store.config, env=env)
        traffic = Traffic(daemon, block_bytes=64 << 10, blocks=48, prompts=32)
        figures = traffic.run(4.0, outstanding=2, saving=True)
        assert figures.missed == 0
        assert 0.14 <= figures.save_rate / (figures.save_rate + figures.load_rate) <= 0.35
