"""`eaas trace ...`: record, make and inspect routing traces, and replay placement policies over them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eaas.counted import counted
from eaas_cli.bench.command import show
from eaas_cli.commands.options import Json, Model, Plot
from eaas_cli.console import print_figures, print_rows, progress_of

if TYPE_CHECKING:
    from simulator import Comparison

__all__ = ["trace"]

# Points of a line in a plot, about half of its width in pixels.
_POINTS = 384

trace = typer.Typer(
    help="Routing traces: tokens per expert, and placement policies replayed over them.",
    no_args_is_help=True,
)

Source = Annotated[
    Path,
    typer.Argument(metavar="TRACE", help="A .npz, a .csv, SGLang's .pt, or an array of counts."),
]
Target = Annotated[Path, typer.Argument(metavar="FILE", help="A .npz, .npy or .csv to write.")]


@trace.command("record")
def record(
    target: Target,
    model: Model,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text file, one prompt per line.", show_default="8 built-in"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 32,
    temperature: Annotated[
        float, typer.Option(min=0, help="0: greedy; above 0: sampled with a fixed seed.")
    ] = 0.0,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Cluster whose servers compute the experts.",
            show_default="this process computes them",
        ),
    ] = None,
) -> None:
    """Run a checkpoint and count the experts that its routers choose."""
    from eaas.checkpoint import precheck
    from simulator.traces.file import check_target, write_trace

    # Check before the imports, which take seconds, so that a mistake is named at once.
    check_target(target)
    precheck(model, tokenizer=True)
    from simulator.traces.record import PROMPTS, read_prompts, record_trace

    texts = PROMPTS if prompts is None else read_prompts(prompts)
    with progress_of("recording") as tell:
        recorded = record_trace(
            model,
            texts,
            batch=batch,
            max_tokens=max_tokens,
            temperature=temperature,
            endpoint=endpoint,
            progress=tell,
        )
    write_trace(recorded, target)
    _wrote(target, recorded.counts_ILE.shape)


@trace.command("generate")
def generate(
    target: Target,
    regime: Annotated[
        str,
        typer.Option(
            help="Load over time: skewed, drift, flips, uniform, bursty_topics or correlated_layers."
        ),
    ] = "skewed",
    iterations: Annotated[int, typer.Option(help="Forward passes.")] = 6144,
    layers: Annotated[int, typer.Option(help="MoE layers.")] = 58,
    experts: Annotated[int, typer.Option(help="Experts per layer.")] = 256,
    tokens: Annotated[int, typer.Option(help="Tokens per batch.")] = 1024,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same trace.")] = 0,
) -> None:
    """Make a synthetic trace. skewed and flips are fitted to published figures of DeepSeek-R1."""
    from simulator.traces import generate_trace, write_trace
    from simulator.traces.file import check_target

    check_target(target)
    with progress_of(regime) as tell:
        made = generate_trace(
            regime,
            iterations=iterations,
            layers=layers,
            experts=experts,
            tokens=tokens,
            top_k=top_k,
            seed=seed,
            progress=tell,
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
            help="Compare with published figures: LmSys, WildChat, ShareGPT or Mix.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the size, the skew and the drift of a trace."""
    from simulator.traces import read_trace
    from simulator.traces.published import published
    from simulator.traces.trace import summary

    if against is not None:
        published(against)
    loaded = read_trace(source)
    document = summary(loaded)
    if against is not None:
        from simulator.placement.calibration import deviations

        with progress_of(f"against {against}") as tell:
            document["against"] = deviations(loaded, against, progress=tell)
    show(document, as_json, _print_summary)


