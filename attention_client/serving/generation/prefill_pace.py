"""How many prompt tokens a step of the attention client's engine may prefill beside running answers.

A long prompt would stop the running answers for as long as a whole chunk takes. Here a step with both takes
at most a multiple of a step of answers alone, by the times of the steps so far. Small chunks cost throughput:
where more prompts wait than answers run, chunks are whole.
"""

from __future__ import annotations

__all__ = ["PrefillPace"]

# Times as long as a step of answers alone. The time between tokens then stays within 3 times the usual one.
_STRETCH = 2.5
_LEAST = 16
_WEIGHT = 0.25
# One slow step, of a failover perhaps, must not change the pace much.
_OUTLIER = 4.0


class PrefillPace:
    """Learns the times of steps, and limits the prompt tokens of the next one. Reads no clock."""

    def __init__(self) -> None:
        self._answers_s: float | None = None
        self._token_s: float | None = None

    def limit(self, answers: int, prompts: int) -> int | None:
        """Return the most prompt tokens of the next step; None: no limit.

        Args:
            answers: Running answers, each with one token in the step.
            prompts: Requests whose prompts wait or are prefilled in part.
        """
        if prompts > answers or self._answers_s is None or self._token_s is None:
            return None
        return max(_LEAST, int((_STRETCH - 1) * self._answers_s / self._token_s))

    def observe(self, answers: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step that is over.

        Args:
            answers: Answers that it continued.
            prompt_tokens: Tokens of prompts in it.
            seconds: Its time.
        """
        if not prompt_tokens:
            self._answers_s = _average(self._answers_s, seconds)
        elif prompt_tokens >= _LEAST:
            alone = (self._answers_s or 0.0) if answers else 0.0
            self._token_s = _average(self._token_s, max(seconds - alone, 1e-9) / prompt_tokens)


def _average(before: float | None, sample: float) -> float:
    if before is None:
        return sample
    return before + _WEIGHT * (min(sample, _OUTLIER * before) - before)
