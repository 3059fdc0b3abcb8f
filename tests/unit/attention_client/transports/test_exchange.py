"""Conformance of all transports: requests and answers."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from attention_client.connections.messages import WIRE_DTYPES
from attention_client.connections.transports import opener
from eaas import transports
from eaas.errors import ConfigError, ConnectionLostError, SlotsBusyError, WrongRequestError
from eaas.one_sided import why_not
from eaas.wire.slot import Status
from transport_bench import (
    EXPERTS,
    LARGE,
    SLOT_TOKENS,
    SLOTS,
    TOP_K,
    Client,
    Server,
    answer,
    eventually,
    right,
    send,
    some,
)


def test_nixl_without_its_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    why_not.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"^transport nixl: .*; pip install '.*\[nixl\]'$"):
            opener("nixl")
        assert "nixl" not in transports.usable()
    finally:
        why_not.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5, SLOT_TOKENS])
def test_round_trip(client: Client, server: Server, dtype: torch.dtype, tokens: int) -> None:
    connection = client.connect(server.address)
    assert connection.max_tokens(TOP_K, WIRE_DTYPES[dtype]) >= tokens
    request = some(tokens, dtype)
    assert right(answer(connection, send(connection, request)), request)
    assert connection.in_flight == 0


def test_full_large_slots(client: Client, large_server: Server) -> None:
    connection = client.connect(large_server.address)
    assert connection.max_tokens(TOP_K, WIRE_DTYPES[torch.float32]) == LARGE
    requests = [some(LARGE, seed=seed) for seed in range(4)]
    for _ in range(3):
        tickets = [send(connection, request) for request in requests]
        for ticket, request in zip(tickets, requests, strict=True):
            assert right(answer(connection, ticket), request)


def test_answers_in_another_order(client: Client, idle_server: Server) -> None:
    connection = client.connect(idle_server.address)
    slot_of: dict[int, int] = {}
    tickets = []
    for i in range(4):
        tickets.append(send(connection, some(2, seed=i)))
        eventually(lambda i=i: len(idle_server.written()) == i + 1)
        slot_of[i] = next(s for s in idle_server.written() if s not in slot_of.values())
    with pytest.raises(SlotsBusyError):
        send(connection, some(1))
    for i in (2, 0, 3, 1):
        idle_server.loop.serve([slot_of[i]])
        assert right(answer(connection, tickets[i]), some(2, seed=i))
    assert connection.in_flight == 0


def test_an_unknown_expert_is_a_stale_placement(client: Client, server: Server) -> None:
    connection = client.connect(server.address)
    server.loop.epoch = 7
    x_TH, ids_TK, scores_TK = some(2)
    ids_TK[0, 0] = EXPERTS
    result = answer(connection, send(connection, (x_TH, ids_TK, scores_TK)))
    assert result.header.status == Status.STALE_PLACEMENT
    assert result.header.detail == 7


def test_a_wrong_request_takes_no_slot(client: Client, server: Server) -> None:
    connection = client.connect(server.address)
    x_TH, ids_TK, scores_TK = some(2)
    with pytest.raises(WrongRequestError, match="hidden size"):
        send(connection, (x_TH[:, :-1], ids_TK, scores_TK))
    with pytest.raises(WrongRequestError, match="float64"):
        send(connection, (x_TH.double(), ids_TK, scores_TK))
    result = answer(connection, send(connection, some(1), layer=9))
    assert result.header.status == Status.INVALID_ARGUMENT
    assert connection.in_flight == 0


def test_a_new_connection_has_a_new_generation(client: Client, idle_server: Server) -> None:
    old = client.connect(idle_server.address)
    ticket = send(old, some(1, seed=1))
    eventually(idle_server.written)
    # The same client connects again: the server revokes its old slots during the loop's round.
    ready = idle_server.written()
    new = client.connect(idle_server.address)
    idle_server.loop.serve(ready)
    with pytest.raises(ConnectionLostError):
        answer(old, ticket)
    assert new._link.generation > old._link.generation
    ticket = send(new, some(1, seed=2))
    eventually(idle_server.written)
    idle_server.loop.serve(idle_server.written())
    assert right(answer(new, ticket), some(1, seed=2))


def test_sixty_four_clients_at_once(client: Client, server: Server) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        connection = client.connect(server.address, f"client-{number}", SLOTS // 64)
        for i in range(5):
            request = some(1 + i % SLOT_TOKENS, seed=number * 100 + i)
            if not right(answer(connection, send(connection, request)), request):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(64)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(client.connections) == 64
    assert not wrong
