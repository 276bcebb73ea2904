"""No system call per poll, none per push while the daemon is awake: strace on a real scheduler thread."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import At
from tests.e2e.probes import BEGIN, END
from tests.lab.daemon import Daemon
from tests.lab.process import frozen
from tests.lab.prompts import make_prompts
from tests.lab.store import Store

POLLS = 2000

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@contextlib.contextmanager
def strace(pid: int, output: Path) -> Iterator[None]:
    """Trace one thread: the process's main thread, which is the scheduler's."""
    tracer = subprocess.Popen(["strace", "-p", str(pid), "-o", str(output)], stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    line = tracer.stderr.readline()
    if "attached" not in line:
        tracer.kill()
        tracer.wait()
        tracer.stderr.close()
        pytest.skip(f"strace cannot attach here: {line.strip()}")
    try:
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait(30)
        tracer.stderr.close()


def between_marks(trace: Path) -> list[Counter[str]]:
    """System calls by name for every stretch between two marks."""
    stretches: list[Counter[str]] = []
    inside: Counter[str] | None = None
    for line in trace.read_text().splitlines():
        if BEGIN in line:
            inside = Counter()
        elif END in line:
            assert inside is not None
            stretches.append(inside)
            inside = None
        elif inside is not None and (match := re.match(r"(\w+)\(", line)):
            inside[match[1]] += 1
    return stretches


def test_polls_and_pushes_make_no_system_call(at: At, tmp_path: Path) -> None:
    prompts = make_prompts(50, 300, seed=51)
    with (
        Store(memory="256 MB") as cluster,
        Daemon(mooncake_config=cluster.config, staging="64MiB") as daemon,
    ):
        site = at(daemon)
        engine = site.engine(own_worker=True)
        engine.run(prompts[:4])
        site.fresh(engine)
        engine.call("tests.e2e.probes:trace_pushes")
        # The storage node stands still: the fetch stays in flight as long as the polls take.
        with frozen(cluster.node_pid):
            with strace(engine.scheduler_pid, tmp_path / "trace"):
                pending = engine.call("tests.e2e.probes:add_and_poll", prompts, POLLS)
            with strace(engine.scheduler_pid, tmp_path / "planted"):
                engine.call("tests.e2e.probes:add_and_poll", prompts[:2], POLLS, plant=True)
        assert pending == POLLS
        *pushes, polls = between_marks(tmp_path / "trace")
        locks = polls.pop("futex", 0)  # Python's own lock changing hands with the watching thread
        assert polls.pop("brk", 0) <= 1, "the C heap grows now and then, by what any thread allocates"
        assert not polls, f"{POLLS} polls made system calls: {dict(polls)} (and {locks} futex)"
        *_, planted = between_marks(tmp_path / "planted")
        assert planted["getppid"] == POLLS, "the trace must see a system call where there is one"
        assert len(pushes) == len(prompts)
        for push in pushes:
            push.pop("futex", 0)
            assert not push - Counter({"write": 1}), f"a push did more than ring the bell: {dict(push)}"
        silent = sum(not push for push in pushes)
        # Between two pushes the daemon may rightly have gone to sleep, on a loaded machine often; a bell that always
        # rings leaves none silent.
        assert silent >= 0.2 * len(pushes), f"only {silent} of {len(pushes)} pushes found the daemon awake"
        engine.stop()
