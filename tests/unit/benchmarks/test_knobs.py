"""Learned knobs: the soft cycle has a gradient, and without softness it is the policy's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from balancer.policies.compact import replicate
from balancer.policies.measure import equal_shares, par
from balancer.policies.problem import make_problem
from balancer.policies.scalpel import check_knobs, scalpel
from benchmarks.knobs.__main__ import app
from benchmarks.knobs.surrogate import cycle_outcome, sinkhorn, soft_counts
from benchmarks.knobs.train import Network, Options, cycle_of, features, train, windows
from eaas.errors import ConfigError
from simulator.placement.replay import replay
from simulator.traces import Trace, generate_trace, write_trace

L, E, S, SLOTS, INTERVAL = 3, 16, 4, 20, 48


def made(regime: str, seed: int, iterations: int = 480) -> Trace:
    return generate_trace(
        regime, iterations=iterations, layers=L, experts=E, tokens=512, top_k=2, seed=seed
    )


def one_cycle(knobs_K: np.ndarray, seed: int = 0, at: int = 2) -> tuple:
    found = list(windows(made("flips", seed), INTERVAL, S))
    # Made for quite another load: there is something to swap.
    held_LSE = scalpel(make_problem(found[at].load_LE[:, ::-1], S, SLOTS)).holds_LSE
    return cycle_of(found[at], knobs_K, held_LSE, np.arange(L)), found[at], held_LSE


# Away from whole budgets, and from where a decision tips over.
KNOBS = np.array([0.8, 0.15, 0.4, 0.05, 0.4])


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_the_soft_objective(seed: int, temperature: float) -> None:
    cycle, _, _ = one_cycle(KNOBS, seed)

    def value(knobs_K: torch.Tensor) -> torch.Tensor:
        outcome = cycle_outcome(knobs_K, cycle, temperature)
        return outcome.par + 0.01 * outcome.transit

    knobs_K = torch.tensor(KNOBS, requires_grad=True)
    value(knobs_K).backward()
    assert knobs_K.grad is not None
    step = 1e-5
    for place in range(len(KNOBS)):
        moved = torch.zeros(len(KNOBS), dtype=torch.float64)
        moved[place] = step
        with torch.no_grad():
            up, down = value(knobs_K + moved), value(knobs_K - moved)
        expected = float(up - down) / (2 * step)
        assert float(knobs_K.grad[place]) == pytest.approx(expected, rel=1e-3, abs=1e-7)
    assert knobs_K.grad.abs().min() > 0, "every knob has one"


@pytest.mark.parametrize("seed", range(3))
def test_without_temperature_it_is_the_policys_own_cycle(seed: int) -> None:
    """With whole budgets: PAR of what comes next, and transit, of the layout that ScalpeLB makes."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(5):
        knobs_K = np.array(
            [
                rng.uniform(0, 3),
                *rng.uniform(0, 0.4, 1),
                rng.integers(0, 4),
                *rng.uniform(0, 0.6, 2),
            ]
        )
        cycle, window, held_LSE = one_cycle(knobs_K, seed)
        problem = make_problem(window.load_LE, S, SLOTS, held_LSE)
        k, shift_tv, budget, drift_tol, heavy_frac = knobs_K
        holds_LSE, shares_LSE = scalpel(
            problem,
            window_WLE=window.counts_WLE,
            k=k,
            shift_tv=shift_tv,
            budget=int(budget),
            drift_tol=drift_tol,
            heavy_frac=heavy_frac,
        ).dense()
        hard = np.mean([par(b_LE, holds_LSE, shares_LSE, np.ones(S)) for b_LE in window.next_BLE])
        transit = (holds_LSE & ~held_LSE).sum() / L
        for soft in (
            cycle_outcome(torch.from_numpy(knobs_K), cycle, 1e-4),
            cycle_outcome(torch.from_numpy(knobs_K), cycle, 0.3, straight_through=True),
        ):
            assert float(soft.par) == pytest.approx(hard, rel=1e-3)
            assert float(soft.transit) == pytest.approx(transit, abs=1e-2)
        errors = [
            abs(float(cycle_outcome(torch.from_numpy(knobs_K), cycle, t).par) - hard)
            for t in (1.0, 1e-2, 1e-4)
        ]
        found.append(errors)
    assert (np.diff(np.mean(found, axis=0)) < 0).all(), "the colder, the nearer"


