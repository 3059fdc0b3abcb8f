"""A collector of spans that counts them, for measuring what sending them costs."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

__all__ = ["OtlpSink"]


class OtlpSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on loopback from its making until `close`.

    Attributes:
        endpoint: Its URL.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: Counter[str] = Counter()
        self._server = grpc.server(ThreadPoolExecutor(4, thread_name_prefix="otlp"))
        add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, _context: Any) -> Any:
        """Spans come in."""
        names = [
            span.name
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans.update(names)
        return pb.ExportTraceServiceResponse()

    def spans(self) -> dict[str, int]:
        """How many came, by name."""
        with self._lock:
            return dict(self._spans)

    def close(self) -> None:
        """Ends."""
        self._server.stop(0).wait(5)
