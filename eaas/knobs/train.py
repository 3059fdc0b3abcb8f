"""Learns knobs: gradient steps along the cycles of recorded traces, then a replay of others that decides.

The state of a cycle, which replicas are held, is the one that the knobs so far have led to. Gradients do not
go through it. A layout lasts for longer than one window, so a cycle is charged for the PAR of several windows
to come, as if nothing was changed in them, and its transit is spread over as many. After each epoch the
traces are gone through once more without learning: the knobs that cost least in truth are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from balancer.live.learned import HeldOut, KnobFile, LearnedKnobs
from balancer.policies.measure import equal_shares, par
from eaas import __version__
from eaas.errors import ConfigError
from eaas.knobs.network import Network
from eaas.knobs.surrogate import cycle_outcome
from eaas.knobs.windows import Window, advance, cycle_of, windows
from eaas.trace import Trace
from simulator.learned import LearnedPlanner
from simulator.planners import first_layout
from simulator.replay import replay

__all__ = ["TRANSIT_WEIGHT", "Learned", "Options", "train"]

TRANSIT_WEIGHT = 88_080_384 / 9e11 / 60
"""Mean PAR that a replica to be loaded is worth: the competition's score (`simulator.score`)."""

_LAYERS_AT_ONCE = 12
_HOT, _COLD = 0.5, 0.05
_EVALUATION_PART = 0.2


@dataclass(frozen=True)
class Options:
    """How is learned.

    Attributes:
        servers: S of the clusters that are replayed.
        slots: Replicas per layer; None: E + S.
        interval: Iterations of a window, and between plans.
        epochs: How often each trace is gone through.
        rate: Of learning (Adam).
        transit_weight: Lambda: mean PAR that a loaded replica is worth.
        lifetime: Windows over which a cycle is judged.
        seed: Same seed, same knobs.
    """

    servers: int = 64
    slots: int | None = None
    interval: int = 256
    epochs: int = 12
    rate: float = 0.03
    transit_weight: float = TRANSIT_WEIGHT
    lifetime: int = 2
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Learned:
    """What came of it.

    Attributes:
        file: To be written.
        loss: Mean PAR + lambda x transit of the traces trained on, with the knobs at the beginning, and after
            each epoch.
    """

    file: KnobFile
    loss: tuple[float, ...]


def train(
    traces: Sequence[tuple[Path, Trace]],
    held_out: Sequence[tuple[Path, Trace]],
    options: Options,
    progress: Callable[[str, float], None] = lambda _what, _part: None,
) -> Learned:
    """Learns from some traces, and replays others with what was learned and with the static defaults.

    Args:
        traces, held_out: With their names. Of the same number of experts, all that are trained on.
        options: How.
        progress: Called with what is done, and the part that is.

    Raises:
        ConfigError: A trace is too short, is in both, or its slots do not fit; named in the message.
    """
    _check(traces, held_out, options)
    threads = torch.get_num_threads()
    # Small sums: with more it takes 20 times as long. And the same however many cores there are.
    torch.set_num_threads(1)
    try:
        learned, loss = _learn([trace for _, trace in traces], options, progress)
    finally:
        torch.set_num_threads(threads)
    results = []
    for number, (path, trace) in enumerate(held_out):
        progress(path.name, 1 - _EVALUATION_PART * (1 - number / len(held_out)))
        results.append(_compared(path, trace, learned, options))
    provenance = {
        "version": __version__,
        "options": asdict(options),
        "traces": [{"trace": path.name, "sha256": _digest(trace)} for path, trace in traces],
        "loss": loss,
    }
    return Learned(KnobFile(learned, results, provenance), tuple(loss))


def _learn(
    traces: Sequence[Trace], options: Options, progress: Callable[[str, float], None]
) -> tuple[LearnedKnobs, list[float]]:
    experts = traces[0].experts
    slots = options.slots or experts + options.servers
    known = [
        tuple(windows(trace, options.interval, options.servers, slots, options.lifetime))
        for trace in traces
    ]
    features_NF = np.stack([window.features_F for found in known for window in found])
    network = Network(features_NF, experts, options.seed)
    optimizer = torch.optim.Adam(network.parameters(), options.rate)
    dice = np.random.default_rng(options.seed)
    best = network.frozen()
    loss = [_cost(known, best, slots, options)]
    for epoch in range(options.epochs):
        part = epoch / options.epochs
        progress(f"epoch {epoch + 1}", part * (1 - _EVALUATION_PART))
        temperature = _HOT * (_COLD / _HOT) ** part
        for trace in dice.permutation(len(known)):
            _go_through(known[trace], network, optimizer, temperature, slots, options, dice)
        learned = network.frozen()
        loss.append(_cost(known, learned, slots, options))
        if loss[-1] == min(loss):
            best = learned
    return best, loss


