"""An HTTP server of a directory that answers range requests, counts what it sends, and fails on demand."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["RangeServer"]


class RangeServer:
    """Serves the files of a directory at `url`; a context manager.

    Attributes:
        sent: File -> bytes of all bodies.
        ranges: (file, first byte, byte after the last) of each answered GET.
        targets: Path and query of each request.
        headers: Header fields of the latest request.
        fault: Called before each answer with method, file name and how often the same bytes were asked for
            (from 1). Returns a status to answer instead, "whole" (ignore the range), "cut" (end the body
            early) or seconds to wait; None: no fault.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sent: Counter[str] = Counter()
        self.ranges: list[tuple[str, int, int]] = []
        self.targets: list[str] = []
        self.headers: dict[str, str] = {}
        self.fault: Callable[[str, str, int], int | str | float | None] = lambda *_: None
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self._attempts: Counter[tuple[str, str, str]] = Counter()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/models/m"

    def attempt(self, request: BaseHTTPRequestHandler) -> int:
        """Counts a request: how often its bytes have been asked for (from 1). Needs `lock`."""
        key = (request.command, request.path, request.headers.get("Range", ""))
        self._attempts[key] += 1
        return self._attempts[key]

    def __enter__(self) -> RangeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(box: RangeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            name = Path(urlsplit(self.path).path).name
            with box.lock:
                box.targets.append(self.path)
                box.headers = dict(self.headers)
                fault = box.fault(self.command, name, box.attempt(self))
            if isinstance(fault, float):
                box.ended.wait(fault)
            file = box.directory / name
            status = fault if isinstance(fault, int) else 200 if file.is_file() else 404
            if status != 200:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            about, data = file.stat(), file.read_bytes()
            begin, end = 0, len(data)
            asked = self.headers.get("Range")
            if asked and fault != "whole":
                first, last = asked.removeprefix("bytes=").split("-")
                begin, end = int(first), min(int(last) + 1, len(data))
                if begin >= len(data):
                    status = 416
                    begin = end = 0
                else:
                    status = 206
            body = data[begin:end]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{about.st_mtime_ns:x}-{about.st_size:x}"')
            if status == 206:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
            self.end_headers()
            if not with_body:
                return
            if fault == "cut":
                body = body[: len(body) // 2]
                self.close_connection = True
            with box.lock:
                box.sent[name] += len(body)
                box.ranges.append((name, begin, end))
            # A client leaves at its deadline.
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
