"""A receiver of OpenTelemetry spans over OTLP/HTTP; it keeps what comes. Needs the extra `otel`."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver(ThreadingHTTPServer):
    """Serves while it is entered. `spans`: as protobuf messages; `resources`: what sent them; `status`: of its answers.

    `headers`: of its last request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.headers: dict[str, str] = {}
        self.status = 200
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def __enter__(self) -> Receiver:
        self._thread = threading.Thread(target=self.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.headers = dict(self.headers.items())
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.server.status == 200:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.server.resources.append(
                    {each.key: each.value.string_value for each in resource.resource.attributes}
                )
                self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...
