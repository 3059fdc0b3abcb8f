"""The direct path: the same answers, headers, counters and refusals as the ordinary one."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eaas.types import ModelShape
from eaas.wire import Arena, RequestHeader, ResultHeader, SlotState
from eaas.wire.header import payload_layout, result_length
from eaas.wire.slot import DAMAGED, DOORBELL, Status, WireDtype, request_views, result_view
from expert_server.kernels import KernelSpec, ReferenceKernel
from expert_server.kernels.native import NativeKernel
from expert_server.loop import direct
from expert_server.loop.loop import ServeLoop
from expert_server.transports.slot_ownership import Grant, SlotTable
from expert_server.weights.weights import ExpertForm, ExpertWeights

EXPERTS, LAYERS, TOKENS, MOST_TOP_K, SLOTS = 5, 2, 9, 4, 3
FORM = ExpertForm(False, False, torch.relu)
# Of the width of each header field.
FIELDS = dict(
    zip(RequestHeader._fields, (32, 16, 8, 8, 32, 32, 64, 64, 64, 64, 32, 32, 32, 32), strict=True)
)


@dataclass
class World:
    """A server with a compiled kernel, whose expert 4 is not held, and a client with all slots."""

    hidden: int
    dtype: torch.dtype
    is_direct: bool

    def __post_init__(self) -> None:
        self.kernel = NativeKernel([FORM] * LAYERS, KernelSpec(self.dtype))
        rng = torch.Generator().manual_seed(0)
        for layer in range(LAYERS):
            for expert in range(EXPERTS - 1):
                up, down = torch.randn(2, self.hidden, self.hidden, generator=rng).to(self.dtype)
                self.kernel.load(layer, expert, ExpertWeights(up, down))
        self.counts_LX = np.zeros((LAYERS, 1 + EXPERTS), np.int64)
        self.kernel.count_into(self.counts_LX)
        shape = ModelShape(
            "tiny", EXPERTS, self.hidden, MOST_TOP_K, ("a", "b"), "float32", "digest"
        )
        total = payload_layout(TOKENS, self.hidden, MOST_TOP_K, WireDtype.FLOAT32).total
        self.arena = Arena.create_local(SLOTS, total, result_length(TOKENS, self.hidden), 1)
        self.table = SlotTable(self.arena)
        self.loop = ServeLoop(self.arena, self.table, self.kernel, shape, 0)
        self.loop.epoch = 42
        assert self.loop._direct is not None
        if not self.is_direct:
            self.loop._direct = None
        grant = self.table.grant("client", 1, SLOTS)
        assert grant is not None
        self.grant = grant

    def write(
        self, header: RequestHeader, seed: int, slot: int = 1, top: int = EXPERTS - 1
    ) -> np.ndarray:
        """Write a request with random numbers, and ids from -1 on and below `top`; return the ids."""
        rng = np.random.default_rng(seed)
        offset = self.arena.request_offset(slot)
        x_TH, ids_TK, scores_TK = request_views(self.arena.buffer, offset, header)
        values_TH = torch.from_numpy(rng.standard_normal(x_TH.shape, np.float32))
        if header.dtype == WireDtype.BFLOAT16:
            x_TH[...] = values_TH.bfloat16().view(torch.uint16).numpy()
        else:
            x_TH[...] = values_TH.numpy()
        ids_TK[...] = rng.integers(-1, top, ids_TK.shape)
        scores_TK[...] = rng.random(scores_TK.shape, np.float32)
        header.pack_into(self.arena.buffer, offset)
        assert self.arena.client_write_done(slot)
        return ids_TK

    def header(self, **fields: int) -> RequestHeader:
        wanted = {
            "dtype": WireDtype.FLOAT32, "request_id": 7, "epoch": 1, "budget_us": 10**9, "layer": 0,
            "batch_size": 2, "top_k": 2, **fields,
        }  # fmt: skip
        return RequestHeader.of(generation=self.grant.generation, hidden_size=self.hidden, **wanted)

    def step(self) -> None:
        with torch.inference_mode():
            self.loop.step(self.arena.flags.seq(DOORBELL))

    def answer(self, slot: int = 1) -> tuple[ResultHeader, bytes]:
        """The answer's header, without its time, and the bytes of its result."""
        assert self.arena.flags.load(slot) == SlotState.DONE
        offset = self.arena.result_offset(slot)
        header = ResultHeader.unpack_from(self.arena.buffer, offset)
        assert (header.service_us > 0) == (header.status == Status.OK)
        assert header.queue_us == 0
        rows_TH = result_view(self.arena.buffer, offset, header.rows, header.hidden_size)
        return header._replace(service_us=0), rows_TH.tobytes()

    def counters(self) -> tuple[object, ...]:
        loop = self.loop
        return (
            loop.computed, loop.batches, loop.refused, loop.expired, loop.requests, loop.in_flight,
            self.table._busy, self.counts_LX.tolist(), loop.busy_s > 0,
        )  # fmt: skip

    @property
    def answered(self) -> int:
        assert self.loop._direct is not None
        return self.loop._direct.answered

    def close(self) -> None:
        self.kernel.close()
        self.arena.close()


