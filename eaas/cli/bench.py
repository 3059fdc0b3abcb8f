"""`eaas bench ...`: benchmarks that anybody can repeat."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from eaas.cli import bench_client, bench_failover, bench_predict, bench_traces
from eaas.cli.options import Json
from eaas.collector import collector_off

__all__ = ["register"]

bench = typer.Typer(
    help="Benchmarks: ratios of two things measured in one run.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    bench_predict.register(bench)
    bench_failover.register(bench)
    bench_traces.register(bench)
    bench_client.register(bench)
    app.add_typer(bench, name="bench")


@bench.callback()
def _bench() -> None:
    pass


@bench.command("serve")
def serve(
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Checkpoint.", show_default="a demo checkpoint"),
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="Expert servers.")] = 3,
    redundancy: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 2,
    transport: Annotated[str, typer.Option(help="shm, grpc or nixl.")] = "shm",
    requests: Annotated[int, typer.Option(min=1, help="Requests in a round.")] = 16,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 3,
    baseline: Annotated[
        str,
        typer.Option(
            help="What the single process computes experts with: transformers, or an expert server's kernels."
        ),
    ] = "transformers",
    as_json: Json = False,
) -> None:
    """Decode tokens/s, time to first token and between tokens: a cluster, and one process, in turn."""
    from eaas.bench.load import Workload
    from eaas.bench.options import known
    from eaas.bench.serve import BASELINES, bench_serve
    from eaas.cli.bench_tables import print_serve

    _end_on_sigterm()
    (checked,) = known("--baseline", [baseline], BASELINES)
    workload = Workload(requests, concurrency, prompt_tokens, max_tokens)
    with tempfile.TemporaryDirectory(prefix="eaas-bench-") as scratch:
        if model is None:
            from eaas.demo_model import write_demo_model

            model = Path(scratch) / "demo"
            write_demo_model(model)
        document = bench_serve(
            model,
            servers=servers,
            redundancy=redundancy,
            transport=transport,
            workload=workload,
            rounds=rounds,
            baseline=checked,
            say=_say,
        )
    _tell(document, as_json, print_serve)


@bench.command("experts")
def experts(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="H,I,E,K",
            help="Measure this one, too: hidden, intermediate, experts, top-k.",
            show_default=False,
        ),
    ] = None,
    built_in: Annotated[
        bool,
        typer.Option(
            "--builtin/--no-builtin", help="Measure shapes A 2048,768,128,8 and B 7168,2048,16,8."
        ),
    ] = True,
    tokens: Annotated[str, typer.Option(metavar="T,...", help="Batch sizes.")] = "1,8,64,512,2048",
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the stored weights: bfloat16, float32, int8, int4.", show_default="all"
        ),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            help="native, packed, zentorch, reference, auto.",
            show_default="all that work here; reference only where auto picks it",
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Calls of each implementation; as few as 3 where they are slow."),
    ] = 5,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Of every implementation.", show_default="one for each core"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw the fractions.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Expert kernels: time, fraction of the machine's limit, and ratio to transformers, in one run."""
    with collector_off():
        from eaas.bench.experts import bench_experts, make_plan
        from eaas.bench.experts.plan import DTYPES
        from eaas.bench.experts.plot import check_plot, draw_plot
        from eaas.bench.experts.report import print_report
        from eaas.cores import usable_cores
        from expert_server.kernels.registry import KERNEL_NAMES

    _end_on_sigterm()
    plan = make_plan(
        shapes=shape or (),
        built_in=built_in,
        tokens=tokens,
        dtypes=dtype or DTYPES,
        kernels=kernel or (),
        known_kernels=KERNEL_NAMES,
        rounds=rounds,
        threads=threads or usable_cores(),
    )
    if plot is not None:
        check_plot(plot)
    document = bench_experts(plan, say=_say)
    if plot is not None:
        draw_plot(document, plot)
    _tell(document, as_json, print_report)


