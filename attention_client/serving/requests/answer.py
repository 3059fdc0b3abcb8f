"""The answer to one request: the choices that its sequences generate together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from attention_client.serving.errors import as_api_error
from attention_client.serving.generation.engine import Delivery
from attention_client.serving.requests.generation import Generation

__all__ = ["Answer"]


class Answer:
    """Runs the sequences of one request; a failure of one, or the client's departure, ends all of them.

    Args:
        request_id: The answer's id.
        generations: The sequences in the order of their choices.
        prompt_tokens: Tokens of all prompts; a prompt counts once, however many choices it has.
    """

    def __init__(
        self, request_id: str, generations: Sequence[Generation], prompt_tokens: int
    ) -> None:
        self.id = request_id
        self._generations = generations
        self._prompt_tokens = prompt_tokens

    def __len__(self) -> int:
        return len(self._generations)

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts of all choices so far, in OpenAI's form."""
        return _usage(self._prompt_tokens, self._generations)

    def prompt_of(self, index: int) -> list[int]:
        """Return the tokens of one choice's prompt."""
        return self._generations[index].prompt

    def usage_of(self, index: int) -> dict[str, Any]:
        """Return the token counts of one choice so far."""
        generation = self._generations[index]
        return _usage(len(generation.prompt), [generation])

    async def pieces(self) -> AsyncIterator[tuple[int, Any]]:
        """Yield each piece of a choice (`Generation.take`) with the choice's index, as they arrive.

        The first step queues all sequences; closing the iterator cancels them. Raises ApiError.
        """
        queue: asyncio.Queue[tuple[int, Delivery]] = asyncio.Queue()
        reason = "abort"
        try:
            for index, generation in enumerate(self._generations):
                generation.start(_into(queue, index))
            running = len(self._generations)
            while running:
                index, delivery = await queue.get()
                generation = self._generations[index]
                if not generation.runs:
                    continue  # a delivery that was under way when a stop string matched
                for piece in generation.take(delivery):
                    yield index, piece
                running -= not generation.runs
        except Exception as error:
            reason = "error"
            raise as_api_error(error) from error
        finally:
            for generation in self._generations:
                generation.end(reason)


def _usage(prompt_tokens: int, generations: Sequence[Generation]) -> dict[str, Any]:
    completion = sum(each.tokens for each in generations)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }
    reasoning = [each.reasoning_tokens for each in generations if each.reasoning_tokens is not None]
    if reasoning:
        usage["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
    return usage


def _into(queue: asyncio.Queue[tuple[int, Delivery]], index: int) -> Callable[[Delivery], None]:
    return lambda delivery: queue.put_nowait((index, delivery))
