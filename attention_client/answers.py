"""What became of a request: look, judge, and learn from what it took."""

from __future__ import annotations

import enum

from attention_client.attempts import Attempt, Result
from attention_client.outcomes import Outcome
from attention_client.shared import Dispatcher
from attention_client.standing import Standing
from eaas.errors import ConnectionLostError, SlotCorruptError, WrongRequestError
from eaas.wire.slot import Status

__all__ = ["Failed", "learn", "look"]


class Failed(enum.Enum):
    """Of a request: it ended without a result."""

    FAILED = enum.auto()


_FAILED = Failed.FAILED
# The server never had that expert, or has more to do than it can: nothing is wrong with it.
_BLAMELESS = (Status.STALE_PLACEMENT, Status.EXPIRED)


def look(
    attempt: Attempt, layer: int, shared: Dispatcher, standing: Standing
) -> Result | Failed | None:
    """Poll a request of a layer.

    Returns:
        Its result; None while there is none.

    Raises:
        WrongRequestError: The server refused the request itself.
    """
    connection = attempt.connection
    name = connection.server_id
    try:
        answer = connection.poll(attempt.ticket)
    except ConnectionLostError as error:
        # Whoever is gone gets no requests anyway, and its next life is another one.
        standing.give_up(connection, str(error), "lost", blame=False)
        return _FAILED
    except SlotCorruptError as error:
        standing.give_up(connection, f"{name}: {error}", "corrupt", blame=True)
        return _FAILED
    now = shared.clock()
    if answer is None:
        if now < attempt.expires_at:
            return None
        connection.abandon(attempt.ticket, overdue=True)
        standing.timeouts[connection] = standing.timeouts.get(connection, 0) + 1
        waited_ms = (now - attempt.sent_at) * 1e3
        reason = f"{name}: no answer in {waited_ms:.0f} ms"
        standing.give_up(connection, reason, "timeout", blame=True)
        return _FAILED
    if answer.part_RH is not None:
        shared.ejections.answered(name)
        shared.metrics.outcomes.count(connection, Outcome.ANSWERED)
        if answer.header.service_us:
            seconds = answer.header.service_us * 1e-6
            shared.speeds.observe(name, attempt.part.work, seconds, now)
        return Result(attempt.part, answer.part_RH, attempt, name)
    status = Status(answer.header.status)
    if status is Status.INVALID_ARGUMENT:
        shared.metrics.outcomes.count(connection, Outcome.REFUSED)
        raise WrongRequestError(f"{name} refused a request of layer {layer}")
    reason = f"{name}: answered {status.name}"
    standing.give_up(connection, reason, "refused", blame=status not in _BLAMELESS)
    return _FAILED


def learn(attempt: Attempt, shared: Dispatcher, *, exactly: bool) -> None:
    """Learn from an answer what its server usually takes; leave out a server that is far too slow.

    Args:
        attempt: Its result was found just now.
        shared: Learns.
        exactly: The answer came just now, too. Otherwise it may have been there for a while.
    """
    now = shared.clock()
    servers = shared.replicas.view().placement.servers
    ejections, speeds = shared.ejections, shared.speeds
    connection, rows = attempt.connection, attempt.part.rows_R.size
    took_s = now - attempt.sent_at
    if exactly:
        connection.service.observe(rows, took_s)
    else:
        connection.service.observe_bound(rows, took_s)
    name = connection.server_id
    slow = speeds.is_outlier(name, servers, ejections.SLOW_FACTOR, ejections.SLOW_ANSWERS)
    if slow and ejections.slow(name, servers, now):
        # When it is asked again, it is to be judged by what it does then.
        speeds.forget(name)
        shared.metrics.ejections.labels("slow").inc()
