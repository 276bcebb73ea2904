"""Leases of prompts that wait long for their fetch, with a real master whose leases last two seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from kvprefetch.shmring.wire.records import FlagState, Outcome
from tests.daemon.stores import blocks, stored
from tests.lab import control
from tests.lab.daemon import Daemon
from tests.lab.store import Store
from tests.support.auditor import ask_daemon
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

BLOCKS = 8192  # 128k tokens of 16 each
SAVED = 1024  # of one save


@pytest.fixture
def cluster() -> Iterator[Store]:
    with Store(memory="512 MB", lease_ms=2000) as store:
        yield store


def test_a_lease_of_two_seconds_holds_three_prompts_of_128k_tokens_beside_new_prompts(
    serve: Callable[..., Daemon], cluster: Store
) -> None:
    """No room is left for them, and new prompts keep the look-ups busy, for more than two leases."""
    daemon = serve(
        memory=None, mooncake_config=cluster.config, staging="11MiB", extra=("--lease-ms", "2000", "--chunk", "1MiB")
    )
    engine = FakeEngine(daemon.socket, block_bytes=1024, max_blocks=BLOCKS)
    prompts = [list(blocks(f"long-{number}", BLOCKS)) for number in range(4)]
    noise = list(blocks("noise", SAVED))
    digests = [digest for prompt in (*prompts, noise) for digest in prompt]
    for start in range(0, len(digests), SAVED):
        engine.save({digest: digest * 32 for digest in digests[start : start + SAVED]})
    stored(daemon, len(digests))
    first = engine.hint(prompts[0])
    assert engine.settled(first, 30).count == BLOCKS
    assert engine.move(first, FlagState.CLAIMED), "its slots stay taken"
    waiting = [engine.hint(prompt) for prompt in prompts[1:]]
    eventually(lambda: int(ask_daemon(daemon.socket).engines[0]["leases"]) > 2.9 * BLOCKS, 30, "the look-ups")
    busy = [engine.hint(noise) for _ in range(8)]
    until = time.monotonic() + 5
    while time.monotonic() < until:
        key = busy.pop(0)
        assert engine.move(key, FlagState.CANCELLED)
        engine.done(key, Outcome.ABORTED)
        busy.append(engine.hint(noise))
        time.sleep(0.005)
    keys = [f"u{os.getuid()}@model@tp_rank:0@{digest.hex()}" for prompt in prompts[1:] for digest in prompt[512::256]]
    assert control.unleased(cluster.config, keys) == []
    for key in (*waiting, *busy):
        assert engine.move(key, FlagState.CANCELLED)
        engine.done(key, Outcome.ABORTED)
    assert engine.move(first, FlagState.RELEASED)
    engine.done(first, loaded=BLOCKS)
