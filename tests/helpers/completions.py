"""A load of greedy completions that checks its answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import httpx

from waiting import eventually

__all__ = ["Load"]


class Load:
    """Greedy completions, a thread for each prompt; each answer must equal the prompt's first one.

    Only a float32 model promises that: in bf16, near ties depend on which servers compute.

    Attributes:
        right: The first answer to each prompt.
    """

    def __init__(self, endpoint: str, prompts: Sequence[str], tokens: int) -> None:
        self._endpoint, self._prompts, self._tokens = endpoint, prompts, tokens
        self.right = {prompt: self.ask(prompt) for prompt in prompts}
        self._over = threading.Event()
        self._counting = threading.Lock()
        self.answers = 0
        self.failures: list[str] = []

    def ask(self, prompt: str) -> str:
        """One completion."""
        body = {"prompt": prompt, "max_tokens": self._tokens, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self._endpoint}/v1/completions", json=body, timeout=120)
        text: str = answer.raise_for_status().json()["choices"][0]["text"]
        return text

    def _ask_on(self, prompt: str) -> None:
        while not self._over.is_set():
            failure = None
            try:
                if self.ask(prompt) != self.right[prompt]:
                    failure = f"another answer to {prompt!r}"
            except httpx.HTTPError as error:
                failure = f"{prompt!r}: {error!r}"
            with self._counting:
                self.answers += 1
                if failure is not None:
                    self.failures.append(failure)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Requests run during the context; none may fail."""
        threads = [threading.Thread(target=self._ask_on, args=(p,)) for p in self._prompts]
        for thread in threads:
            thread.start()
        try:
            self.some_more()
            yield
            self.some_more()
        finally:
            self._over.set()
            for thread in threads:
                thread.join()
        assert not self.failures, self.failures

    def some_more(self) -> None:
        """Wait until each thread has had another answer or two."""
        wanted = self.answers + 2 * len(self._prompts)
        eventually(lambda: self.answers >= wanted, 120.0)
