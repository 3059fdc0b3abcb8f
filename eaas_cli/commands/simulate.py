"""`eaas simulate ...`: run the live code in simulated time, on a trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eaas.errors import ConfigError
from eaas_cli.bench.command import show
from eaas_cli.commands.options import ConfigFile, Json
from eaas_cli.commands.simulate_caps import caps
from eaas_cli.console import print_rows, progress_of

if TYPE_CHECKING:
    from simulator.autoscaling.traffic import Traffic

__all__ = ["simulate"]

_PAPER_S = (600.0, 7200.0)

simulate = typer.Typer(
    help="Simulations: the live autoscaler and request scheduler, on a trace.",
    no_args_is_help=True,
)


Unit = Annotated[
    Literal["s", "ms", "us", "ns"] | None,
    typer.Option(
        help="Unit of the trace's times, if they are numbers.",
        show_default="told by the trace's fields and span",
    ),
]
Paper = Annotated[
    bool,
    typer.Option(
        "--paper",
        help="Run the paper's setting instead: 8,192 requests on 64 servers, then 5,120. "
        "Only --token-ms, --change-s, --config and --json apply to it.",
    ),
]


@simulate.command("autoscale")
def autoscale(
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Requests (CSV or JSON lines): a trace of Azure, Bailian, BurstGPT, LLMServingSim or "
            "Mooncake.",
        ),
    ] = None,
    time_unit: Unit = None,
    paper: Paper = False,
    fixed: Annotated[
        str, typer.Option(help="Sizes of the fixed groups to compare with.", metavar="N,N,...")
    ] = "8,16,32",
    start: Annotated[
        int | None,
        typer.Option(min=1, help="Servers at the start.", show_default="the largest of --fixed"),
    ] = None,
    max_servers: Annotated[
        int | None,
        typer.Option(help="Maximum number of servers.", show_default="the largest of --fixed"),
    ] = None,
    server_tokens_per_s: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            help="Tokens per second of one busy server.",
            show_default="fits the largest of --fixed to the busiest minute",
        ),
    ] = None,
    token_ms: Annotated[
        float, typer.Option(min=1e-3, help="Milliseconds between two tokens while servers keep up.")
    ] = 50.0,
    prompt_tokens: Annotated[
        int,
        typer.Option(min=0, help="Prompt tokens of one step; 0: prompts are computed elsewhere."),
    ] = 256,
    change_s: Annotated[
        float, typer.Option(min=0, help="Seconds that a server takes to join or to leave.")
    ] = 10.0,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Compare the server-hours of an autoscaled group with groups of fixed sizes."""
    from eaas.config import load_config
    from eaas_cli.option_values import numbers, once
    from simulator.autoscaling import savings

    if paper == (trace is not None):
        raise ConfigError("give --trace FILE, or --paper in its place")
    sizes = [savings.PAPER_SERVERS] if paper else [*once(numbers("--fixed", fixed))]
    if paper:
        start = max_servers = server_tokens_per_s = None
        prompt_tokens = 0
    loaded = load_config(config, autoscaler={"max_servers": max_servers or max(sizes)})
    with progress_of("reading") as tell:
        study = savings.study(
            _traffic(trace, time_unit, token_ms / 1000, tell),
            loaded.autoscaler,
            sizes,
            start=start or max(sizes),
            fewest=loaded.balancer.redundancy,
            change_s=change_s,
            token_s=token_ms / 1000,
            prompt_tokens=prompt_tokens,
            tokens_per_s=server_tokens_per_s,
            progress=lambda share: tell(share, "replaying"),
        )
    if study.traffic.warning:
        typer.echo(f"warning: {study.traffic.warning}", err=True)
    show(study.document(), as_json, lambda document: _print(document, max(sizes), paper))


simulate.command("caps")(caps)


def _traffic(trace: Path | None, unit: Unit, token_s: float, tell: Callable[..., None]) -> Traffic:
    """Read the trace, or make the paper's traffic."""
    from simulator.autoscaling import savings
    from simulator.autoscaling.traffic import read_traffic

    if trace is None:
        return savings.paper_traffic(token_s, *_PAPER_S)
    return read_traffic(trace, unit, lambda line: tell(text=f"line {line:,}"))


def _print(document: dict[str, Any], largest: int, paper: bool) -> None:
    trace = document["trace"]
    print_rows(
        document["groups"],
        title=f"{trace['name']}: {trace['requests']:,} requests in {trace['seconds'] / 60:.0f} min",
    )
    print(_legend(document["server"], trace["busiest_minute_tokens_per_s"], largest))
    if paper:
        print(_PAPER)


def _legend(server: dict[str, float], asked: float, largest: int) -> str:
    busy = asked / (largest * server["tokens_per_s"])
    return f"""
saved by autoscaling, saved at end: share of that group's server hours, and of its servers at the end.
slowed tokens: share that came more than {server["token_ms"]:g} ms after the one before: too few servers.
token ms p99: of the means of each interval.
A busy server computes {server["tokens_per_s"]:,.0f} tokens/s. The busiest minute needs {asked:,.0f} tokens/s
and keeps {largest} servers {100 * busy:.0f} % busy.
Assumptions: throughput is proportional to servers, the load is even, all requests slow down alike."""


_PAPER = """
The paper's figure (section 5.3: up to 37.5 %) is `saved at end`: 40 servers of 64. It assumes:
- 128 requests per server are the right load, at either rate;
- throughput is proportional to servers (measured there from 32 to 64), and no expert needs more than 40;
- attention shrinks with the experts: the paper counts all GPUs that decode; prompts are computed elsewhere;
- the way down is free. `saved by autoscaling` counts it: a window of waiting, then a server per minute."""
