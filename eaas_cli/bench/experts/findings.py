"""Results of a run so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eaas_cli.bench.experts.plan import Shape

__all__ = ["Findings"]


@dataclass
class Findings:
    """Parts of the document of a run.

    Attributes:
        say: Prints a line of progress.
        rows: One per shape, dtype, number of tokens and kernel.
        auto: Choices of `auto` for each shape and dtype, with the candidates.
        skipped: Combinations that were not measured, and why.
    """

    say: Callable[[str], None]
    rows: list[dict[str, Any]] = field(default_factory=list)
    auto: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def skip(
        self, shape: Shape, dtype: str, what: str, reason: str, tokens: int | None = None
    ) -> None:
        """Record a skipped combination.

        Args:
            shape: Shape of the layer.
            dtype: Dtype of the weights.
            what: A kernel or an implementation of transformers.
            reason: Why it is skipped.
            tokens: Batch size, if only this one is skipped.
        """
        entry = {"shape": str(shape), "dtype": dtype, "what": what, "reason": reason}
        self.skipped.append(entry if tokens is None else entry | {"tokens": tokens})
