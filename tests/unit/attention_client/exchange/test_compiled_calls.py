"""Layer calls in compiled code: the same sums as `LayerCall`, and the same care with faulty answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from arena_server import ArenaServer, context_of
from attention_client.layer_call.layer_calls import LayerCalls
from attention_client.layer_call.shared import ClusterView
from attention_client.telemetry.metrics import ClientMetrics
from eaas.errors import ExpertsUnavailableError, WrongRequestError
from eaas.wire import RequestHeader, SlotState
from eaas.wire.slot import DOORBELL, Status
from waiting import eventually

HIDDEN, EXPERTS, LAYERS = 8, 6, 2
# Answers, or breaks, one request: (server, slot).
Answer = Callable[["Server", int], None]


class Server(ArenaServer):
    """Answers in a thread, unless the test says what it does with the next request."""

    def __init__(self, name: str, metrics: ClientMetrics, slots: int, capacity: int) -> None:
        super().__init__(name, metrics, HIDDEN, slots, capacity, spin=20)
        self.requests: list[RequestHeader] = []
        self.next_answers: list[Answer] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, name=name, daemon=True)
        self.thread.start()

    def notify(self, slot: int) -> None:
        self.arena.flags.ring(DOORBELL)

    def close(self) -> None:
        self.ended.set()
        self.arena.flags.interrupt(DOORBELL)
        self.thread.join(5)
        assert not self.thread.is_alive()

    def run(self) -> None:
        flags = self.arena.flags
        seen = set[int]()
        while not self.ended.is_set():
            ready = flags.wait(0, self.slots, SlotState.WRITTEN.mask, DOORBELL, -1, 20, 20_000)
            for slot in ready:
                header = self.header_of(slot)
                if header.request_id not in seen:
                    seen.add(header.request_id)
                    self.requests.append(header)
                    answer = self.next_answers.pop(0) if self.next_answers else Server.answer
                    answer(self, slot)


def breaks(**changes: Any) -> Answer:
    """An answer with a wrong field in its header."""
    return lambda server, slot: server.answer(slot, **changes)


def silent(server: Server, slot: int) -> None:
    """No answer at all."""


def offline(server: Server, slot: int) -> None:
    """The server takes the slot back."""
    server.arena.server_offline(slot)
    server.arena.flags.interrupt(server.reply_doorbell)


@dataclass
class World:
    servers: list[Server]
    calls: LayerCalls
    views: list[ClusterView]
    metrics: ClientMetrics
    seed: int = field(default=0)

    @classmethod
    def of(
        cls, servers: int = 2, slots: int = 4, capacity: int = 4096, timeout_s: float = 20.0
    ) -> World:
        metrics = ClientMetrics(CollectorRegistry())
        made = [Server(f"s{i}", metrics, slots, capacity) for i in range(servers)]
        context, views = context_of(made, LAYERS, EXPERTS, metrics, timeout_s, 0.05)
        return cls(made, LayerCalls(context, checksum=False), views, metrics)

    def warm(self) -> None:
        """Let the client learn the servers' times for one and for few tokens."""
        for tokens in (1, 2, 4, 8, 16, 1, 2, 4, 8, 16):
            for _ in range(3):
                self.check(tokens)

    def inputs(
        self, tokens: int, top_k: int = 3, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.seed += 1
        rng = np.random.default_rng(self.seed)
        x_TH = torch.from_numpy(rng.integers(-8, 8, (tokens, HIDDEN)).astype(np.float32)).to(dtype)
        ids = np.stack([rng.permutation(EXPERTS)[:top_k] for _ in range(tokens)])
        return x_TH, torch.from_numpy(ids), torch.ones(tokens, top_k)

    def check(self, tokens: int, **kwargs: Any) -> None:
        """Make a call and compare it with the right sum."""
        x_TH, ids_TK, scores_TK = self.inputs(tokens, **kwargs)
        out_TH = self.calls.run(0, x_TH, ids_TK, scores_TK, None)
        assert torch.equal(out_TH, right(x_TH, ids_TK))

    def compiled(self) -> int:
        return self.calls.compiled

    def requests(self) -> list[int]:
        return [len(server.requests) for server in self.servers]

    def in_flight(self) -> int:
        return sum(s.connection.owes_answer() or s.connection.in_flight for s in self.servers)

    def wait_idle(self) -> None:
        """On a busy machine a server may be late, and its answer comes after the call."""
        eventually(lambda: not self.in_flight(), 10.0)

    def close(self) -> None:
        for server in self.servers:
            server.connection.close()


def right(x_TH: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    return (x_TH.float() * (ids_TK + 1).sum(dim=1, keepdim=True)).to(x_TH.dtype)


@pytest.fixture
def world() -> Iterator[World]:
    made = World.of()
    made.warm()
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_world() -> Iterator[World]:
    made = World.of(servers=3, slots=4, capacity=1024)
    made.warm()
    yield made
    made.close()


# -- the common case --------------------------------------------------------------------------------------


@given(data=st.data())
def test_sums_are_right(shared_world: World, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 40), "tokens")
    top_k = data.draw(st.integers(1, EXPERTS), "top_k")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]), "dtype")
    wide = data.draw(st.booleans(), "int64 ids")
    x_TH, ids_TK, scores_TK = shared_world.inputs(tokens, top_k, dtype)
    wanted = data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens), "wanted")
    wanted_T = torch.tensor(wanted) if data.draw(st.booleans(), "some tokens") else None
    ids = ids_TK if wide else ids_TK.to(torch.int32)
    layer = data.draw(st.integers(0, LAYERS - 1), "layer")
    overlapped = data.draw(st.booleans(), "overlapped")
    arguments = (layer, x_TH, ids, scores_TK, wanted_T)
    if overlapped:
        out_TH = shared_world.calls.start(*arguments).finish()
    else:
        out_TH = shared_world.calls.run(*arguments)
    expected_TH = right(x_TH, ids_TK)
    if wanted_T is not None:
        expected_TH[~wanted_T] = 0
    assert torch.equal(out_TH, expected_TH)
    shared_world.wait_idle()


