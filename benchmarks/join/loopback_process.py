"""A gRPC server that streams bytes over loopback: `python -m benchmarks.join.loopback_process CHUNKS`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import grpc

from benchmarks.join.media import CHUNK_BYTES, METHOD
from eaas.launcher_pipe import announce, bind_to_launcher
from eaas.net.grpc_server import Service, serve
from eaas.shutdown import Shutdown

__all__ = ["main"]


class _Loopback(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, chunks: int) -> None:
        self._chunks = chunks

    def service(self, details: Any) -> Any:
        if details.method != METHOD:
            return None
        return grpc.unary_stream_rpc_method_handler(self._read)

    def _read(self, request: bytes, context: Any) -> Iterator[bytes]:
        chunk = bytes(CHUNK_BYTES)
        for _ in range(self._chunks):
            yield chunk


def main(chunks: int) -> None:
    """Stream bytes to the benchmark until SIGTERM. Each answer has `chunks` chunks."""
    bind_to_launcher()
    with Shutdown() as shutdown:

        def add(handler: _Loopback, server: Any) -> None:
            server.add_generic_rpc_handlers((handler,))

        server = serve([Service("benchmarks.Loopback", add, _Loopback(chunks))], "127.0.0.1", 0)
        announce(ready=server.address)
        shutdown.wait()
        server.stop(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
