"""Prompts fetched over a limited link: calls run one after the other, and wait for their turn. Needs root."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import pytest

from tests.daemon.traffic import Traffic
from tests.lab.daemon import Daemon
from tests.lab.link import LimitedLink, available
from tests.lab.store import Store


@pytest.fixture
def traffic(serve: Callable[..., Daemon]) -> Iterator[Traffic]:
    """Prompts of 48 blocks, each 0.26 s of the link; its pace is known."""
    if why_not := available():
        pytest.skip(why_not)
    with LimitedLink() as link, Store(memory="1 GB", link=link) as store:
        env = {"MC_TCP_BIND_ADDRESS": link.host_ip}
        daemon = serve(memory=None, staging="16MB", mooncake_config=store.config, env=env)
        traffic = Traffic(daemon, block_bytes=64 << 10, blocks=48, prompts=12)
        link.limit(100)
        for _ in range(3):
            traffic.together(1)
        yield traffic


def test_the_first_of_two_prompts_has_the_link_for_itself(traffic: Traffic) -> None:
    """It is there in little more than its own time, and the second one no later than both together would be.

    Its first blocks are there before, so that the engine can tell how fast they come.
    """
    (some, alone), (_, first, second) = (
        [statistics.median(ends) for ends in zip(*(traffic.together(count) for _ in range(5)), strict=True)]
        for count in (1, 2)
    )
    assert some < 0.7 * alone, "all blocks came in one call"
    assert first < 1.5 * alone, "both shared the link"
    assert second < 2.5 * alone, "the link was idle"


def test_a_stopped_fetch_ends_with_the_call_that_runs(traffic: Traffic) -> None:
    """The call behind it waits for its turn, and is dropped; the next prompt comes whole."""
    first, came = (statistics.median(counts) for counts in zip(*(traffic.stopped() for _ in range(7)), strict=True))
    assert came < 2.5 * first, "one call more at most, not two"
    assert len(traffic.together(1)) == 2