def test_large_calls_take_several_slots(shared_world: World) -> None:
    """40 tokens, and some 17 fit into a slot: more requests than servers, however many are asked."""
    shared_world.check(40)
    before, compiled = shared_world.requests(), shared_world.compiled()
    shared_world.check(40)
    new = [after - first for after, first in zip(shared_world.requests(), before, strict=True)]
    assert sum(new) > np.count_nonzero(new)
    assert shared_world.compiled() >= compiled


def test_counts_are_those_of_the_calls(world: World) -> None:
    compiled, calls = world.compiled(), world.metrics.layer_calls._value.get()
    finished, pairs = world.calls.finished, world.metrics.pairs._value.get()
    requests = sum(len(s.requests) for s in world.servers)
    sent = world.metrics.server_requests._value.get()
    for _ in range(50):
        world.check(2)
    # All but those that a busy machine makes slow.
    assert compiled < world.compiled() <= compiled + 50
    assert world.calls.finished == finished + 50
    assert world.metrics.layer_calls._value.get() == calls + 50
    assert world.metrics.pairs._value.get() == pairs + 50 * 2 * 3
    new = sum(len(s.requests) for s in world.servers) - requests
    assert world.metrics.server_requests._value.get() == sent + new


def test_requests_have_the_header_of_the_slow_path(world: World) -> None:
    world.check(4)
    fast = world.servers[0].requests[-1]
    fields = ("magic", "version", "flags", "generation", "checksum", "epoch", "layer", "top_k")
    slow = next(r for r in world.servers[0].requests if r.request_id < 1 << 63)
    for name in fields:
        assert getattr(fast, name) == getattr(slow, name), name
    assert fast.request_id >= 1 << 63
    assert 0 < fast.budget_us <= 2_000_000


def test_nonfinite_rows_are_counted(world: World) -> None:
    x_TH, ids_TK, scores_TK = world.inputs(4)
    x_TH[1, 2] = float("nan")
    before = world.metrics.nonfinite_rows._value.get()
    world.calls.run(0, x_TH, ids_TK, scores_TK, None)
    world.calls.read()
    assert world.metrics.nonfinite_rows._value.get() == before + 1


