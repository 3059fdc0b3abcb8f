"""Clients and servers in simulated time: the clients' own dispatch and measurements, and servers that batch.

A server computes all requests of one layer that wait as one batch: each expert's weights once, and their
pairs. Clients compute between their layer calls.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attention_client.dispatch import Load, dispatch_policy
from attention_client.dispatch.parts import LOAD_PAIRS
from attention_client.layer_call.server_speeds import Speeds
from eaas.replicas import Replicas

__all__ = ["KNOWLEDGE", "Guests", "Situation", "simulate"]

KNOWLEDGE = {
    "shares": "nothing: the placement's shares decide",
    "times": "seconds in the server, as if all were this client's work",
    "work": "seconds of this client's work only",
    "queues": "the same, and each server's usual queue (live clients)",
    "oracle": "the queues of this moment (a bound)",
}
# Seconds to read an expert's weights.
_LOAD_S = 1e-4
# Standard deviation of the logarithm of the time between a client's calls.
_VARIES = 0.3
_NO_ROOM = 1 << 30


class Guests(NamedTuple):
    """Other work of the first servers."""

    servers: int
    every_s: float
    """Mean seconds between its requests to a server."""
    takes_s: float


_NO_GUESTS = Guests(0, 0.0, 0.0)


@dataclass(frozen=True)
class Situation:
    """What is simulated.

    Attributes:
        name: For the report.
        clients: Clients with one layer call at a time.
        think_s: Usual seconds between two calls of a client.
        slow: Factors of the first servers' times; the others have 1.
        guests: Other work; None: there is none.
    """

    name: str
    clients: int
    think_s: float
    slow: tuple[float, ...] = ()
    guests: Guests | None = None


@dataclass(eq=False)
class _Request:
    client: int
    layer: int
    experts: frozenset[int]
    pairs: int
    work: float
    seen_at: float = -1.0


@dataclass(eq=False)
class _Server:
    factor: float
    queue: deque[_Request] = field(default_factory=deque)
    batch: list[_Request] = field(default_factory=list)
    began_at: float = 0.0
    ends_at: float = 0.0

    def seconds(self, requests: list[_Request]) -> float:
        """Of a batch."""
        experts = frozenset().union(*(request.experts for request in requests))
        pairs = sum(request.pairs for request in requests)
        return self.factor * _LOAD_S * (len(experts) + pairs / LOAD_PAIRS)

    def begin(self, now: float) -> bool:
        """Begin a batch of all requests of the oldest one's layer, if there are any and it is idle."""
        if self.batch or not self.queue:
            return False
        # A server looks for requests between two batches.
        for request in self.queue:
            request.seen_at = request.seen_at if request.seen_at >= 0 else now
        layer = self.queue[0].layer
        self.batch = [request for request in self.queue if request.layer == layer]
        self.queue = deque(request for request in self.queue if request.layer != layer)
        self.began_at, self.ends_at = now, now + self.seconds(self.batch)
        return True

    def backlog(self, now: float) -> float:
        """Seconds until it is idle."""
        running = max(self.ends_at - now, 0.0) if self.batch else 0.0
        return running + sum(self.seconds([request]) for request in self.queue)


