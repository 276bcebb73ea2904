"""The lab measures what it says: real engines, tokens that depend on every block, a store that really serves them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lab import connectors, control, link, process
from tests.lab.checkpoint import TINY, make_checkpoint
from tests.lab.engine import Engine, EngineError, EngineSpec
from tests.lab.passes import Abort
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.lab.template import Template, TemplateError
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e

BLOCK = 32
PROMPT_TOKENS = 300
HIT_TOKENS = (PROMPT_TOKENS - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def model() -> Path:
    return make_checkpoint(process.REPO / "build" / "checkpoints", TINY)


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with Store(memory="256 MB") as running:
        yield running


@pytest.fixture(scope="module")
def engine(model: Path, store: Store) -> Iterator[Engine]:
    """One engine for all tests: upstream's connector on a real store, and room for four prompts at a time."""
    spec = EngineSpec(
        model=model,
        max_model_len=1024,
        num_gpu_blocks=64,
        kv_transfer=connectors.upstream(),
        mooncake_config=store.config,
    )
    with Engine(spec) as running:
        yield running


def cached_blocks(engine: Any) -> int:
    """Runs in the scheduler's process: hashed blocks of its pool."""
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return len(pool.cached_block_hash_to_block)


def test_a_checkpoint_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    first = make_checkpoint(tmp_path / "a", TINY)
    second = make_checkpoint(tmp_path / "b", TINY)
    other = make_checkpoint(tmp_path / "a", replace(TINY, seed=1))
    weights = "model.safetensors"
    assert (first / weights).read_bytes() == (second / weights).read_bytes()
    assert (first / weights).read_bytes() != (other / weights).read_bytes()
    assert first.name == second.name != other.name
    assert make_checkpoint(tmp_path / "a", TINY) == first


def test_recomputed_cached_and_loaded_tokens_agree_and_swapped_blocks_change_them(
    engine: Engine, store: Store, model: Path
) -> None:
    """One test, because each step needs the one before: compute, cache, load, spoil, load again."""
    prompts = make_prompts(4, PROMPT_TOKENS, seed=1)
    recomputed = engine.run(prompts)
    assert recomputed.cached_tokens == [0] * 4
    assert len({tuple(tokens) for tokens in recomputed.tokens}) == 4, "the tokens do not depend on the prompt"

    cached = engine.run(prompts)
    assert cached.cached_tokens == [HIT_TOKENS] * 4
    assert cached.tokens == recomputed.tokens

    keys = [key for prompt in prompts for key in control.block_keys(model, prompt)]
    assert None not in control.read_digests(store.config, keys)
    assert engine.reset_prefix_cache()
    loaded = engine.run(prompts)
    assert loaded.cached_tokens == [HIT_TOKENS] * 4
    assert loaded.tokens == recomputed.tokens

    swapped = [control.block_keys(model, prompt)[2] for prompt in prompts[:2]]
    before = control.read_digests(store.config, swapped)
    control.swap_values(store.config, *swapped)
    assert control.read_digests(store.config, swapped) == before[::-1]
    assert engine.reset_prefix_cache()
    spoilt = engine.run(prompts)
    assert spoilt.cached_tokens == [HIT_TOKENS] * 4
    assert spoilt.tokens[0] != recomputed.tokens[0]
    assert spoilt.tokens[1] != recomputed.tokens[1]
    assert spoilt.tokens[2:] == recomputed.tokens[2:]


def test_the_end_of_the_answer_depends_on_the_first_block(engine: Engine) -> None:
    """Prompts that differ in their first block only: else a wrong block could go unseen."""
    [prompt] = make_prompts(1, PROMPT_TOKENS, seed=2)
    [other] = make_prompts(1, BLOCK, seed=3)
    tokens = engine.run([prompt, other + prompt[BLOCK:]]).tokens
    assert tokens[0] != tokens[1]


def test_a_closed_loop_keeps_so_many_requests_outstanding(engine: Engine) -> None:
    result = engine.run(make_prompts(6, 64, seed=4), max_tokens=4, concurrency=2)
    for each in result.requests:
        assert each.finished_s is not None
        others = [
            other
            for other in result.requests
            if other.arrival_s <= each.arrival_s and (other.finished_s or 0.0) > each.arrival_s
        ]
        assert len(others) <= 2
    assert [len(tokens) for tokens in result.tokens] == [4] * 6


