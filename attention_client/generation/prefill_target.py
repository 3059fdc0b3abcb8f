"""How many tokens of prompts a pass computes beside running answers, so that these keep their pace.

Pure. A pass takes about as long as its answers alone, and a time for each token of a prompt. Small chunks
cost more a token than large ones, so times are kept by powers of two.
"""

from __future__ import annotations

__all__ = ["PrefillTarget"]

_LEAST = 16
_WEIGHT = 0.25
# One slow pass, of a failover perhaps, must not change the limit much.
_OUTLIER = 4.0


class PrefillTarget:
    """Learns the times of passes, and limits the next one's tokens of prompts by a target.

    Args:
        seconds: Wanted time between two tokens of an answer while prompts wait; 0: no limit.
    """

    def __init__(self, seconds: float) -> None:
        self._target_s = seconds
        # By the bit length of the number of answers: seconds of a pass without prompts.
        self._alone_s: dict[int, float] = {}
        # By the bit length of the number of prompt tokens: seconds that one of them adds to a pass.
        self._token_s: dict[int, float] = {}

    def limit(self, answers: int, prompts: int) -> int | None:
        """Return the most tokens of prompts in the next pass, at least 16; None: no limit.

        If more prompts wait than answers run, whole chunks serve more of the users.

        Args:
            answers: Sequences that decode.
            prompts: Sequences that wait or are prefilled in part.
        """
        if not self._target_s or prompts > answers or not self._token_s:
            return None
        seconds = self._target_s - self._alone_s.get(answers.bit_length(), 0.0)
        largest, most, cost = max(self._token_s), _LEAST, float("inf")
        for size in range(_LEAST.bit_length(), largest + 1):
            # A larger chunk costs no more a token, whatever it once took: so larger ones are tried again.
            cost = min(cost, self._cost(size))
            tokens = int(seconds / cost)
            # Fewer than this class has would cost what a smaller class does.
            if tokens >= 2 ** (size - 1):
                most = tokens if size == largest else min(tokens, 2**size - 1)
        return most

    def _cost(self, size: int) -> float:
        """Return the seconds a token of a chunk of this class, or of the next known larger one."""
        return next(self._token_s[known] for known in sorted(self._token_s) if known >= size)

    def observe(self, answers: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a pass: its answers, its tokens of prompts and its time."""
        if not prompt_tokens:
            _learn(self._alone_s, answers, seconds)
        elif prompt_tokens >= _LEAST:
            added_s = seconds - self._alone_s.get(answers.bit_length(), 0.0)
            # A pass that was faster than one of answers alone says nothing.
            if added_s > 0:
                _learn(self._token_s, prompt_tokens, added_s / prompt_tokens)


def _learn(averages: dict[int, float], count: int, sample: float) -> None:
    size = count.bit_length()
    before = averages.get(size)
    if before is None:
        averages[size] = sample
    else:
        averages[size] = before + _WEIGHT * (min(sample, _OUTLIER * before) - before)
