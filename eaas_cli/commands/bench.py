"""`eaas bench`: the endpoint and the expert kernels, each against a baseline in the same run."""

from __future__ import annotations

from typing import Annotated

import typer

from eaas.garbage_collection import collector_off
from eaas_cli.bench.command import end_on_sigterm, model_or_demo, say, show
from eaas_cli.commands.options import DemoModel, Json, Plot, Transport

__all__ = ["bench"]

bench = typer.Typer(help="Benchmarks: each compares two systems in one run.", no_args_is_help=True)


@bench.command("serve")
def serve(
    model: DemoModel = None,
    servers: Annotated[int, typer.Option(min=1, help="Expert servers.")] = 3,
    redundancy: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 2,
    transport: Transport = "shm",
    requests: Annotated[int, typer.Option(min=1, help="Requests per round.")] = 16,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 3,
    baseline: Annotated[
        str,
        typer.Option(
            help="Experts of the single process: transformers, or an expert server's kernels."
        ),
    ] = "transformers",
    as_json: Json = False,
) -> None:
    """Compare a cluster with one process: tokens/s, time to first token, time between tokens."""
    from eaas_cli.bench.load import Workload
    from eaas_cli.bench.serve import BASELINES, bench_serve, print_serve
    from eaas_cli.option_values import known

    end_on_sigterm()
    (checked,) = known("--baseline", [baseline], BASELINES)
    workload = Workload(requests, concurrency, prompt_tokens, max_tokens)
    with model_or_demo(model) as checkpoint:
        document = bench_serve(
            checkpoint,
            servers=servers,
            redundancy=redundancy,
            transport=transport,
            workload=workload,
            rounds=rounds,
            baseline=checked,
            say=say,
        )
    show(document, as_json, print_serve)


@bench.command("experts")
def experts(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="H,I,E,K",
            help="Shape to measure: hidden, intermediate, experts, top-k. Repeatable.",
            show_default="2048,768,128,8 and 7168,2048,16,8",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="T,...",
            help="Batch sizes.",
            show_default="1,8,64,512,2048; on a GPU the last is 4096",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Stored weights: bfloat16, float32, or a format such as int8. Repeatable.",
            show_default="all; of a GPU bfloat16, and the formats that it computes from",
        ),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            help="native or reference; of a GPU triton. Repeatable.",
            show_default="all that work here; reference only if auto picks it",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Calls of each implementation; slow ones get at least 3.",
            show_default="5; of a GPU 20",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda: a GPU.")] = "cpu",
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="First measure a GPU's tiles, launched from Python; its servers then use the fastest.",
        ),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of each implementation.", show_default="one per core"),
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Measure expert kernels: time, fraction of the machine's limit, speed-up over transformers."""
    with collector_off():
        from eaas_cli.bench.experts import bench_experts, make_plan
        from eaas_cli.bench.experts.report import draw, print_report
        from eaas_cli.plot import check_plot

    end_on_sigterm()
    plan = make_plan(
        shapes=shape or (),
        tokens=tokens,
        dtypes=dtype or (),
        kernels=kernel or (),
        rounds=rounds,
        threads=threads,
        device=device,
        tune=tune,
    )
    if plot is not None:
        check_plot(plot)
    document = bench_experts(plan, say=say)
    if plot is not None:
        draw(document, plot)
    show(document, as_json, print_report)
