"""Exports `request.done` lines as OpenTelemetry spans over OTLP: one for the request, one for each part of its life.

A request's spans belong to vLLM's trace (`traceparent`).  OpenTelemetry's own variables hold, such as
OTEL_EXPORTER_OTLP_HEADERS and OTEL_RESOURCE_ATTRIBUTES.  The only importer of OpenTelemetry.
"""

from __future__ import annotations

import logging
from datetime import datetime

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ... import __version__
from .pretty import figure
from .reader import Record
from .trace_picture import spans

AT_ONCE = 512  # spans of one message
# Fields with a name of their own among OpenTelemetry's conventions for generative AI.
_CONVENTIONS = {"prompt_tokens": "gen_ai.usage.input_tokens"}


class ExportError(Exception):
    """The receiver did not take the spans; one line."""


class Exporter:
    """Sends to the OTLP/HTTP receiver at `url`, such as http://localhost:4318/v1/traces; "": as the environment says.

    Not for the main loop.
    """

    def __init__(self, url: str) -> None:
        self._url = url or "that of OTEL_EXPORTER_OTLP_ENDPOINT"
        self._collected, self._exporter = InMemorySpanExporter(), OTLPSpanExporter(endpoint=url or None)
        self.requests = 0
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `send` says what failed
        ours = Resource.create({"service.name": "kvprefetchd", "service.version": __version__})
        provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))  # the environment's words win
        provider.add_span_processor(SimpleSpanProcessor(self._collected))
        self._tracer = provider.get_tracer("kvprefetch")

    def add(self, record: Record) -> None:
        """Add a `request.done` record; what is full of them is sent. Raises ExportError."""
        parts, ended_ms = spans(record), figure(record, "ended_ms")
        if not parts or ended_ms is None:
            return
        try:
            written = datetime.fromisoformat(str(record["ts"]).replace("Z", "+00:00"))
        except ValueError:  # a foreign line
            return
        arrived_ns = int(written.timestamp() * 1e6) * 1000 - int(ended_ms * 1e6)
        # An engine says its times itself; OTLP has none outside of these.
        if not all(0 <= arrived_ns + at * 1e6 < 1 << 63 for part in parts for at in (0, part.start_ms, part.end_ms)):
            return
        headers = {"traceparent": str(record.get("traceparent") or "")}
        parent = TraceContextTextMapPropagator().extract(headers, context.Context())
        fields = {f"kvprefetch.{name}": value for name, value in record.items() if isinstance(value, (str, int, float))}
        fields |= {name: record[field] for field, name in _CONVENTIONS.items() if f"kvprefetch.{field}" in fields}
        whole = self._tracer.start_span("kvprefetch request", parent, start_time=arrived_ns, attributes=fields)
        inside = trace.set_span_in_context(whole, parent)
        for part in parts:
            span = self._tracer.start_span(part.name, inside, start_time=arrived_ns + int(part.start_ms * 1e6))
            span.end(arrived_ns + int(part.end_ms * 1e6))
        whole.end(arrived_ns + int(max(part.end_ms for part in parts) * 1e6))
        self.requests += 1
        if len(self._collected.get_finished_spans()) >= AT_ONCE:
            self.send()

    def send(self) -> None:
        """Send what waits. Raises ExportError."""
        waiting = self._collected.get_finished_spans()
        self._collected.clear()
        if waiting and self._exporter.export(waiting) is not SpanExportResult.SUCCESS:
            raise ExportError(f"the OTLP receiver did not take {len(waiting)} spans: url={self._url}")

    def close(self) -> None:
        self._exporter.shutdown()
