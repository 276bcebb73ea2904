"""A slow disk beside fast memory: requests with blocks in memory do not wait behind those with blocks on disk.

The disk is really slow: the embedded store keeps one file per block, and each open of a file takes a while
(tests/lab/slow_disk.py). A restart decides where blocks lie: those stored before it are on disk only, those stored
after it are in memory, too.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import PATIENT, answers, wait_attached, whole_blocks
from tests.e2e.deep import Pair, finished, patient, traces, wishing
from tests.lab.bed import engine as bed
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine
from tests.lab.prompts import make_prompts
from tests.lab.slow_disk import SlowDisk, available
from tests.support.auditor import Auditor

ON_DISK = make_prompts(32, 300, seed=81)  # 9 blocks each
IN_MEMORY = make_prompts(24, 300, seed=82)
HIT = whole_blocks(ON_DISK[0])
# A test reads 16 prompts on disk and the others in memory; each has its own, because blocks stay in staging.
SLOW = ON_DISK[:16] + IN_MEMORY[:8]
HUNG = ON_DISK[16:] + IN_MEMORY[8:]
DISK = range(16)
OPEN_S = 0.06  # 144 blocks: more than eight seconds for all
WAIT_S = 60.0
# Four blocks per call: far below the two seconds after which Mooncake gives up a read from disk.
EXTRA = ("--save-share", "0.5", "--chunk", "256KiB", *PATIENT)

pytestmark = pytest.mark.stress  # minutes of a slow disk; what stays behind it is in tests/daemon/planning


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disk")
    if why_not := available(folder):
        pytest.skip(why_not)
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path, engines: Callable[..., Engine], module_auditor: Auditor) -> Iterator[Pair]:
    with Daemon(memory="64MiB", disk=f"{folder}:256MiB", staging="64MiB", extra=EXTRA) as daemon:
        engine = engines(bed.spec(connector=patient(daemon, WAIT_S, key_format="vllm")))
        pair = Pair(engine, daemon, module_auditor, WAIT_S)
        pair.run(ON_DISK, max_tokens=1)
        assert daemon.sigterm(60) == 0
        daemon.start()
        wait_attached(engine)
        pair.run(IN_MEMORY, max_tokens=1)
        assert pair.counters()["saved_blocks"] == 9 * len(IN_MEMORY)
        yield pair
        engine.stop()
        assert daemon.sigterm(60) == 0


def test_memory_does_not_wait_behind_a_slow_disk(pair: Pair, folder: Path) -> None:
    """The prompts on disk arrive first; those in memory have a first token before the disk has done half its work."""
    with SlowDisk(folder, OPEN_S) as disk:
        result = pair.run(SLOW, max_tokens=8)
        assert disk.opens > 8 * len(DISK), "the disk was slow for nearly all"
    assert finished(result)
    assert result.tokens == answers(SLOW, 8)
    assert result.cached_tokens == [HIT] * len(SLOW)
    lines = traces(pair.daemon, result, range(len(SLOW)))
    assert sum(line["bytes_memory"] > 0 for line in lines) == len(SLOW) - len(DISK), "each lies where it should"
    assert sum(line["bytes_disk"] > 0 for line in lines) == len(DISK)
    first_tokens = [request.first_token_s or 0.0 for request in result.requests]
    half = sorted(first_tokens[index] for index in DISK)[len(DISK) // 2]
    assert max(first_tokens[index] for index in range(len(DISK), len(SLOW))) < half


def test_a_disk_that_hangs_takes_nobody_along(pair: Pair, folder: Path) -> None:
    """A read from disk hangs: the requests that wait for it recompute in time, all others load all their blocks.

    Requests for blocks in memory arrive before and after the daemon's call for the disk has failed.
    """
    brief = dataclasses.replace(pair, wait_s=1.0)
    arrivals = [0.0] * len(DISK) + [0.2 * turn for turn in range(len(HUNG) - len(DISK))]
    with SlowDisk(folder, 30.0):
        brief.begin(HUNG, max_tokens=8, arrivals_s=arrivals, sampling=wishing(wait_timeout_ms=1000))
        during = brief.collect()
    assert finished(during)
    assert during.tokens == answers(HUNG, 8)
    assert during.cached_tokens == [0] * len(DISK) + [HIT] * (len(HUNG) - len(DISK))
    again = time.monotonic()
    while (after := pair.run(HUNG, max_tokens=8)).cached_tokens != [HIT] * len(HUNG):
        assert time.monotonic() < again + 30, "the disk answers again, and what is on it is served again"
    assert after.tokens == answers(HUNG, 8)