@trace.command("convert")
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A trace, or an array: .npy, .npz, .safetensors or .pt (whose code does not run).",
        ),
    ],
    target: Target,
    kind: Annotated[
        Literal["ids", "counts"] | None,
        typer.Option(
            help="What an array holds: ids of each token's experts (tokens, layers, top-k), or counts of "
            "tokens (iterations, layers, experts).",
            show_default="asked for if the array can be either",
        ),
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Experts per layer; ids alone do not tell.",
            show_default="for counts: the array's",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Of ids: tokens of one iteration.", show_default="1024"),
    ] = None,
    array: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The array to read from a file of several.",
            show_default="the only one",
        ),
    ] = None,
) -> None:
    """Convert a trace to another format, or an array of routed experts to a trace."""
    from simulator.traces import read_trace, write_trace
    from simulator.traces.arrays import Meaning
    from simulator.traces.file import check_target

    check_target(target)
    said = Meaning(kind, experts, tokens, array)
    converted = read_trace(source, said)
    write_trace(converted, target)
    _wrote(target, converted.counts_ILE.shape)


Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="Policy to replay; NAME+dispatch divides each batch as clients do, NAME+split in the "
        "best way. NAME+spare splits, too, and one slot of each server follows the last 8 batches: "
        "an expert takes 1.8 ms (400 Gb/s), an iteration 80 ms. Repeatable.",
        show_default="all, and fractional+split",
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Deal the servers to this many nodes, and show what the loss of the worst one costs.",
        show_default="nodes are unknown",
    ),
]


@trace.command("compare")
def compare(
    source: Source,
    policies: Policies = None,
    servers: Annotated[
        str, typer.Option(metavar="S,...", help="Numbers of servers to replay with.")
    ] = "64",
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
            help="Seconds that each plan counts as; 'measured' takes the time on this machine.",
        ),
    ] = "0.4",
    nodes: Nodes = None,
    racks: Annotated[
        int, typer.Option(min=1, help="With --nodes: deal the nodes to this many racks.")
    ] = 1,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Replay placement policies over a trace: balance, moved replicas, planning time, score, lost nodes."""
    from eaas_cli.option_values import numbers, once
    from eaas_cli.plot import check_plot
    from simulator.placement.compare import compare as run
    from simulator.placement.planners import parse_name, usual_names
    from simulator.traces import read_trace

    planning_s = _planning_s(planning)
    counts, intervals = once(numbers("--servers", servers)), once(numbers("--interval", interval))
    names = once(policies or usual_names())
    for name in names:
        parse_name(name)
    if plot is not None:
        check_plot(plot)
    loaded = read_trace(source)
    with progress_of("") as tell:
        comparison = run(
            loaded,
            names,
            servers=counts,
            intervals=intervals,
            slots=slots,
            planning_s=planning_s,
            nodes=nodes,
            racks=racks,
            progress=lambda what, part: tell(part, what),
        )
    if plot is not None:
        _draw(comparison, plot)
    show(comparison.document(), as_json, lambda document: _print_comparison(document, comparison))


def _draw(comparison: Comparison, path: Path) -> None:
    """Draw PAR over time: a panel for each number of servers, a line for each policy and interval."""
    import numpy as np

    from eaas_cli.plot import Line, draw_plot

    panels: dict[str, list[Line]] = {}
    for run in comparison.replays:
        par_I = run.par_IL.mean(axis=1)
        edges = np.linspace(0, len(par_I), min(_POINTS, len(par_I)) + 1).astype(int)
        par_P = np.add.reduceat(par_I, edges[:-1]) / np.diff(edges)
        label = f"{run.policy} / {run.interval}" if run.plans else run.policy
        line = Line(label, ((edges[:-1] + edges[1:]) / 2).tolist(), par_P.tolist())
        panels.setdefault(f"{run.servers} servers", []).append(line)
    draw_plot(path, panels, "iteration", "PAR, mean of layers", limit=1.0)


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


def _print_comparison(document: dict[str, Any], comparison: Comparison) -> None:
    print_rows(document["rows"])
    print(
        "par: busiest server over the mean; transit: loaded replicas; plan ms: time on this machine; "
        "score 100: EPLB every 1,024 iterations"
    )
    if comparison.replays[0].losses:
        print(
            "node loss, rack loss: share of tokens whose experts the worst node or rack has alone"
        )
    if not all(baseline.plans for baseline in comparison.baselines.values()):
        print("The trace ends before EPLB's first plan: score 100 is the layout at the start.")


def _print_summary(document: dict[str, Any]) -> None:
    print_figures(document)
    if "against" in document:
        print_rows(document["against"]["rows"])
        print("off: par over that of the dataset, less 1")
