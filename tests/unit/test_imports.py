"""What the core and a layer call import, in a process of their own."""

from __future__ import annotations

import json
import sys

import pytest

from helper_process import output_of

PROGRAM = """
import importlib, json, os, sys
before = dict(os.environ)
for name in sys.argv[1:]:
    importlib.import_module(name)
tops = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps([tops, os.environ == before]))
"""
CORE = [
    "eaas",
    "eaas.checkpoint",
    "eaas.cluster_snapshot",
    "eaas.config",
    "eaas.control_plane.balancer_client",
    "eaas.membership.session",
    "eaas.net.grpc_server",
]


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (CORE, {"torch", "transformers", "typer", "rich", "httpx", "attention_client"}),
        (
            ["attention_client.cluster"],
            {"transformers", "typer", "rich", "httpx", "fastapi"},
        ),
        (["monitor.main", "balancer.main"], {"torch", "transformers", "typer"}),
    ],
)
def test_imports_are_few_and_leave_the_environment_alone(
    modules: list[str], absent: set[str]
) -> None:
    printed = output_of(sys.executable, "-c", PROGRAM, *modules)
    imported, unchanged = json.loads(printed)
    assert not absent & set(imported)
    assert unchanged
