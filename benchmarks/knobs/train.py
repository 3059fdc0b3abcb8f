"""Learns ScalpeLB's knobs by gradient steps along recorded traces, then replays held-out traces.

    features of a window, standardised --tanh--> hidden --sigmoid, between two bounds--> knobs

Each window is one cycle: its cost is the PAR of the next windows, if nothing else changes, plus its transit
spread over as many windows. The layout at the start of a cycle is the one that the knobs so far have led to;
gradients do not go through it. After each epoch the policy itself runs over the traces, and the network with
the lowest cost is kept.
Shape suffixes: F features, N windows, K knobs, W window, B samples, L layers, S servers, E logical experts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from balancer.live.signals import burstiness
from balancer.policies.measure import equal_shares, par
from balancer.policies.plan import make_plan
from balancer.policies.problem import make_problem
from balancer.policies.scalpel import align, fresh_placement, scalpel, swap_hottest
from balancer.policies.sparse import Layout
from balancer.policies.types import Float, Holds, Plan
from balancer.policies.window import planning_weight, shift, variance_buffer
from benchmarks.knobs.surrogate import Cycle, cycle_outcome
from eaas.errors import ConfigError
from simulator.placement.planners import first_layout
from simulator.placement.replay import replay
from simulator.traces import Trace

__all__ = ["TRANSIT_WEIGHT", "Network", "Options", "train"]

TRANSIT_WEIGHT = 88_080_384 / 9e11 / 60
"""Mean PAR that one loaded replica costs: the competition's score (`simulator.placement.score`)."""

# Knobs in the order of `cycle_outcome`, with their bounds and ScalpeLB's defaults (k: by number of experts).
_BOUNDS = {
    "k": (0.0, 4.0),
    "shift_tv": (0.02, 1.0),
    "budget": (0.0, 12.0),
    "drift_tol": (0.0, 0.6),
    "heavy_frac": (0.02, 0.98),
}
_DEFAULTS = (0.2, 8.0, 0.2, 0.5)
# Defaults at a bound start this far from it, because a sigmoid does not reach its ends.
_EDGE = 0.02
_HIDDEN = 8
_RATE = 0.03  # Adam's
_HOT, _COLD = 0.5, 0.05  # temperatures of the first and the last epoch
_LIFETIME = 2  # windows over which a cycle is judged
_SAMPLES = 3  # iterations of each of these windows that are evaluated
_LAYERS_AT_ONCE = 12


@dataclass(frozen=True)
class Options:
    """Options of `train`.

    Attributes:
        servers: S of the replayed clusters; they have E + S replicas per layer.
        interval: Iterations of a window, and between plans.
        epochs: Passes over each trace.
        transit_weight: Lambda: mean PAR that one loaded replica costs.
        seed: Same seed, same knobs.
    """

    servers: int = 64
    interval: int = 256
    epochs: int = 12
    transit_weight: float = TRANSIT_WEIGHT
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Window:
    """The iterations that a plan is made from, and samples of those after them (`next_BLE`)."""

    counts_WLE: npt.NDArray[Any]
    features_F: Float
    load_LE: Float
    next_BLE: Float


