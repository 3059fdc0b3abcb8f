"""Decisions of CAPS (docs/scheduling.md): judge a strategy, fit a step's cost, replay a recorded queue."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from attention_client.scheduler import strategy as strategy_named
from eaas.cores import usable_cores
from eaas.errors import ConfigError
from eaas_cli.bench.command import figure, show
from eaas_cli.commands.options import Json
from eaas_cli.console import print_figures, print_rows, progress
from eaas_cli.errors import exit_with_one_line
from eaas_cli.option_values import numbers, once, positive_numbers
from simulator.autoscaling.traffic import read_traffic
from simulator.caps.policy import Trial
from simulator.caps.policy import judge as simulate
from simulator.caps.replay import replay as run_again

__all__ = ["ServerFit", "app", "fit_calls", "read_fits"]

_LEAST_SIZES = 3
_KERNEL = ("shape", "dtype", "kernel")

app = typer.Typer(
    help="Decisions of CAPS (docs/scheduling.md).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def judge(
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help="Strategy to judge.")
    ] = "greedy_dot_product",
    loads: Annotated[
        str, typer.Option(metavar="L,...", help="Calm loads: shares of FCFS's capacity, below 1.")
    ] = "0.5,0.6,0.7,0.8,0.9,0.95",
    overloads: Annotated[
        str, typer.Option(metavar="L,...", help="Overloads: shares of FCFS's capacity, above 1.")
    ] = "1.29,1.72,2.58",
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Also use the arrivals of this trace, as of `eaas simulate autoscale`.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a run without a trace.")] = 6000,
    seeds: Annotated[str, typer.Option(metavar="N,...", help="One run for each.")] = "1,2,3,4",
    predicted_pairs: Annotated[
        int, typer.Option(min=1, help="Token-expert pairs that a request's prediction sees.")
    ] = 40,
    step_us: Annotated[
        str | None,
        typer.Option(
            metavar="FIXED,LOAD,PAIR",
            help="Run batches on expert servers with these times (from `fit`).",
            show_default="the execution model of CAPS",
        ),
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="Expert servers, with --step-us.")] = 3,
    as_json: Json = False,
) -> None:
    """Compare a strategy with FCFS, calm and overloaded. Controls: random, a perfect predictor."""
    strategy_named(strategy)  # an unknown one is an error before anything runs
    calm = once(positive_numbers("--loads", loads))
    over = once(positive_numbers("--overloads", overloads))
    if max(calm) >= 1 or min(over) <= 1:
        raise ConfigError(f"--loads {loads} must be below 1, --overloads {overloads} above")
    trial = Trial(
        strategy,
        requests,
        once(numbers("--seeds", seeds, least=0)),
        calm,
        over,
        once(trace or []),
        predicted_pairs,
        None if step_us is None else _times(step_us),
        servers,
    )
    for path in trial.traces:
        read_traffic(path)
    with progress("simulating", trial.cells) as done:
        document = simulate(trial, usable_cores(), done)
    show(document, as_json, _report)


def _times(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if len(found) != 3 or not all(0 <= value < math.inf for value in found) or sum(found) <= 0:
        raise ConfigError(f"--step-us {text}: give three times in microseconds, FIXED,LOAD,PAIR")
    return found


def _report(document: dict[str, Any]) -> None:
    """Print the comparison with FCFS for each pattern and load, then the verdict."""
    columns = ("arrivals", "clustered", "load", "fcfs_p99_ms", "p99_reduction_pct")
    print_rows(document["rows"], columns)
    print("p99_reduction_pct: less P99 than FCFS; perfect predictor: with the true loads")
    print_figures(document["verdict"])


@app.command()
def fit(
    bench: Annotated[
        Path, typer.Argument(metavar="FILE", help="Output of `eaas bench experts --json`.")
    ],
    as_json: Json = False,
) -> None:
    """Fit the cost of a step: a fixed part, a part per active expert, a part per token-expert pair."""
    rows = [
        {
            **dict(zip(_KERNEL, kernel, strict=True)),
            "fixed_us": figure(1e6 * found.fixed_s),
            "load_us": figure(1e6 * found.load_s),
            "pair_us": figure(1e6 * found.pair_s),
            "worst_error_pct": round(100 * found.worst_error, 1),
        }
        for kernel, found in read_fits(bench).items()
    ]
    if as_json:
        typer.echo(json.dumps(rows))
    else:
        print_rows(rows)


@app.command()
def replay(
    recording: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Recording of an attention client (attention_client.scheduler.record).",
        ),
    ],
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Choose by this strategy.", show_default="the recorded one"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a recorded queue through the live code and count the choices that stay the same."""
    found = run_again(recording, strategy)
    document = {
        "strategy": found.settings.strategy,
        "requests": found.requests,
        "seconds": found.seconds,
        "choices": len(found.choices),
        "same_as_recorded": found.same,
        "passed_over": sum(choice.passed_over for choice in found.choices),
        "par_mean": round(found.par, 3),
    }
    show(document, as_json, print_figures)