def test_a_user_pauses_between_an_answer_and_the_next_request(engine: Engine) -> None:
    result = engine.run(make_prompts(4, 64, seed=7), max_tokens=4, concurrency=1, pauses_s=[0.0, 0.3, 0.0, 0.0])
    ends = [each.finished_s or 0.0 for each in result.requests]
    gaps = [each.arrival_s - end for each, end in zip(result.requests[1:], ends, strict=False)]
    assert gaps[1] >= 0.3
    assert min(gaps) >= 0.0


def test_arrivals_and_aborts_are_followed(engine: Engine) -> None:
    prompts = make_prompts(3, 64, seed=5)
    aborts = [Abort(1, after_tokens=3), Abort(2, after_steps=1)]
    heard: list[dict[str, Any]] = []
    result = engine.run(prompts, max_tokens=16, arrivals_s=[0.0, 0.0, 0.3], aborts=aborts, on_event=heard.append)
    assert [each.finish_reason for each in result.requests] == ["length", "abort", "abort"]
    assert len(result.tokens[1]) == 3
    assert result.requests[2].arrival_s >= 0.3
    assert {"event": "finished", "index": 0} in heard


def test_functions_run_in_the_schedulers_process(engine: Engine) -> None:
    engine.reset_prefix_cache()
    assert engine.call("tests.lab.test_lab:cached_blocks") == 0
    engine.run(make_prompts(1, PROMPT_TOKENS, seed=6), max_tokens=1)
    assert engine.call("tests.lab.test_lab:cached_blocks") == PROMPT_TOKENS // BLOCK
    assert engine.scheduler_pid != os.getpid()
    with pytest.raises(EngineError, match="AttributeError"):
        engine.call("tests.lab.test_lab:no_such_function")


def test_a_killed_parent_of_a_child_takes_it_along(tmp_path: Path) -> None:
    """SIGKILL of whoever started it must not leave a store behind."""
    log = tmp_path / "log"
    code = (
        "import pathlib, time; from tests.lab import process\n"
        f"print(process.spawn(['sleep', '60'], log=pathlib.Path({str(log)!r})).pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=process.REPO) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert process.alive(pid)
        starter.send_signal(signal.SIGKILL)
    assert process.wait_gone([pid]) == []


def test_a_limited_link_carries_so_much_and_leaves_nothing(tmp_path: Path) -> None:
    """A stream over a 200 Mbit/s link takes its time; afterwards namespace, link and process are gone."""
    if why_not := link.available():
        pytest.skip(why_not)
    size = 5_000_000
    with link.LimitedLink(rate_mbit=200) as limited:
        serve = (
            "import socket, sys; s = socket.create_server((sys.argv[1], 7001)); print('up', flush=True)\n"
            f"c, _ = s.accept(); c.sendall(bytes({size})); c.close()"
        )
        log = tmp_path / "log"
        server = limited.run_in_ns([sys.executable, "-c", serve, limited.remote_ip], log=log)
        try:
            before = limited.received_bytes
            seconds = _receive_seconds(limited.remote_ip, log, size)
            counted = limited.received_bytes - before
        finally:
            process.reap(server)
        namespace = limited.namespace
    assert size < counted < 1.1 * size
    assert seconds > 0.8 * size * 8 / 200e6
    listed = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert namespace not in listed
    assert not Path("/run/netns", namespace).exists()


def _receive_seconds(address: str, log: Path, size: int) -> float:
    import socket
    import time

    eventually(lambda: log.exists() and "up" in log.read_text(), 20, lambda: process.tail(log))
    with socket.create_connection((address, 7001), timeout=20) as stream:
        begun, got = time.monotonic(), 0
        while part := stream.recv(1 << 16):
            got += len(part)
    assert got == size
    return time.monotonic() - begun


def test_a_template_that_cannot_import_says_why(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('planted')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with Template({"PYTHONPATH": path}) as template, pytest.raises(TemplateError, match="planted"):
        template.fork({}, 2)
