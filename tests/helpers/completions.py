"""A load of greedy completions, each of which must equal the first answer to its prompt."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping

from eaas_cli.bench import load
from eaas_cli.bench.stream import Answer
from waiting import eventually

__all__ = ["Load"]


class Load:
    """So many streamed answers at a time, to prompts that come again and again.

    Only a float32 model promises equal answers: in bf16, near ties depend on which servers compute.

    Attributes:
        answers: All answers, after the context.
    """

    def __init__(
        self, endpoint: str, streams: int, tokens: int, headers: Mapping[str, str] | None = None
    ) -> None:
        self._endpoint, self._tokens, self._headers = endpoint, tokens, headers or {}
        self._prompts = [list(range(40 + i, 60 + i)) for i in range(streams)]
        self.answers: list[Answer] = []
        right = load.Load(endpoint, self._prompts, tokens, most_at_once=1, headers=self._headers)
        assert not any(answer.error for answer in right.result().answers), right.result()
        self._right = [answer.text for answer in right.result().answers]

    @property
    def worst_pause_s(self) -> float:
        """Longest time between two pieces of text, or before the first one."""
        firsts = (a.stamps_s[0] - a.sent_s for a in self.answers if a.stamps_s)
        return max((*firsts, *(answer.stall_s for answer in self.answers)), default=0.0)

    @contextlib.contextmanager
    def running(self, pause_s: float = 0.0) -> Iterator[None]:
        """Streams run during the context; none may fail, and all must have another answer after it.

        Args:
            pause_s: Least time from a request to the next one.
        """
        count = len(self._prompts)
        self._load = load.Load(
            *(self._endpoint, self._prompts, self._tokens),
            ((pause_s, number) for number in itertools.cycle(range(count))),
            most_at_once=count,
            headers=self._headers,
        )
        try:
            self.some_more()
            yield
            self.some_more()
        finally:
            result = self._load.stop(60.0)
            self.answers += result.answers
        texts = {(a.prompt, a.answer.text if a.answer else "no answer") for a in result.asked}
        assert not any(answer.error for answer in result.answers), result.answers
        assert texts == set(enumerate(self._right))

    def some_more(self) -> None:
        """Wait until each stream has sent two more requests, and so has had another answer."""
        wanted = self._load.sent + 2 * len(self._prompts)
        eventually(lambda: self._load.sent >= wanted, 120.0, what="answers")
