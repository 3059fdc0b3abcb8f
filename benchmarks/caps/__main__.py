"""`python -m benchmarks.caps`."""

from __future__ import annotations

import typer

from benchmarks.caps.fit import fit
from benchmarks.caps.judge import judge
from benchmarks.caps.replay import replay
from eaas_cli.errors import exit_with_one_line

app = typer.Typer(
    help="Decisions of CAPS (docs/scheduling.md).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for run in (judge, fit, replay):
    app.command()(run)

if __name__ == "__main__":
    exit_with_one_line(app)