@pytest.mark.parametrize(
    "strided",
    [
        lambda x, ids, scores: (x.half(), ids, scores),
        lambda x, ids, scores: (x.T.contiguous().T, ids, scores),
        lambda x, ids, scores: (x, torch.stack([ids, ids], dim=-1)[..., 0], scores),
        lambda x, ids, scores: (x, ids, torch.stack([scores, scores], dim=-1)[..., 0]),
        lambda x, ids, scores: (x, ids, scores.double()),
        lambda x, ids, scores: (x, ids.to(torch.int16), scores),
    ],
    ids=["half precision", "hidden states", "ids", "scores", "double scores", "short ids"],
)
def test_tensors_that_compiled_code_cannot_read(world: World, strided: Any) -> None:
    x_TH, ids_TK, scores_TK = world.inputs(4)
    before = world.compiled()
    given_TH, *others = strided(x_TH, ids_TK, scores_TK)
    wanted_T = torch.tensor([True, False, True, True])
    out_TH = world.calls.run(0, given_TH, *others, wanted_T)
    assert torch.equal(out_TH, right(given_TH, ids_TK) * wanted_T[:, None])
    assert world.compiled() == before


def test_one_row_is_contiguous_whatever_its_strides(world: World) -> None:
    x_TH, ids_TK, scores_TK = world.inputs(4)
    before = world.compiled()
    one = slice(1, 2)
    out_TH = world.calls.run(0, x_TH[one], ids_TK[one], scores_TK[::2][:1], None)
    assert torch.equal(out_TH, right(x_TH[one], ids_TK[one]))
    assert world.compiled() == before + 1


def test_a_wrong_hidden_size_and_an_unknown_expert_are_refused(world: World) -> None:
    x_TH, ids_TK, scores_TK = world.inputs(2)
    with pytest.raises(WrongRequestError, match="hidden size"):
        world.calls.run(0, torch.zeros(2, HIDDEN + 1), ids_TK, scores_TK, None)
    for ids_TK[1, 0] in (-1, EXPERTS):
        with pytest.raises(IndexError):
            world.calls.run(0, x_TH, ids_TK, scores_TK, None)
    world.check(2)


# -- faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        breaks(request_id=5),
        breaks(generation=8),
        breaks(rows=1),
        breaks(hidden_size=HIDDEN + 1),
        breaks(status=Status.STALE_PLACEMENT),
        breaks(status=Status.INTERNAL),
        silent,
        offline,
    ],
    ids=["id", "generation", "rows", "hidden", "stale", "internal", "silent", "offline"],
)
def test_a_fault_is_survived(world: World, fault: Answer) -> None:
    """The other server computes what the faulty one did not."""
    world.servers[0].next_answers.append(fault)
    failovers = _total(world.metrics.failovers)
    for _ in range(4):
        world.check(4)
    assert not world.servers[0].next_answers
    assert _total(world.metrics.failovers) > failovers


def test_a_refusal_of_the_request_itself_is_an_error(world: World) -> None:
    for server in world.servers:
        server.next_answers = [breaks(status=Status.INVALID_ARGUMENT)]
    x_TH, ids_TK, scores_TK = world.inputs(4)
    with pytest.raises(WrongRequestError, match="refused"):
        world.calls.run(0, x_TH, ids_TK, scores_TK, None)


def test_a_lost_connection_ends_the_wait(world: World) -> None:
    """The wait of a compiled call ends with the connection, long before the server's time is over."""
    world.servers[0].next_answers = [silent]
    x_TH, ids_TK, scores_TK = world.inputs(16)
    for server in world.servers:
        for tokens in (1, 2, 4, 8, 16):
            server.connection.service.observe(tokens, 5.0)
        server.connection.slots.set_times(*server.connection.service.table())
    done: list[torch.Tensor] = []
    call = world.calls.start(0, x_TH, ids_TK, scores_TK, None)
    thread = threading.Thread(target=lambda: done.append(call.finish()))
    thread.start()
    while world.servers[0].next_answers:
        time.sleep(0.001)
    started = time.monotonic()
    world.servers[0].connection.lose("the process ended")
    world.views.append(ClusterView(world.views[0].placement, (None, world.servers[1].connection)))
    thread.join(5)
    assert torch.equal(done[0], right(x_TH, ids_TK))
    assert time.monotonic() - started < 1.0