@contextmanager
def both(hidden: int = 8, dtype: torch.dtype = torch.float32) -> Iterator[tuple[World, World]]:
    """The world with the direct path, and the one without."""
    worlds = World(hidden, dtype, True), World(hidden, dtype, False)
    yield worlds
    for world in worlds:
        world.close()


@given(
    hidden=st.sampled_from([1, 8, 24, 33, 96]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    wire=st.sampled_from([WireDtype.FLOAT32, WireDtype.BFLOAT16]),
    requests=st.lists(
        st.tuples(
            st.integers(1, TOKENS), st.integers(1, MOST_TOP_K), st.integers(0, LAYERS - 1),
            st.integers(0, 2**64 - 1), st.integers(0, 99),
        ),
        min_size=1, max_size=4,
    ),
)  # fmt: skip
def test_same_answer_and_counters(hidden, dtype, wire, requests) -> None:
    counts_LX = np.zeros((LAYERS, 1 + EXPERTS), np.int64)
    with both(hidden, dtype) as worlds:
        for tokens, top_k, layer, request_id, seed in requests:
            for world in worlds:
                header = world.header(
                    dtype=wire, batch_size=tokens, top_k=top_k, layer=layer, request_id=request_id
                )
                ids_TK = world.write(header, seed)
                world.step()
            visited, count = np.unique(ids_TK[ids_TK >= 0], return_counts=True)
            counts_LX[layer, 0] += len(visited)
            counts_LX[layer, 1 + visited] += count
            ours, wanted = (world.answer() for world in worlds)
            assert ours == wanted
            assert ours[0].status == Status.OK
            assert worlds[0].counters() == worlds[1].counters()
            assert worlds[0].counts_LX.tolist() == counts_LX.tolist()
            assert all(world.arena.client_free(1) for world in worlds)
        assert worlds[0].answered == len(requests)


@given(field=st.sampled_from(sorted(FIELDS)), data=st.data())
def test_any_other_header_has_the_ordinary_verdict(field: str, data) -> None:
    width = FIELDS[field]
    # Products of sizes overflow at the last ones.
    limits = [2**16, 2**16 + 1, 2**31, 2**32 - 1] if width >= 32 else [0]
    values = st.integers(0, 9) | st.integers(0, 2**width - 1) | st.sampled_from(limits)
    if field == "budget_us":
        # A short one may end or not.
        values = st.sampled_from([0, 10**9, 2**64 - 1])
    value = data.draw(values)
    is_free = field in {"request_id", "epoch", "budget_us"} and (field, value) != ("budget_us", 0)
    with both() as worlds:
        for world in worlds:
            world.write(world.header(), 0)
            changed = world.header()._replace(**{field: value})
            changed.pack_into(world.arena.buffer, world.arena.request_offset(1))
            world.step()
        assert worlds[0].answer() == worlds[1].answer()
        assert worlds[0].counters() == worlds[1].counters()
        if not is_free and value != getattr(worlds[0].header(), field) and field != "dtype":
            assert worlds[0].answered == (field == "layer" and value < LAYERS)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("is_direct", [True, False])
def test_a_missing_expert_is_refused_with_the_epoch_until_it_is_loaded(layer, is_direct) -> None:
    world = World(8, torch.float32, is_direct)
    world.write(world.header(layer=layer), 0)
    offset = world.arena.request_offset(1)
    _, ids_TK, _ = request_views(world.arena.buffer, offset, world.header())
    ids_TK[1, 1] = EXPERTS - 1
    world.step()
    header, _ = world.answer()
    assert (header.status, header.detail) == (Status.STALE_PLACEMENT, 42)
    assert (world.loop.refused, world.loop.computed) == (1, 0)
    assert not world.counts_LX.any()
    assert world.arena.client_free(1)
    one = torch.eye(world.hidden)
    world.kernel.load(layer, EXPERTS - 1, ExpertWeights(one, one))
    world.write(world.header(layer=layer), 0, top=EXPERTS)
    world.step()
    assert world.answer()[0].status == Status.OK
    # Without its experts, the layer has nothing to compute with.
    assert world.arena.client_free(1)
    for expert in range(EXPERTS):
        world.kernel.unload(layer, expert)
    world.write(world.header(layer=layer), 0, top=0)
    world.step()
    header, rows = world.answer()
    assert (header.status, any(rows)) == (Status.OK, False)
    world.close()


@pytest.mark.parametrize("wire", [WireDtype.FLOAT32, WireDtype.FLOAT16])
def test_a_large_batch_and_float16_take_the_ordinary_path(wire: WireDtype, monkeypatch) -> None:
    monkeypatch.setattr("expert_server.kernels.native._DIRECT_ROWS", 8)
    world = World(8, torch.float32, True)
    world.write(world.header(dtype=wire, batch_size=9, top_k=4), 0)
    world.step()
    assert world.answer()[0].status == Status.OK
    assert (world.answered, world.loop.computed) == (0, 1)
    world.close()


def test_who_takes_the_ordinary_path(benches, native_kernel) -> None:
    """Requests with a checksum, several at once, and all of a server that delays or has another kernel."""
    bench = benches(kernel=native_kernel)
    grants = [bench.grant(name) for name in "ab"]
    slot = bench.write(grants[0], 2, checksum=True)
    bench.step()
    status, rows_TH = bench.take(grants[0], slot, checksum=True)
    assert (status, rows_TH[0, 0]) == (Status.OK, 8)
    slots = [bench.write(grant, 2) for grant in grants]
    bench.step()
    assert [bench.rows(slot)[0, 0] for slot in slots] == [8, 8]
    assert (bench.loop._direct.answered, bench.loop.computed, bench.loop.batches) == (0, 3, 2)
    assert benches().loop._direct is None
    assert benches(latency_s=0.001, kernel=native_kernel).loop._direct is None
    reference = ReferenceKernel([FORM], KernelSpec(torch.float32))
    assert direct.create_direct(bench.arena, bench.table, reference, bench.loop._limits) is None


def test_revoked_while_it_is_computed(benches, native_kernel) -> None:
    """Row 16: late reply after slot reuse (ABA): the slot is neither answered nor granted."""
    bench = benches(kernel=native_kernel)
    grant = bench.grant("a", bench.slots)
    slot = bench.write(grant, 2)
    granted: list[Grant | None] = []
    begins = bench.loop.liveness.begins

    def revoke(tokens: int, now: float) -> None:
        begins(tokens, now)
        assert bench.loop.in_flight == 1
        bench.table.revoke(grant.connection_id)
        granted.append(bench.table.grant("b", 1, bench.slots))

    bench.loop.liveness.begins = revoke
    bench.step()
    assert granted == [None]
    assert bench.arena.flags.load(slot) == SlotState.OFFLINE
    assert bench.loop.in_flight == 0
    assert bench.table.grant("b", 1, bench.slots) is not None


@pytest.mark.parametrize("is_granted_again", [True, False])
def test_revoked_before_it_is_claimed(benches, native_kernel, is_granted_again: bool) -> None:
    """Row 16: late reply after slot reuse (ABA): there is nothing to do for the new owner."""
    bench = benches(kernel=native_kernel)
    grant = bench.grant("a", bench.slots)
    slot = bench.write(grant, 2)
    bench.table.revoke(grant.connection_id)
    new = bench.grant("b", bench.slots) if is_granted_again else None
    assert not bench.loop._answer_directly(slot, time.monotonic())
    if new is None:
        assert bench.arena.flags.load(slot) == SlotState.OFFLINE
        return
    assert bench.arena.flags.load(slot) == SlotState.FREE
    # A request with the former generation.
    bench.put(slot, bench.image(grant, 2))
    assert bench.arena.client_write_done(slot)
    bench.step()
    assert (bench.result(slot).status, bench.result(slot).detail) == (Status.INTERNAL, DAMAGED)
    assert bench.loop._direct.answered == 0


def test_a_sleeping_client_is_woken(benches, native_kernel) -> None:
    bench = benches(kernel=native_kernel)
    grant = bench.grant("a")
    slot = bench.write(grant, 2)
    seen = bench.arena.flags.seq(grant.reply_bell)
    woken = []

    def wait() -> None:
        flags = bench.arena.flags
        woken.append(
            flags.wait(slot, 1, SlotState.DONE.mask, grant.reply_bell, seen, 0, 60_000_000)
        )
        woken.append(bench.loop.computed)

    client = threading.Thread(target=wait)
    client.start()
    time.sleep(0.05)
    bench.step()
    client.join(30)
    # Counted before the client can know of it.
    assert woken == [[slot], 1]
    assert bench.arena.flags.load(slot) == SlotState.DONE


def test_the_arena_is_freed_after_the_loop(benches, native_kernel) -> None:
    bench = benches(kernel=native_kernel)
    slot = bench.write(bench.grant("a"), 2)
    bench.step()
    buffer = bench.arena.buffer
    bench.loop.stop()
    bench.loop.run()
    assert bench.arena.flags.load(slot) == SlotState.DONE
    assert bench.loop.computed == 1
    bench.arena.close()
    assert buffer.closed
    assert bench.loop._direct.accept(slot, 1) is None
    with pytest.raises(ValueError, match="no request is accepted"):
        bench.loop._direct.answer(1, 0.0)


def test_slots_outside_the_buffer(benches) -> None:
    bench = benches()
    arena, limits = bench.arena, bench.loop._limits
    flags, bells, _, first_slot = arena.offsets
    offsets = (flags, bells, first_slot)
    strides = (arena.request_stride, arena.result_stride)
    good = (arena.buffer, arena.slots, offsets, strides, limits, [], bench.table.owners)
    direct.Direct(*good)
    with pytest.raises(ValueError, match="owners do not match"):
        direct.Direct(*good[:-1], SlotTable(Arena.create_local(2, 64, 64, 1)).owners)
    for place, bad in [
        (0, bytearray(64)), (1, 0), (1, -1), (1, arena.slots + 1), (1, 1 << 60),
        (2, (offsets[0], offsets[1], arena.size)), (2, (offsets[0], offsets[1], arena.size - 64)),
        (2, (-64, *offsets[1:])), (2, (offsets[0] + 4, *offsets[1:])),
        (3, (64, strides[1])), (3, (-64, strides[1])), (3, (strides[0], 0)),
        (4, limits._replace(payload_capacity=arena.size)), (4, limits._replace(result_capacity=-1)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=r"do not lie in the buffer|do not match the slots"):
            direct.Direct(*good[:place], bad, *good[place + 1 :])
