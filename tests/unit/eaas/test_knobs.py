"""Knobs are learned through a cycle that has a gradient, and which is the policy's where nothing is soft."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from balancer.live.learned import read_knobs
from balancer.policies.compact import replicate
from balancer.policies.measure import equal_shares, par
from balancer.policies.problem import make_problem
from balancer.policies.scalpel import scalpel
from eaas.cli import app
from eaas.errors import ConfigError
from eaas.knobs import Options, train
from eaas.knobs.surrogate import cycle_outcome, sinkhorn, soft_counts
from eaas.knobs.windows import cycle_of, windows
from eaas.trace import Trace, generate_trace, write_trace
from simulator.replay import replay

L, E, S, SLOTS, INTERVAL = 3, 16, 4, 20, 48


def made(regime: str, seed: int, iterations: int = 480) -> Trace:
    return generate_trace(
        regime, iterations=iterations, layers=L, experts=E, tokens=512, top_k=2, seed=seed
    )


def one_cycle(knobs_K: np.ndarray, seed: int = 0, at: int = 2) -> tuple:
    found = list(windows(made("flips", seed), INTERVAL, S, SLOTS, 2))
    # Made for quite another load: there is something to swap.
    held_LSE, _ = scalpel(make_problem(found[at].load_LE[:, ::-1], S, SLOTS))
    return cycle_of(found[at], knobs_K, held_LSE, SLOTS, np.arange(L)), found[at], held_LSE


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
    dice = np.random.default_rng(seed)
    found = []
    for _ in range(5):
        knobs_K = np.array(
            [
                dice.uniform(0, 3),
                *dice.uniform(0, 0.4, 1),
                dice.integers(0, 4),
                *dice.uniform(0, 0.6, 2),
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
        )
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
    dice = np.random.default_rng(0)
    weight_LE = dice.lognormal(0, 1, (L, E))
    hard_LE = replicate(weight_LE, np.full(L, SLOTS), S)
    for temperature in (1.0, 0.1, 1e-4):
        count_LE = soft_counts(torch.from_numpy(weight_LE), torch.full((L,), SLOTS), S, temperature)
        assert torch.allclose(count_LE.sum(dim=1), torch.full((L,), SLOTS).double())
        assert ((count_LE >= 1) & (count_LE <= S)).all()
    assert np.allclose(count_LE, hard_LE, atol=1e-6)
    holds_LSE, _ = scalpel(make_problem(weight_LE, S, SLOTS))
    anchor_LSE = torch.from_numpy(holds_LSE).double()
    columns_LS = anchor_LSE.sum(dim=2)
    packed_LSE = sinkhorn((anchor_LSE - 1) / 0.5, anchor_LSE.sum(dim=1), columns_LS)
    assert torch.allclose(packed_LSE.sum(dim=1), anchor_LSE.sum(dim=1))
    assert torch.allclose(packed_LSE.sum(dim=2), columns_LS, rtol=1e-3)
    cold_LSE = sinkhorn((anchor_LSE - 1) / 1e-3, anchor_LSE.sum(dim=1), columns_LS)
    assert torch.allclose(cold_LSE, anchor_LSE)
    shares_LSE = (cold_LSE / cold_LSE.sum(dim=1, keepdim=True)).numpy()
    assert np.allclose(shares_LSE, equal_shares(holds_LSE))


SMALL = Options(servers=S, slots=SLOTS, interval=INTERVAL, epochs=4, rate=0.1)


def test_learning_lowers_the_loss_and_is_the_same_each_time() -> None:
    traces = [(Path(f"{r}.npz"), made(r, n, 288)) for n, r in enumerate(("drift", "flips"))]
    held_out = [(Path("other.npz"), made("drift", 7))]
    learned = train(traces, held_out, SMALL)
    assert len(learned.loss) == 1 + SMALL.epochs
    assert min(learned.loss) < learned.loss[0], "the first is that of the static defaults"
    again = train(traces, held_out, SMALL)
    assert learned.loss == again.loss
    assert learned.file.held_out == again.file.held_out
    assert (learned.file.knobs.out_KN == again.file.knobs.out_KN).all()
    (result,) = learned.file.held_out
    static = replay(held_out[0][1], "scalpel", servers=S, interval=INTERVAL, slots=SLOTS)
    assert (result.static_par, result.static_transit) == (static.par_mean, static.transit)
    assert result.static_cost == pytest.approx(static.time_s / 60)
    other = train(traces, held_out, replace(SMALL, seed=1, epochs=1))
    assert other.loss[1] != learned.loss[1]


def test_what_cannot_be_learned_from() -> None:
    one, two = (Path("a.npz"), made("drift", 0)), (Path("b.npz"), made("drift", 1))
    with pytest.raises(ConfigError, match=r"a.npz is what is trained on, too"):
        train([one, two], [one], SMALL)
    with pytest.raises(ConfigError, match=r"b.npz has 480 iterations.*there have to be 600"):
        train([two], [one], replace(SMALL, interval=200))
    with pytest.raises(ConfigError, match="give 16 to 64"):
        train([one], [two], replace(SMALL, slots=65))
    few = generate_trace("drift", iterations=480, layers=1, experts=8, top_k=2)
    with pytest.raises(ConfigError, match="train on one model"):
        train([one, (Path("c.npz"), few)], [two], SMALL)


def test_from_the_command_line_to_a_comparison(tmp_path: Path) -> None:
    names = [tmp_path / f"{name}.npz" for name in "abc"]
    for seed, name in enumerate(names):
        write_trace(made("drift", seed, 240), name)
    out = tmp_path / "knobs.safetensors"
    setting = f"--servers {S} --interval {INTERVAL}"

    def run(words: str) -> str:
        done = CliRunner().invoke(app, words.split())
        assert done.exit_code == 0, done.output
        return done.stdout

    learned = run(
        f"knobs train {names[0]} {names[1]} --held-out {names[2]} --out {out} --epochs 1 --json {setting}"
    )
    told = json.loads(learned)
    assert [trace["trace"] for trace in told["provenance"]["traces"]] == ["a.npz", "b.npz"]
    assert told["wins"] == read_knobs(out, must_win=False).wins
    assert "c.npz" in run(f"knobs info {out}")
    compared = run(f"trace compare {names[2]} --policy scalpel --knobs {out} --json {setting}")
    rows = {row["policy"]: row for row in json.loads(compared)["rows"]}
    assert rows.keys() == {"scalpel", "scalpel-learned"}
    (result,) = told["held_out"]
    assert rows["scalpel-learned"]["par_mean"] == pytest.approx(result["learned_par"])
    assert rows["scalpel-learned"]["transit"] == result["learned_transit"]
