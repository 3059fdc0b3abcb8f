"""One load generator: `python -m benchmarks.dispatch.load_generator_process JSON`."""

from __future__ import annotations

import itertools
import json
import sys
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.dispatch.caller import Caller, random_request
from benchmarks.dispatch.turns import take_turn
from eaas.launcher_pipe import announce, bind_to_launcher
from eaas.log import configure_logging
from eaas_cli.bench.worker import commands_from

__all__ = ["main"]


def main(arguments: str) -> None:
    """Exchange on command until SIGTERM; see `load_generators.py` for the arguments."""
    bind_to_launcher()
    configure_logging("bench-client")
    torch.set_num_threads(1)
    wanted: dict[str, Any] = json.loads(arguments)
    request = random_request(
        wanted["tokens"], wanted["hidden"], wanted["num_experts"], wanted["top_k"]
    )
    with ExitStack() as stack:
        callers = [
            stack.enter_context(
                Caller(
                    address,
                    wanted["transport"],
                    hidden=wanted["hidden"],
                    num_experts=wanted["num_experts"],
                    top_k=wanted["top_k"],
                    name=wanted["client"],
                    slots=wanted["slots"],
                )
            )
            for address in wanted["addresses"]
        ]
        next_caller = itertools.cycle(callers)
        commands = commands_from(wanted["control"])
        announce(ready=wanted["client"])
        for command, reply in commands:
            reply(take_turn(lambda: next(next_caller).exchange(request), command["seconds"]))


if __name__ == "__main__":
    main(sys.argv[1])