@bench.command("dispatch")
def dispatch(
    transport: Annotated[
        list[str] | None,
        typer.Option(help="Measure this one.", show_default="all that servers offer"),
    ] = None,
    hidden: Annotated[str, typer.Option(metavar="H,...", help="Hidden sizes.")] = "2048,7168",
    tokens: Annotated[
        str, typer.Option(metavar="T,...", help="Batch sizes; each fits a slot.")
    ] = "1,8,64,512",
    rounds: Annotated[
        int, typer.Option(min=1, help="Turns of each measurement; 3 where they are slow.")
    ] = 5,
    server: Annotated[
        bool,
        typer.Option(
            "--server/--no-server",
            help="Measure a server's processor time, a crowd and a real layer, too.",
        ),
    ] = True,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw the rows.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """The data plane: an exchange without compute, against the same copies in C, in one run."""
    with collector_off():
        from eaas.bench.dispatch import make_plan
        from eaas.bench.dispatch.plot import draw_plot
        from eaas.bench.dispatch.report import print_report
        from eaas.bench.dispatch.run import bench_dispatch
        from eaas.bench.experts.plot import check_plot
        from expert_server.service import transports as known_transports

    _end_on_sigterm()
    plan = make_plan(
        transports=transport or (),
        known_transports=known_transports(),
        hidden=hidden,
        tokens=tokens,
        rounds=rounds,
        with_server=server,
    )
    if plot is not None:
        check_plot(plot)
    document = bench_dispatch(plan, say=_say)
    if plot is not None:
        draw_plot(document, plot)
    _tell(document, as_json, print_report)


@bench.command("monitor")
def monitor(
    members: Annotated[
        str, typer.Option(metavar="N,...", help="Simulated members, in turn.")
    ] = "100,1000,10000",
    watchers: Annotated[
        str, typer.Option(metavar="N,...", help="How many of them watch; then all do.")
    ] = "10,100,1000",
    per_connection: Annotated[
        int, typer.Option(min=1, help="Members that share a connection.")
    ] = 1,
    loaders: Annotated[int, typer.Option(min=1, help="Processes that simulate members.")] = 2,
    seconds: Annotated[float, typer.Option(min=1, help="Of each measurement.")] = 10.0,
    as_json: Json = False,
) -> None:
    """The monitor: what members cost it, and how soon all know of a death. Takes some minutes."""
    from eaas.bench.monitor import make_plan
    from eaas.bench.monitor.report import print_report
    from eaas.bench.monitor.run import bench_monitor

    _end_on_sigterm()
    plan = make_plan(
        members=members,
        watchers=watchers,
        per_connection=per_connection,
        loaders=loaders,
        seconds=seconds,
    )
    _tell(bench_monitor(plan, say=_say), as_json, print_report)


@bench.command("overlap")
def overlap(
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Checkpoint.", show_default="a demo checkpoint, hidden 512"),
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="Expert servers.")] = 1,
    transport: Annotated[str, typer.Option(help="shm, grpc or nixl.")] = "shm",
    latency: Annotated[
        str, typer.Option(metavar="US,...", help="Added to each request's way, microseconds.")
    ] = "0,2000,5000,10000",
    sequences: Annotated[str, typer.Option(metavar="B,...", help="Batch sizes.")] = "8,32,128",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    steps: Annotated[int, typer.Option(min=2, help="Decode steps of a round.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of each way.")] = 3,
    as_json: Json = False,
) -> None:
    """Double-batch overlap: decode steps with it, without, and chosen, with servers far away."""
    from eaas.bench.options import numbers

    _end_on_sigterm()
    # Before the imports: transformers takes seconds, a typing error should not.
    latency_us = numbers("--latency", latency, least=0)
    batches = numbers("--sequences", sequences)
    with collector_off():
        from eaas.bench.overlap import bench_overlap
        from eaas.cli.bench_tables import print_overlap

    with tempfile.TemporaryDirectory(prefix="eaas-bench-") as scratch:
        if model is None:
            from eaas.demo_model import write_demo_model

            model = Path(scratch) / "demo"
            write_demo_model(model, hidden=512, max_shard_size="100MB")
        document = bench_overlap(
            model,
            servers=servers,
            transport=transport,
            latency_us=latency_us,
            sequences=batches,
            prompt_tokens=prompt_tokens,
            steps=steps,
            rounds=rounds,
            say=_say,
        )
    _tell(document, as_json, print_overlap)


