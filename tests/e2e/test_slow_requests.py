"""Slow requests of a real engine: `explain` and `top` name the cause, and its trace has their parts."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import PATIENT, At, Site, hits
from tests.lab import link
from tests.lab.daemon import Daemon
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.lab.test_slow_requests import told
from tests.support.auditor import ask_daemon
from tests.support.command import kvprefetchd
from tests.support.otlp_receiver import Receiver
from tests.support.waiting import eventually

PROMPTS = make_prompts(2, 300, seed=83)
LONG = make_prompts(12, 1900, seed=84)  # 3.8 MB of KV each
SLICES_S = 15.0  # two slices of the usual pace, before one is called slow
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with Receiver() as receiver:
        yield receiver


def test_full_places_in_one_trace_with_vllm(site: Site, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request queues behind a long answer: the cause, and spans of both sides under the client's trace."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    options = {"otlp_traces_endpoint": receiver.url, "disable_log_stats": False}
    engine = site.engine(site.spec(extra={"cache_prefix": "slow"}, max_num_seqs=1).but(extra=options))
    engine.run(PROMPTS)
    site.fresh(engine)
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    # Half a second later: of two that arrive at once, the one whose KV comes first gets the place.
    answers, arrivals = [600, 8], [0.0, 0.5]
    served = engine.run(PROMPTS, max_tokens=answers, arrivals_s=arrivals, request_options={"trace_headers": headers})
    assert served.cached_tokens == hits(PROMPTS)
    name = served.requests[1].request_id
    cause, top = told(site.daemon, name)
    assert cause.startswith("Cause: the engine's places or tokens went to other requests for "), cause
    assert "places full" in top

    sent = kvprefetchd("tail", "--otlp", receiver.url, "--request", name, given="\n".join(site.daemon.lines))
    assert (sent.returncode, sent.stdout, sent.stderr) == (0, "requests sent: 1\n", "")
    eventually(lambda: len([span for span in receiver.spans if span.name == "llm_request"]) >= 4, 20, "vLLM's spans")
    spans = [span for span in receiver.spans if span.trace_id.hex() == TRACE_ID]
    roots = sorted(span.name for span in spans if span.parent_span_id.hex() == PARENT_ID)
    assert roots == ["kvprefetch request", "llm_request", "llm_request"]
    [ours] = [span for span in spans if span.name == "kvprefetch request"]
    parts = {span.name for span in spans if span.parent_span_id == ours.span_id}
    assert "in the engine's queue" in parts
    site.assert_idle()
    engine.stop()


@pytest.mark.stress  # half a minute: slices of 5 s for the usual pace, and for the slow one
def test_a_slow_link_is_the_cause_and_is_warned_of(at: At) -> None:
    if why_not := link.available():
        pytest.skip(why_not)
    with (
        link.LimitedLink() as wire,
        Store(memory="512 MB", link=wire) as store,
        Daemon(mooncake_config=store.config, staging="24MiB", extra=PATIENT) as daemon,
    ):
        site = at(daemon)
        engine = site.engine()
        for prompt in LONG:
            engine.run([prompt], max_tokens=1)
            site.fresh(engine)  # one prompt at a time has room to be saved whole
        started = time.monotonic()
        while time.monotonic() < started + SLICES_S or "hour" not in ask_daemon(daemon.socket).rates.get("memory", {}):
            assert time.monotonic() < started + 90, "the link's pace is not known"
            usual = engine.run(LONG, max_tokens=1, concurrency=1)
            assert usual.cached_tokens == hits(LONG)
            assert engine.reset_prefix_cache()
        wire.limit(20)
        slow = engine.run(LONG, max_tokens=1, concurrency=1)
        assert slow.cached_tokens == hits(LONG)
        cause, top = told(daemon, slow.requests[0].request_id)
        assert cause.startswith("Cause: the link was slow: the store gave "), cause
        assert "; its last hour " in cause
        assert "slow link" in top
        [warned, *_] = daemon.records("fetch.slow")
        assert warned["path"] == "memory"
        assert warned["bytes_s"] < 0.25 * warned["hour_bytes_s"]
        site.assert_idle()
        engine.stop()
