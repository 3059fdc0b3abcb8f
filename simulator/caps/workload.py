"""Simulated workloads: arrival times of requests, and the tokens that each sends to each expert.

A request belongs to a semantic *domain*, in which a few experts are hot. No public data has expert ids with
arrival times, so loads are drawn; the parameters are fitted to the results of CAPS (`fit.py`).
Hot experts can come from recorded routing instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from balancer.policies.token_ids import MOST_TOP_K
from eaas.errors import TraceError
from simulator.traces.readers import read_trace

__all__ = [
    "PATTERNS",
    "Domains",
    "RecordedDomains",
    "Workload",
    "draw_workload",
]

PATTERNS = ("bursty", "poisson")
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival.

    Attributes:
        arrival_s: Ascending, float64 (N,), in seconds.
        load_NE: Tokens of each request on each expert, float64 (N, E).
        predicted_NE: The predicted loads that the scheduler gets, float64 (N, E).
    """

    arrival_s: Floats
    load_NE: Floats
    predicted_NE: Floats


@dataclass(frozen=True)
class Domains:
    """Distribution of requests' tokens over experts.

    Attributes:
        experts: E.
        domains: Number of domains, all equally likely.
        hot: Number of hot experts of a domain, drawn for each domain.
        hot_weight: Likelihood of a hot expert relative to another.
        top_k: Experts of a token.
        burst_mean: Mean number of requests in a row of one domain (geometric distribution).
        burst_speed: Arrival rate in a burst relative to the average; a pause afterwards compensates.
    """

    experts: int
    domains: int
    hot: int
    hot_weight: float
    tokens: int
    top_k: int
    burst_mean: float
    burst_speed: float

    def draw(
        self,
        rng: np.random.Generator,
        domain_N: Ints,
        arrival_s: Floats,
        predicted_pairs: int | None,
    ) -> Workload:
        """Draw the true and predicted loads of requests at these arrivals; see `draw_workload`."""
        chance_NLE = self.chances(rng)[domain_N]
        pairs = self.tokens * self.top_k
        load_NE = _flat(rng.multinomial(pairs, chance_NLE))
        if predicted_pairs is None:
            return Workload(arrival_s, load_NE, load_NE)
        sample_NE = _flat(rng.multinomial(predicted_pairs, chance_NLE))
        predicted_NE = sample_NE * (pairs / predicted_pairs)
        return Workload(arrival_s, load_NE, predicted_NE)

    def chances(self, rng: np.random.Generator) -> Floats:
        """Draw the probability of each expert of a layer, by domain: (D, L, E), with one layer."""
        weight_DE = np.ones((self.domains, self.experts))
        for weight_E in weight_DE:
            weight_E[rng.choice(self.experts, self.hot, replace=False)] = self.hot_weight
        return _shares(weight_DE[:, None])

    def clusters(self, rng: np.random.Generator, requests: int) -> tuple[Ints, Ints]:
        """Draw requests in bursts; return, (N,) each, domains and lengths of the bursts that ended before.

        The length is 0 except for the first request of a burst, and 0 for the very first request.
        """
        lengths: list[int] = []
        while sum(lengths) < requests:
            # Lengths are stratified: each 64 bursts have one length from each 64th of the distribution, so
            # that runs differ little.
            share = (rng.permutation(64) + rng.random(64)) / 64
            lengths += (
                np.ceil(np.log1p(-share) / math.log1p(-1 / self.burst_mean)).astype(int).tolist()
            )
        domain_N = np.repeat(rng.integers(self.domains, size=len(lengths)), lengths)[:requests]
        ended_N = np.zeros(sum(lengths), dtype=np.int64)
        ended_N[np.cumsum(lengths[:-1])] = lengths[:-1]
        return domain_N, ended_N[:requests]


