"""What a run has found so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eaas.bench.experts.plan import Shape

__all__ = ["Findings"]


@dataclass
class Findings:
    """Parts of a run's document.

    Attributes:
        say: Tells people how far the run is.
        rows: One for each shape, dtype, number of tokens and kernel.
        auto: What `auto` picked for each shape and dtype, and from what.
        skipped: What was not measured, and why.
    """

    say: Callable[[str], None]
    rows: list[dict[str, Any]] = field(default_factory=list)
    auto: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def skip(
        self, shape: Shape, dtype: str, what: str, reason: str, tokens: int | None = None
    ) -> None:
        """Note what is left out.

        Args:
            shape: Of the layer.
            dtype: Of the weights.
            what: A kernel, or an implementation of transformers.
            reason: Why.
            tokens: At this batch size only.
        """
        entry = {"shape": str(shape), "dtype": dtype, "what": what, "reason": reason}
        self.skipped.append(entry if tokens is None else entry | {"tokens": tokens})
