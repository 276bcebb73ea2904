"""Slow requests of a real engine: `explain` and `top` name the cause, and its trace has their parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Site, hits
from tests.lab.prompts import make_prompts
from tests.lab.test_slow_requests import told
from tests.support.command import kvprefetchd
from tests.support.otlp_receiver import Receiver
from tests.support.waiting import eventually

PROMPTS = make_prompts(2, 300, seed=83)
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
    cause = told(site.daemon, name, "places full")
    assert cause.startswith("Cause: the engine's places or tokens went to other requests for "), cause

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
