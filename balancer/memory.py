"""From what a balancer knows to the record that it leaves, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from balancer.live.history import History
from balancer.live.questions import knobs_of
from balancer.live.state import LiveLayout
from balancer.once import Answered, Once
from balancer.planner import Planner
from eaas.log import get_logger
from eaas.message_check import check
from eaas.message_ranges import TRUSTED_EPOCH
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Placement

__all__ = ["Memory"]

_log = get_logger(__name__)


class Memory:
    """What survives a balancer, where it belongs.

    Args:
        layout: Has what operators want.
        history: Of decisions.
        once: Answers that were given.
    """

    def __init__(self, layout: LiveLayout, history: History, once: Once) -> None:
        self._layout = layout
        self._history = history
        self._once = once
        self._configured = layout.settings

    def record(self) -> pb.BalancerRecord:
        """What there is now."""
        settings, wanted = self._layout.settings, self._history.wanted
        said = (settings.policy, settings.knobs) != (
            self._configured.policy,
            self._configured.knobs,
        )
        return pb.BalancerRecord(
            wanted=wanted.to_proto() if wanted is not None else None,
            policy=settings.policy if said else "",
            knobs=dict(settings.knobs) if said else {},
            pins=[
                pb.Pin(layer=layer, expert=expert, server_id=server)
                for layer, expert, server in sorted(settings.pins)
            ],
            history=self._history.entries()[::-1],
            answered=[
                pb.AnsweredRequest(request_id=a.request_id, digest=a.digest, answer=a.answer)
                for a in self._once.answered()
            ],
        )

    def restore(self, data: bytes, ask: Callable[[Callable[[Planner], Any]], Any]) -> None:
        """Goes on from a record. Of a record that this release cannot read nothing is taken.

        Args:
            data: Serialized; may be empty.
            ask: Asks the planner on its thread.
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
        except Exception as error:  # noqa: BLE001 - DecodeError, ValueError: servers tell what they hold
            _log.error("what the balancer before left cannot be read: %s", error)
            return
        pins = frozenset((p.layer, p.expert, p.server_id) for p in record.pins)
        self._layout.change(pins=pins)
        if record.policy:
            _log.info("policy %s, as an operator said", record.policy)
            self._layout.change(policy=record.policy, knobs=knobs)
        self._history.restore(record.history)
        self._once.restore(Answered(a.request_id, a.digest, a.answer) for a in record.answered)
        if wanted is not None:
            ask(lambda planner: planner.remember(wanted))
