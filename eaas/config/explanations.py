"""One-line messages about wrong settings: where the value comes from, and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

__all__ = ["BETWEEN", "PREFIX", "explain", "variable"]

PREFIX = "EAAS_"
BETWEEN = "__"

REMOVED = {
    "balancer.ack_timeout_s": "is fixed at 10 s",
    "balancer.drift_tv": "is fixed at 0.2",
    "balancer.drift_tolerance": "is fixed at 0.2",
    "balancer.least_gain": "is fixed at 0.02",
    "balancer.horizon_s": "is fixed at 600 s",
    "balancer.latency_target_ms": "is autoscaler.latency_target_ms, which live knobs hold, too",
    "autoscaler.tolerance": "is fixed at 0.15",
    "expert_server.spin_us": "is fixed at 20 us",
    "attention_client.spin_us": "is fixed at 20 us",
    "attention_client.cache_block_tokens": "is fixed at 64; set cache_blocks for a larger cache",
    "attention_client.scheduler.most_stretch": "went with the strategy cost_bounded",
    "attention_client.scheduler.weight_pairs": "went with the strategy cost_bounded",
    "attention_client.scheduler.predicted_layers": "is fixed at 1",
}
"""Removed settings of earlier versions, and their replacements."""


def variable(*place: str) -> str:
    """Name of the environment variable that sets a section or a field in it, for errors and their check."""
    return (PREFIX + BETWEEN.join(place)).upper()


def explain(
    error: ValidationError, path: Path | None, given: Mapping[str, Mapping[str, object]]
) -> str:
    """Describe the first wrong setting in one line: source, name, value, problem.

    Args:
        error: The validation error.
        path: The configuration file, if there is one.
        given: Fields that the command line sets, by section.
    """
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    section, field = (*place, "", "")[:2]
    variables = {name.upper() for name in os.environ}
    if field in given.get(section, {}):
        source = f"--{field.replace('_', '-')}"
    elif known := next(
        (v for v in (variable(*place[:n]) for n in (3, 2, 1)) if v in variables), None
    ):
        source = known
    else:
        source = str(path)
    name = ".".join(place)
    if now := REMOVED.get(name):
        what = f"no longer a setting: it {now}. Delete this setting"
    elif first["type"] == "extra_forbidden":
        what = "no such setting"
    else:
        what = first["msg"]
    # A key may contain line breaks.
    return " ".join(f"{source}: {name} = {first['input']!r}: {what}".split())
