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
    def usage(self) -> dict[str, int]:
        """Token counts of all choices so far, in OpenAI's form."""
        completion = sum(each.usage["completion_tokens"] for each in self._generations)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
        }

    def usage_of(self, index: int) -> dict[str, int]:
        """Return the token counts of one choice so far."""
        return self._generations[index].usage

    async def pieces(self) -> AsyncIterator[tuple[int, Any]]:
        """Yield each piece of a choice (`Generation.take`) with the choice's index, as they arrive.

        The first step queues all sequences; closing the iterator cancels them. Raises ApiError.
        """
        queue: asyncio.Queue[tuple[int, Delivery]] = asyncio.Queue()
        reason = "abort"
        try:
            openings = [
                list(generation.start(_into(queue, index)))
                for index, generation in enumerate(self._generations)
            ]
            for index, opening in enumerate(openings):
                for piece in opening:
                    yield index, piece
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


def _into(queue: asyncio.Queue[tuple[int, Delivery]], index: int) -> Callable[[Delivery], None]:
    return lambda delivery: queue.put_nowait((index, delivery))
