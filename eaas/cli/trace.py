"""`eaas trace ...`: routing traces, and what placement policies make of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from eaas.cli.options import Json, Model
from eaas.cli.progress import progress_bar
from eaas.words import counted

__all__ = ["register"]

trace = typer.Typer(
    help="Routing traces: how many tokens each expert got, and what policies make of it.",
    no_args_is_help=True,
)

Source = Annotated[
    Path, typer.Argument(metavar="TRACE", help="A .npz, .npy, .csv, or SGLang's .pt.")
]
Target = Annotated[Path, typer.Argument(metavar="FILE", help="A .npz, .npy or .csv to write.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(trace, name="trace")


@trace.callback()
def _trace() -> None:
    pass


@trace.command("record")
def record(
    target: Target,
    model: Model,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text, one prompt a line.", show_default="8 built-in"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 32,
    temperature: Annotated[
        float, typer.Option(min=0, help="0: greedy; above: tokens are drawn, always the same.")
    ] = 0.0,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Join this cluster: its servers compute the experts.",
            show_default="in this process",
        ),
    ] = None,
) -> None:
    """Run a checkpoint and count what its routers choose."""
    from eaas.checkpoint import precheck
    from eaas.trace.file import check_target, write_trace

    # Before the imports: transformers takes seconds, a typing error should not.
    check_target(target)
    precheck(model)
    from eaas.trace.record import PROMPTS, read_prompts, record_trace

    texts = PROMPTS if prompts is None else read_prompts(prompts)
    with progress_bar() as bar:
        task = bar.add_task("recording", total=1.0)
        recorded = record_trace(
            model,
            texts,
            batch=batch,
            max_tokens=max_tokens,
            temperature=temperature,
            endpoint=endpoint,
            progress=lambda part: bar.update(task, completed=part),
        )
    write_trace(recorded, target)
    _wrote(target, recorded.counts_ILE.shape)


@trace.command("convert")
def convert(
    source: Source,
    target: Target,
    experts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="TRACE is a .npy with the ids of each token's experts (tokens, layers, top-k), out of so "
            "many per layer.",
            show_default="TRACE holds counts",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="With --experts: tokens that count as one iteration.")
    ] = 1024,
) -> None:
    """Write a trace in another format."""
    from eaas.trace.file import check_target, write_trace
    from eaas.trace.readers import read_token_ids, read_trace

    check_target(target)
    converted = read_trace(source) if experts is None else read_token_ids(source, experts, tokens)
    write_trace(converted, target)
    _wrote(target, converted.counts_ILE.shape)


@trace.command("generate")
def generate(
    target: Target,
    regime: Annotated[str, typer.Option(help="skewed, drift, flips or uniform.")] = "skewed",
    iterations: Annotated[int, typer.Option(help="Forward passes.")] = 6144,
    layers: Annotated[int, typer.Option(help="MoE layers.")] = 58,
    experts: Annotated[int, typer.Option(help="Experts per layer.")] = 256,
    tokens: Annotated[int, typer.Option(help="Tokens of a batch.")] = 1024,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same trace.")] = 0,
) -> None:
    """Make a synthetic trace; skewed and flips are fitted to published figures of DeepSeek-R1."""
    from eaas.trace import generate_trace, write_trace
    from eaas.trace.file import check_target

    check_target(target)
    with progress_bar() as bar:
        task = bar.add_task(regime, total=1.0)
        made = generate_trace(
            regime,
            iterations=iterations,
            layers=layers,
            experts=experts,
            tokens=tokens,
            top_k=top_k,
            seed=seed,
            progress=lambda part: bar.update(task, completed=part),
        )
    write_trace(made, target)
    _wrote(target, made.counts_ILE.shape)


@trace.command("info")
def info(
    source: Source,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="DATASET",
            help="Measure how far it is from published figures: LmSys, WildChat, ShareGPT, Mix.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say how large and how skewed a trace is, and how much it changes."""
    from eaas.trace.published import published
    from eaas.trace.readers import read_trace
    from eaas.trace.summary import summary

    if against is not None:
        published(against)
    loaded = read_trace(source)
    document = summary(loaded)
    if against is not None:
        from simulator.calibration import deviations

        with progress_bar() as bar:
            task = bar.add_task(f"against {against}", total=1.0)
            document["against"] = deviations(
                loaded, against, progress=lambda part: bar.update(task, completed=part)
            )
    if as_json:
        typer.echo(json.dumps(document))
        return
    from eaas.cli.trace_report import print_summary

    print_summary(document)


@trace.command("compare")
def compare(
    source: Source,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Replay this one; with +split after it, clients split each batch anew.",
            show_default="all, and fractional+split",
        ),
    ] = None,
    servers: Annotated[str, typer.Option(metavar="S,...", help="Numbers of servers.")] = "64",
    interval: Annotated[
        str, typer.Option(metavar="N,...", help="Iterations between plans.")
    ] = "256,1024",
    slots: Annotated[
        int | None,
        typer.Option(help="Replicas per layer.", show_default="experts + servers"),
    ] = None,
    planning: Annotated[
        str,
        typer.Option(
            metavar="S",
            help="What each plan is taken to last, in seconds; or 'measured': what it takes here.",
        ),
    ] = "0.4",
    knobs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also scalpel with these, of `eaas knobs train`.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw PAR over time.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay placement policies over a trace: balance, replicas moved, planning time, score."""
    from eaas.bench.experts.plot import check_plot
    from eaas.bench.options import numbers, once
    from eaas.trace.readers import read_trace
    from simulator.compare import compare as run
    from simulator.planners import parse_name, usual_names

    planning_s = _planning_s(planning)
    counts = once(numbers("--servers", servers))
    intervals = once(numbers("--interval", interval))
    policies = once(policy or usual_names())
    for name in policies:
        parse_name(name)
    if plot is not None:
        check_plot(plot)
    learned = None
    if knobs is not None:
        from balancer.live.learned import read_knobs

        learned = read_knobs(knobs, must_win=False).knobs
    loaded = read_trace(source)
    with progress_bar() as bar:
        task = bar.add_task("", total=1.0)
        comparison = run(
            loaded,
            policies,
            servers=counts,
            intervals=intervals,
            slots=slots,
            planning_s=planning_s,
            learned=learned,
            progress=lambda what, part: bar.update(task, description=what, completed=part),
        )
    if plot is not None:
        from simulator.plot import draw_plot

        draw_plot(comparison, plot)
    if as_json:
        typer.echo(json.dumps(comparison.document()))
        return
    from eaas.cli.trace_report import print_comparison

    print_comparison(comparison)


def _planning_s(text: str) -> float | None:
    from eaas.errors import ConfigError

    if text == "measured":
        return None
    try:
        given = float(text)
    except ValueError:
        given = -1.0
    if not 0 <= given < math.inf:
        raise ConfigError(f"--planning {text}: give seconds, at least 0, or 'measured'")
    return given


def _wrote(target: Path, shape: tuple[int, ...]) -> None:
    iterations, layers, experts = shape
    typer.echo(
        f"wrote {target}: {counted(iterations, 'iteration')}, "
        f"{counted(layers, 'layer')}, {counted(experts, 'expert')}"
    )
