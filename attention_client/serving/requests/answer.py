"""The answer to one request: the choices that its sequences generate together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from attention_client.serving.errors import as_api_error
from attention_client.serving.requests.generation import Generation
from eaas.generation.work import Delivery

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
        self.created = int(time.time())  # for the client; nothing is decided by it
        self.generations = generations
        self._prompt_tokens = prompt_tokens

    def usage(self, index: int | None = None) -> dict[str, Any]:
        """Return the token counts so far of one choice, or of all, in OpenAI's form."""
        counted, prompt = self.generations, self._prompt_tokens
        if index is not None:
            counted = [counted[index]]
            prompt = len(counted[0].prompt)
        completion = sum(len(each.ids) for each in counted)
        counts: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        reasoning = [n for each in counted if (n := each.reasoning_tokens) is not None]
        if reasoning:
            counts["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
        return counts

    async def pieces(self) -> AsyncIterator[tuple[int, Any]]:
        """Yield each piece of a choice (`Generation.take`) with the choice's index, as they arrive.

        The first step queues all sequences; closing the iterator cancels them. Raises ApiError.
        """
        queue: asyncio.Queue[tuple[int, Delivery]] = asyncio.Queue()
        reason = "abort"
        try:
            for index, generation in enumerate(self.generations):
                generation.start(lambda each, at=index: queue.put_nowait((at, each)))  # type: ignore[misc]
            running = len(self.generations)
            while running:
                index, delivery = await queue.get()
                generation = self.generations[index]
                if not generation.runs:
                    continue  # a delivery that was under way when a stop string matched
                for piece in generation.take(delivery):
                    yield index, piece
                running -= not generation.runs
        except Exception as error:
            reason = "error"
            raise as_api_error(error) from error
        finally:
            for generation in self.generations:
                generation.end(reason)
