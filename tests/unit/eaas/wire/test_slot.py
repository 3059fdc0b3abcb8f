"""Headers, lengths, validation and views of a slot."""

import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from answer_headers import validate_result
from eaas.errors import SlotCorruptError, WrongRequestError
from eaas.wire import RequestHeader, ResultHeader, _protocol, slot
from eaas.wire.header import MAGIC, align, payload_layout
from eaas.wire.slot import (
    CHECKSUM_FLAG,
    REQUEST_HEADER_BYTES,
    RESULT_HEADER_BYTES,
    VERSION,
    SlotLimits,
    Status,
    WireDtype,
    max_tokens,
    request_views,
    seal,
    validate_request,
    verify,
)

U8 = st.integers(0, 2**8 - 1)
U16 = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
DTYPES = st.sampled_from(WireDtype)

HIDDEN, LAYERS, GENERATION, REQUEST_ID = 16, 4, 7, 42
CAPACITY = 4096
NO_BYTES = bytearray()

request_headers = st.builds(
    RequestHeader, U32, U16, U8, U8, U32, U32, U64, U64, U64, U64, U32, U32, U32, U32
)
result_headers = st.builds(ResultHeader, U32, U16, U16, U32, U32, U64, U32, U32, U64, U64, U64, U64)


def good_request(**changes: int) -> RequestHeader:
    header = RequestHeader.of(
        dtype=WireDtype.BFLOAT16,
        generation=GENERATION,
        request_id=REQUEST_ID,
        epoch=3,
        budget_us=1000,
        layer=2,
        batch_size=5,
        hidden_size=HIDDEN,
        top_k=2,
    )
    return header._replace(**changes)


def good_result(**changes: int) -> ResultHeader:
    header = ResultHeader.of(
        Status.OK, generation=GENERATION, request_id=REQUEST_ID, rows=5, hidden_size=HIDDEN
    )
    return header._replace(**changes)


def check_request(
    header: RequestHeader,
    payload_capacity: int = CAPACITY,
    result_capacity: int = CAPACITY,
    buffer: bytearray = NO_BYTES,
) -> None:
    limits = SlotLimits(payload_capacity, result_capacity, HIDDEN, LAYERS)
    fault = _protocol.request_fault(header.packed(), limits, GENERATION)
    validate_request(buffer, 0, header, fault)


def sealed_request() -> tuple[RequestHeader, int, int, bytearray]:
    """Arguments of `check_request` for a request with a checksum, and random data."""
    header = good_request(flags=CHECKSUM_FLAG)
    buffer = bytearray(header.end)
    buffer[REQUEST_HEADER_BYTES:] = np.random.default_rng(0).bytes(header.payload_length)
    seal(buffer, 0, header)
    return RequestHeader.unpack_from(buffer, 0), CAPACITY, CAPACITY, buffer


def check_result(header: ResultHeader, result_capacity: int = CAPACITY) -> None:
    validate_result(
        header,
        result_capacity=result_capacity,
        request_id=REQUEST_ID,
        rows=5,
        hidden_size=HIDDEN,
        generation=GENERATION,
    )


# -- headers --------------------------------------------------------------------------------------


@given(st.one_of(request_headers, result_headers))
def test_a_header_is_read_as_it_was_written(header: RequestHeader | ResultHeader) -> None:
    is_request = isinstance(header, RequestHeader)
    end = 64 + (REQUEST_HEADER_BYTES if is_request else RESULT_HEADER_BYTES)
    buffer = bytearray(b"\xaa" * (end + 8))
    header.pack_into(buffer, 64)
    assert type(header).unpack_from(buffer, 64) == header
    assert buffer[:64] + buffer[end:] == b"\xaa" * 72


def test_the_layout_equals_the_documentation() -> None:
    """Frozen: a change needs another protocol version, but for a field in zeros, of which 0 says nothing."""
    request = RequestHeader(*range(1, 15))
    buffer = bytearray(REQUEST_HEADER_BYTES)
    request.pack_into(buffer, 0)
    places = "I0 H4 B6 B7 I8 I12 Q16 Q24 Q32 Q40 I48 I52 I56 I60"
    found = [struct.unpack_from("<" + place[0], buffer, int(place[1:])) for place in places.split()]
    assert found == [(n,) for n in range(1, 15)]
    assert not any(buffer[64:])

    result = ResultHeader(*range(1, 13))
    buffer = bytearray(RESULT_HEADER_BYTES)
    result.pack_into(buffer, 0)
    places = "I0 H4 H6 I8 I12 Q16 I24 I28 Q32 Q40 Q48 Q56"
    found = [struct.unpack_from("<" + place[0], buffer, int(place[1:])) for place in places.split()]
    assert found == [(n,) for n in range(1, 13)]

    assert (MAGIC.to_bytes(4, "little"), VERSION) == (b"EaaS", 1)
    assert [(s.name, s.value) for s in Status] == [
        ("OK", 0),
        ("INVALID_ARGUMENT", 1),
        ("STALE_PLACEMENT", 2),
        ("INTERNAL", 3),
        ("EXPIRED", 4),
    ]
    assert [(d.name, d.value, d.itemsize) for d in WireDtype] == [
        ("FLOAT32", 0, 4),
        ("BFLOAT16", 1, 2),
        ("FLOAT16", 2, 2),
    ]


