"""What a run of `python -m benchmarks.dispatch` measures."""

from __future__ import annotations

from dataclasses import dataclass

from eaas_cli.bench.experts.plan import BUILT_IN, Shape

__all__ = ["SLOTS", "Plan"]

SLOTS = 2
"""Slots of a client, one for each of two micro-batches. At T=512 and H=7168 a slot has 30 MB."""


@dataclass(frozen=True)
class Plan:
    """Transports, sizes and durations.

    Attributes:
        transports: In the order of measurement; the parts after the rows use the first.
        tokens: T of the rows.
        top_k: K.
        num_experts: E.
        watch_s: Seconds for which a server's processor time is measured.
        few_tokens: T of the calls to a busy server.
        layer: Shape of the real layer.
        layer_tokens: T of the real layer's calls.
    """

    transports: tuple[str, ...]
    hidden: tuple[int, ...]
    tokens: tuple[int, ...]
    rounds: int
    top_k: int = 8
    num_experts: int = 128
    turn_s: float = 0.2
    watch_s: float = 3.0
    few_tokens: int = 8
    layer: Shape = BUILT_IN[0]
    layer_tokens: tuple[int, ...] = (64,)

    def shape(self, hidden: int) -> Shape:
        """Make the shape of a layer whose experts are never computed."""
        return Shape(hidden, 1, self.num_experts, self.top_k)