@bench.command("select")
def select(
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="W,E", help="Window and experts.", show_default="32,60 and 128,256"),
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Measure these.", show_default="all")
    ] = None,
    decisions: Annotated[int, typer.Option(min=1, help="Of each row.")] = 2000,
    as_json: Json = False,
) -> None:
    """One decision of each selection strategy, batches of 8."""
    from attention_client.scheduler import strategy, strategy_names
    from eaas.bench.options import numbers, words
    from eaas.bench.select import bench_select
    from eaas.cli.bench_tables import print_select
    from eaas.errors import ConfigError

    names = strategy_names() if strategies is None else words(strategies)
    for name in names:
        strategy(name)
    sizes = []
    for text in size or ("32,60", "128,256"):
        found = numbers("--size", text)
        if len(found) != 2:
            raise ConfigError(f"--size {text}: give two whole numbers, the window and the experts")
        sizes.append((found[0], found[1]))
    _tell(bench_select(sizes, names, decisions), as_json, print_select)


@bench.command("join")
def join(
    share_mb: Annotated[
        int, typer.Option(min=1, help="Weights that the new server is to hold, MB.")
    ] = 1000,
    source: Annotated[
        list[str] | None,
        typer.Option(help="Where they come from: disk, peers.", show_default="both"),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of another client's layer call.")] = 8,
    calls: Annotated[float, typer.Option(min=1, help="Calls of that client in a second.")] = 50,
    quiet: Annotated[
        float, typer.Option(min=1, help="Seconds that it is measured before somebody joins.")
    ] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Joins of each source.")] = 3,
    as_json: Json = False,
) -> None:
    """A server that joins: how fast it serves, by what its weights come from, and what others feel."""
    _end_on_sigterm()
    from eaas.bench.options import known

    sources = known("--source", source or ["disk", "peers"], ("disk", "peers"))
    from eaas.bench.join import bench_join
    from eaas.bench.join.report import print_report

    document = bench_join(
        share_bytes=share_mb * 1_000_000,
        sources=sources,
        tokens=tokens,
        calls_per_s=calls,
        quiet_s=quiet,
        rounds=rounds,
        say=_say,
    )
    _tell(document, as_json, print_report)


@bench.command("rebalance")
def rebalance(
    share_mb: Annotated[int, typer.Option(min=1, help="Replicas that a server loads, MB.")] = 500,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a client's layer call.")] = 8,
    calls: Annotated[float, typer.Option(min=1, help="Calls of that client in a second.")] = 100,
    quiet: Annotated[
        float, typer.Option(min=1, help="Seconds that it is measured before each roll-out.")
    ] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Roll-outs.")] = 5,
    as_json: Json = False,
) -> None:
    """A placement that changes: how much slower calls are while a server loads replicas."""
    _end_on_sigterm()
    from eaas.bench.rebalance import bench_rebalance
    from eaas.bench.rebalance.report import print_report

    document = bench_rebalance(
        share_bytes=share_mb * 1_000_000,
        tokens=tokens,
        calls_per_s=calls,
        quiet_s=quiet,
        rounds=rounds,
        say=_say,
    )
    _tell(document, as_json, print_report)


@bench.command("policies")
def policies(
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="L,E,S,P",
            help="Layers, experts, servers, replicas per layer.",
            show_default="58,256,64,320; 58,256,288,576; 60,512,1000,2000",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Measure this one.", show_default="all")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Plans of each policy and size.")] = 9,
    as_json: Json = False,
) -> None:
    """Placement policies: time of planning on one core, and how good the plan is."""
    from eaas.bench.policies import SIZES, bench_policies, parse_size
    from eaas.cli.bench_tables import print_policies

    _end_on_sigterm()
    sizes = [parse_size(text) for text in size] if size else SIZES
    _tell(bench_policies(sizes, policy or (), rounds=rounds, say=_say), as_json, print_policies)


def _end_on_sigterm() -> None:
    """SIGTERM ends the run as Python's SIGINT does: through its `finally`s, with processes and files."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tell(
    document: dict[str, Any], as_json: bool, report: Callable[[dict[str, Any]], None]
) -> None:
    if as_json:
        typer.echo(json.dumps(document))
    else:
        report(document)
