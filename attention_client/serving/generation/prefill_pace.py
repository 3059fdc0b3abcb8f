"""How many prompt tokens a step of the attention client's engine may prefill beside running answers.

A long prompt would stop the running answers for as long as a whole chunk takes. Here a step with both takes
at most a multiple of a step of answers alone, by the times of the steps so far. Small chunks cost throughput:
where more prompts wait than answers run, chunks are whole.

Times are kept by powers of two of answers and of prompt tokens: a small chunk costs more per token than a
large one, and one average over both would make ever smaller chunks of ever higher cost.
"""

from __future__ import annotations

__all__ = ["PrefillPace"]

# Times as long as a step of answers alone. The time between tokens then stays within 3 times the usual one.
_STRETCH = 2.5
_LEAST = 8
_WEIGHT = 0.25
# One slow step, of a failover perhaps, must not change the pace much.
_OUTLIER = 4.0


class PrefillPace:
    """Learns the times of steps, and limits the prompt tokens of the next one. Reads no clock."""

    def __init__(self) -> None:
        # By the bit length of the number of answers: seconds of a step without prompts.
        self._alone_s: dict[int, float] = {}
        # By the bit length of the number of prompt tokens: seconds that one of them adds to a step.
        self._token_s: dict[int, float] = {}

    def limit(self, answers: int, prompts: int) -> int | None:
        """Return the most prompt tokens of the next step; None: no limit; 0: a step of answers alone.

        A step of as many answers alone is needed once, to learn its time.

        Args:
            answers: Running answers, each with one token in the step.
            prompts: Requests whose prompts wait or are prefilled in part.
        """
        if prompts > answers or not prompts or not self._token_s:
            return None
        alone_s = self._alone_s.get(answers.bit_length())
        if alone_s is None:
            return 0
        return max(_LEAST, self._affordable((_STRETCH - 1) * alone_s))

    def _affordable(self, seconds: float) -> int:
        """Return the most prompt tokens that add at most so many seconds to a step."""
        largest = max(self._token_s)
        most, token_s = 0, float("inf")
        for size in range(_LEAST.bit_length(), largest + 1):
            # A larger chunk costs no more per token, whatever it once took: so larger ones are tried again.
            token_s = min(token_s, self._cost(size))
            tokens = int(seconds / token_s)
            if tokens >= 2 ** (size - 1):
                most = tokens if size == largest else min(tokens, 2**size - 1)
        return most

    def _cost(self, size: int) -> float:
        """Return the seconds per token of a chunk of this size class, or of the next known larger one."""
        return next(self._token_s[known] for known in sorted(self._token_s) if known >= size)

    def observe(self, answers: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step that is over.

        Args:
            answers: Answers that it continued.
            prompt_tokens: Tokens of prompts in it.
            seconds: Its time.
        """
        if not prompt_tokens:
            _learn(self._alone_s, answers, seconds)
        elif prompt_tokens >= _LEAST:
            alone_s = self._alone_s.get(answers.bit_length(), 0.0)
            _learn(self._token_s, prompt_tokens, max(seconds - alone_s, 1e-9) / prompt_tokens)


def _learn(averages: dict[int, float], count: int, sample: float) -> None:
    size = count.bit_length()
    before = averages.get(size)
    if before is None:
        averages[size] = sample
    else:
        averages[size] = before + _WEIGHT * (min(sample, _OUTLIER * before) - before)
