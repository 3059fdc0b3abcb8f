"""`python -m benchmarks.caps judge`: whether a batch selection strategy can be enabled permanently."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from eaas.errors import ConfigError
from eaas_cli.commands.options import Json
from eaas_cli.console import print_table, progress
from simulator.caps.policy import PERFECT, cells
from simulator.caps.policy import judge as run
from simulator.caps.workload import PATTERNS

__all__ = ["judge"]


def judge(
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help="Strategy to judge.")
    ] = "cost_bounded",
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
    from attention_client.scheduler import strategy as strategy_named
    from eaas.cores import usable_cores
    from eaas_cli.option_values import numbers, once, positive_numbers
    from simulator.autoscaling.traffic import read_arrivals

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
        document = run(
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
    if as_json:
        typer.echo(json.dumps(document))
    else:
        _print(document)


def _times(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if len(found) != 3 or not all(0 <= value < math.inf for value in found) or sum(found) <= 0:
        raise ConfigError(f"--step-us {text}: give three times in microseconds, FIXED,LOAD,PAIR")
    return found


def _print(document: dict[str, Any]) -> None:
    """Print the comparison with FCFS for each pattern and load, then the verdict."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        kind = "clusters" if row["clustered"] else "independent"
        named = row["arrivals"] if row["arrivals"] in PATTERNS else f"{row['arrivals']}, {kind}"
        groups.setdefault(named, []).append(row)
    for named, rows in groups.items():
        labels = list(rows[0]["p99_reduction_pct"])
        heads = ("(perfect)" if label.endswith(PERFECT) else label for label in labels)
        lines = [
            (
                f"{row['load']:g}",
                f"{row['fcfs_p99_ms']:.0f} ms",
                *(_change(row["p99_reduction_pct"][label]) for label in labels),
            )
            for row in rows
        ]
        print_table(("load", "FCFS P99", *heads), lines, title=named)
    print("P99 against FCFS, less is better; (perfect): with the true loads")
    verdict = document["verdict"]
    for told, worst in verdict["worst_in_calm"].items():
        share = verdict["share_of_greedy_gain_pct"][told]
        gains = ", ".join(f"{arrivals} {value:.0f} %" for arrivals, value in share.items())
        half = worst["p99_reduction_ci95_pct"]
        sure = "" if half is None else f" (95 %: {half:.1f} more or less)"
        print(
            f"{told}: at worst {_change(worst['p99_reduction_pct'])}{sure} in calm "
            f"({worst['arrivals']}, load {worst['load']:g}); "
            f"of greedy's gain under overload at least: {gains or 'it has none'}"
        )
    print(f"correlation of the prediction with the truth: {verdict['predictor_correlation']}")


def _change(reduction_pct: float) -> str:
    """Format a reduction as a change, in per cent. `0.0 -` avoids showing -0.0."""
    return f"{0.0 - reduction_pct:+.1f} %"
