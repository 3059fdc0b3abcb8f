"""A lone request: the compiled turn, the ordinary turn and a kernel without compiled layers answer alike."""

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
from eaas.wire.slot import DOORBELL, SlotLimits, Status, WireDtype, request_views, result_view
from expert_server.kernels import KernelSpec
from expert_server.kernels.native import NativeKernel
from expert_server.loop import loop
from expert_server.loop._slots import Slots
from expert_server.loop.batching.batcher import Batcher
from expert_server.loop.loop import ServeLoop
from expert_server.transports.slot_ownership import SlotTable
from expert_server.weights.weights import ExpertForm, ExpertWeights
from watched import Watched

EXPERTS, LAYERS, TOKENS, MOST_TOP_K, SLOTS = 5, 2, 9, 4, 3
FORM = ExpertForm(False, False, torch.relu)
# Of the width of each header field.
FIELDS = dict(
    zip(RequestHeader._fields, (32, 16, 8, 8, 32, 32, 64, 64, 64, 64, 32, 32, 32, 32), strict=True)
)
# Ways to serve a lone request: the compiled turn; the loop's turn, where a policy decides and the kernel has
# compiled layers; and where it has none.
WAYS = ("compiled", "ordinary", "without layers")


@pytest.fixture(scope="module", autouse=True)
def short_turns() -> Iterator[None]:
    """The compiled turn ends with its first request."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "_MOST_US", 0)
        yield


@dataclass
class World:
    """A server with a compiled kernel, whose expert 4 is not held, and a client with all slots."""

    hidden: int
    dtype: torch.dtype
    way: str

    def __post_init__(self) -> None:
        self.kernel = NativeKernel([FORM] * LAYERS, KernelSpec(self.dtype))
        rng = torch.Generator().manual_seed(0)
        for layer in range(LAYERS):
            for expert in range(EXPERTS - 1):
                up, down = torch.randn(2, self.hidden, self.hidden, generator=rng).to(self.dtype)
                self.kernel.load(layer, expert, ExpertWeights(up, down))
        if self.way == "without layers":
            self.kernel.direct = None
        shape = ModelShape(
            "tiny", EXPERTS, self.hidden, MOST_TOP_K, ("a", "b"), "float32", "digest"
        )
        total = payload_layout(TOKENS, self.hidden, MOST_TOP_K, WireDtype.FLOAT32).total
        self.arena = Arena.create_local(SLOTS, total, result_length(TOKENS, self.hidden), 1)
        self.table = SlotTable(self.arena)
        batching = "immediate" if self.way == "compiled" else "all"
        self.loop = ServeLoop(self.arena, self.table, self.kernel, shape, 0, batching)
        self.loop.epoch = 42
        grant = self.table.grant("client", 1, SLOTS)
        assert grant is not None
        self.grant = grant
        # In its first turn the loop learns of the grant.
        self.write(self.header(), 0)
        self.step()
        assert self.arena.client_free(1)
        self.counts_LX = np.zeros((LAYERS, 1 + EXPERTS), np.int64)
        self.kernel.count_into(self.counts_LX)
        # Verbs that the loop's Python calls.
        self.called: list[str] = []
        self.loop.slots.verbs = Watched(self.loop.slots.verbs, self.called.append)

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
            list(self.table.busy), self.counts_LX.tolist(), loop.busy_s > 0,
        )  # fmt: skip

    def close(self) -> None:
        self.kernel.close()
        self.arena.close()


@contextmanager
def worlds_of(hidden: int = 8, dtype: torch.dtype = torch.float32) -> Iterator[list[World]]:
    """A world for each way, the compiled one first."""
    worlds = [World(hidden, dtype, way) for way in WAYS]
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
    with worlds_of(hidden, dtype) as worlds:
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
            answers = [world.answer() for world in worlds]
            assert answers == answers[:1] * len(WAYS)
            assert answers[0][0].status == Status.OK
            counters = [world.counters() for world in worlds]
            assert counters == counters[:1] * len(WAYS)
            assert worlds[0].counts_LX.tolist() == counts_LX.tolist()
            assert all(world.arena.client_free(1) for world in worlds)
        assert set(worlds[0].called) == {"serve"}
        assert worlds[1].called[:2] == worlds[2].called[:2] == ["accept", "compute"]


def test_the_policy_learns_from_a_compiled_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[tuple[object, int, int]] = []

    def note(_: object, client: object, layer: int, tokens: int, began: float, now: float) -> None:
        assert began <= now <= time.monotonic()
        learned.append((client, layer, tokens))

    monkeypatch.setattr(Batcher, "computed_alone", note)
    with worlds_of() as worlds:
        compiled = worlds[0]
        learned.clear()
        compiled.write(compiled.header(layer=1, batch_size=3), 0)
        compiled.step()
        assert learned == [(compiled.grant, 1, 3)]


@given(field=st.sampled_from(sorted(FIELDS)), data=st.data())
def test_any_header_has_the_same_verdict(field: str, data) -> None:
    width = FIELDS[field]
    # Products of sizes overflow at the last ones.
    limits = [2**16, 2**16 + 1, 2**31, 2**32 - 1] if width >= 32 else [0]
    values = st.integers(0, 9) | st.integers(0, 2**width - 1) | st.sampled_from(limits)
    if field == "budget_us":
        # A short one may end or not.
        values = st.sampled_from([0, 10**9, 2**64 - 1])
    value = data.draw(values)
    is_free = field in {"request_id", "epoch", "budget_us"} and (field, value) != ("budget_us", 0)
    with worlds_of() as worlds:
        for world in worlds:
            world.write(world.header(), 0)
            changed = world.header()._replace(**{field: value})
            changed.pack_into(world.arena.buffer, world.arena.request_offset(1))
            world.step()
        answers = [world.answer() for world in worlds]
        assert answers == answers[:1] * len(WAYS)
        counters = [world.counters() for world in worlds]
        assert counters == counters[:1] * len(WAYS)
        if not is_free and value != getattr(worlds[0].header(), field) and field != "dtype":
            is_plain = field == "layer" and value < LAYERS
            assert ("accept" not in worlds[0].called) == is_plain


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("way", WAYS)
def test_a_missing_expert_is_refused_with_the_epoch_until_it_is_loaded(layer, way: str) -> None:
    world = World(8, torch.float32, way)
    world.write(world.header(layer=layer), 0)
    offset = world.arena.request_offset(1)
    _, ids_TK, _ = request_views(world.arena.buffer, offset, world.header())
    ids_TK[1, 1] = EXPERTS - 1
    world.step()
    header, _ = world.answer()
    assert (header.status, header.detail) == (Status.STALE_PLACEMENT, 42)
    assert (world.loop.refused, world.loop.computed) == (1, 1)
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
def test_a_large_batch_and_float16_are_computed_in_python(wire: WireDtype, monkeypatch) -> None:
    monkeypatch.setattr("expert_server.kernels.native._DIRECT_ROWS", 8)
    world = World(8, torch.float32, "compiled")
    world.write(world.header(dtype=wire, batch_size=9, top_k=4), 0)
    world.step()
    assert world.answer()[0].status == Status.OK
    assert world.called == ["serve", "accept", "compute", "write_answer", "hand_over", "release"]
    world.close()


def test_delayed_requests_are_left_to_the_loop(benches, native_kernel) -> None:
    called: list[str] = []
    bench = benches(latency_s=0.001, kernel=native_kernel)
    bench.watch(called.append)
    for name in "ab":
        slot = bench.write(bench.grant(name), 2)
        while bench.arena.flags.load(slot) != SlotState.DONE:
            bench.step()
    assert "serve" not in called


def test_the_verbs_of_a_request(benches, native_kernel) -> None:
    """A client sees nothing before the whole answer is there, and the slot is claimed until then."""
    bench = benches(kernel=native_kernel)
    verbs, flags = bench.loop.slots.verbs, bench.arena.flags
    slot = bench.write(bench.grant("a", bench.slots), 2, checksum=True)
    for verb in (verbs.compute, verbs.hand_over, verbs.release):
        with pytest.raises(ValueError, match="no such request"):
            verb(slot)
        with pytest.raises(IndexError, match=f"slot {bench.slots} of {bench.slots}"):
            verb(bench.slots)
    header, _ = verbs.accept(slot)
    assert RequestHeader.unpack_from(header, 0).request_id == 5
    assert bench.loop.in_flight == 1
    assert verbs.accept(slot) is None
    assert verbs.compute(slot)
    unsealed = verbs.write_answer(slot, Status.OK, 0, 3e-6, 1e-6)
    assert flags.load(slot) == SlotState.WRITTEN
    verbs.hand_over(slot)
    assert bench.loop.in_flight == 1
    verbs.release(slot)
    answer = bench.result(slot)
    assert (answer.service_us, answer.queue_us) == (3, 1)
    assert unsealed == answer.packed()
    assert bench.loop.in_flight == 0


def test_a_request_of_another_size_than_its_grant(benches) -> None:
    """It fits the arena's slots, but its client has less memory there."""
    bench = benches()
    layout = payload_layout(2, bench.hidden, bench.top_k, WireDtype.FLOAT32).total
    grant = bench.table.grant("a", 1, 2, [(layout, result_length(2, bench.hidden))])
    for tokens, status in ((2, Status.OK), (3, Status.INTERNAL)):
        slot = bench.write(grant, 2, tokens=tokens)
        bench.step()
        assert bench.result(slot).status == status
        assert bench.arena.client_free(slot)