@dataclass(frozen=True)
class ServerFit:
    """The model fixed_s + max(load_s x active, pair_s x pairs), in seconds, and its error.

    Attributes:
        fixed_s, load_s, pair_s: See `simulator.caps.cost.ServerCost`.
        worst_error: Largest relative error over the measured calls.
    """

    fixed_s: float
    load_s: float
    pair_s: float
    worst_error: float


def fit_calls(calls: Sequence[tuple[float, float, float]]) -> ServerFit:
    """Fit a model to calls of a kernel: non-negative least squares of the relative errors.

    Tries each split of the calls into those bound by weights and those bound by pairs.

    Args:
        calls: Active experts, token-expert pairs and seconds of each call.
    """
    calls_N3 = np.array(sorted(calls, key=lambda call: call[1]))
    fits = [_fit(calls_N3, by_weights) for by_weights in range(len(calls) + 1)]
    return min(fits, key=lambda fit: fit.worst_error)


def _fit(calls_N3: npt.NDArray[np.float64], by_weights: int) -> ServerFit:
    """Fit the model, with the first `by_weights` calls bound by weights and the others by pairs."""
    active_N, pairs_N, seconds_N = calls_N3.T
    is_by_weights_N = np.arange(len(seconds_N)) < by_weights
    terms_N3 = np.stack(
        [
            np.ones(len(seconds_N)),
            np.where(is_by_weights_N, active_N, 0.0),
            np.where(is_by_weights_N, 0.0, pairs_N),
        ],
        axis=1,
    )
    used = [column for column in range(3) if terms_N3[:, column].any()]
    while True:
        found, *_ = np.linalg.lstsq(terms_N3[:, used] / seconds_N[:, None], np.ones(len(seconds_N)))
        if not (found < 0).any():
            break
        del used[int(found.argmin())]
    fixed_s, load_s, pair_s = np.bincount(used, found, minlength=3).tolist()
    fitted_N = fixed_s + np.maximum(load_s * active_N, pair_s * pairs_N)
    return ServerFit(fixed_s, load_s, pair_s, float(abs(fitted_N / seconds_N - 1).max()))


def read_fits(path: Path) -> dict[tuple[str, str, str], ServerFit]:
    """Fit each shape, dtype and kernel in a document of `eaas bench experts --json`.

    Raises ConfigError: the file is not such a document, or has too few batch sizes.
    """
    calls: dict[tuple[str, str, str], list[tuple[float, float, float]]] = {}
    try:
        for row in json.loads(path.read_text())["rows"]:
            shape, dtype, kernel = (row[name] for name in _KERNEL)
            _, _, experts, top_k = (int(word) for word in shape.split(","))
            # Each token went to top-k experts, all equally likely.
            active = experts * (1 - (1 - top_k / experts) ** row["tokens"])
            call = active, row["tokens"] * top_k, row["ms"] / 1e3
            calls.setdefault((shape, dtype, kernel), []).append(call)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: no document of `eaas bench experts --json` ({type(error).__name__}: {error})"
        ) from error
    if not calls or min(map(len, calls.values())) < _LEAST_SIZES:
        raise ConfigError(f"{path}: a fit takes at least {_LEAST_SIZES} batch sizes (--tokens)")
    return {kernel: fit_calls(of_kernel) for kernel, of_kernel in calls.items()}


if __name__ == "__main__":
    exit_with_one_line(app)
