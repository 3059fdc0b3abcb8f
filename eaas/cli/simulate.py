"""`eaas simulate ...`: what runs live, on a trace and in no time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eaas.cli import (
    simulate_caps,
    simulate_fit,
    simulate_policy,
    simulate_replay,
    simulate_validate,
)
from eaas.cli.options import ConfigFile, Json
from eaas.errors import ConfigError, TrafficError

if TYPE_CHECKING:
    from eaas.config import AutoscalerConfig
    from simulator.savings import Comparison
    from simulator.serving import ServerModel
    from simulator.traffic import Traffic

__all__ = ["register"]

_PAPER_S = (600.0, 7200.0)
_PIPED_WIDTH = 160

simulate = typer.Typer(
    help="Simulations: the code that runs live, on a trace.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (
        simulate_caps,
        simulate_policy,
        simulate_fit,
        simulate_replay,
        simulate_validate,
    ):
        command.register(simulate)
    app.add_typer(simulate, name="simulate")


@simulate.callback()
def _simulate() -> None:
    pass


@simulate.command("autoscale")
def autoscale(
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Requests: an Azure (CSV) or Mooncake (JSON lines) trace."),
    ] = None,
    paper: Annotated[
        bool,
        typer.Option(
            "--paper",
            help="The paper's setting instead: 8,192 requests on 64 servers, then 5,120. "
            "Of the other options --token-ms, --change-s, --config and --json count.",
        ),
    ] = False,
    fixed: Annotated[
        str, typer.Option(help="Sizes of the groups to compare with.", metavar="N,N,...")
    ] = "8,16,32",
    start: Annotated[
        int | None,
        typer.Option(min=1, help="Servers at first.", show_default="the largest of --fixed"),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option("--max-servers", help="Most servers.", show_default="the largest of --fixed"),
    ] = None,
    server_tokens_per_s: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            help="Tokens that one busy server computes.",
            show_default="the largest of --fixed is right for the busiest minute",
        ),
    ] = None,
    token_ms: Annotated[
        float, typer.Option(min=1e-3, help="Between two tokens while servers keep up.")
    ] = 50.0,
    prompt_tokens: Annotated[
        int,
        typer.Option(min=0, help="Of a prompt in one step; 0: prompts are computed elsewhere."),
    ] = 256,
    change_s: Annotated[
        float, typer.Option(min=0, help="Seconds that a server takes to come or to go.")
    ] = 10.0,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Server-hours of a group that the autoscaler changes, beside groups of fixed sizes."""
    from eaas.bench.options import numbers, once
    from eaas.config import load_config
    from simulator import savings
    from simulator.serving import ServerModel
    from simulator.traffic import read_traffic

    if paper == (trace is not None):
        raise ConfigError("give --trace FILE, or --paper in its place")
    sizes = [savings.PAPER_SERVERS] if paper else [*once(numbers("--fixed", fixed))]
    if paper:
        start = most = server_tokens_per_s = None
        prompt_tokens = 0
    loaded = load_config(config, autoscaler={"max_servers": most or max(sizes)})
    settings, token_s = loaded.autoscaler, token_ms / 1000
    if settings.min_servers > settings.max_servers:
        raise ConfigError(
            f"autoscaler: min_servers {settings.min_servers} is above max_servers {settings.max_servers}"
        )
    with _progress() as progress:
        progress("reading", 0.0)
        if trace is None:
            traffic = savings.paper_traffic(token_s, *_PAPER_S)
        else:
            traffic = read_traffic(trace, lambda line: progress(f"reading, line {line:,}", 0.0))
        asked = savings.busiest_tokens_per_s(traffic, token_s, prompt_tokens)
        if not asked:
            raise TrafficError(f"{traffic.name}: no request asks these servers for a token")
        if server_tokens_per_s is None:
            server_tokens_per_s = savings.tokens_per_s_at_target(asked, max(sizes), settings)
        model = ServerModel(server_tokens_per_s, token_s, prompt_tokens)
        comparison = savings.compare(
            traffic,
            model,
            settings,
            sizes,
            start=start or max(sizes),
            fewest=loaded.balancer.redundancy,
            change_s=change_s,
            progress=lambda share: progress("replaying", share),
        )
    if as_json:
        typer.echo(json.dumps(_document(traffic, model, settings, asked, comparison)))
    else:
        _print(traffic, model, asked, comparison, sizes, paper)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error, where that is a terminal; gone at the end."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


