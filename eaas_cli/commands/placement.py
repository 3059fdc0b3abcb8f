"""`eaas plan`, `rebalance`, `pin`, `policy`, `history`: commands to a running cluster's balancer."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eaas.counted import counted
from eaas.errors import ConfigError
from eaas_cli.commands.options import DEFAULT_ENDPOINT, Endpoint, Json, KeyToShow, Tls
from eaas_cli.commands.servers import balancer_of
from eaas_cli.endpoint import fetch_status

if TYPE_CHECKING:
    from eaas.control_plane.balancer_client import BalancerClient
    from eaas.rpc.v1 import balancer_pb2

__all__ = ["history", "pin", "plan", "policy", "rebalance", "unpin"]

# Largest int32 of the contract. The balancer checks its own limits.
_MOST = 2**31 - 1

Policy = Annotated[
    str | None,
    typer.Option(help="Policy for this plan (docs/policies.md).", show_default="the one in force"),
]
Layer = Annotated[
    int, typer.Argument(help="MoE layer, from 0.", min=0, max=_MOST, show_default=False)
]
Expert = Annotated[
    int, typer.Argument(help="Logical expert, from 0.", min=0, max=_MOST, show_default=False)
]
Server = Annotated[str, typer.Argument(help="Server id, as in `eaas status`.", show_default=False)]


def plan(
    policy: Policy = None,
    more_servers: Annotated[
        int, typer.Option(help="Plan with this many more servers.", min=0, max=_MOST)
    ] = 0,
    without: Annotated[
        list[str] | None,
        typer.Option(help="Plan without this server. Repeatable.", show_default=False),
    ] = None,
    redundancy: Annotated[
        int | None,
        typer.Option(
            help="Servers that hold each expert.", min=1, max=_MOST, show_default="unchanged"
        ),
    ] = None,
    redundant_experts: Annotated[
        int | None,
        typer.Option(
            help="Extra replicas per layer, for balance.",
            min=0,
            max=_MOST,
            show_default="unchanged",
        ),
    ] = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    key_file: KeyToShow = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Evaluate a new placement, for this cluster or a changed one; nothing is moved."""
    with _balancer(endpoint, key_file, tls) as balancer:
        answer = balancer.plan(
            policy or "",
            more_servers=more_servers,
            without_servers=without or (),
            redundancy=redundancy,
            num_redundant_experts=redundant_experts,
        )
    _show(answer, as_json)


