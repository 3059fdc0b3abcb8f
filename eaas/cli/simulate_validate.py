"""`eaas simulate validate`: simulated against live."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from eaas.cli.options import ConfigFile, Json

__all__ = ["register"]


def register(simulate: typer.Typer) -> None:
    """Add the command."""
    simulate.command("validate")(validate)


def validate(
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Checkpoint.", show_default="a demo checkpoint"),
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(metavar="NAME,...", show_default="fcfs and the default")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Times of arrivals: Azure's .csv or Mooncake's .jsonl; the first --requests of it.",
            show_default="Poisson",
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Text of a domain, that prompts are taken from. May be given again.",
            show_default="domains are drawn",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Compared loads; their means count.")] = 10,
    requests: Annotated[int, typer.Option(min=10, help="Requests of each.")] = 40,
    load: Annotated[
        float, typer.Option(min=0.05, help="Arrivals, as a share of what the cluster can do.")
    ] = 3.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 4,
    window_size: Annotated[int, typer.Option(min=1, help="Requests to choose from.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 16,
    servers: Annotated[int, typer.Option(min=1, help="Expert servers.")] = 2,
    redundancy: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the arrivals without a trace.")] = 1,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """P50 and throughput of a cluster and of its simulation; ends with 1 where they are 10 % apart."""
    import numpy as np

    from attention_client.scheduler import strategy as strategy_named
    from attention_client.scheduler.strategies.registry import DEFAULT
    from eaas.bench.compare_recording import Sizes
    from eaas.bench.domains import check_texts
    from eaas.bench.options import words
    from eaas.bench.validate import validate
    from eaas.errors import ConfigError
    from simulator.traffic import read_arrivals

    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    names = ("fcfs", DEFAULT) if strategies is None else words(strategies)
    for name in names:
        strategy_named(name)  # an unknown one is an error before anything starts
    if window_size < batch_size:
        raise ConfigError(
            f"--window-size {window_size}: smaller than a batch (--batch-size {batch_size}), "
            "which could never be filled"
        )
    times = None if trace is None else read_arrivals(trace)
    if times is not None and len(times) < requests:
        raise ConfigError(f"--trace {trace}: {len(times)} requests, --requests is {requests}")

    texts = [(str(path), _tokens(path, model)) for path in prompts or []]
    check_texts(texts, prompt_tokens)

    def arrivals(count: int, rate: float) -> Sequence[float]:
        if times is None:
            gaps_s = np.random.default_rng(seed).exponential(1 / rate, count)
            return [float(at) for at in np.cumsum(gaps_s) - gaps_s[0]]
        span = times[count - 1] or 1.0
        return [at * (count - 1) / rate / span for at in times[:count]]

    sizes = Sizes(rounds, requests, prompt_tokens, max_tokens, batch_size, window_size, load)
    with tempfile.TemporaryDirectory(prefix="eaas-validate-") as scratch:
        if model is None:
            from eaas.demo_model import write_demo_model

            model = Path(scratch) / "demo"
            write_demo_model(model)
        document = validate(
            model,
            config,
            names,
            sizes,
            arrivals,
            texts=[tokens for _, tokens in texts],
            servers=servers,
            redundancy=redundancy,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    if as_json:
        typer.echo(json.dumps(document))
    else:
        _print(document)
    if not document["within"]:
        raise typer.Exit(1)


def _tokens(path: Path, model: Path | None) -> list[int]:
    """A text's, by the model's tokenizer. Raises ConfigError where there is no such text or tokenizer."""
    from tokenizers import Tokenizer

    from eaas.errors import ConfigError

    if model is None:
        raise ConfigError("--prompts: texts say nothing to the demo checkpoint; give a --model")
    try:
        text = path.read_text(encoding="utf-8")
        found: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"--prompts {path}, by the tokenizer of {model}: {error}") from error
    return found


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    columns = ("", "P50 live", "simulated", "req/s live", "simulated", "choices")
    for column in columns:
        table.add_column(column, justify="right")
    for row in document["strategies"]:
        for each in row["rounds"]:
            live, simulated = each["live"], each["simulated"]
            table.add_row(
                row["strategy"],
                f"{live['p50_ms']:.0f} ms",
                f"{simulated['p50_ms']:.0f} ms",
                f"{live['throughput_per_s']:.2f}",
                f"{simulated['throughput_per_s']:.2f}",
                str(each["choices"]),
            )
    Console().print(table)
    for row in document["strategies"]:
        print(f"{row['strategy']}, means of {len(row['rounds'])} rounds:")
        print(f"  {_words(row, 'error')}")
        print(f"  with the engine's pace of the time: {_words(row, 'error_own_steps')}")
    first = document["strategies"][0]["strategy"]
    for row in document["strategies"][1:]:
        print(f"{row['strategy']} against {first}, live: {_words(row, 'live_change')}")
    verdict = "within" if document["within"] else "NOT within"
    print(f"{document['rate_per_s']} requests/s; {verdict} {100 * document['tolerance']:.0f} %")


_NAMES = {
    "p50_ms": "P50",
    "p99_ms": "P99",
    "throughput_per_s": "throughput",
    "itl_p50_ms": "P50 between tokens",
    "itl_p99_ms": "P99 between tokens",
}


def _words(row: dict[str, Any], kind: str) -> str:
    """Each figure with its interval."""
    found, intervals = row[kind], row[f"{kind}_ci95"]
    parts = []
    for key, name in _NAMES.items():
        if key in found:
            low, high = (f"{100 * end:+.1f}" for end in intervals[key])
            parts.append(f"{name} {100 * found[key]:+.1f} % ({low} to {high})")
    return ", ".join(parts)
