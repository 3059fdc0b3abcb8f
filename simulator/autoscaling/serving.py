"""Fluid model of a simulated group of expert servers: requests share the throughput evenly.

A request consists of steps. It first processes `prompt_tokens` of its prompt per step, then generates one
token per step. A step takes `token_s` while the servers keep up; otherwise all requests slow down alike:

    steps per second of each request = min(1 / token_s, servers * tokens_per_s / (tokens of one step of all))

Rates change only at events (a request arrives, its prompt is done, it is done), so processor sharing is
exact. `steps` counts the steps of a request that never ends; a request that arrived at count c is done at c
plus its own steps.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

__all__ = ["Load", "ServerModel", "SharedServers"]

_DONE = -1


@dataclass(frozen=True)
class ServerModel:
    """Throughput of servers and shape of requests.

    Attributes:
        tokens_per_s: Throughput of a server that is always busy.
        token_s: Seconds between two tokens of a request while the servers keep up.
        prompt_tokens: Prompt tokens of a step; 0: prompts are served elsewhere (disaggregated prefill).
    """

    tokens_per_s: float
    token_s: float
    prompt_tokens: int

    def prompt_steps(self, prompt: int) -> float:
        """Return the number of steps of a prompt, not rounded; 0 if prompts are served elsewhere."""
        return prompt / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass
class Load:
    """Work of a simulated group of servers in an interval, which the autoscaler decides by.

    Attributes:
        seconds: Length of the interval.
        computed: Tokens computed, including prompts.
        capacity: Tokens that could have been computed.
        outputs: Generated tokens.
        waited_s: Sum of the seconds that generated tokens took.
        slowed: Number of generated tokens that took longer than `token_s`.
    """

    seconds: float = 0.0
    computed: float = 0.0
    capacity: float = 0.0
    outputs: float = 0.0
    waited_s: float = 0.0
    slowed: float = 0.0

    @property
    def utilization(self) -> float:
        """Utilisation of the servers, 0 to 1; 0 without servers."""
        return min(1.0, self.computed / self.capacity) if self.capacity else 0.0

    @property
    def token_s(self) -> float | None:
        """Mean seconds between two tokens of a request, which the autoscaler reads; None: no tokens."""
        return self.waited_s / self.outputs if self.outputs else None

    def add(self, other: Load) -> None:
        """Add the load of the interval that follows, to sum up a whole trace."""
        self.seconds += other.seconds
        self.computed += other.computed
        self.capacity += other.capacity
        self.outputs += other.outputs
        self.waited_s += other.waited_s
        self.slowed += other.slowed


class SharedServers:
    """Running requests and their servers (see the module's docstring).

    Args:
        model: Model of servers and requests.
        servers: Initial number of servers; may be set at any time.
    """

    def __init__(self, model: ServerModel, servers: int) -> None:
        self.servers = servers
        self._model = model
        self._steps = 0.0
        self._prompting = 0
        self._generating = 0
        # Heap of events: (count of steps, tokens to generate from then on; _DONE: the request is done).
        self._due: list[tuple[float, int]] = []
        self._load = Load()

    @property
    def requests(self) -> int:
        """Number of running requests: in their prompt, or generating."""
        return self._prompting + self._generating

    def arrive(self, prompt: int, output: int) -> None:
        """Add a request, with prompt and output lengths in tokens; it starts at once, as none queues."""
        prompt_steps = self._model.prompt_steps(prompt)
        if prompt_steps:
            self._prompting += 1
            heapq.heappush(self._due, (self._steps + prompt_steps, output))
        else:
            self._generate(output)

    def next_s(self) -> float:
        """Return the seconds until a prompt or request is done, if nothing arrives; inf: none runs."""
        return (self._due[0][0] - self._steps) / self._rate() if self._due else math.inf

    def advance(self, seconds: float) -> None:
        """Advance the simulated time, at most by `next_s`: add to the load, and end what is done."""
        rate, model = self._rate(), self._model
        load, outputs = self._load, self._generating * rate * seconds
        load.seconds += seconds
        load.computed += self._tokens() * rate * seconds
        load.capacity += self.servers * model.tokens_per_s * seconds
        load.outputs += outputs
        load.waited_s += outputs / rate
        if rate < 1 / model.token_s:
            load.slowed += outputs
        is_due = bool(self._due) and seconds >= self.next_s()
        self._steps += rate * seconds
        while self._due and (is_due or self._due[0][0] <= self._steps):
            # Without this, a sum of floats slightly short of the next event would never reach it.
            is_due = False
            self._steps = max(self._steps, self._due[0][0])
            _, output = heapq.heappop(self._due)
            if output == _DONE:
                self._generating -= 1
            else:
                self._prompting -= 1
                self._generate(output)

    def take_load(self) -> Load:
        """Return the load since the last call, and start a new interval."""
        load, self._load = self._load, Load()
        return load

    def _generate(self, output: int) -> None:
        if output:
            self._generating += 1
            heapq.heappush(self._due, (self._steps + output, _DONE))

    def _tokens(self) -> float:
        """Return the tokens of one step of all requests, which share the throughput."""
        return self._generating + self._prompting * self._model.prompt_tokens

    def _rate(self) -> float:
        """Return the steps per second of each request, now: the same for all (see the module)."""
        tokens = self._tokens()
        most = 1 / self._model.token_s
        return min(most, self.servers * self._model.tokens_per_s / tokens) if tokens else most
