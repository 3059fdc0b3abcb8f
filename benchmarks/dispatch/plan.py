"""The plan of `python -m benchmarks.dispatch`, from its command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eaas_cli.bench.device import DEVICES
from eaas_cli.bench.experts.plan import BUILT_IN, Shape, parse_shape
from eaas_cli.option_values import known, numbers, once

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """Transports, sizes and durations that a run measures.

    Attributes:
        transports: In the order of measurement; the parts after the rows use the first.
        tokens: T of the exchanges; all of them fit a slot.
        with_server: Also measure a server and a real layer.
        device: One of DEVICES; with "cuda" there are also layer calls for tensors on the GPU.
        top_k: K.
        num_experts: E.
        watch_s: Seconds for which a server's processor time is measured.
        upkeep_tokens: T of the exchanges that keep that server busy.
        layer: Shape of the real layer.
        layer_tokens: T of the real layer's calls.
        servers: Servers that answer a layer call together, against one.
        sleep_us: How long each of them sleeps instead of computing.
    """

    transports: tuple[str, ...]
    hidden: tuple[int, ...]
    tokens: tuple[int, ...]
    rounds: int
    with_server: bool
    device: str = "cpu"
    top_k: int = 8
    num_experts: int = 128
    turn_s: float = 0.2
    watch_s: float = 3.0
    upkeep_tokens: int = 8
    layer: Shape = BUILT_IN[0]
    layer_tokens: tuple[int, ...] = (64,)
    servers: int = 3
    sleep_us: int = 2000


def make_plan(
    *,
    transports: Sequence[str],
    known_transports: Sequence[str],
    hidden: str,
    tokens: str,
    rounds: int,
    with_server: bool,
    device: str = "cpu",
    layer: str = str(BUILT_IN[0]),
    layer_tokens: str = "64",
    servers: int = 3,
    sleep_us: int = 2000,
) -> Plan:
    """Check the options of `python -m benchmarks.dispatch` and make a plan. Raises ConfigError."""
    return Plan(
        transports=known("--transport", transports or known_transports, known_transports),
        hidden=once(numbers("--hidden", hidden)),
        tokens=tuple(sorted(set(numbers("--tokens", tokens)))),
        rounds=rounds,
        with_server=with_server,
        device=known("--device", [device], DEVICES)[0],
        layer=parse_shape(layer),
        layer_tokens=tuple(sorted(set(numbers("--layer-tokens", layer_tokens)))),
        servers=servers,
        sleep_us=sleep_us,
    )
