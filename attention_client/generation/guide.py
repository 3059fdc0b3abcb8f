"""One sequence's position in a grammar: the tokens that may follow its answer so far.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from eaas.generation.errors import ApiError
from eaas.generation.grammar import Grammar

__all__ = ["Guide", "restrict"]


class Guide:
    """One sequence's position in a grammar.

    It follows the tokens of the answer, not the number of calls.

    Args:
        grammar: The grammar.
        prompt_length: Tokens of the prompt, which the grammar does not cover.
        min_length: Least length of prompt plus answer. Before it no end token may follow, unless the
            grammar allows nothing else.
        stop_tokens: Further tokens that end the answer.
    """

    def __init__(
        self,
        grammar: Grammar,
        prompt_length: int,
        min_length: int = 0,
        stop_tokens: tuple[int, ...] = (),
    ) -> None:
        self._grammar = grammar
        self._prompt_length = prompt_length
        self._min_length = min_length
        self._ends = [*grammar.end_tokens, *stop_tokens]
        self._matcher = grammar.start.deep_copy()
        self._seen = 0  # tokens of the answer that the matcher has read

    @property
    def next(self) -> int:
        """Position, in prompt plus answer, of the first token that the guide has not read."""
        return self._prompt_length + self._seen

    def allowed(self, new_tokens: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Read the tokens of the answer from position `next` on; return which tokens may follow.

        Returns:
            bool (V,) or longer.

        Raises:
            ApiError: The grammar exceeds a limit (400).
        """
        matcher = self._matcher
        if new_tokens:
            matcher.consume_tokens(list(new_tokens))
            self._seen += len(new_tokens)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            reason = matcher.get_error().splitlines()[0]
            field = self._grammar.field
            raise ApiError.invalid(field, f"'{field}': the answer cannot follow it: {reason}.")
        allowed = np.unpackbits(bits, bitorder="little").astype(bool)
        if self.next < self._min_length:
            longer = allowed.copy()
            longer[self._ends] = False
            if longer.any():
                return longer
        return allowed


def restrict(scores_V: torch.Tensor, allowed: npt.NDArray[np.bool_]) -> None:
    """Set the scores of tokens that may not follow to -inf, in place.

    Args:
        scores_V: float (V,).
        allowed: bool; tokens beyond its end may not follow.
    """
    size = min(len(allowed), len(scores_V))
    scores_V[size:] = -torch.inf
    banned = torch.from_numpy(~allowed[:size]).to(scores_V.device)
    scores_V[:size].masked_fill_(banned, -torch.inf)
