"""Commands of `python -m benchmarks.caps`: judge, fit, replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.caps.judge import judge
from eaas_cli.commands.options import Json
from eaas_cli.errors import exit_with_one_line

app = typer.Typer(
    help="Decisions of CAPS (docs/scheduling.md).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(judge)


@app.command()
def fit(
    bench: Annotated[
        Path, typer.Argument(metavar="FILE", help="Output of `eaas bench experts --json`.")
    ],
    as_json: Json = False,
) -> None:
    """Fit the cost of a step: a fixed part, a part per active expert, a part per token-expert pair."""
    from benchmarks.caps.server_fit import read_fits

    document = [
        {
            **name,
            **{
                f"{part}_us": float(f"{1e6 * getattr(found, f'{part}_s'):.4g}")
                for part in ("fixed", "load", "pair")
            },
            "worst_error_pct": round(100 * found.worst_error, 1),
        }
        for name, found in read_fits(bench)
    ]
    if as_json:
        typer.echo(json.dumps(document))
        return
    for row in document:
        typer.echo(", ".join(f"{key} {value}" for key, value in row.items()))


@app.command()
def replay(
    recording: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Recording of an attention client (attention_client.scheduler.record).",
        ),
    ],
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Choose by this strategy.", show_default="the recorded one"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a recorded queue through the live code and count the choices that stay the same."""
    from simulator.caps.replay import replay as run

    found = run(recording, strategy)
    document = {
        "strategy": found.settings.strategy,
        "requests": found.requests,
        "seconds": found.seconds,
        "choices": len(found.choices),
        "same_as_recorded": found.same,
        "passed_over": sum(choice.passed_over for choice in found.choices),
        "predicted_cost": found.predicted_s,
    }
    if as_json:
        typer.echo(json.dumps(document))
        return
    for key, value in document.items():
        typer.echo(f"{key.replace('_', ' ')}: {value}")


if __name__ == "__main__":
    exit_with_one_line(app)