@dataclass(frozen=True, eq=False)
class RecordedDomains(Domains):
    """Domains with probabilities from recorded routing; `experts` counts the experts of all layers.

    Attributes:
        chance_DLE: Recorded probability of each expert of a layer, by domain.
    """

    chance_DLE: Floats

    @classmethod
    def of(cls, drawn: Domains, paths: Sequence[Path]) -> RecordedDomains:
        """Make one domain for each routing trace; tokens and bursts as in `drawn`.

        Raises TraceError: a trace cannot be read, has a layer without load, or another shape than the first.
        """
        loads: list[Floats] = []
        for path in paths:
            loaded = read_trace(path)
            load_LE = loaded.counts_ILE.sum(axis=0, dtype=np.float64)
            if loads and load_LE.shape != loads[0].shape:
                raise TraceError(
                    f"{path}: has {load_LE.shape} layers and experts, {paths[0]} has {loads[0].shape}"
                )
            if load_LE.shape[1] < 2:
                raise TraceError(f"{path}: has one expert per layer: nothing to balance")
            if not load_LE.sum(axis=1).all():
                raise TraceError(f"{path}: has a layer without load")
            loads.append(load_LE)
        chance_DLE = _shares(np.stack(loads))
        top_k = loaded.notes.get("top_k", drawn.top_k)
        if type(top_k) is not int or not 1 <= top_k <= MOST_TOP_K:
            raise TraceError(f"{path}: its note top_k is {top_k!r}: record or convert it again")
        values = asdict(drawn) | {
            "experts": loads[0].size,
            "domains": len(loads),
            "top_k": top_k,
        }
        return cls(**values, chance_DLE=chance_DLE)

    def chances(self, rng: np.random.Generator) -> Floats:
        """Return the recorded probabilities of experts, nothing drawn (see `Domains.chances`)."""
        return self.chance_DLE


def _shares(load_DLE: Floats) -> Floats:
    shares_DLE: Floats = load_DLE / load_DLE.sum(axis=-1, keepdims=True)
    return shares_DLE


def _flat(count_NLE: Ints) -> Floats:
    return count_NLE.reshape(len(count_NLE), -1).astype(np.float64)


def draw_workload(
    domains: Domains,
    pattern: str,
    requests: int,
    rate: float,
    seed: int,
    predicted_pairs: int | None = None,
    *,
    times_s: npt.ArrayLike | None = None,
) -> Workload:
    """Draw a workload: arrivals, each request's domain, and its loads.

    Args:
        domains: Domains that loads are drawn from.
        pattern: `bursty`: bursts of one domain each; a pause in proportion to its length follows each burst.
            `poisson`: independent arrivals, each of any domain.
        requests: N; the number of times if they are given.
        rate: Mean requests per second.
        predicted_pairs: The prediction is another sample from the request's domain, of this many (token,
            expert) pairs. None: the prediction is the true load.
        times_s: Arrival times in seconds, not falling; the last is after the first. They are stretched to
            the rate, and the pattern tells only whether requests come in bursts of a domain.
    """
    given_s = None if times_s is None else np.asarray(times_s, dtype=np.float64)
    stream = PATTERNS.index(pattern) if given_s is None else len(PATTERNS)
    rng = np.random.default_rng([seed, stream])
    requests = requests if given_s is None else len(given_s)
    if pattern == "bursty":
        speed = domains.burst_speed
        domain_N, ended_N = domains.clusters(rng, requests)
    else:
        speed = 1.0
        domain_N = rng.integers(domains.domains, size=requests)
        ended_N = np.zeros(requests, np.int64)
    if given_s is None:
        gap_s = rng.exponential(1 / (rate * speed), requests) + ended_N / rate * (1 - 1 / speed)
        arrival_s = np.cumsum(gap_s)
    else:
        arrival_s = (given_s - given_s[0]) * ((requests - 1) / rate / (given_s[-1] - given_s[0]))
    return domains.draw(rng, domain_N, arrival_s, predicted_pairs)