def _document(
    traffic: Traffic,
    model: ServerModel,
    settings: AutoscalerConfig,
    asked: float,
    comparison: Comparison,
) -> dict[str, Any]:
    return {
        "trace": {
            "name": traffic.name,
            "requests": traffic.requests,
            "seconds": traffic.span_s,
            "busiest_minute_tokens_per_s": asked,
        },
        "server": {
            "tokens_per_s": model.tokens_per_s,
            "token_ms": 1000 * model.token_s,
            "prompt_tokens": model.prompt_tokens,
        },
        "autoscaler": settings.model_dump(),
        "groups": comparison.rows(),
        "servers_over_time": comparison.autoscaled.servers,
    }


def _print(
    traffic: Traffic,
    model: ServerModel,
    asked: float,
    comparison: Comparison,
    sizes: Sequence[int],
    paper: bool,
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{traffic.name}: {traffic.requests:,} requests in {traffic.span_s / 60:.0f} min",
        title_justify="left",
        box=None,
    )
    table.add_column("GROUP")
    columns = ("SERVERS", "LAST", "HOURS", "SAVED", "AT END", "BUSY", "ms/TOKEN", "p99", "SLOWED")
    for column in (*columns, "LEFT"):
        table.add_column(column, justify="right")
    for row in comparison.rows():
        servers = row["servers"]
        table.add_row(
            row["group"],
            f"{servers['fewest']}-{servers['most']}" if row["changes"] else str(servers["most"]),
            str(servers["last"]),
            f"{row['server_hours']:.2f}",
            _share(row["saved_by_autoscaling"]),
            _share(row["saved_at_end"]),
            _share(row["utilization"]),
            _ms(row["token_ms"]),
            _ms(row["token_ms_p99"]),
            _share(row["slowed_tokens"]),
            str(row["unfinished_requests"]),
        )
    console = Console(highlight=False)
    # Piped, there is no width to fit into.
    console = Console(highlight=False, width=None if console.is_terminal else _PIPED_WIDTH)
    console.print(table)
    console.print(_legend(model, asked, max(sizes)), soft_wrap=True)
    if paper:
        console.print(_PAPER, soft_wrap=True)


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 1000 else f"{milliseconds:.4g}"


def _legend(model: ServerModel, asked: float, largest: int) -> str:
    busy = asked / (largest * model.tokens_per_s)
    return f"""
HOURS: of servers. SAVED: by autoscaling, beside that group; AT END: by the number of servers at the end.
SLOWED: tokens that came later than {model.token_s * 1000:g} ms after the one before: too few servers.
p99: of the means between two looks. LEFT: requests that were not done at the end of the trace.
A busy server computes {model.tokens_per_s:,.0f} tokens/s: the busiest minute, of {asked:,.0f} tokens/s,
keeps {largest} servers {100 * busy:.0f} % busy.
Taken for granted: throughput is in proportion to servers, the load is even, requests are slowed alike."""


_PAPER = """
The paper's figure (section 5.3: up to 37.5 %) is AT END: 40 servers of 64. What it takes:
- 128 requests a server are as much as it should have, at either load;
- throughput is in proportion to servers (measured there from 32 to 64), and no expert needs more than 40;
- attention shrinks with the experts: the paper counts all GPUs that decode; prompts are computed elsewhere;
- the way there is left out. SAVED counts it: a window of waiting, then one server a minute."""