# -- lengths --------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 16), DTYPES)
def test_sections_are_aligned_and_do_not_overlap(t: int, h: int, k: int, dtype: WireDtype) -> None:
    layout = payload_layout(t, h, k, dtype)
    assert layout.ids_offset == align(t * h * dtype.itemsize)
    assert layout.scores_offset == layout.ids_offset + align(t * k * 4)
    assert layout.total == layout.scores_offset + t * k * 4


@given(
    st.integers(0, 20_000), st.integers(0, 20_000), st.integers(1, 200), st.integers(1, 16), DTYPES
)
def test_max_tokens_fits_and_one_more_does_not(
    payload: int, result: int, h: int, k: int, dtype: WireDtype
) -> None:
    def fits(tokens: int) -> bool:
        return payload_layout(tokens, h, k, dtype).total <= payload and tokens * h * 4 <= result

    tokens = max_tokens(payload, result, h, k, dtype)
    assert tokens == 0 or fits(tokens)
    assert not fits(tokens + 1)


# -- checks ---------------------------------------------------------------------------------------


def test_good_headers_pass() -> None:
    check_request(good_request())
    check_request(*sealed_request())
    check_result(good_result())
    check_result(ResultHeader.of(Status.EXPIRED, generation=GENERATION, request_id=REQUEST_ID))


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": MAGIC + 1},
        {"version": VERSION + 1},
        {"generation": GENERATION + 1},
        {"flags": 2},
        {"checksum": 1},
        {"payload_length": 0},
        {"payload_length": good_request().payload_length + 1},
        {"payload_length": 2**64 - 1},
        {"batch_size": 6},
        {"batch_size": 2**32 - 1},
        {"top_k": 2**32 - 1},
        {"batch_size": 2**32 - 1, "top_k": 2**32 - 1},
        {"dtype": WireDtype.FLOAT32},
    ],
)
def test_a_corrupt_request_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(SlotCorruptError):
        check_request(good_request(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": 3},
        {"dtype": 255},
        {"hidden_size": HIDDEN + 1},
        {"hidden_size": 2**32 - 1},
        {"layer": LAYERS},
        {"layer": 2**32 - 1},
        {"batch_size": 0},
        {"top_k": 0},
    ],
)
def test_a_request_for_another_model_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(WrongRequestError):
        check_request(good_request(**changes))


def test_a_request_and_its_result_must_fit_the_slot() -> None:
    """The result is float32: the answer to a bfloat16 request can be larger than its payload."""
    length, answer = good_request().payload_length, 5 * HIDDEN * 4
    check_request(good_request(), length, answer)
    with pytest.raises(SlotCorruptError, match="payload"):
        check_request(good_request(), length - 1, answer)
    with pytest.raises(SlotCorruptError, match="result"):
        check_request(good_request(), length, answer - 1)
    check_result(good_result(), answer)
    with pytest.raises(SlotCorruptError):
        check_result(good_result(), answer - 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": 0},
        {"version": VERSION + 1},
        {"generation": GENERATION + 1},
        {"request_id": REQUEST_ID + 1},
        {"status": 5},
        {"status": Status.INTERNAL},
        {"rows": 1},
        {"rows": 6},
        {"hidden_size": 1},
        {"length": 0},
        {"length": 2**64 - 1},
    ],
)
def test_a_result_of_another_request_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(SlotCorruptError):
        check_result(good_result(**changes))


PLAUSIBLE = st.one_of(
    st.binary(min_size=REQUEST_HEADER_BYTES, max_size=REQUEST_HEADER_BYTES),
    # Random bytes stop at the magic; these get past the first checks.
    st.builds(
        RequestHeader,
        st.just(MAGIC),
        st.just(VERSION),
        st.integers(0, 4),
        st.integers(0, 3),
        st.sampled_from([GENERATION, 0]),
        st.sampled_from([0, 1]),
        U64,
        U64,
        st.one_of(U64, st.integers(0, CAPACITY)),
        U64,
        st.one_of(U32, st.integers(0, LAYERS)),
        st.one_of(U32, st.integers(0, 70)),
        st.sampled_from([HIDDEN, 2**32 - 1]),
        st.one_of(U32, st.integers(0, 20)),
    ),
)


@given(PLAUSIBLE, st.booleans())
def test_row_19_a_lying_header_never_leads_to_a_view_outside_the_slot(
    lie: bytes | RequestHeader, right_length: bool
) -> None:
    """Row 19: lying header: lengths, dtype, layer, counts: refused before any view is made."""
    buffer = bytearray(REQUEST_HEADER_BYTES + CAPACITY)
    if isinstance(lie, bytes):
        buffer[:REQUEST_HEADER_BYTES] = lie
    else:
        if right_length and lie.dtype in list(WireDtype):
            layout = payload_layout(
                lie.batch_size, lie.hidden_size, lie.top_k, WireDtype(lie.dtype)
            )
            lie = lie._replace(payload_length=min(layout.total, 2**64 - 1))
        lie.pack_into(buffer, 0)
    header = RequestHeader.unpack_from(buffer, 0)
    try:
        check_request(header, buffer=buffer)
    except (SlotCorruptError, WrongRequestError):
        return
    views = request_views(buffer, 0, header)
    assert views[0].shape == (header.batch_size, HIDDEN)
    assert views[1].shape == views[2].shape == (header.batch_size, header.top_k)
    assert header.batch_size * HIDDEN * 4 <= CAPACITY


