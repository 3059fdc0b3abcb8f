"""Timeline of a replay: when to plan and when a layer's new placement takes effect.

The rules are those of the dynamic-balancing competition, whose simulator counts iterations from 1. After
`done` iterations:

    plan         when done = finish + interval + 1, from the last `interval` of them; finish is 0 at first
    think        planning that takes t seconds lasts n = max(1, ceil(t / 0.08)) iterations
    redeploy     the k-th layer that changes (k = 0, 1, ...) is redeployed in iteration done + n + k and
                 serves with its new placement from the next one on; until then with the old one
    finish       the iteration of the last redeployment; n - 1 iterations later than `done` if no layer
                 changes

The competition leaves two things open. Here layers are redeployed in the order of their numbers, and a layer
whose replicas stay needs no redeployment, because clients use its new shares as soon as planning is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ITERATION_S", "PLANNING_S", "Timeline"]

ITERATION_S = 0.08

PLANNING_S = 0.4
"""Default planning time: five iterations, more than any policy here needs for 64 servers and a window of
1,024 iterations (58 layers x 256 experts, one core)."""


@dataclass
class Timeline:
    """Decides when a replay plans and redeploys.

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
        """Number of iterations done at the next plan; None: the trace ends before, so the replay is over."""
        done = self.finish + self.interval + 1
        return done if done <= self.iterations else None

    def deploy(
        self, done: int, seconds: float, layers: Sequence[int]
    ) -> tuple[int, dict[int, int]]:
        """Schedule a plan made after `done` iterations: when each layer changes, and the next plan.

        Args:
            done: Iterations done, as given by `next_plan`.
            seconds: Planning time.
            layers: Layers whose replicas change.

        Returns:
            ready: Iterations done when planning is over and new shares take effect.
            deployed: Iterations done when a layer has its new replicas, by layer; without layers whose
                redeployment is after the end of the trace.
        """
        think = max(1, math.ceil(seconds / ITERATION_S))
        ready = done + think
        self.finish = ready + len(layers) - 1
        deployed = {layer: ready + k for k, layer in enumerate(layers)}
        return ready, {layer: at for layer, at in deployed.items() if at <= self.iterations}
