"""The balancer's cache of operators' calls: a repeated one has no second effect and gets the first answer."""

from __future__ import annotations

import concurrent.futures
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar, cast

_T = TypeVar("_T")

__all__ = ["Answered", "IdempotencyCache", "RequestIdTakenError"]


class RequestIdTakenError(Exception):
    """The request id belongs to a different request. Choose another one."""


class Answered(NamedTuple):
    """A request that took effect, with its answer.

    Attributes:
        request_id: Chosen by the caller.
        digest: Digest of the request's type and content.
        answer: The response, serialized.
    """

    request_id: str
    digest: bytes
    answer: bytes


class IdempotencyCache:
    """Keeps the latest answers to calls that change something. Thread-safe.

    Args:
        capacity: Number of answers to keep.
        on_answered: Called after each new answer.
    """

    def __init__(self, capacity: int = 256, on_answered: Callable[[], None] = lambda: None) -> None:
        self._capacity = capacity
        self._on_answered = on_answered
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, Answered] = OrderedDict()
        # Requests in progress. A repetition waits for the same answer.
        self._running: dict[str, tuple[bytes, concurrent.futures.Future[Any]]] = {}

    def run(self, request: Any, response_type: type[_T], work: Callable[[], _T]) -> _T:
        """Do the work of a request unless its `request_id` is cached; return the response.

        Errors of `work` are raised and not kept.

        Raises:
            RequestIdTakenError: Another request has this id.
        """
        request_id = request.request_id
        if not request_id:
            return work()
        content = request.SerializeToString(deterministic=True)
        digest = hashlib.sha256(request.DESCRIPTOR.full_name.encode() + b"\0" + content).digest()
        with self._lock:
            known = self._answers.get(request_id)
            running = self._running.get(request_id)
            for other in (known.digest if known else None, running[0] if running else None):
                if other is not None and other != digest:
                    raise RequestIdTakenError(f"request id {request_id!r} is another call's")
            if known is not None:
                return cast(_T, cast(Any, response_type).FromString(known.answer))
            if running is None:
                mine: concurrent.futures.Future[Any] = concurrent.futures.Future()
                self._running[request_id] = digest, mine
        if running is not None:
            return cast(_T, running[1].result())
        try:
            answer = work()
        except BaseException as error:
            with self._lock:
                del self._running[request_id]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._running[request_id]
            self._keep(Answered(request_id, digest, cast(Any, answer).SerializeToString()))
        mine.set_result(answer)
        self._on_answered()
        return answer

    def restore(self, answers: Iterable[Answered]) -> None:
        """Add the previous balancer's answers from its record, the oldest first."""
        with self._lock:
            for answer in answers:
                self._keep(answer)

    def answered(self) -> list[Answered]:
        """Return the kept answers for the balancer's record, the oldest first."""
        with self._lock:
            return list(self._answers.values())

    def _keep(self, answer: Answered) -> None:
        self._answers[answer.request_id] = answer
        while len(self._answers) > self._capacity:
            self._answers.popitem(last=False)
