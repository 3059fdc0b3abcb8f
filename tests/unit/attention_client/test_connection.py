"""A connection's slots, with an arena in this process and the test as the server."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from attention_client.connections.connection import Connection
from attention_client.connections.messages import LayerInput, Ticket
from attention_client.dispatch.parts import Part
from attention_client.telemetry.metrics import ClientMetrics
from eaas.errors import ConnectionLostError, SlotCorruptError, SlotsBusyError
from eaas.wire import Arena, RequestHeader, ResultHeader, SlotState
from eaas.wire.slot import (
    DAMAGED,
    RESULT_HEADER_BYTES,
    Status,
    reply_doorbell,
    result_view,
    seal,
)
from expert_server.transports.slot_ownership import Grant, SlotTable

HIDDEN = 4


class FakeLink:
    def __init__(self, arena: Arena, grant: Grant) -> None:
        self.arena, self.first_slot, self.slots = arena, grant.first_slot, grant.slots
        self.generation, self.reply_doorbell = grant.generation, reply_doorbell(grant.first_slot)
        self.payload_capacity = grant.payload_capacity
        self.result_capacity = grant.result_capacity
        self.direct = True

    def notify(self, slot: int) -> None:
        self.arena.flags.ring(0)

    def close(self) -> None:
        pass


class Bench:
    def __init__(self, slots: int = 3) -> None:
        self.arena = Arena.create_local(slots, 1024, 1024, 1)
        self.table = SlotTable(self.arena)
        self.metrics = ClientMetrics(CollectorRegistry())

    def connect(self, client: str = "a", *, checksum: bool = False) -> Connection:
        grant = self.table.grant(client, 1, self.arena.slots)
        assert grant is not None
        link = FakeLink(self.arena, grant)
        return Connection(
            client, 1, link, HIDDEN, 0, checksum, lambda c: None, lambda: None, self.metrics
        )

    def answer(self, slot: int, **changes: int) -> bool:
        request = RequestHeader.unpack_from(self.arena.buffer, self.arena.request_offset(slot))
        fields = {
            "generation": request.generation,
            "request_id": request.request_id,
            "rows": request.batch_size,
            "hidden_size": HIDDEN,
        }
        offset = self.arena.result_offset(slot)
        result_view(self.arena.buffer, offset, request.batch_size, HIDDEN)[...] = request.request_id
        header = ResultHeader.of(**({"status": Status.OK} | fields | changes))
        if request.flags:
            seal(self.arena.buffer, offset, header)
        else:
            header.pack_into(self.arena.buffer, offset)
        return self.arena.server_done(slot)

    def late_answers(self) -> float:
        return float(self.metrics.late_answers._value.get())


class SlotsBefore:
    """The slots of a connection, which call something before each write."""

    def __init__(self, connection: Connection, before: Callable[[], None]) -> None:
        self._slots: Any = connection.slots
        self._before = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slots, name)

    def write(self, *request: Any) -> bool:
        self._before()
        return bool(self._slots.write(*request))


def send(connection: Connection, rows: int = 1) -> Ticket:
    inputs = LayerInput.of(0, torch.ones(rows, HIDDEN), np.zeros((rows, 1), dtype=np.float32))
    part = Part(0, np.arange(rows), np.zeros((rows, 1), dtype=np.int32), 1.5)
    return connection.submit(inputs, 1, part, 1.0)


@pytest.mark.parametrize("lie", [{"request_id": 1 << 40}, {"generation": 99}, {"rows": 2}])
def test_an_answer_to_another_request_is_dropped_and_frees_the_slot(
    lie: dict[str, int],
) -> None:
    bench = Bench()
    connection = bench.connect()
    ticket = send(connection)
    bench.answer(ticket.slot, **lie)
    with pytest.raises(SlotCorruptError):
        connection.poll(ticket)
    assert connection.in_flight == 0
    assert bench.arena.flags.load(ticket.slot) == SlotState.FREE
    assert bench.late_answers() == 1


@pytest.mark.parametrize(
    ("status", "answered"), [(Status.OK, 1), (Status.EXPIRED, 0), (Status.INTERNAL, 0)]
)
def test_a_late_error_is_no_answer(status: Status, answered: int) -> None:
    """A server that always answers EXPIRED has answered nobody."""
    bench = Bench()
    connection = bench.connect()
    ticket = send(connection)
    connection.abandon(ticket, overdue=True)
    bench.answer(ticket.slot, status=status)
    assert not connection.owes_answer()
    assert bench.late_answers() == 1
    assert sum(server.answered for server in bench.metrics.outcomes.read()) == answered


def test_work_in_flight_counts_until_the_answer() -> None:
    bench = Bench()
    connection = bench.connect()
    answered, late = send(connection), send(connection)
    assert connection.work_in_flight == 3.0
    bench.answer(answered.slot)
    assert connection.poll(answered) is not None
    assert connection.work_in_flight == 1.5
    assert connection.release(answered)
    connection.abandon(late, overdue=False)
    assert connection.work_in_flight == 1.5  # The server still works on it.
    assert not connection.owes_answer()
    bench.answer(late.slot)
    assert not connection.owes_answer()
    assert connection.work_in_flight == 0


def test_a_result_revoked_during_the_read_is_invalid() -> None:
    bench = Bench()
    connection = bench.connect()
    ticket = send(connection)
    bench.answer(ticket.slot)
    assert connection.poll(ticket) is not None
    bench.table.revoke_all()
    assert not connection.release(ticket)
    assert connection.lost_reason == "the server took its slots back"


@pytest.mark.parametrize("damage", [0, 8, 20, RESULT_HEADER_BYTES + 1])
def test_a_damaged_answer_quarantines_its_slot(damage: int) -> None:
    bench = Bench()
    connection = bench.connect(checksum=True)
    for _ in range(3):
        ticket = send(connection)
        bench.answer(ticket.slot)
        bench.arena.buffer[bench.arena.result_offset(ticket.slot) + damage] ^= 1
        assert connection.lost_reason is None
        with pytest.raises(SlotCorruptError):
            connection.poll(ticket)
    assert connection.lost_reason == "every slot is in quarantine"
    assert bench.metrics.quarantined_slots._value.get() == 3


def test_a_request_that_arrived_damaged_quarantines_its_slot() -> None:
    bench = Bench()
    connection = bench.connect(checksum=True)
    ticket = send(connection)
    bench.answer(ticket.slot, status=Status.INTERNAL, detail=DAMAGED, rows=0, hidden_size=0)
    with pytest.raises(SlotCorruptError, match="reached the server damaged"):
        connection.poll(ticket)
    other = send(connection)
    assert other.slot != ticket.slot
    bench.answer(other.slot, status=Status.INTERNAL, rows=0, hidden_size=0)
    answer = connection.poll(other)
    assert answer is not None
    assert answer.part_RH is None
    assert send(connection).slot == other.slot


def test_bytes_that_arrive_after_their_flag_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    connection = bench.connect(checksum=True)
    ticket = send(connection)
    bench.answer(ticket.slot)
    place = bench.arena.result_offset(ticket.slot) + RESULT_HEADER_BYTES
    bench.arena.buffer[place] ^= 1

    def arrive(_seconds: float) -> None:
        bench.arena.buffer[place] ^= 1

    monkeypatch.setattr("attention_client.connections.connection.time.sleep", arrive)
    answer = connection.poll(ticket)
    assert answer is not None
    assert answer.part_RH is not None
    assert connection.release(ticket)


def test_a_paused_client_does_not_touch_the_slots_of_their_new_owner() -> None:
    bench = Bench()
    old = bench.connect("old")
    ticket = send(old)
    bench.table.revoke_all()
    new = bench.connect("new")
    tickets = [send(new) for _ in range(3)]
    before = bench.arena.buffer[bench.arena.request_offset(0) :]
    with pytest.raises(ConnectionLostError):
        send(old)
    assert bench.arena.buffer[bench.arena.request_offset(0) :] == before
    for t in tickets:
        bench.answer(t.slot)
    with pytest.raises(ConnectionLostError):
        old.poll(ticket)
    for t in tickets:
        result = new.poll(t)
        assert result is not None
        assert result.header.request_id == t.request_id
        assert new.release(t)


def test_a_paused_client_does_not_free_the_new_owners_answer() -> None:
    bench = Bench(1)
    old = bench.connect("old")
    old.abandon(send(old), overdue=True)
    bench.table.revoke_all()
    new = bench.connect("new")
    ticket = send(new)
    bench.answer(ticket.slot)
    assert old.owes_answer()
    assert old.lost_reason == "the server took its slots back"
    assert new.poll(ticket) is not None
    assert new.release(ticket)


def test_slots_are_given_back_after_writes_in_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    connection = bench.connect()
    events: list[str] = []
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        go_on.wait(5)
        events.append("written")

    monkeypatch.setattr(connection, "slots", SlotsBefore(connection, wait))
    monkeypatch.setattr(connection._link, "close", lambda: events.append("closed"))
    writer = threading.Thread(target=send, args=(connection,))
    writer.start()
    reached.wait(5)
    closer = threading.Thread(target=connection.close)
    closer.start()
    time.sleep(0.05)
    go_on.set()
    writer.join()
    closer.join()
    assert events == ["written", "closed"]


def test_abandon_is_idempotent() -> None:
    bench = Bench(1)
    connection = bench.connect()
    ticket = send(connection)
    connection.abandon(ticket, overdue=True)
    connection.abandon(ticket, overdue=True)
    bench.answer(ticket.slot)
    assert not connection.owes_answer()
    connection.abandon(ticket, overdue=True)
    assert not connection.owes_answer()
    send(connection)
    with pytest.raises(SlotsBusyError):
        send(connection)


def test_an_interrupted_write_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Bench(1).connect()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(connection, "slots", SlotsBefore(connection, interrupt))
        with pytest.raises(KeyboardInterrupt):
            send(connection)
    send(connection)


def test_concurrent_polls_and_abandons_leak_no_slot() -> None:
    bench = Bench(4)
    connection = bench.connect()
    over = threading.Event()
    wrong: list[object] = []

    def serve() -> None:
        while not over.is_set():
            for slot in bench.arena.flags.wait(0, 4, SlotState.WRITTEN.mask, 0, -1, 0, 10_000):
                bench.answer(slot)
                bench.arena.flags.ring(reply_doorbell(0))

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            try:
                ticket = send(connection, rng.randint(1, 3))
            except SlotsBusyError:
                continue
            while rng.random() < 0.9:
                seen = connection.seq()
                result = connection.poll(ticket)
                if result is not None:
                    if result.part_RH is None or not (result.part_RH == ticket.request_id).all():
                        wrong.append(ticket)
                    connection.release(ticket)
                    break
                connection.wait(ticket, seen, 0.01)
            else:
                connection.abandon(ticket, overdue=True)

    server = threading.Thread(target=serve)
    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in (server, *workers):
        thread.start()
    for worker in workers:
        worker.join()
    for _ in range(1000):
        if not connection.owes_answer():
            break
        over.wait(0.01)
    over.set()
    server.join()
    assert not wrong
    assert connection.in_flight == 0