@given(st.binary(min_size=RESULT_HEADER_BYTES, max_size=RESULT_HEADER_BYTES))
def test_random_bytes_are_not_a_result(lie: bytes) -> None:
    with pytest.raises(SlotCorruptError):
        check_result(ResultHeader.unpack_from(lie, 0))


# -- checksum -------------------------------------------------------------------------------------


def flip_every_bit(buffer: bytearray, check: Callable[[], None]) -> None:
    """The check accepts the buffer, and refuses it with any one bit flipped."""
    check()
    for bit in range(8 * len(buffer)):
        buffer[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SlotCorruptError):
            check()
        buffer[bit // 8] ^= 1 << bit % 8
    check()


def test_row_18_every_single_bit_flip_of_a_sealed_request_is_found() -> None:
    """Row 18: single bit flips in a slot: with the checksum on, 100 % detected; typed error; retried
    elsewhere. So none may pass for the client's own mistake, which is not retried (WrongRequestError).
    """
    _, _, _, buffer = sealed_request()
    flip_every_bit(
        buffer, lambda: check_request(RequestHeader.unpack_from(buffer, 0), buffer=buffer)
    )


@pytest.mark.parametrize(
    "header",
    [
        good_result(),
        ResultHeader.of(
            Status.STALE_PLACEMENT, generation=GENERATION, request_id=REQUEST_ID, detail=7
        ),
    ],
    ids=["result", "refusal"],
)
def test_row_18_every_single_bit_flip_of_a_sealed_answer_is_found(header: ResultHeader) -> None:
    """Row 18: single bit flips in a slot: with the checksum on, 100 % detected."""
    buffer = bytearray(header.end)
    buffer[RESULT_HEADER_BYTES:] = np.random.default_rng(0).bytes(header.length)
    seal(buffer, 0, header)

    def check() -> None:
        found = ResultHeader.unpack_from(buffer, 0)
        check_result(found)
        verify(buffer, 0, found)

    flip_every_bit(buffer, check)


def test_the_checksum_equals_the_documentation() -> None:
    """CRC-32 of header and payload without its own four bytes."""
    header, _, _, buffer = sealed_request()
    assert header.checksum == zlib.crc32(buffer[:12] + buffer[16:])


def test_a_checksum_is_never_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 means no checksum: a lost flag bit must be detected."""
    monkeypatch.setattr(slot, "crc32", lambda *_: 0)
    header, _, _, buffer = sealed_request()
    assert header.checksum == 1
    verify(buffer, 0, header)
    with pytest.raises(SlotCorruptError, match="wrong checksum"):
        check_request(header._replace(flags=0))


@given(st.integers(0, REQUEST_HEADER_BYTES // 2 - 1))
def test_row_17_a_header_that_was_read_before_its_data_came_is_not_verified_by_them(
    cut: int,
) -> None:
    """Row 17: flag visible before data: with the checksum on it is caught. Also where the data is there by
    the time that it is summed: the header that was read is not the one that the checksum is of.
    """
    header, _, _, buffer = sealed_request()
    earlier = bytearray(REQUEST_HEADER_BYTES)
    header._replace(request_id=1, layer=0, batch_size=1, budget_us=9).pack_into(earlier, 0)
    earlier[:cut] = buffer[:cut]
    torn = RequestHeader.unpack_from(earlier, 0)
    if torn == header:
        return
    with pytest.raises(SlotCorruptError):
        check_request(torn, buffer=buffer)


# -- views ----------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 33), st.integers(1, 5), DTYPES)
def test_views_do_not_overlap_and_stay_inside(t: int, h: int, k: int, dtype: WireDtype) -> None:
    total = payload_layout(t, h, k, dtype).total
    header = good_request(dtype=dtype, batch_size=t, hidden_size=h, top_k=k, payload_length=total)
    buffer = bytearray(64 + header.end + 64)
    hidden_TH, ids_TK, scores_TK = request_views(buffer, 64, header)
    assert hidden_TH.shape == (t, h)
    assert ids_TK.shape == scores_TK.shape == (t, k)
    assert (hidden_TH.itemsize, ids_TK.dtype, scores_TK.dtype) == (dtype.itemsize, "i4", "f4")
    hidden_TH.view(np.uint8)[...] = 1
    ids_TK[...] = -1
    scores_TK[...] = 0.5
    assert (hidden_TH.view(np.uint8) == 1).all()
    assert (ids_TK == -1).all()
    assert (scores_TK == 0.5).all()
    assert not any(buffer[: 64 + REQUEST_HEADER_BYTES])
    assert not any(buffer[64 + header.end :])