def rebalance(
    policy: Policy = None,
    force: Annotated[
        bool, typer.Option("--force", help="Apply the plan even if it is not worth its cost.")
    ] = False,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    key_file: KeyToShow = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Plan now, and apply the plan if its benefit exceeds its cost. `eaas history` shows the result.

    Requests continue during the moves.
    """
    with _balancer(endpoint, key_file, tls) as balancer:
        answer = balancer.rebalance(policy or "", force=force)
    if as_json:
        typer.echo(json.dumps({"applied": answer.applied, "plan": _document(answer.plan)}))
        return
    _show(answer.plan, as_json=False)
    typer.echo(_applied(answer, force))


def _applied(answer: balancer_pb2.RebalanceResponse, force: bool) -> str:
    """Sentence on what `rebalance` applies of its plan: the moves, new shares alone, or nothing."""
    from eaas.rpc.v1 import balancer_pb2

    if not answer.applied:
        return "Nothing changes."
    if answer.plan.moves and (force or answer.plan.verdict == balancer_pb2.VERDICT_MOVES):
        return "The moves are being applied."
    return "New shares are being applied; no expert moves."


def pin(
    layer: Layer,
    expert: Expert,
    server: Server,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    key_file: KeyToShow = None,
    tls: Tls = None,
) -> None:
    """Keep an expert on a server, whatever the policy."""
    with _balancer(endpoint, key_file, tls) as balancer:
        balancer.pin(layer, expert, server)
    typer.echo(f"layer {layer}, expert {expert}: pinned to {server}")


def unpin(
    layer: Layer,
    expert: Expert,
    server: Server,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    key_file: KeyToShow = None,
    tls: Tls = None,
) -> None:
    """Undo a pin: the policy places the expert again."""
    with _balancer(endpoint, key_file, tls) as balancer:
        balancer.unpin(layer, expert, server)
    typer.echo(f"layer {layer}, expert {expert}: no longer pinned to {server}")


def policy(
    name: Annotated[str, typer.Argument(help="Policy (docs/policies.md).", show_default=False)],
    knob: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Knob of the policy. Repeatable.",
            show_default=False,
        ),
    ] = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    key_file: KeyToShow = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Set the placement policy. Knobs that are not given return to their defaults.

    spread acts at once, the other policies at the next interval.
    """
    knobs = _numbers(knob or ())
    with _balancer(endpoint, key_file, tls) as balancer:
        before = balancer.set_policy(name, knobs)
    if as_json:
        typer.echo(json.dumps({"policy": name, "knobs": knobs, "before": before}))
        return
    typer.echo(f"policy set to {name} (was {before})")


def _numbers(given: Sequence[str]) -> dict[str, float]:
    """Parse the NAME=VALUE words of `--knob`. Raises ConfigError for others and for a name given twice."""
    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not name or not math.isfinite(number):
            raise ConfigError(f"--knob {text}: give NAME=VALUE, a name and a number")
        if name in found:
            raise ConfigError(f"--knob {name} is given twice: give it once")
        found[name] = number
    return found


def history(
    limit: Annotated[int, typer.Option(help="Decisions to show; 0: all.", min=0, max=_MOST)] = 20,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    key_file: KeyToShow = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Show past placement decisions, their reasons and their results."""
    with _balancer(endpoint, key_file, tls) as balancer:
        entries = balancer.history(limit)
    if as_json:
        typer.echo(json.dumps([_document(entry) for entry in entries]))
        return
    for entry in reversed(entries):
        typer.echo(_line(entry))


def _balancer(endpoint: str, key_file: Path | None, tls: Path | None) -> BalancerClient:
    return balancer_of(endpoint, fetch_status(endpoint, key_file), tls)


def _document(message: Any) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _show(answer: balancer_pb2.PlanResponse, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_document(answer)))
        return
    typer.echo(f"policy {answer.policy}, placement of epoch {answer.epoch}")
    typer.echo(
        f"PAR {answer.par_now:.3f} now, {answer.par_then:.3f} then; "
        f"bound {answer.bound:.3f}, gap {answer.gap:.3f}"
    )
    typer.echo(_moves(answer))
    typer.echo(f"best: {_verdict(answer.verdict)}: {answer.reason}")
    typer.echo(f"survives the loss of any one node: {_survival(answer)}")


def _survival(answer: balancer_pb2.PlanResponse) -> str:
    if not answer.HasField("experts_on_one_node"):
        return "unknown: the servers' nodes are not known yet"
    if not answer.experts_on_one_node:
        return "yes"
    return f"no ({counted(answer.experts_on_one_node, 'expert')} with all replicas on one node)"


def _moves(answer: balancer_pb2.PlanResponse) -> str:
    """Text on a plan's loads and unloads of experts, and on their effect on the PAR."""
    if not answer.moves:
        return "nothing would move"
    line = f"{counted(answer.transit, 'load')} ({answer.bytes / 1e6:.1f} MB)"
    if unloads := len(answer.moves) - answer.transit:
        line += f" and {counted(unloads, 'unload')}"
    if not math.isfinite(answer.payback_s):
        return f"{line}, which would not lower the PAR"
    effect = f"lower the PAR by {answer.gain:.3f} and pay back in {answer.payback_s:.1f} s"
    return f"{line}, which would {effect}"


def _line(entry: balancer_pb2.HistoryEntry) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.unix_ms / 1e3))
    parts = [f"{at}  #{entry.number} {entry.trigger}: {_verdict(entry.verdict)}: {entry.reason}"]
    if entry.epoch:
        parts.append(
            f"epoch {entry.epoch_before} -> {entry.epoch}, plan {entry.plan_s:.2f} s, "
            f"prepare {_phase(entry.prepare_s)}, retire {_phase(entry.retire_s)}"
        )
    if entry.given_up:
        parts.append(f"given up: {entry.given_up}")
    return "; ".join(parts)


def _phase(seconds: float) -> str:
    """Format the seconds of a roll-out's phase; "-" if it has not ended or was given up."""
    return f"{seconds:.2f} s" if seconds else "-"


def _verdict(verdict: balancer_pb2.Verdict) -> str:
    from eaas.rpc.v1 import balancer_pb2

    return balancer_pb2.Verdict.Name(verdict).removeprefix("VERDICT_").lower()