def test_counts_and_packing() -> None:
    rng = np.random.default_rng(0)
    weight_LE = rng.lognormal(0, 1, (L, E))
    hard_LE = replicate(weight_LE, np.full(L, SLOTS), S)
    for temperature in (1.0, 0.1, 1e-4):
        count_LE = soft_counts(torch.from_numpy(weight_LE), torch.full((L,), SLOTS), S, temperature)
        assert torch.allclose(count_LE.sum(dim=1), torch.full((L,), SLOTS).double())
        assert ((count_LE >= 1) & (count_LE <= S)).all()
    assert np.allclose(count_LE, hard_LE, atol=1e-6)
    holds_LSE = scalpel(make_problem(weight_LE, S, SLOTS)).holds_LSE
    anchor_LSE = torch.from_numpy(holds_LSE).double()
    columns_LS = anchor_LSE.sum(dim=2)
    packed_LSE = sinkhorn((anchor_LSE - 1) / 0.5, anchor_LSE.sum(dim=1), columns_LS)
    assert torch.allclose(packed_LSE.sum(dim=1), anchor_LSE.sum(dim=1))
    assert torch.allclose(packed_LSE.sum(dim=2), columns_LS, rtol=1e-3)
    cold_LSE = sinkhorn((anchor_LSE - 1) / 1e-3, anchor_LSE.sum(dim=1), columns_LS)
    assert torch.allclose(cold_LSE, anchor_LSE)
    shares_LSE = (cold_LSE / cold_LSE.sum(dim=1, keepdim=True)).numpy()
    assert np.allclose(shares_LSE, equal_shares(holds_LSE))


SMALL = Options(servers=S, interval=INTERVAL, epochs=4)


def test_learning_lowers_the_loss_and_is_the_same_each_time() -> None:
    traces = [(f"{r}.npz", made(r, n, 288)) for n, r in enumerate(("drift", "flips"))]
    held_out = [("other.npz", made("drift", 7))]
    said: list[str] = []
    learned = train(traces, held_out, SMALL, said.append)
    assert len(learned["loss"]) == 1 + len(said) == 1 + SMALL.epochs
    assert min(learned["loss"]) < learned["loss"][0], "the first is that of the static defaults"
    assert train(traces, held_out, SMALL, said.append) == learned
    (result,) = learned["held_out"]
    static = replay(held_out[0][1], "scalpel", servers=S, interval=INTERVAL)
    assert (result["static_par"], result["static_transit"]) == (static.par_mean, static.transit)
    assert result["static_cost"] == pytest.approx(static.time_s / 60)
    check_knobs(**result["knobs"] | {"budget": 8}, matching="greedy")
    other = train(traces, held_out, replace(SMALL, seed=1, epochs=1), said.append)
    assert other["loss"][1] != learned["loss"][1]


@given(st.integers(0, 1000), st.floats(0.1, 30))
def test_learned_knobs_are_within_the_policys_bounds(seed: int, size: float) -> None:
    random = np.random.default_rng(seed)
    network = Network(random.standard_normal((4, 6)), E, seed)
    with torch.no_grad():
        network.out.copy_(torch.from_numpy(size * random.standard_normal(network.out.shape)))
    knobs = network.knobs(size * random.standard_normal(6))
    assert isinstance(knobs["budget"], int)
    check_knobs(**knobs, matching="greedy")


def test_features_of_a_window() -> None:
    window_WLE = np.zeros((8, 2, 4), np.int64)
    window_WLE[:4, :, 0] = window_WLE[4:, :, 1] = 10
    found = features(window_WLE, 2)
    assert found[1:] == pytest.approx([1, 1, 0.5, 1, np.log10(81)])
    assert np.isfinite(features(np.zeros((8, 2, 4), np.int64), 2)).all()


def test_traces_that_cannot_be_learned_from() -> None:
    one, two = ("a.npz", made("drift", 0)), ("b.npz", made("drift", 1))
    with pytest.raises(ConfigError, match=r"b.npz has 480 iterations.*needs at least 600"):
        train([two], [one], replace(SMALL, interval=200), print)
    few = generate_trace("drift", iterations=480, layers=1, experts=8, top_k=2)
    with pytest.raises(ConfigError, match="train on traces of one model"):
        train([one, ("c.npz", few)], [two], SMALL, print)


def test_the_command_reports_each_trace_held_out(tmp_path: Path) -> None:
    names = [tmp_path / f"{name}.npz" for name in "abc"]
    for seed, name in enumerate(names):
        write_trace(made("drift", seed, 240), name)

    def run(held_out: Path, *more: str) -> Result:
        words = f"{names[0]} {names[1]} --held-out {held_out} --epochs 1"
        setting = f"--servers {S} --interval {INTERVAL}"
        return CliRunner().invoke(app, [*words.split(), *setting.split(), *more])

    done = run(names[2], "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert len(document["loss"]) == 2
    assert [row["trace"] for row in document["held_out"]] == ["c.npz"]
    assert "c.npz: PAR" in run(names[2]).stdout
    refused = run(names[1])
    assert refused.exit_code != 0
    assert "b.npz is trained on and held out" in f"{refused.output}{refused.exception}"
