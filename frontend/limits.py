"""Limits on the requests of one HTTP endpoint, each and together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from eaas.generation.errors import ApiError

__all__ = ["Quota", "ServeLimits"]


@dataclass(frozen=True)
class ServeLimits:
    """Limits of one HTTP endpoint.

    Attributes:
        max_requests: Most requests that wait or run; the next one gets status 429. A request counts once for
            each sequence that it generates.
        max_body_bytes: Largest request body; a larger one gets status 413.
        max_bodies_bytes: Most bytes of all bodies together, without the first 64 KiB of each; a request that
            needs more gets status 429. If incomplete bodies need more than half, the oldest gets status 408.
        body_timeout_s: Time for a client to send its body; a slower one gets status 408.
        send_timeout_s: A client that reads nothing of its answer for this long is disconnected.
        max_connections: Most open connections; fewer if the limit of open files is low. A further connection
            replaces an idle one or the oldest incomplete one; if there is none, it gets status 429.
        head_timeout_s: Time for a client to send a request's headers; a slower one is disconnected.
        ping_s: A stream of events in which nothing was sent for this long gets a comment. This may take
            twice as long.
        max_stored_responses: Most responses that are kept for `previous_response_id`; the oldest go first.
        max_stored_bytes: Most bytes of them and of their requests.
    """

    max_requests: int = 1024
    max_body_bytes: int = 4 * 2**20
    max_bodies_bytes: int = 128 * 2**20
    body_timeout_s: float = 30.0
    send_timeout_s: float = 30.0
    max_connections: int = 4096
    head_timeout_s: float = 10.0
    ping_s: float = 7.0
    max_stored_responses: int = 1024
    max_stored_bytes: int = 64 * 2**20


class Quota:
    """An amount that requests share, for one event loop.

    Args:
        most: The amount.
        refusal: Message to a client whose request needs more than is left.
    """

    def __init__(self, most: int, refusal: str) -> None:
        self._left = most
        self._refusal = refusal

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes so much for one request; the end of the block gives all back.

        The function raises ApiError (429) if less is left.
        """
        held = 0

        def take(amount: int) -> None:
            nonlocal held
            if amount > self._left:
                raise ApiError(429, self._refusal, code="overloaded")
            self._left -= amount
            held += amount

        try:
            yield take
        finally:
            self._left += held
