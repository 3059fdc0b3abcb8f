"""Handle the outcome of one request to an expert server: poll for it, classify it, learn from its time."""

from __future__ import annotations

import enum

import numpy as np

from attention_client.layer_call.attempts import Attempt, Result
from attention_client.layer_call.server_health import ServerHealth
from attention_client.layer_call.shared import Dispatcher
from attention_client.telemetry.request_outcomes import Outcome
from eaas.errors import ConnectionLostError, SlotCorruptError, WrongRequestError
from eaas.wire.slot import Status

__all__ = ["Failed", "learn", "poll"]


class Failed(enum.Enum):
    """Marks a request to an expert server that ended without a result."""

    FAILED = enum.auto()


_FAILED = Failed.FAILED
# Refusals that do not count as failures: the server lacks the expert or is overloaded, but is not faulty.
_BLAMELESS = (Status.STALE_PLACEMENT, Status.EXPIRED)


def poll(
    attempt: Attempt, layer: int, shared: Dispatcher, server_health: ServerHealth
) -> Result | Failed | None:
    """Check once whether the expert server has answered a request of a layer call.

    A failure is counted, towards ejection too if the server is to blame; the rest of the call avoids it.

    Returns:
        The request's result or failure; None while it is in flight.

    Raises:
        WrongRequestError: The server refused the request itself.
    """
    connection = attempt.connection
    name = connection.server_id
    try:
        answer = connection.poll(attempt.ticket)
    except ConnectionLostError as error:
        # Do not blame the server: it gets no more requests, and its next process starts with a clean record.
        server_health.give_up(connection, str(error), "lost", blame=False)
        return _FAILED
    except SlotCorruptError as error:
        server_health.give_up(connection, f"{name}: {error}", "corrupt", blame=True)
        return _FAILED
    now = shared.clock()
    if answer is None:
        if now < attempt.expires_at:
            return None
        connection.abandon(attempt.ticket, overdue=True)
        server_health.timeouts[connection] = server_health.timeouts.get(connection, 0) + 1
        waited_ms = (now - attempt.sent_at) * 1e3
        reason = f"{name}: no answer in {waited_ms:.0f} ms"
        server_health.give_up(connection, reason, "timeout", blame=True)
        return _FAILED
    if answer.part_RH is not None:
        shared.ejections.answered(name)
        shared.metrics.outcomes.count(connection, Outcome.ANSWERED)
        if answer.header.service_us:
            shared.speeds.observe(
                name,
                attempt.part.work,
                answer.header.service_us * 1e-6,
                now,
                pairs=float(np.count_nonzero(attempt.part.ids_RK >= 0)),
                queue_s=answer.header.queue_us * 1e-6,
            )
        return Result(attempt.part, answer.part_RH, attempt, name)
    status = Status(answer.header.status)
    if status is Status.INVALID_ARGUMENT:
        shared.metrics.outcomes.count(connection, Outcome.REFUSED)
        raise WrongRequestError(f"{name} refused a request of layer {layer}")
    reason = f"{name}: answered {status.name}"
    has_gone = status is Status.STALE_PLACEMENT and bool(attempt.spares.of(name))
    if has_gone:
        shared.on_stale(name, attempt.spares)
    # A server that has lost a spare replica may be the only one with other experts of the part.
    server_health.give_up(
        connection, reason, "refused", blame=status not in _BLAMELESS, avoid=not has_gone
    )
    return _FAILED


def learn(attempt: Attempt, shared: Dispatcher, *, exactly: bool) -> None:
    """Update the server's service times, which set budgets and hedges; eject a server that is far too slow.

    Args:
        attempt: The answered request.
        shared: State to update.
        exactly: Whether the answer came just now; otherwise the measured time is only an upper bound.
    """
    now = shared.clock()
    connection, rows = attempt.connection, attempt.part.rows_R.size
    took_s = now - attempt.sent_at
    if exactly:
        connection.service.observe(rows, took_s)
    else:
        connection.service.observe_bound(rows, took_s)
    shared.eject_if_slow(connection.server_id, now)