def simulate(
    situation: Situation,
    knowledge: str,
    counts_ILE: npt.NDArray[Any],
    shares_LSE: npt.NDArray[np.float32],
    *,
    tokens: int,
    calls: int,
    seed: int,
) -> npt.NDArray[np.float64]:
    """Simulate layer calls; the first fifth, in which clients learn, does not count.

    Args:
        situation: Clients and servers.
        knowledge: What a client knows, one of `KNOWLEDGE`.
        counts_ILE: Loads to draw the calls' experts from.
        shares_LSE: The placement.
        tokens: (token, expert) pairs of a call, over the number of experts of a token (8).
        calls: Layer calls of all clients.
        seed: Of all random numbers.

    Returns:
        float64 (N): the calls' seconds.
    """
    rng = np.random.default_rng(seed)
    layers, servers_count, experts = shares_LSE.shape
    replicas = Replicas.of(shares_LSE > 0, shares_LSE)
    factors = (*situation.slow, *[1.0] * servers_count)
    servers = [_Server(factors[s]) for s in range(servers_count)]
    names = [str(s) for s in range(servers_count)]
    speeds = [Speeds() for _ in range(situation.clients)]
    policies = [
        dispatch_policy("weights" if knowledge == "shares" else "least_loaded")
        for _ in range(situation.clients)
    ]
    at_layer = rng.integers(layers, size=situation.clients)
    waiting, began_at = np.zeros(situation.clients, np.int64), np.zeros(situation.clients)
    took: list[float] = []
    # (time, number, what, of whom)
    events: list[tuple[float, int, str, int]] = []
    numbers = iter(range(1 << 60))

    def at(when: float, what: str, whom: int) -> None:
        heapq.heappush(events, (when, next(numbers), what, whom))

    def load(client: int, now: float) -> Load:
        known = speeds[client].load(names, [0.0] * servers_count, now)
        if knowledge == "oracle":
            return Load(known.rate_S, np.array([server.backlog(now) for server in servers]))
        return Load(
            known.rate_S, known.backlog_S if knowledge == "queues" else np.zeros(servers_count)
        )

    def begin(server: int, now: float) -> None:
        if servers[server].begin(now):
            at(servers[server].ends_at, "ends", server)

    def call(client: int, now: float) -> None:
        layer = at_layer[client] = (at_layer[client] + 1) % layers
        load_E = counts_ILE[rng.integers(len(counts_ILE)), layer].astype(np.float64)
        pairs_E = rng.multinomial(tokens * 8, load_E / load_E.sum())
        ids_P1 = np.repeat(np.arange(experts), pairs_E)[:, None]
        parts, _ = policies[client].plan(
            ids_P1, np.ones(ids_P1.shape, np.bool_), replicas, load(client, now),
            [_NO_ROOM] * servers_count, int(layer),
        )  # fmt: skip
        waiting[client], began_at[client] = len(parts), now
        for part in parts:
            ids = part.ids_RK[part.ids_RK >= 0].tolist()
            servers[part.server].queue.append(
                _Request(client, int(layer), frozenset(ids), len(ids), part.work)
            )
        for part in parts:
            begin(part.server, now)

    def end(server: int, now: float) -> None:
        batch, servers[server].batch = servers[server].batch, []
        total = sum(request.pairs for request in batch)
        for request in batch:
            if request.client < 0:
                continue
            service = now - request.seen_at
            own = (now - servers[server].began_at) * request.pairs / total
            queue = 0.0 if knowledge == "times" else service - own
            speeds[request.client].observe(
                names[server], request.work, service, now, pairs=request.pairs, queue_s=queue
            )
            waiting[request.client] -= 1
            if waiting[request.client] == 0:
                took.append(now - began_at[request.client])
                at(now + situation.think_s * rng.lognormal(0, _VARIES), "calls", request.client)
        begin(server, now)

    for client in range(situation.clients):
        at(rng.random() * situation.think_s, "calls", client)
    guests = situation.guests or _NO_GUESTS
    for server in range(guests.servers):
        at(rng.exponential(guests.every_s), "guest", server)
    while len(took) < calls:
        now, _, what, whom = heapq.heappop(events)
        if what == "calls":
            call(whom, now)
        elif what == "ends":
            end(whom, now)
        else:
            pairs = int(guests.takes_s / _LOAD_S * LOAD_PAIRS)
            servers[whom].queue.append(_Request(-1, -next(numbers), frozenset(), pairs, 0.0))
            at(now + rng.exponential(guests.every_s), "guest", whom)
            begin(whom, now)
    return np.array(took[calls // 5 :])
