"""A group of expert servers under traffic, as a fluid: requests share the servers' throughput evenly.

A request lives through steps. In each of the first ones it brings `prompt_tokens` of its prompt, then one
token a step until its output is whole. While the servers keep up, a step takes `token_s`; where all requests
together ask for more tokens a second than there are, all are slowed down alike:

    steps a second of each request = min(1 / token_s, servers * tokens_per_s / (tokens of one step of all))

So the events are few (a request comes, its prompt is through, it is done), and between two of them nothing
changes: processor sharing, followed exactly. `steps` counts what a request that never ends would have made;
a request that came at count c is done when the count is c plus its own steps.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

__all__ = ["Load", "ServerModel", "SharedServers"]

_DONE = -1


@dataclass(frozen=True)
class ServerModel:
    """What a server can do, and what requests ask for.

    Attributes:
        tokens_per_s: Of one server that is busy all the time.
        token_s: Between two tokens of a request while the servers keep up.
        prompt_tokens: Of one step of a prompt; 0: prompts are served elsewhere (prefill apart from decode).
    """

    tokens_per_s: float
    token_s: float
    prompt_tokens: int

    def prompt_steps(self, prompt: int) -> float:
        """Steps that a prompt takes; the last one need not be full."""
        return prompt / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass
class Load:
    """What happened between two looks.

    Attributes:
        seconds: How long that was.
        computed: Tokens, of prompts too.
        capacity: Tokens that could have been computed.
        outputs: Tokens that requests were given.
        waited_s: Sum over those tokens of the time that each took.
        slowed: How many of them came later than `token_s` after the one before.
    """

    seconds: float = 0.0
    computed: float = 0.0
    capacity: float = 0.0
    outputs: float = 0.0
    waited_s: float = 0.0
    slowed: float = 0.0

    @property
    def utilization(self) -> float:
        """0 to 1; 0 where there was nobody."""
        return min(1.0, self.computed / self.capacity) if self.capacity else 0.0

    @property
    def token_s(self) -> float | None:
        """Mean seconds between two tokens; None where there were none."""
        return self.waited_s / self.outputs if self.outputs else None

    def add(self, other: Load) -> None:
        """This, and what happened after it."""
        self.seconds += other.seconds
        self.computed += other.computed
        self.capacity += other.capacity
        self.outputs += other.outputs
        self.waited_s += other.waited_s
        self.slowed += other.slowed


class SharedServers:
    """The requests that are being served, and by how many servers (see the module's head).

    Args:
        model: Of servers and requests.
        servers: How many there are at first; may be set at any time.
    """

    def __init__(self, model: ServerModel, servers: int) -> None:
        self.servers = servers
        self._model = model
        self._steps = 0.0
        self._prompting = 0
        self._generating = 0
        # (count of steps, tokens that are generated from then on; _DONE: it was all of them)
        self._due: list[tuple[float, int]] = []
        self._load = Load()

    @property
    def requests(self) -> int:
        """Requests that are not done."""
        return self._prompting + self._generating

    def arrive(self, prompt: int, output: int) -> None:
        """A request comes."""
        prompt_steps = self._model.prompt_steps(prompt)
        if prompt_steps:
            self._prompting += 1
            heapq.heappush(self._due, (self._steps + prompt_steps, output))
        else:
            self._generate(output)

    def next_s(self) -> float:
        """Seconds until something happens by itself; inf where nothing does."""
        return (self._due[0][0] - self._steps) / self._rate() if self._due else math.inf

    def advance(self, seconds: float) -> None:
        """Time passes, no more of it than `next_s`."""
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
            # Without this a sum of floats that is a little short of the next event would never reach it.
            is_due = False
            self._steps = max(self._steps, self._due[0][0])
            _, output = heapq.heappop(self._due)
            if output == _DONE:
                self._generating -= 1
            else:
                self._prompting -= 1
                self._generate(output)

    def take_load(self) -> Load:
        """What happened since this was asked last."""
        load, self._load = self._load, Load()
        return load

    def _generate(self, output: int) -> None:
        if output:
            self._generating += 1
            heapq.heappush(self._due, (self._steps + output, _DONE))

    def _tokens(self) -> float:
        """Of one step of all requests."""
        return self._generating + self._prompting * self._model.prompt_tokens

    def _rate(self) -> float:
        """Steps a second of each request."""
        tokens = self._tokens()
        most = 1 / self._model.token_s
        return min(most, self.servers * self._model.tokens_per_s / tokens) if tokens else most
