"""A real engine saves right blocks under preemption, announces them once stored, and attributes hits to a medium."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.conftest import BLOCK, PATIENT, At, Site, answers, hits, served, wait_attached, whole_blocks
from tests.lab.connectors import multi, ours
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.prompts import make_prompts
from tests.support.waiting import eventually

LONG = 64


@pytest.mark.shows("preemption")
@pytest.mark.parametrize(("decode", "load_mode"), [(False, "sync"), (True, "async")])
def test_preempted_requests_are_saved_and_loaded_right(site: Site, decode: bool, load_mode: str) -> None:
    """The KV pool holds one and a half of four long outputs; then all saved blocks are loaded and continued."""
    prompts = make_prompts(5, 200, seed=61)
    right = answers(prompts, LONG)
    continued = [prompt + tokens for prompt, tokens in zip(prompts, right, strict=True)]
    right_on = answers(continued, 8)
    engine = site.bed(
        extra={"save_decode_cache": decode, "load_mode": load_mode, "cache_prefix": f"saving-{load_mode}"},
        num_gpu_blocks=26,
        max_model_len=512,
    )
    engine.call("tests.e2e.probes:count_preemptions")
    assert engine.run(prompts, max_tokens=LONG).tokens == right
    assert engine.call("tests.e2e.probes:preemptions") > 0
    site.fresh(engine)
    served(engine.run(prompts, max_tokens=LONG), right, hits(prompts))
    site.fresh(engine)
    third = engine.run(continued, max_tokens=8)
    assert third.tokens == right_on
    for prompt, whole, hit in zip(prompts, continued, third.cached_tokens, strict=True):
        if decode:  # the KV of all tokens but the last was computed
            assert hit == whole_blocks(whole)
        else:  # the second prefill of a preempted request takes its output for prompt
            assert whole_blocks(prompt) <= hit <= whole_blocks(whole)
    site.assert_idle()
    engine.stop()


@pytest.mark.shows("KV events, sources of hits")
def test_stored_blocks_are_announced_and_hits_attributed_to_memory_or_disk(
    at: At, model: Path, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    """As a child of MultiConnector: from memory while the daemon lives, from its disk after a restart."""
    prompts = make_prompts(4, 200, seed=62)
    hits = sum(whole_blocks(prompt) for prompt in prompts)
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    with Daemon(memory="64MiB", staging="16MiB", disk=f"{tmp_path / 'disk'}:256MiB", extra=PATIENT) as daemon:
        site = at(daemon)
        engine = engines(
            EngineSpec(
                model=model,
                kv_transfer=multi(ours(daemon.socket), example),
                extra={
                    "disable_log_stats": False,
                    "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
                },
            )
        )
        engine.call("tests.e2e.probes:record_events_and_sources")
        engine.run(prompts, max_tokens=2)
        wanted = {tuple(p[at : at + BLOCK]) for p in prompts for at in range(0, whole_blocks(p), BLOCK)}

        def stored() -> bool:
            engine.run([[5, 6, 7]], max_tokens=1)  # events are taken with steps
            return {tuple(tokens) for _, tokens in engine.call("tests.e2e.probes:stored_events")} == wanted

        eventually(stored, 20, "the events of all blocks")
        events = engine.call("tests.e2e.probes:stored_events")
        assert {medium for medium, _ in events} == {"CPU"}
        assert len(events) == len(wanted), "each once"

        site.fresh(engine)
        engine.call("tests.e2e.probes:sources")
        assert sum(engine.run(prompts, max_tokens=2).cached_tokens) == hits
        attributed = find_spec("vllm.v1.metrics.cache_hit_source") is not None  # vLLM 0.31 does not ask
        assert engine.call("tests.e2e.probes:sources") == ({"host": hits} if attributed else {})

        assert daemon.sigterm(60) == 0
        daemon.start()
        wait_attached(engine)
        assert engine.reset_prefix_cache()
        assert sum(engine.run(prompts, max_tokens=2).cached_tokens) == hits
        assert engine.call("tests.e2e.probes:sources") == ({"disk": hits} if attributed else {})
        site.assert_idle()
        engine.stop()