def _go_through(
    found: Sequence[Window],
    network: Network,
    optimizer: torch.optim.Optimizer,
    temperature: float,
    slots: int,
    options: Options,
    dice: np.random.Generator,
) -> None:
    layers, experts = found[0].load_LE.shape
    held_LSE, _ = first_layout(layers, options.servers, experts)
    for number, window in enumerate(found):
        knobs_K = network(torch.from_numpy(window.features_F))
        if number:  # The first cycle places anew whatever the knobs say.
            chosen = _some(layers, dice)
            cycle = cycle_of(window, knobs_K.detach().numpy(), held_LSE, slots, chosen)
            outcome = cycle_outcome(knobs_K, cycle, temperature, straight_through=True)
            # Transit adds up over all cycles and layers, PAR is a mean.
            weight = options.transit_weight * len(found) * layers / options.lifetime
            value = outcome.par + weight * outcome.transit
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        knobs = network.frozen()(window.features_F)
        held_LSE = advance(window, knobs, held_LSE, slots, anew=not number)


def _cost(
    known: Sequence[Sequence[Window]], learned: LearnedKnobs, slots: int, options: Options
) -> float:
    """What these knobs cost, mean of the traces: PAR of what comes next, and lambda x transit."""
    costs = []
    for found in known:
        layers, experts = found[0].load_LE.shape
        held_LSE, _ = first_layout(layers, options.servers, experts)
        pars, transit = [], 0
        for number, window in enumerate(found):
            before_LSE, knobs = held_LSE, learned(window.features_F)
            held_LSE = advance(window, knobs, held_LSE, slots, anew=not number)
            transit += int(np.count_nonzero(held_LSE & ~before_LSE))
            soon_BLE = window.next_BLE[: len(window.next_BLE) // options.lifetime or 1]
            pars += [
                par(load_LE, held_LSE, equal_shares(held_LSE), np.ones(options.servers)).mean()
                for load_LE in soon_BLE
            ]
        costs.append(float(np.mean(pars)) + options.transit_weight * transit)
    return float(np.mean(costs))


def _some(layers: int, dice: np.random.Generator) -> npt.NDArray[np.int64]:
    if layers <= _LAYERS_AT_ONCE:
        return np.arange(layers)
    return np.sort(dice.choice(layers, _LAYERS_AT_ONCE, replace=False))


def _compared(path: Path, trace: Trace, learned: LearnedKnobs, options: Options) -> HeldOut:
    setting = {"servers": options.servers, "interval": options.interval, "slots": options.slots}
    static = replay(trace, "scalpel", **setting)  # type: ignore[arg-type]
    slots = options.slots or trace.experts + options.servers
    planner = LearnedPlanner(learned, options.servers, slots)
    new = replay(trace, "scalpel-learned", planner=planner, **setting)  # type: ignore[arg-type]
    return HeldOut(
        trace=path.name,
        sha256=_digest(trace),
        servers=options.servers,
        interval=options.interval,
        static_cost=static.par_mean + options.transit_weight * static.transit,
        learned_cost=new.par_mean + options.transit_weight * new.transit,
        static_par=static.par_mean,
        learned_par=new.par_mean,
        static_transit=static.transit,
        learned_transit=new.transit,
    )


def _check(
    traces: Sequence[tuple[Path, Trace]], held_out: Sequence[tuple[Path, Trace]], options: Options
) -> None:
    known = {_digest(trace): path for path, trace in traces}
    for path, trace in held_out:
        if (same := known.get(_digest(trace))) is not None:
            raise ConfigError(f"{path} is what is trained on, too ({same}): hold another trace out")
    experts = traces[0][1].experts
    for path, trace in traces:
        if trace.experts != experts:
            raise ConfigError(
                f"{path} has {trace.experts} experts, {traces[0][0]} has {experts}: train on one model"
            )
    for path, trace in (*traces, *held_out):
        if trace.iterations < 3 * options.interval:
            raise ConfigError(
                f"{path} has {trace.iterations} iterations: with --interval {options.interval} "
                f"there have to be {3 * options.interval}"
            )
        slots = options.slots or trace.experts + options.servers
        if not trace.experts <= slots <= trace.experts * options.servers:
            raise ConfigError(
                f"--slots {slots}: {path} has {trace.experts} experts, so give "
                f"{trace.experts} to {trace.experts * options.servers}"
            )


def _digest(trace: Trace) -> str:
    return sha256(np.ascontiguousarray(trace.counts_ILE).data).hexdigest()
