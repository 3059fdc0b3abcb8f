"""The `eaas` program. Each command imports its modules when it runs, so that `--help` needs no torch."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from eaas import __version__
from eaas.config.former import FORMER_COMMANDS, FORMER_OPTIONS
from eaas.cores import limit_thread_pools
from eaas.errors import ConfigError
from eaas_cli.commands import (
    autoscale,
    bench,
    certs,
    chaos,
    client,
    demo,
    down,
    placement,
    roles,
    servers,
    simulate,
    top,
    trace,
    up,
    vllm,
)
from eaas_cli.errors import exit_with_one_line

__all__ = ["app", "main"]


class _Program(TyperGroup):
    """The program. The error for a former option names its successor."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            # NoSuchOption, of click or of the copy of it that newer versions of typer have.
            name, inner = getattr(error, "option_name", None), getattr(error, "ctx", None)
            if name is None or inner is None:
                raise
            option = f"{inner.command_path.removeprefix(f'{ctx.command_path} ')} {name}"
            if option not in FORMER_OPTIONS:
                raise
            raise ConfigError(f"`eaas {option}` is {FORMER_OPTIONS[option]}") from None


app = typer.Typer(
    name="eaas",
    cls=_Program,
    help="Expert-as-a-Service: serve Mixture-of-Experts models with the experts on separate servers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # The commands inherit it.
    context_settings={"help_option_names": ["--help", "-h"]},
)
for _command in (
    *(up.up, down.down, client.status, client.generate, top.top, servers.scale, servers.drain),
    *(autoscale.autoscale, placement.plan, placement.rebalance, placement.pin, placement.unpin),
    *(placement.policy, placement.history, certs.certs, roles.expert_server),
    *(
        roles.attention_client,
        roles.frontend,
        roles.monitor,
        roles.balancer,
        vllm.vllm,
        demo.demo_model,
    ),
):
    app.command(_command.__name__.replace("_", "-"))(_command)
_GROUPS = {
    "bench": bench.bench,
    "chaos": chaos.chaos,
    "simulate": simulate.simulate,
    "trace": trace.trace,
}
for _name, _group in _GROUPS.items():
    app.add_typer(_group, name=_name)


def _add_former(command: str, successor: str) -> None:
    """Add a former command, hidden from `--help`: its error names the command to give."""
    group, _, name = command.rpartition(" ")

    @_GROUPS.get(group, app).command(
        name,
        hidden=True,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def former() -> None:
        raise ConfigError(f"`eaas {command}` is {successor}")


for _name, _successor in FORMER_COMMANDS.items():
    _add_former(_name, _successor)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def main() -> None:
    """Run the program. A user's mistake prints one line on standard error and exits with code 2."""
    limit_thread_pools()
    atexit.register(_skip_last_collection)
    exit_with_one_line(app)


def _skip_last_collection() -> None:
    """Skip the last garbage collection, which would take more than a second with torch imported."""
    gc.freeze()
    if "triton" in sys.modules:
        # torch imports it where it is installed. Its bindings would print all of their objects as leaks.
        # Standard error may be closed, or its disk full. The rest of the output is lost.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