class Network(torch.nn.Module):
    """The network from a window's features to knobs. Before training it gives ScalpeLB's defaults.

    Args:
        features_NF: Features of the training windows, for their mean and scale.
        experts: E, which decides the default of `k`.
        seed: Seed of the hidden weights.
    """

    def __init__(self, features_NF: Float, experts: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        count = features_NF.shape[1]
        self._mean_F = torch.from_numpy(features_NF.mean(axis=0))
        # A feature that is constant in training carries no information, so it must not count in other traces.
        scale_F = features_NF.std(axis=0)
        self._scale_F = torch.from_numpy(np.where(scale_F > 1e-6, scale_F, 1e6))
        weights = torch.randn(_HIDDEN, count, generator=generator, dtype=torch.float64)
        self.hidden = torch.nn.Parameter(weights / count**0.5)
        self.hidden_bias = torch.nn.Parameter(torch.zeros(_HIDDEN, dtype=torch.float64))
        self.out = torch.nn.Parameter(torch.zeros(len(_BOUNDS), _HIDDEN, dtype=torch.float64))
        low_K, high_K = np.array(list(_BOUNDS.values())).T
        default_K = np.array([variance_buffer(experts), *_DEFAULTS])
        part_K = np.clip((default_K - low_K) / (high_K - low_K), _EDGE, 1 - _EDGE)
        self.out_bias = torch.nn.Parameter(torch.from_numpy(np.log(part_K / (1 - part_K))))
        self._low_K, self._range_K = torch.from_numpy(low_K), torch.from_numpy(high_K - low_K)

    def forward(self, features_F: torch.Tensor) -> torch.Tensor:
        """Compute the knobs from features: float64 (K); the budget is not rounded."""
        x_F = (features_F - self._mean_F) / self._scale_F
        hidden = torch.tanh(self.hidden @ x_F + self.hidden_bias)
        return self._low_K + self._range_K * torch.sigmoid(self.out @ hidden + self.out_bias)

    def knobs(self, features_F: Float) -> dict[str, Any]:
        """Compute the knobs from features, by name, as `policies.scalpel` takes them."""
        with torch.no_grad():
            values = self(torch.from_numpy(features_F)).tolist()
        knobs: dict[str, Any] = dict(zip(_BOUNDS, values, strict=True))
        knobs["budget"] = round(knobs["budget"])
        return knobs


def features(window_WLE: npt.NDArray[Any], servers: int) -> Float:
    """Features of a window's loads, float64 (F).

    Burstiness, shift, skew, redundancy, log2 of experts per server, log10 of tokens.
    """
    load_LE = window_WLE.sum(axis=0, dtype=np.float64)
    tokens_L = load_LE.sum(axis=1)
    layers, experts = load_LE.shape
    part_LE = load_LE[tokens_L > 0] / tokens_L[tokens_L > 0, None]
    skew = np.sqrt(np.maximum(experts * (part_LE**2).sum(axis=1) - 1, 0.0))
    return np.array(
        [
            burstiness(window_WLE),
            shift(window_WLE).mean(),
            skew.mean() if len(skew) else 0.0,
            servers / experts,
            math.log2(experts / servers),
            math.log10(1 + tokens_L.sum() / layers),
        ]
    )


def windows(trace: Trace, interval: int, servers: int) -> Iterator[Window]:
    """Split a trace into its windows, without the last one, which has no successor to judge it by."""
    for end in range(interval, trace.iterations - interval + 1, interval):
        counts_WLE = trace.counts_ILE[end - interval : end]
        last = min(trace.iterations, end + _LIFETIME * interval)
        count = _SAMPLES * (last - end) // interval
        chosen = end + ((np.arange(count) + 0.5) * (last - end) / count).astype(np.int64)
        load_LE = counts_WLE.sum(axis=0, dtype=np.float64)
        next_BLE = trace.counts_ILE[np.unique(chosen)].astype(np.float64)
        yield Window(
            counts_WLE, features(counts_WLE, servers), _not_empty(load_LE), _not_empty(next_BLE)
        )


def cycle_of(
    window: Window, knobs_K: Float, current_LSE: Holds, layers: npt.NDArray[np.int64]
) -> Cycle:
    """Build a cycle of some layers, with anchors that the policy makes with these knobs."""
    k, shift_tv, budget, *_ = knobs_K
    counts_WLE = window.counts_WLE[:, layers]
    servers, experts = current_LSE.shape[1:]
    problem = make_problem(window.load_LE[layers], servers, experts + servers, current_LSE[layers])
    weight_LE = planning_weight(counts_WLE, k, shift_tv)
    fresh = align(problem, fresh_placement(problem, weight_LE), slice(None))
    assert problem.current_LSE is not None
    kept, more = (
        swap_hottest(problem.current_LSE, weight_LE, problem.speeds_S, int(budget) + extra)
        for extra in (0, 1)
    )
    moments = []
    for threshold in (np.inf, -1.0):  # the whole window alike, and weighted towards its end
        mean_LE = planning_weight(counts_WLE, 0.0, threshold)
        moments += [mean_LE, planning_weight(counts_WLE, 1.0, threshold) - mean_LE]
    arrays = (
        *(*moments, shift(counts_WLE), window.load_LE[layers], window.next_BLE[:, layers]),
        *(problem.current_LSE, problem.slots_LS, fresh.layout().holds_LSE, kept, more),
    )
    return Cycle(*(torch.from_numpy(np.ascontiguousarray(a)).double() for a in arrays))


def train(
    traces: Sequence[tuple[str, Trace]],
    held_out: Sequence[tuple[str, Trace]],
    options: Options,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Learn knobs from traces, and replay held-out traces with the learned knobs and with the defaults.

    Args:
        traces, held_out: (name, trace) pairs. All training traces have the same number of experts.

    Returns:
        JSON: `loss`, the cost of the training traces with the defaults and after each epoch; `held_out`, for
        each of those traces its name, the `static` and `learned` cost (mean PAR + lambda * transit), PAR and
        transit, and the learned knobs, mean over its windows.

    Raises:
        ConfigError: A trace is too short or of another model; the message names it.
    """
    _check(traces, held_out, options)
    threads = torch.get_num_threads()
    # The tensors are small, so more threads take 20 times as long. They would also change the sums.
    torch.set_num_threads(1)
    try:
        network, loss = _learn([trace for _, trace in traces], options, say)
    finally:
        torch.set_num_threads(threads)
    return {
        "loss": loss,
        "held_out": [_compare(name, trace, network, options) for name, trace in held_out],
    }


def _learn(
    traces: Sequence[Trace], options: Options, say: Callable[[str], None]
) -> tuple[Network, list[float]]:
    known = [tuple(windows(trace, options.interval, options.servers)) for trace in traces]
    features_NF = np.stack([window.features_F for found in known for window in found])
    network = Network(features_NF, traces[0].experts, options.seed)
    optimizer = torch.optim.Adam(network.parameters(), _RATE)
    random = np.random.default_rng(options.seed)
    best = copy.deepcopy(network)
    loss = [_cost(known, best, options)]
    for epoch in range(options.epochs):
        temperature = _HOT * (_COLD / _HOT) ** (epoch / options.epochs)
        for trace in random.permutation(len(known)):
            _train_on(known[trace], network, optimizer, temperature, options, random)
        loss.append(_cost(known, network, options))
        say(f"epoch {epoch + 1} of {options.epochs}: cost {loss[-1]:.4f}")
        if loss[-1] == min(loss):
            best = copy.deepcopy(network)
    return best, loss


def _train_on(
    found: Sequence[Window],
    network: Network,
    optimizer: torch.optim.Optimizer,
    temperature: float,
    options: Options,
    random: np.random.Generator,
) -> None:
    layers, experts = found[0].load_LE.shape
    held_LSE = first_layout(layers, options.servers, experts).holds_LSE
    # Transit adds up over all cycles and layers, PAR is a mean.
    weight = options.transit_weight * len(found) * layers / _LIFETIME
    for number, window in enumerate(found):
        if number:  # No knob changes the first cycle, which places everything.
            knobs_K = network(torch.from_numpy(window.features_F))
            chosen = np.sort(random.permutation(layers)[:_LAYERS_AT_ONCE])
            cycle = cycle_of(window, knobs_K.detach().numpy(), held_LSE, chosen)
            outcome = cycle_outcome(knobs_K, cycle, temperature, straight_through=True)
            optimizer.zero_grad()
            (outcome.par + weight * outcome.transit).backward()
            optimizer.step()
        held_LSE = _advance(window, network, held_LSE, anew=not number)


def _cost(known: Sequence[Sequence[Window]], network: Network, options: Options) -> float:
    """Run the policy with the network's knobs; mean over traces of the next PAR + lambda * transit."""
    costs = []
    for found in known:
        layers, experts = found[0].load_LE.shape
        held_LSE = first_layout(layers, options.servers, experts).holds_LSE
        pars, transit = [], 0
        for number, window in enumerate(found):
            before_LSE = held_LSE
            held_LSE = _advance(window, network, held_LSE, anew=not number)
            transit += int(np.count_nonzero(held_LSE & ~before_LSE))
            pars += [
                par(load_LE, held_LSE, equal_shares(held_LSE), np.ones(options.servers)).mean()
                for load_LE in window.next_BLE[: len(window.next_BLE) // _LIFETIME or 1]
            ]
        costs.append(float(np.mean(pars)) + options.transit_weight * transit)
    return float(np.mean(costs))


def _advance(window: Window, network: Network, current_LSE: Holds, *, anew: bool) -> Holds:
    """Run one cycle of the policy with the network's knobs; return which server then holds which replicas."""
    servers, experts = current_LSE.shape[1:]
    problem = make_problem(window.load_LE, servers, experts + servers, current_LSE)
    knobs = network.knobs(window.features_F)
    return scalpel(problem, window_WLE=window.counts_WLE, anew=anew, **knobs).holds_LSE


class _Planner:
    """Planner for `replay` that runs ScalpeLB with learned knobs."""

    def __init__(self, network: Network, servers: int) -> None:
        self._network, self._servers = network, servers
        self.used: list[dict[str, Any]] = []

    def step(
        self, counts_WLE: npt.NDArray[Any], load_LE: Float, current: Layout
    ) -> Callable[[], Plan]:
        return partial(self._plan, counts_WLE, load_LE, current)

    def _plan(self, counts_WLE: npt.NDArray[Any], load_LE: Float, current: Layout) -> Plan:
        knobs = self._network.knobs(features(counts_WLE, self._servers))
        slots = load_LE.shape[1] + self._servers
        problem = make_problem(load_LE, self._servers, slots, current)
        layout = scalpel(problem, window_WLE=counts_WLE, anew=not self.used, **knobs)
        self.used.append(knobs)
        return make_plan("scalpel-learned", problem, layout)


def _compare(name: str, trace: Trace, network: Network, options: Options) -> dict[str, Any]:
    planner = _Planner(network, options.servers)
    run = partial(replay, trace, servers=options.servers, interval=options.interval)
    row: dict[str, Any] = {"trace": name}
    for kind, done in (
        ("static", run("scalpel")),
        ("learned", run("scalpel-learned", planner=planner)),
    ):
        row |= {
            f"{kind}_cost": done.par_mean + options.transit_weight * done.transit,
            f"{kind}_par": done.par_mean,
            f"{kind}_transit": done.transit,
        }
    return row | {"knobs": {k: float(np.mean([used[k] for used in planner.used])) for k in _BOUNDS}}


def _not_empty(load: Float) -> Float:
    """Give each expert of a layer without tokens a load of one, so that its balance is defined."""
    return np.where(load.sum(axis=-1, keepdims=True) > 0, load, 1.0)


def _check(
    traces: Sequence[tuple[str, Trace]], held_out: Sequence[tuple[str, Trace]], options: Options
) -> None:
    first, model = traces[0]
    for name, trace in traces:
        if trace.experts != model.experts:
            raise ConfigError(
                f"{name} has {trace.experts} experts, {first} has {model.experts}: "
                "train on traces of one model"
            )
    for name, trace in (*traces, *held_out):
        if trace.iterations < 3 * options.interval:
            raise ConfigError(
                f"{name} has {trace.iterations} iterations: --interval {options.interval} needs "
                f"at least {3 * options.interval}"
            )
