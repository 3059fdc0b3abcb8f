"""Simulates an attention client's engine, one batch at a time, by events: arrivals, ends of batches, ticks.

Events at the same moment happen in this order: the end of the batch, arrivals, the tick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attention_client.scheduler.queue import RequestQueue
from simulator.caps.cost import CostModel
from simulator.caps.workload import Workload

__all__ = ["Rules", "Run", "simulate"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rules:
    """When an idle engine dispatches a batch: enough requests wait, or the tick comes.

    Attributes:
        trigger: Number of waiting requests at which a batch is dispatched at once.
        tick_s: With fewer, a batch is dispatched at the next multiple of this, in seconds.
    """

    trigger: int = 16
    tick_s: float = 0.1


@dataclass(frozen=True)
class Run:
    """The result of a simulation.

    Attributes:
        finish_s: End of each request, float64 (N,), in seconds.
        latency_s: Time from arrival to end, float64 (N,), in seconds.
        batches: The requests of each batch, in the order of dispatch.
        batch_load_BE: The experts' load of each batch, float64 (batches, E).
    """

    finish_s: Floats
    latency_s: Floats
    batches: list[list[int]]
    batch_load_BE: Floats
    events: int


def simulate(workload: Workload, queue: RequestQueue, cost: CostModel, rules: Rules) -> Run:
    """Simulate the requests of a workload to their end; the live queue chooses each batch.

    Args:
        workload: The requests. True loads decide a batch's duration; the queue gets predicted ones.
        queue: A new, empty queue; its tickets are the requests' indices.
        rules: When a batch is dispatched.
    """
    arrivals: list[float] = workload.arrival_s.tolist()
    load_NE, predicted_NE = workload.load_NE, workload.predicted_NE
    total = len(arrivals)
    finish_s = np.empty(total)
    batches: list[list[int]] = []
    loads: list[Floats] = []
    came = events = 0
    end_s = -math.inf  # of the running batch; in the past if there is none
    while True:
        # Step 1: while a batch runs, requests only queue up.
        while came < total and arrivals[came] < end_s:
            queue.add(predicted_NE[came])
            came += 1
        now = end_s
        go = len(queue) >= rules.trigger
        # Step 2: the engine is idle; the next event is an arrival or the tick.
        while not go:
            arrive_s = arrivals[came] if came < total else math.inf
            tick_s = _next_tick(now, rules.tick_s) if len(queue) else math.inf
            if arrive_s <= tick_s:
                if came == total:
                    return Run(
                        finish_s,
                        finish_s - workload.arrival_s,
                        batches,
                        np.array(loads),
                        events + total,
                    )
                now = arrive_s
                queue.add(predicted_NE[came])
                came += 1
                go = len(queue) >= rules.trigger
            else:
                now = tick_s
                events += 1
                go = True
        # Step 3: dispatch a batch. Its end is also an event.
        chosen = queue.take()
        load_E = load_NE[chosen].sum(axis=0)
        end_s = now + cost.batch_s(load_E)
        finish_s[chosen] = end_s
        batches.append(chosen)
        loads.append(load_E)
        events += 1


def _next_tick(now: float, tick_s: float) -> float:
    """Return the tick that dispatches a batch below the trigger: the next multiple of tick_s from now on."""
    count = math.ceil(now / tick_s)
    while count * tick_s < now:
        count += 1
    return count * tick_s
