"""Former commands, and words of other programs. Each ends with an error that names the command to give."""

from __future__ import annotations

import typer

from eaas.errors import ConfigError

__all__ = ["register"]

_IN_A_CLONE = ("client", "dispatch", "failover", "policies")
_REMOVED = ("join", "overlap", "predict", "rebalance", "select", "traces")
# What people type who know vllm, docker or ollama.
_ELSEWHERE = {
    **dict.fromkeys(("serve", "run", "start"), "up DIR"),
    "stop": "down",
    **dict.fromkeys(("ps", "list", "ls"), "status"),
    "chat": "generate PROMPT",
    "help": "--help",
}


def register(app: typer.Typer, bench: typer.Typer, simulate: typer.Typer) -> None:
    """Add the former commands, hidden from `--help`."""
    for name in _IN_A_CLONE:
        _add(bench, f"bench {name}", _clone(f"benchmarks.{name}"))
    for name in _REMOVED:
        _add(
            bench,
            f"bench {name}",
            "gone; docs/performance.md and docs/scheduling.md keep its figures",
        )
    _add(bench, "bench monitor", _clone("benchmarks.scale --only monitor"))
    _add(simulate, "simulate policy", _clone("benchmarks.caps judge"))
    for name in ("fit", "replay"):
        _add(simulate, f"simulate {name}", _clone(f"benchmarks.caps {name}"))
    _add(simulate, "simulate validate", "gone; docs/scheduling.md keeps its figures")
    _add(app, "knobs", "gone; docs/policies.md keeps its figures")
    for name, ours in _ELSEWHERE.items():
        _add(app, name, f"`eaas {ours}` here")


def _clone(module: str) -> str:
    return f"now `python -m {module}`, in a clone of the repository"


def _add(group: typer.Typer, command: str, successor: str) -> None:
    @group.command(
        command.split()[-1],
        hidden=True,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def moved() -> None:
        raise ConfigError(f"`eaas {command}` is {successor}")
