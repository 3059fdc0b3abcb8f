"""When is planned, and when does a layer's new placement take effect: the competition's rule.

The dynamic-balancing competition's simulator counts iterations from 1. With `done` iterations over:

    plan         when done = finish + interval + 1, from the last `interval` of them; finish is 0 at first
    think        planning that takes t seconds lasts n = max(1, ceil(t / 0.08)) iterations
    redeploy     the k-th layer that changes (k = 0, 1, ...) is redeployed in iteration done + n + k and
                 serves with its new placement from the next one on; until then with the old one
    finish       the iteration of the last redeployment; n - 1 iterations later than `done` if no layer
                 changes

Two things the competition leaves open are settled here: layers are redeployed in the order of their
numbers, and a layer whose replicas stay where they are needs no redeployment: new shares are a table that
clients look into, in force as soon as the planning is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ITERATION_S", "Timeline"]

ITERATION_S = 0.08


@dataclass
class Timeline:
    """The course of one replay.

    Attributes:
        interval: Iterations between the end of one redeployment and the next plan.
        iterations: I, the length of the trace.
        finish: Iteration of the last redeployment.
    """

    interval: int
    iterations: int
    finish: int = 0

    @property
    def next_plan(self) -> int | None:
        """How many iterations are over when is planned next; None: not within the trace."""
        done = self.finish + self.interval + 1
        return done if done <= self.iterations else None

    def deploy(
        self, done: int, seconds: float, layers: Sequence[int]
    ) -> tuple[int, dict[int, int]]:
        """Plan after `done` iterations, and redeploy.

        Args:
            done: `next_plan`.
            seconds: That planning took.
            layers: Those whose replicas change.

        Returns:
            ready: How many iterations are over when the plan is known (new shares are in force).
            deployed: Layer -> how many iterations are over when it has its new replicas; layers that the
                trace ends before are left out.
        """
        think = max(1, math.ceil(seconds / ITERATION_S))
        ready = done + think
        self.finish = ready + len(layers) - 1
        deployed = {layer: ready + k for k, layer in enumerate(layers)}
        return ready, {layer: at for layer, at in deployed.items() if at <= self.iterations}
