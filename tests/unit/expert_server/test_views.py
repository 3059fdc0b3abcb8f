"""Cached views, and scratch memory that grows with the largest batch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eaas.wire import Arena, RequestHeader
from eaas.wire.header import payload_layout, result_length
from eaas.wire.slot import WireDtype, request_views
from endpoint_box import header_of
from expert_server.loop import views as views_module
from expert_server.loop.views import PayloadViews, Scratch, TensorViews

HIDDEN, TOKENS, TOP_K = 4, 6, 2


def header(tokens: int, top_k: int = TOP_K, dtype: WireDtype = WireDtype.FLOAT32) -> RequestHeader:
    return header_of(1, tokens, HIDDEN, top_k, dtype)


@pytest.fixture
def arena() -> Arena:
    total = payload_layout(TOKENS, HIDDEN, TOP_K, WireDtype.FLOAT32).total
    return Arena.create_local(2, total, result_length(TOKENS, HIDDEN), 1)


def test_views_are_made_once_per_shape(arena: Arena) -> None:
    views = TensorViews(arena, HIDDEN)
    for slot in (0, 1):
        for tokens in (1, 3):
            for dtype in (WireDtype.FLOAT32, WireDtype.BFLOAT16):
                like = header(tokens, dtype=dtype)
                payload = views.tensors(slot, like)
                assert views.tensors(slot, like) is payload
                x_TH, ids_TK, scores_TK = payload.tensors
                written = request_views(arena.buffer, arena.request_offset(slot), like)
                for number, array in enumerate(written, 1):
                    array[...] = number
                bfloat16 = dtype is WireDtype.BFLOAT16
                assert x_TH.dtype is (torch.bfloat16 if bfloat16 else torch.float32)
                assert x_TH.shape == (tokens, HIDDEN)
                assert (x_TH.view(torch.uint16 if bfloat16 else torch.float32) == 1).all()
                assert (ids_TK == 2).all()
                assert (scores_TK == 3).all()
            assert views.result(slot, tokens) is views.result(slot, tokens)
    assert views.made == 12


def test_the_number_of_kept_views_is_bounded(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views_module, "_KEPT", 3)
    monkeypatch.setattr("eaas.wire.views._MOST_CACHED", 3)
    views, scratch = TensorViews(arena, HIDDEN), Scratch()
    for tokens in range(1, TOKENS + 1):
        payload = views.tensors(0, header(tokens))
        assert payload.tensors[0].shape == (tokens, HIDDEN)
        assert scratch.gather([payload, payload], header(tokens)).tensors[0].shape == (
            2 * tokens,
            HIDDEN,
        )
        assert len(views._with_tensors) <= 3
        assert len(scratch._views) <= 3


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, TOKENS), min_size=2, max_size=5), st.integers(1, 3)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(WireDtype),
)
def test_gather_concatenates_payloads(batches, dtype: WireDtype) -> None:
    scratch = Scratch()
    largest = 0
    rng = np.random.default_rng(0)
    for sizes, top_k in batches:
        payloads = []
        for tokens in sizes:
            like = header(tokens, top_k, dtype)
            buffer = bytearray(rng.bytes(like.end))
            payloads.append(PayloadViews.of(request_views(buffer, 0, like), WireDtype(like.dtype)))
        joint = scratch.gather(payloads, header(sizes[0], top_k, dtype))
        for place in range(3):
            wanted = b"".join(payload.arrays[place].tobytes() for payload in payloads)
            assert joint.arrays[place].tobytes() == wanted
            assert joint.tensors[place].shape == joint.arrays[place].shape
            assert joint.tensors[place].data_ptr() == joint.arrays[place].ctypes.data
        needed = header(sum(sizes), top_k, dtype).end
        held, largest = scratch.nbytes, max(largest, needed)
        assert needed <= held <= 2 * largest