def test_a_sleeping_client_is_woken(benches, native_kernel) -> None:
    bench = benches(kernel=native_kernel)
    grant = bench.grant("a")
    slot = bench.write(grant, 2)
    seen = bench.arena.flags.seq(grant.reply_doorbell)
    woken = []

    def wait() -> None:
        flags = bench.arena.flags
        woken.append(
            flags.wait(slot, 1, SlotState.DONE.mask, grant.reply_doorbell, seen, 0, 60_000_000)
        )
        woken.append(bench.loop.computed)

    client = threading.Thread(target=wait)
    client.start()
    time.sleep(0.05)
    bench.step()
    client.join(30)
    # Counted before the client can know of it.
    assert woken == [[slot], 1]
    # Without a ring, the client would look again only a quarter of a second later.
    assert bench.arena.flags.seq(grant.reply_doorbell) != seen
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
    with pytest.raises(ValueError, match="the slots are closed"):
        bench.loop.slots.verbs.accept(slot)
    bench.loop.slots.verbs.close()


def test_slots_outside_the_buffer(benches) -> None:
    bench = benches()
    arena = bench.arena
    limits = SlotLimits(arena.payload_capacity, arena.result_capacity, bench.hidden, 4)
    flags, doorbells, _, first_slot = arena.offsets
    offsets = (flags, doorbells, first_slot)
    strides = (arena.request_stride, arena.result_stride)
    good = (arena.buffer, arena.slots, offsets, strides, limits, [], bench.table.owners)
    Slots(*good)
    with pytest.raises(ValueError, match="busy: 2 bytes in items of 1, wanted 6"):
        Slots(*good[:-1], SlotTable(Arena.create_local(2, 64, 64, 1)).owners)
    for place, bad in [
        (0, bytearray(64)), (1, 0), (1, -1), (1, arena.slots + 1), (1, 1 << 60),
        (2, (offsets[0], offsets[1], arena.size)), (2, (offsets[0], offsets[1], arena.size - 64)),
        (2, (-64, *offsets[1:])), (2, (offsets[0] + 4, *offsets[1:])),
        (3, (64, strides[1])), (3, (-64, strides[1])), (3, (strides[0], 0)),
        (4, limits._replace(payload_capacity=arena.size)), (4, limits._replace(result_capacity=-1)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=r"do not lie in the buffer|busy: 6 bytes"):
            Slots(*good[:place], bad, *good[place + 1 :])
