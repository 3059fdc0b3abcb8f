"""HTTP/2 frames and gRPC messages that simulated members make by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scale import http2

FRAMES = st.lists(
    st.builds(
        http2.Frame,
        st.integers(0, 255),
        st.integers(0, 255),
        st.integers(0, http2.WINDOW),
        st.binary(max_size=70_000),
    ),
    max_size=5,
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(ends)]


@given(FRAMES, st.lists(st.integers(0), max_size=6))
def test_frames_survive_any_split(frames: list[http2.Frame], places: list[int]) -> None:
    reader = http2.Frames()
    data = b"".join(http2.frame(*frame) for frame in frames)
    found = [frame for piece in cut(data, places) for frame in reader.feed(piece)]
    assert found == frames


@given(st.lists(st.binary(max_size=300), max_size=5), st.lists(st.integers(0), max_size=6))
def test_messages_survive_any_split(payloads: list[bytes], places: list[int]) -> None:
    reader = http2.Messages()
    data = b"".join(http2.message(payload) for payload in payloads)
    assert [m for piece in cut(data, places) for m in reader.feed(piece)] == payloads


def test_a_request_head_in_hpack() -> None:
    """RFC 7541, 6.1 and 6.2.2: two of the static table, then literals."""
    (frame,) = http2.Frames().feed(http2.request_head(5, "/s/M", "host:1"))
    assert (frame.kind, frame.stream, frame.flags) == (http2.HEADERS, 5, 4)
    assert frame.payload == (
        b"\x83\x86\x00\x05:path\x04/s/M\x00\x0a:authority\x06host:1"
        b"\x00\x02te\x08trailers\x00\x0ccontent-type\x10application/grpc"
    )
    with pytest.raises(ValueError, match="longer than 126 bytes"):
        http2.request_head(1, "/" + "x" * 126, "host:1")
