"""Decisions of CAPS (docs/scheduling.md): judge a strategy, fit a step's cost, replay a recorded queue."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from attention_client.scheduler import strategy as strategy_named
from benchmarks.harness.report import print_figures, print_rows
from eaas.cores import usable_cores
from eaas.errors import ConfigError
from eaas_cli.bench.command import figure, show
from eaas_cli.commands.options import Json
from eaas_cli.console import progress
from eaas_cli.errors import exit_with_one_line
from eaas_cli.option_values import numbers, once, positive_numbers
from simulator.autoscaling.traffic import read_arrivals
from simulator.caps.policy import cells
from simulator.caps.policy import judge as simulate
from simulator.caps.replay import replay as run_again

__all__ = ["ServerFit", "Step", "app", "fit_steps", "read_fits"]

_LEAST_SIZES = 3

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
    seed_list = once(numbers("--seeds", seeds, least=0))
    times_us = None if step_us is None else _times(step_us)
    traces = once(trace or [])
    for path in traces:
        read_arrivals(path)
    steps = cells(len(seed_list), len(calm), len(over), len(traces))
    with progress("simulating", steps) as done:
        document = simulate(
            strategy,
            requests,
            seed_list,
            calm,
            over,
            traces,
            predicted_pairs,
            times_us,
            servers,
            usable_cores(),
            done,
        )
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
            **name,
            **{
                f"{part}_us": figure(1e6 * getattr(found, f"{part}_s"))
                for part in ("fixed", "load", "pair")
            },
            "worst_error_pct": round(100 * found.worst_error, 1),
        }
        for name, found in read_fits(bench)
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
class Step:
    """A measured call of an expert kernel.

    Attributes:
        pairs: Number of token-expert pairs.
    """

    active: float
    pairs: float
    seconds: float


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


def fit_steps(steps: Sequence[Step]) -> ServerFit:
    """Fit a model to measured calls: non-negative least squares of the relative errors.

    Tries each split of the calls into those bound by weights and those bound by pairs.
    """
    by_pairs = sorted(steps, key=lambda step: step.pairs)
    fits = [_fit(by_pairs, loads) for loads in range(len(by_pairs) + 1)]
    return min(fits, key=lambda fit: fit.worst_error)


def read_fits(path: Path) -> list[tuple[dict[str, str], ServerFit]]:
    """Fit each shape, dtype and kernel in a document of `eaas bench experts --json`.

    Raises ConfigError: the file is not such a document, or has too few batch sizes.
    """
    try:
        document = json.loads(path.read_text())
        groups: dict[tuple[str, str, str], list[Step]] = {}
        # A row of `auto` repeats one of a kernel.
        for row in (row for row in document["rows"] if "picked" not in row):
            key = (row["shape"], row["dtype"], row["kernel"])
            groups.setdefault(key, []).append(_step(row))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: no document of `eaas bench experts --json` ({type(error).__name__}: {error})"
        ) from error
    if not groups or min(map(len, groups.values())) < _LEAST_SIZES:
        raise ConfigError(f"{path}: a fit takes at least {_LEAST_SIZES} batch sizes (--tokens)")
    return [
        ({"shape": shape, "dtype": dtype, "kernel": kernel}, fit_steps(steps))
        for (shape, dtype, kernel), steps in groups.items()
    ]


def _step(row: dict[str, Any]) -> Step:
    """Convert a row of the document to a call. Each token went to top-k experts, all equally likely."""
    _, _, experts, top_k = (int(word) for word in row["shape"].split(","))
    active = experts * (1 - (1 - top_k / experts) ** row["tokens"])
    return Step(active, row["tokens"] * top_k, row["ms"] / 1e3)


def _fit(by_pairs: Sequence[Step], loads: int) -> ServerFit:
    """Fit the model, with the first `loads` calls bound by weights and the others by pairs."""
    terms = np.array(
        [
            (1.0, step.active, 0.0) if place < loads else (1.0, 0.0, step.pairs)
            for place, step in enumerate(by_pairs)
        ]
    )
    seconds = np.array([step.seconds for step in by_pairs])
    used = [column for column in range(3) if terms[:, column].any()]
    while True:
        found, *_ = np.linalg.lstsq(terms[:, used] / seconds[:, None], np.ones(len(seconds)))
        if not (found < 0).any():
            break
        del used[int(found.argmin())]
    fixed_s, load_s, pair_s = np.bincount(used, found, minlength=3).tolist()
    errors = [
        abs(fixed_s + max(load_s * step.active, pair_s * step.pairs) - step.seconds) / step.seconds
        for step in by_pairs
    ]
    return ServerFit(fixed_s, load_s, pair_s, max(errors))


if __name__ == "__main__":
    exit_with_one_line(app)
