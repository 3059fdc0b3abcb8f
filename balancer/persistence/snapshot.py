"""Converts between the balancer's state and the record that its successor restores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from balancer.live.history import History
from balancer.live.requests import knobs_of
from balancer.persistence.idempotency import Answered, IdempotencyCache
from balancer.planner.layout import Layout
from balancer.planner.planner import Planner
from eaas.log import get_logger
from eaas.net.message_ranges import TRUSTED_EPOCH
from eaas.net.message_validation import check
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Placement

__all__ = ["BalancerSnapshot"]

_log = get_logger(__name__)


class BalancerSnapshot:
    """Makes the record of the balancer's state, and restores the state from one.

    Args:
        layout: Holds the operators' settings.
        history: Holds past decisions.
        idempotency: Holds past answers.
    """

    def __init__(self, layout: Layout, history: History, idempotency: IdempotencyCache) -> None:
        self._layout = layout
        self._history = history
        self._idempotency = idempotency
        self._configured = layout.settings

    def record(self) -> pb.BalancerRecord:
        """Make a record of the current state, for `WriteAheadState` to store at the monitor."""
        settings, wanted = self._layout.settings, self._history.wanted
        configured = self._configured
        changed = (settings.policy, settings.knobs) != (configured.policy, configured.knobs)
        return pb.BalancerRecord(
            wanted=wanted.to_proto() if wanted is not None else None,
            policy=settings.policy if changed else "",
            knobs=dict(settings.knobs) if changed else {},
            pins=[
                pb.Pin(layer=layer, expert=expert, server_id=server)
                for layer, expert, server in sorted(settings.pins)
            ],
            history=self._history.entries()[::-1],
            answered=[
                pb.AnsweredRequest(request_id=a.request_id, digest=a.digest, answer=a.answer)
                for a in self._idempotency.answered()
            ],
        )

    def restore(self, data: bytes, ask: Callable[[Callable[[Planner], Any]], Any]) -> None:
        """At start: restore the state from the previous balancer's record; nothing if it cannot be read.

        Args:
            data: The serialized record; may be empty.
            ask: Runs a function of the planner on the planner's thread.
        """
        if not data:
            return
        try:
            record = pb.BalancerRecord.FromString(data)
            check(record)
            if record.wanted.epoch > TRUSTED_EPOCH:
                raise ValueError(f"it has epoch {record.wanted.epoch}: no balancer gets there")
            wanted = Placement.from_proto(record.wanted) if record.wanted.epoch else None
            knobs = knobs_of(record.policy, record.knobs) if record.policy else {}
        except Exception as error:  # noqa: BLE001 - DecodeError, ValueError: servers say what they hold
            _log.error("the previous balancer's record cannot be read: %s", error)
            return
        pins = frozenset((p.layer, p.expert, p.server_id) for p in record.pins)
        self._layout.change(pins=pins)
        if record.policy:
            _log.info("policy %s, as an operator set it", record.policy)
            self._layout.change(policy=record.policy, knobs=knobs)
        self._history.restore(record.history)
        self._idempotency.restore(
            Answered(a.request_id, a.digest, a.answer) for a in record.answered
        )
        if wanted is not None:
            ask(lambda planner: planner.remember(wanted))
