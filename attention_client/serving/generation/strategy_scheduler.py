"""Scheduler of the attention client's engine: transformers' own, but a strategy orders the admission."""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler, Scheduler

from attention_client.scheduler.cost import Loads
from attention_client.serving.generation.live_admission import LiveAdmission
from attention_client.serving.generation.prefill_pace import PrefillPace
from attention_client.serving.generation.prompt_scoring import scores_prompt

__all__ = ["StrategyScheduler"]


class StrategyScheduler(FIFOScheduler):  # type: ignore[misc]
    """A strategy chooses the next requests. The base class decides what fits into cache and forward pass.

    A request evicted from a full cache returns before all others; in transformers it returns last. A request
    that scores its prompt computes all of it, even if the cache holds a prefix.
    """

    def __init__(self, base: Scheduler, admission: LiveAdmission) -> None:
        self._admission = admission
        # The request that left last, and its load: an evicted request is added again at once.
        self._left: tuple[str, Loads | None] = ("", None)
        self._pace = PrefillPace()
        # Answers and prompt tokens of the last step.
        self._last = 0, 0
        super().__init__(base.cache, base.safety_margin, base.max_requests_per_batch)

    def schedule_batch(
        self, token_budget: int, cache_budget: int
    ) -> tuple[list[Any] | None, bool, int, int]:
        """Choose the requests of the next step; prompts leave the answers their pace (`Scheduler`)."""
        states = self.active_requests.values()
        answers = sum(state.status is RequestStatus.DECODING for state in states)
        prompts = len(self.active_requests) - answers + len(self.waiting_requests)
        limit = self._pace.limit(answers, prompts)
        if limit is not None:
            token_budget = min(token_budget, answers + limit)
        found: tuple[list[Any] | None, bool, int, int]
        found = super().schedule_batch(token_budget, cache_budget)
        scheduled = found[0] or []
        answers = sum(each.state.status is RequestStatus.DECODING for each in scheduled)
        self._last = answers, sum(each.query_length for each in scheduled) - answers
        return found

    def stepped(self, seconds: float) -> None:
        """Learn the time of the last step."""
        self._pace.observe(*self._last, seconds)

    def add_waiting_request(self, state: Any) -> None:
        """Queue a request for the strategy; an evicted one goes ahead of all others (`Scheduler`)."""
        super().add_waiting_request(state)
        if self._left[0] == state.request_id:
            self._admission.put_back(*self._left)
        else:
            self._admission.arrive(
                state.request_id, state.initial_tokens, len(self.active_requests)
            )

    def finish_request(self, request_id: str) -> None:
        """Remove a finished or evicted request from the batch; keep its load for a return (`Scheduler`)."""
        super().finish_request(request_id)
        self._left = request_id, self._admission.leave(request_id)

    def clear_cancelled_requests(self) -> list[Any]:
        """Remove the cancelled requests here and in the strategy's queue before a pass (`Scheduler`)."""
        cancelled: list[Any] = super().clear_cancelled_requests()
        for state in cancelled:
            self._admission.leave(state.request_id)
        return cancelled

    def _infer_request_tokens(
        self, state: Any, request_ids_to_remove_from_waiting: set[str]
    ) -> Any:
        if state.status == RequestStatus.PENDING and scores_prompt(state):
            return state.remaining_prefill_tokens
        return super()._infer_request_tokens(state, request_ids_to_remove_from_waiting)

    def _get_waiting_candidates(self) -> list[Any]:
        names = self._admission.candidates(list(self.active_requests.values()))
        return [self.waiting_requests[name] for name in names]

    def _cleanup_waiting_queue(self, request_ids_to_remove_from_waiting: set[str]) -> None:
        super()._cleanup_waiting_queue(request_ids_to_remove_from_waiting)
        self._admission.admit(request_ids_to_remove_from_waiting)
