"""`python -m benchmarks.caps fit`: the cost of a step on an expert server, for `judge --step-us`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from eaas_cli.commands.options import Json

__all__ = ["fit"]


def fit(
    bench: Annotated[
        Path, typer.Argument(metavar="FILE", help="Output of `eaas bench experts --json`.")
    ],
    as_json: Json = False,
) -> None:
    """Fit the cost of a step: a fixed part, a part per active expert, a part per token-expert pair."""
    from simulator.caps.report import print_fits
    from simulator.caps.server_fit import read_fits

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
    else:
        print_fits(document)
