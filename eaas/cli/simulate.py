"""`eaas simulate ...`: questions that simulated time answers. A module for each command."""

from __future__ import annotations

import typer

from eaas.cli import simulate_caps, simulate_fit, simulate_policy

__all__ = ["register"]

simulate = typer.Typer(
    help="Simulations: policies and strategies that run live, in simulated time.",
    no_args_is_help=True,
)
simulate_caps.register(simulate)
simulate_policy.register(simulate)
simulate_fit.register(simulate)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(simulate, name="simulate")


@simulate.callback()
def _simulate() -> None:
    pass