@pytest.mark.timeout(30)
def test_the_only_server_is_late() -> None:
    """Nobody waits for it beyond its time: the request is sent again, with more of it."""
    world = World.of(servers=1)
    world.warm()
    world.servers[0].next_answers = [silent]
    world.check(4)
    world.close()


def test_a_server_that_owes_an_answer_gets_no_request(world: World) -> None:
    owing: list[int] = []
    world.servers[0].next_answers = [lambda _server, slot: owing.append(slot)]
    while not owing:
        world.check(4)
    asked = len(world.servers[0].requests)
    for _ in range(8):
        world.check(4)
    assert len(world.servers[0].requests) == asked
    world.servers[0].answer(owing[0])
    world.wait_idle()
    while len(world.servers[0].requests) == asked:
        world.check(4)


def test_all_slots_in_use(world: World) -> None:
    """More calls at once than slots: the others take the slow path and wait."""
    calls = []
    for _ in range(6):
        x_TH, ids_TK, scores_TK = world.inputs(4)
        calls.append((world.calls.start(0, x_TH, ids_TK, scores_TK, None), x_TH, ids_TK))
    for call, x_TH, ids_TK in calls:
        assert torch.equal(call.finish(), right(x_TH, ids_TK))
    world.wait_idle()


def test_cancel_frees_the_slots(world: World) -> None:
    for _ in range(20):
        x_TH, ids_TK, scores_TK = world.inputs(4)
        world.calls.start(0, x_TH, ids_TK, scores_TK, None).cancel()
    world.wait_idle()
    assert world.calls.in_flight == 0
    world.check(4)


def test_calls_of_several_threads(world: World) -> None:
    """Views change meanwhile, and each thread's sums are right."""
    stop = threading.Event()
    wrong: list[object] = []

    def work(seed: int) -> None:
        own = World(world.servers, world.calls, world.views, world.metrics, seed * 100_000)
        try:
            while not stop.is_set():
                own.check(1 + seed)
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        world.views.append(ClusterView(world.views[0].placement, world.views[0].connections))
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join(10)
    assert not wrong
    world.wait_idle()
    assert world.calls.in_flight == 0
    calls = world.calls.finished
    assert world.metrics.layer_calls._value.get() == calls


# -- closed connections -------------------------------------------------------------------


def test_a_closed_connection_starts_nothing() -> None:
    made = World.of(servers=1, timeout_s=0.5)
    made.warm()
    made.servers[0].connection.close()
    x_TH, ids_TK, scores_TK = made.inputs(1)
    with pytest.raises(ExpertsUnavailableError):
        made.calls.run(0, x_TH, ids_TK, scores_TK, None)


def _total(counter: Any) -> float:
    return sum(s.value for m in counter.collect() for s in m.samples if s.name.endswith("_total"))


def test_a_connection_that_closes_during_a_call(world: World) -> None:
    """The arena stays open until the call's requests are taken over and abandoned."""
    world.servers[0].next_answers.append(silent)
    x_TH, ids_TK, scores_TK = world.inputs(16)
    call = world.calls.start(0, x_TH, ids_TK, scores_TK, None)
    while world.servers[0].next_answers:
        time.sleep(0.001)
    connection = world.servers[0].connection
    connection.close()
    assert world.servers[0].arena.buffer
    world.views.append(ClusterView(world.views[0].placement, (None, world.servers[1].connection)))
    assert torch.equal(call.finish(), right(x_TH, ids_TK))
    assert connection.slots.users == 0
    with pytest.raises(ValueError, match="closed"):
        _ = world.servers[0].arena.buffer
