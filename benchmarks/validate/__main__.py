"""Compare P50 and throughput of a cluster and of its simulation; exit code 1 above 10 % difference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from eaas_cli.bench.command import command, end_on_sigterm, model_or_demo, say, show
from eaas_cli.commands.options import ConfigFile, Json
from eaas_cli.errors import exit_with_one_line


def main(
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Checkpoint.", show_default="a demo checkpoint"),
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(metavar="NAME,...", show_default="fcfs,cost_bounded")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Arrival times: Azure's .csv or Mooncake's .jsonl; the first --requests of them.",
            show_default="Poisson",
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Text of a domain, for prompts. Repeatable.",
            show_default="synthetic domains",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Compared loads; the verdict uses their means.")
    ] = 10,
    requests: Annotated[int, typer.Option(min=10, help="Requests per load.")] = 40,
    load: Annotated[
        float, typer.Option(min=0.05, help="Arrival rate over the measured capacity.")
    ] = 3.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 4,
    window_size: Annotated[int, typer.Option(min=1, help="Requests to choose from.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 16,
    servers: Annotated[int, typer.Option(min=1, help="Expert servers.")] = 2,
    redundancy: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the arrivals without a trace.")] = 1,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Compare P50 and throughput of a cluster and of its simulation; exit code 1 above 10 % difference."""
    import numpy as np

    from attention_client.scheduler import strategy as strategy_named
    from attention_client.scheduler.strategies.cost_bounded import CostBounded
    from benchmarks.validate.compare_recording import Sizes
    from benchmarks.validate.domains import check_texts
    from benchmarks.validate.run import validate
    from eaas.errors import ConfigError
    from eaas_cli.option_values import words
    from simulator.autoscaling.traffic import read_arrivals

    end_on_sigterm()
    names = ("fcfs", CostBounded.name) if strategies is None else words(strategies)
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
    with model_or_demo(model) as checkpoint:
        document = validate(
            checkpoint,
            config,
            names,
            sizes,
            arrivals,
            texts=[tokens for _, tokens in texts],
            servers=servers,
            redundancy=redundancy,
            say=say,
        )
    show(document, as_json, _print)
    if not document["within"]:
        raise typer.Exit(1)


def _tokens(path: Path, model: Path | None) -> list[int]:
    """Tokenize a text. Raises ConfigError if the text or the tokenizer is missing."""
    from tokenizers import Tokenizer

    from eaas.errors import ConfigError

    if model is None:
        raise ConfigError("--prompts: the demo checkpoint cannot read texts; give a --model")
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
        print(f"  with the engine's own pace: {_words(row, 'error_own_steps')}")
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


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
