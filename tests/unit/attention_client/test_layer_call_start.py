"""Layer calls with separate start and finish, with arenas in this process and the test as the servers."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from arena_server import ArenaServer, context_of
from attention_client.layer_call.call import Arguments, LayerCall
from attention_client.layer_call.shared import CallContext
from attention_client.telemetry.metrics import ClientMetrics
from eaas.errors import ExpertsUnavailableError

HIDDEN, EXPERTS = 4, 4
IDS = np.array([[0, 1], [1, 2], [2, 3], [3, 0]])


class Server(ArenaServer):
    """Answers on `answer_all`, or at once if `prompt`."""

    prompt, requests = False, 0

    def notify(self, slot: int) -> None:
        self.requests += 1
        if self.prompt:
            self.answer_all()

    def answer_all(self) -> None:
        for slot in self.waiting():
            self.answer(slot)


@dataclass
class Cluster:
    """Servers that hold every expert, and calls to them."""

    servers: list[Server]
    context: CallContext

    @classmethod
    def of(
        cls, servers: int, slots: int = 2, capacity: int = 1024, timeout_s: float = 5
    ) -> Cluster:
        metrics = ClientMetrics(CollectorRegistry())
        made = [Server(f"s{i}", metrics, HIDDEN, slots, capacity) for i in range(servers)]
        return cls(made, context_of(made, 1, EXPERTS, metrics, timeout_s, 5.0)[0])

    def call(self, seed: int = 0, ids_TK: np.ndarray = IDS) -> tuple[LayerCall, torch.Tensor]:
        """A call and its right answer, in whole numbers that sum exactly in any order."""
        x_TH = torch.from_numpy(
            np.random.default_rng(seed).integers(1, 9, (len(ids_TK), HIDDEN)).astype(np.float32)
        )
        ids, scores_TK = torch.from_numpy(ids_TK), torch.ones(ids_TK.shape)
        call = LayerCall(self.context, Arguments(0, x_TH, ids, scores_TK, None))
        weight_T = torch.from_numpy((ids_TK + 1).sum(axis=1).astype(np.float32))
        return call, x_TH * weight_T[:, None]

    def prompt(self) -> None:
        """Answer all waiting and future requests at once."""
        for server in self.servers:
            server.prompt = True
            server.answer_all()

    def in_flight(self) -> int:
        # `owes_answer` frees the slots of late answers.
        return sum(s.connection.owes_answer() or s.connection.in_flight for s in self.servers)


def test_a_started_call_leaves_slots_for_the_finishing_one() -> None:
    """Both need three slots, and there are two: `finish` sends the rest."""
    cluster = Cluster.of(1, capacity=3 * 64)
    ids_TK = np.tile(IDS, (3, 1))
    calls = [cluster.call(seed, ids_TK) for seed in range(2)]
    for call, _ in calls:
        call.start()
    assert len(cluster.servers[0].waiting()) == 2
    cluster.prompt()
    for call, right_TH in calls:
        assert torch.equal(call.finish(), right_TH)
    assert cluster.servers[0].requests == 6
    assert cluster.in_flight() == 0


def test_the_deadline_counts_from_the_start() -> None:
    cluster = Cluster.of(1, timeout_s=0.6)
    call, _ = cluster.call()
    started = time.monotonic()
    call.start()
    time.sleep(0.5)
    with pytest.raises(ExpertsUnavailableError):
        call.finish()
    # From `finish` it would be 1.1 s.
    assert time.monotonic() - started < 1.0
    cluster.prompt()
    assert cluster.in_flight() == 0


def test_time_between_start_and_finish_is_not_service_time() -> None:
    cluster = Cluster.of(1)
    service = cluster.servers[0].connection.service
    service.observe(len(IDS), 0.001)
    before = service.budget(len(IDS), 0.0, 10.0)
    for _ in range(5):
        call, _ = cluster.call()
        call.start()
        cluster.prompt()
        time.sleep(0.05)
        call.finish()
    assert service.budget(len(IDS), 0.0, 10.0) <= before


def test_a_call_is_used_once() -> None:
    cluster = Cluster.of(1)
    cluster.prompt()
    call, right_TH = cluster.call()
    call.start()
    assert torch.equal(call.finish(), right_TH)
    with pytest.raises(RuntimeError, match="has ended"):
        call.finish()
    cancelled, _ = cluster.call()
    cancelled.start()
    cancelled.cancel()
    with pytest.raises(RuntimeError, match="has ended"):
        cancelled.finish()


def test_a_failed_start_frees_every_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster.of(2)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster.servers[1].connection, "submit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cluster.call()[0].start()
    cluster.prompt()
    assert cluster.in_flight() == 0


@given(st.lists(st.tuples(st.sampled_from(("start", "answer", "finish", "cancel")), st.integers(0, 3)),
                max_size=24), st.integers(2, 4))  # fmt: skip
def test_any_order_of_start_finish_and_cancel_leaks_no_slot(steps, slots: int) -> None:
    cluster = Cluster.of(2, slots)
    open_calls: dict[int, tuple[LayerCall, torch.Tensor]] = {}
    for seed, (step, which) in enumerate(steps):
        if step == "start" and which not in open_calls and len(open_calls) < slots:
            open_calls[which] = cluster.call(seed)
            open_calls[which][0].start()
        elif step == "answer":
            for server in cluster.servers:
                server.answer_all()
        elif step != "start" and which in open_calls:
            call, right_TH = open_calls.pop(which)
            if step == "cancel":
                call.cancel()
            else:
                cluster.prompt()
                assert torch.equal(call.finish(), right_TH)
                for server in cluster.servers:
                    server.prompt = False
    for call, _ in open_calls.values():
        call.cancel()
    cluster.prompt()
    assert cluster.in_flight() == 0
