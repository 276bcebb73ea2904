"""`kvprefetchd tail --otlp`: requests become spans of vLLM's trace, read with the protocol's own classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvprefetch import __version__
from kvprefetch.connector.hints import trace_of
from kvprefetch.daemon.telemetry import trace_picture
from kvprefetch.shmring.wire.records import NO_TRACE
from tests.daemon.telemetry.test_trace_picture import LINE
from tests.support.command import kvprefetchd, one_line
from tests.support.otlp_receiver import Receiver

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACED = {**LINE, "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    pytest.importorskip("opentelemetry.proto")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with Receiver() as server:
        yield server


def test_a_request_is_a_span_of_vllm_s_trace_with_a_span_for_each_part(receiver: Receiver, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"noise\n{json.dumps(TRACED)}\n" + json.dumps({**LINE, "request_id": "untraced"}) + "\n")
    sent = kvprefetchd("tail", "--otlp", receiver.url, "--request", "cmpl-7", log)
    assert (sent.returncode, sent.stdout, sent.stderr) == (0, "requests sent: 1\n", "")
    [sender] = receiver.resources
    assert (sender["service.name"], sender["service.version"]) == ("kvprefetchd", __version__)
    assert {span.trace_id.hex() for span in receiver.spans} == {TRACE_ID}
    [whole] = [span for span in receiver.spans if span.name == "kvprefetch request"]
    assert whole.parent_span_id.hex() == PARENT_ID
    arrived_ns = whole.start_time_unix_nano
    assert arrived_ns == 1795246200_000_000_000 - 100_400_000, "the line's time, less `ended_ms`"
    parts = {span.name: span for span in receiver.spans if span is not whole}
    assert {span.parent_span_id for span in parts.values()} == {whole.span_id}
    times = {
        name: ((span.start_time_unix_nano - arrived_ns) / 1e6, (span.end_time_unix_nano - arrived_ns) / 1e6)
        for name, span in parts.items()
    }
    assert times == {part.name: pytest.approx((part.start_ms, part.end_ms)) for part in trace_picture.spans(TRACED)}
    fields = {each.key: each.value for each in whole.attributes}
    assert fields["kvprefetch.outcome"].string_value == "loaded"
    assert fields["kvprefetch.bytes"].int_value == LINE["bytes"]
    assert fields["kvprefetch.cause"].string_value == "places"
    assert fields["gen_ai.usage.input_tokens"].int_value == LINE["prompt_tokens"]


def test_opentelemetry_s_own_variables_say_where_to_and_as_whom(receiver: Receiver, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(json.dumps(LINE) + "\n")
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url.removesuffix("/v1/traces"),
        "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=blue",
        "OTEL_SERVICE_NAME": "prefetch-7",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
    }
    sent = kvprefetchd("tail", log, "--otlp", **environ)
    assert (sent.returncode, sent.stdout, sent.stderr) == (0, "requests sent: 1\n", "")
    [sender] = receiver.resources
    assert (sender["service.name"], sender["service.version"]) == ("prefetch-7", __version__)
    assert sender["deployment.environment.name"] == "test"
    assert receiver.headers["x-tenant"] == "blue"


def test_a_file_in_the_url_s_place_is_named(tmp_path: Path) -> None:
    sent = kvprefetchd("tail", "--otlp", tmp_path / "log")
    assert sent.returncode == 78
    assert f"name FILE before it: otlp='{tmp_path}/log'" in sent.stderr
    assert one_line(sent.stderr)


def test_a_request_without_a_trace_has_one_of_its_own(receiver: Receiver) -> None:
    sent = kvprefetchd("tail", "--otlp", receiver.url, given=json.dumps(LINE) + "\n" + json.dumps(TRACED) + "\n")
    assert sent.stdout == "requests sent: 2\n"
    assert len({span.trace_id for span in receiver.spans}) == 2
    assert [span.parent_span_id for span in receiver.spans if span.name == "kvprefetch request"].count(b"") == 1


def test_a_receiver_that_refuses_is_one_line(receiver: Receiver) -> None:
    receiver.status = 400
    sent = kvprefetchd("tail", "--otlp", receiver.url, given=json.dumps(LINE) + "\n")
    assert sent.returncode == 69
    assert "did not take" in sent.stderr
    assert one_line(sent.stderr)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"00-{TRACE_ID}-{PARENT_ID}-01", bytes.fromhex(TRACE_ID + PARENT_ID)),
        (f"01-{TRACE_ID}-{PARENT_ID}-03-more", bytes.fromhex(TRACE_ID + PARENT_ID)),
        (f"00-{TRACE_ID}-{PARENT_ID}-00", NO_TRACE),  # not sampled
        (f"00-{TRACE_ID}", NO_TRACE),
        ("x", NO_TRACE),
        ("", NO_TRACE),
    ],
)
def test_the_trace_of_a_request_comes_from_its_headers(header: str, expected: bytes) -> None:
    assert trace_of({"traceparent": header}) == expected
    assert trace_of({"tracestate": header}) == NO_TRACE
