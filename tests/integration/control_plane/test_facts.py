"""The facts of a cluster over real gRPC and HTTP: what is read, and what is left when somebody is silent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from balancer.main import Balancer
from control_plane import FakeExpertServer, eventually
from eaas.facts import FactsReader
from eaas.facts.remote import remote_reader
from eaas.types import MemberState, Role
from monitor.main import Monitor
from rebalancing_box import NAMES, Box

pytestmark = pytest.mark.integration


class _Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"eaas_generation_tokens_total 41.0\n")

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_all_there_is_to_see(box: Box, endpoint: str) -> None:
    with remote_reader(box.monitor, endpoint) as reader:
        eventually(lambda: (facts := reader.look()).par is not None and facts.bound is not None)
        facts = reader.look()
        servers = facts.live(Role.EXPERT_SERVER)
        assert tuple(m.id for m in servers) == NAMES
        assert {m.state for m in servers} == {MemberState.SERVING}
        assert {m.member.role for m in facts.members} >= {Role.MONITOR, Role.BALANCER}
        assert facts.counters is not None
        assert facts.counters.tokens == 41
        truth = box.placement()
        assert facts.placement is not None
        assert facts.placement.epoch == truth.epoch
        assert np.array_equal(facts.placement.holds_LSE, truth.holds_LSE)
        assert (facts.uncovered, facts.min_replicas) == ((), truth.holds_LSE.sum(axis=1).min())
        assert facts.par == pytest.approx(box.par(), rel=0.1)
        assert facts.bound is not None
        assert 1 <= facts.bound <= facts.par
        assert facts.gap == facts.par / facts.bound

        before = facts.placement.epoch
        assert box.client.rebalance("fractional").applied
        eventually(lambda: (p := reader.look().placement) is not None and p.epoch > before)
        eventually(lambda: "rebalance" in {event.kind for event in reader.look().events})
        assert reader.facts.decisions[0].trigger == "manual"
        assert reader.facts.decisions[0].verdict == "moves"


def test_each_may_be_silent_and_the_rest_is_shown(
    start_monitor: Callable[..., Monitor],
    start_balancer: Callable[..., Balancer],
    start_server: Callable[..., FakeExpertServer],
) -> None:
    monitor = start_monitor()
    balancer = start_balancer(monitor.address)
    for name in ("a", "b"):
        start_server(monitor.address, name)

    def silent(reader: FactsReader) -> set[str]:
        sources = reader.look().sources.values()
        return {source.name for source in sources if source.silent_since is not None}

    with remote_reader(monitor.address, "http://127.0.0.1:1") as reader:
        # Nobody listens at the endpoint's port.
        eventually(lambda: silent(reader) == {"endpoint"} and reader.facts.placement is not None)
        balancer.stop()
        eventually(lambda: silent(reader) == {"endpoint", "balancer"})
        assert reader.facts.placement is not None
        monitor.stop()
        eventually(lambda: silent(reader) == {"endpoint", "balancer", "monitor"})
        assert {m.member.id for m in reader.facts.members} >= {"a", "b"}
        assert [event.subject for event in reader.facts.events if event.kind == "unreachable"] == [
            "monitor",
            "balancer",
        ]
