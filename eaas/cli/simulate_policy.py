"""`eaas simulate policy`: whether a strategy can be left on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from eaas.cli.options import Json
from eaas.cli.progress import progress

__all__ = ["register"]


def register(simulate: typer.Typer) -> None:
    """Add the command."""
    simulate.command("policy")(policy)


def policy(
    strategy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Judge this one.", show_default="the default")
    ] = None,
    loads: Annotated[
        str, typer.Option(metavar="L,...", help="In calm: shares of FCFS's capacity, below 1.")
    ] = "0.5,0.6,0.7,0.8,0.9,0.95",
    overloads: Annotated[
        str, typer.Option(metavar="L,...", help="Under overload: likewise, above 1.")
    ] = "1.29,1.72,2.58",
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Times of arrivals, too: Azure's .csv or Mooncake's .jsonl.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a run without a trace.")] = 6000,
    seeds: Annotated[str, typer.Option(metavar="N,...", help="A run for each.")] = "1,2,3,4",
    predicted_pairs: Annotated[
        int, typer.Option(min=1, help="Pairs of token and expert that a request's prediction sees.")
    ] = 40,
    step_us: Annotated[
        str | None,
        typer.Option(
            metavar="FIXED,LOAD,PAIR",
            help="Batches run on expert servers with these times (eaas simulate fit).",
            show_default="the execution model of CAPS",
        ),
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="Expert servers, with --step-us.")] = 3,
    as_json: Json = False,
) -> None:
    """A strategy against FCFS in calm and under overload; controls: random, a perfect predictor."""
    from attention_client.scheduler import strategy as strategy_named
    from attention_client.scheduler.strategies.registry import DEFAULT
    from eaas.bench.options import numbers, once, positive_numbers
    from eaas.cores import usable_cores
    from eaas.errors import ConfigError
    from simulator.caps.policy import cells, judge
    from simulator.caps.report import print_judgement
    from simulator.traffic import read_arrivals

    name = DEFAULT if strategy is None else strategy
    strategy_named(name)  # an unknown one is an error before anything runs
    calm, over = (
        once(positive_numbers("--loads", loads)),
        once(positive_numbers("--overloads", overloads)),
    )
    if max(calm) >= 1 or min(over) <= 1:
        raise ConfigError(f"--loads {loads} must be below 1, --overloads {overloads} above")
    seed_list = once(numbers("--seeds", seeds, least=0))
    times_us = step_us if step_us is None else _times(step_us)
    traces = once(trace or [])
    for path in traces:
        read_arrivals(path)
    steps = cells(len(seed_list), len(calm), len(over), len(traces))
    with progress("simulating", steps) as done:
        document = judge(
            name,
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
        print_judgement(document)


def _times(text: str) -> list[float]:
    from eaas.errors import ConfigError

    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if len(found) != 3 or not all(0 <= value < math.inf for value in found) or sum(found) <= 0:
        raise ConfigError(f"--step-us {text}: give three times in microseconds, FIXED,LOAD,PAIR")
    return found
