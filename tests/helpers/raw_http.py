"""HTTP over plain sockets, as no client library would send it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from http_box import Box


@dataclass(frozen=True)
class Answer:
    """An answer without its interim ones (1xx)."""

    status: int
    headers: dict[str, str]
    body: bytes
    interim: int = 0

    @property
    def error(self) -> dict[str, Any]:
        """Its error, in OpenAI's form."""
        assert self.headers["content-type"] == "application/json"
        content = json.loads(self.body)
        assert set(content) == {"error"}
        assert set(content["error"]) == {"message", "type", "param", "code"}
        return dict(content["error"])


def connected(box: Box) -> socket.socket:
    host, port = box.server.address.split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def head(line: str, *fields: str) -> bytes:
    return "\r\n".join([line, "Host: localhost", *fields, "", ""]).encode()


def post(
    body: dict[str, Any], path: str = "/v1/completions", *fields: str, http: str = "1.1"
) -> bytes:
    data = json.dumps(body).encode()
    kind, length = "Content-Type: application/json", f"Content-Length: {len(data)}"
    return head(f"POST {path} HTTP/{http}", kind, length, *fields) + data


def read_until(connection: socket.socket, is_enough: Callable[[bytes], bool]) -> bytes:
    """Read until the condition holds for all bytes; a closed connection is an error."""
    data = b""
    while not is_enough(data):
        piece = connection.recv(65_536)
        assert piece, data
        data += piece
    return data


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65_536), b""))


def answer_of(data: bytes) -> Answer:
    """Take one answer apart; the body is left as it came (chunks, too)."""
    interim = 0
    while data.startswith(b"HTTP/1.1 1"):
        data = data.partition(b"\r\n\r\n")[2]
        interim += 1
    first, _, body = data.partition(b"\r\n\r\n")
    line, *fields = first.decode().split("\r\n")
    headers = dict(field.lower().split(": ", 1) for field in fields)
    return Answer(int(line.split()[1]), headers, body, interim)


def exchange(box: Box, request: bytes, *, half_close: bool = False) -> Answer:
    """Send a request; return its answer once the server has closed the connection."""
    with connected(box) as connection:
        connection.sendall(request)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        return answer_of(read_all(connection))
