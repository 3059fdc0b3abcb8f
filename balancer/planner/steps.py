"""The planner's calls that bring a placement to servers: load shares, later drop all else. No I/O."""

from __future__ import annotations

from balancer.planner.actions import Action, Call, Life, Prepare, Retire
from balancer.planner.digests import ExpertDigests
from balancer.planner.ledger import Ledger
from balancer.planner.pool import ServerPool
from eaas.types import Member, MemberState, Placement

__all__ = ["Steps"]


class Steps:
    """Makes the calls due for a placement, and tracks whether they are done.

    Args:
        pool: The servers.
        ledger: State of the calls.
        digests: The experts' digests.
    """

    def __init__(self, pool: ServerPool, ledger: Ledger, digests: ExpertDigests) -> None:
        self._pool = pool
        self._ledger = ledger
        self._digests = digests
        # Servers, with the epoch, that have loaded a share and wait for digests to compare it with.
        self._awaiting: set[tuple[Life, int]] = set()

    def loaded(self, call: Prepare) -> None:
        """Record that a server has loaded its share and waits for digests; `decide_digests` ends the wait."""
        self._awaiting.add((call.life, call.placement.epoch))

    def decide_digests(self, placement: Placement) -> None:
        """Decide digests once all servers of the placement have stated theirs; Prepare is then sent again."""
        waited_for = {
            life
            for life in self._lives(placement)
            if not self._ledger.is_done(Prepare, life, placement.epoch)
        }
        awaiting = {life for life, epoch in self._awaiting if epoch == placement.epoch}
        if not waited_for or not waited_for <= awaiting:
            return
        self._digests.decide(waited_for)
        self._awaiting.clear()
        self._ledger.ask_again(waited_for)

    def _lives(self, placement: Placement) -> list[Life]:
        """Return the processes of a placement's servers, without those that cannot load for now."""
        servers = frozenset(placement.servers)
        return [
            self._pool.life(server)
            for server_id, server in self._pool.willing.items()
            if server_id in servers
        ]

    def prepare(self, placement: Placement, layer_order: tuple[int, ...]) -> list[Action]:
        """Return the Prepare calls to send: to servers that have not received one for this placement."""
        calls: list[Call] = []
        servers = frozenset(placement.servers)
        for server_id, server in self._pool.willing.items():
            if server_id not in servers:
                continue
            life = self._pool.life(server)
            has_it = server.state is MemberState.SERVING and server.epoch == placement.epoch
            if not has_it and self._ledger.is_begun(Prepare, life, placement.epoch):
                continue
            known_LE = self._digests.known_LE
            call = Prepare(server_id, life, server.address, placement, layer_order, known_LE)
            if has_it:
                # A server that lost only its lease still has its weights.
                self._ledger.succeeded(call)
            calls.append(call)
        return self._ledger.begin(calls)

    def is_prepared(self, placement: Placement) -> bool:
        """Whether every server of the placement that can load has its share: it may be published."""
        return all(
            self._ledger.is_done(Prepare, life, placement.epoch) for life in self._lives(placement)
        )

    def retire(self, placement: Placement) -> list[Action]:
        """Return the Retire calls to send, once each: to servers that have their share or that get none."""
        calls: list[Call] = []
        servers = frozenset(placement.servers)
        for m in self._retirable(placement):
            life = self._pool.life(m)
            if self._ledger.is_begun(Retire, life, placement.epoch):
                continue
            if m.id not in servers or self._ledger.is_done(Prepare, life, placement.epoch):
                calls.append(Retire(m.id, life, m.address, placement))
        return self._ledger.begin(calls)

    def is_retired(self, placement: Placement) -> bool:
        """Whether servers hold nothing but their shares, or do not answer Retire: the roll-out is over."""
        return all(
            self._ledger.is_over(Retire, self._pool.life(m), placement.epoch)
            for m in self._retirable(placement)
        )

    def unheard(self, placement: Placement) -> list[str]:
        """Return servers that may hold more than their shares, because Retire has not reached them."""
        return [
            m.id
            for m in self._retirable(placement)
            if not self._ledger.is_done(Retire, self._pool.life(m), placement.epoch)
        ]

    def most_of_unheard(self, placement: Placement) -> dict[str, int]:
        """Return, by server that Retire has not reached, its share's replicas: it gets no more for now."""
        count_S = placement.holds_LSE.sum(axis=(0, 2)).tolist()
        known = dict(zip(placement.servers, count_S, strict=True))
        return {s: known.get(s, 0) for s in self.unheard(placement)}

    def _retirable(self, placement: Placement) -> list[Member]:
        """Return live servers that hold experts of this placement or of an older one."""
        servers = frozenset(placement.servers)
        return [
            m
            for s, m in self._pool.willing.items()
            if s in servers or m.state is not MemberState.JOINING
        ]
