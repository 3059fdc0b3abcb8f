"""Clients that others made, with tools, streams and structured output, on each architecture's demo model.

EAAS_CLIENT_PYTHONS has the interpreters of environments with clients, as PATH has directories. The first that
has a client is used: pip install langchain-openai litellm pydantic-ai-slim[openai] anthropic lm-eval[api],
and in an environment of its own llama-index-llms-openai-like.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import client_program
from eaas_cli.demo_model import ARCHITECTURES
from http_box import demo_endpoint

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(1200)]

OFFLINE = {
    name: "True"
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "LITELLM_LOCAL_MODEL_COST_MAP")
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """NAME=URL of a server of each architecture's demo model."""
    directory = tmp_path_factory.mktemp("models")
    with ExitStack() as stack:
        found = []
        for arch in ARCHITECTURES:
            endpoint = demo_endpoint(directory / arch, arch, client_program.MODEL)
            url, _ = stack.enter_context(endpoint)
            found.append(f"{arch}={url}")
        yield found


@pytest.mark.parametrize("client", client_program.CLIENTS)
def test_tools_streams_and_objects(servers: list[str], client: str, tmp_path: Path) -> None:
    pythons = [*os.environ.get("EAAS_CLIENT_PYTHONS", "").split(os.pathsep), sys.executable]
    for python in filter(None, pythons):
        done = subprocess.run(
            [python, client_program.__file__, client, *servers],
            cwd=tmp_path,
            env=os.environ | OFFLINE | {"HF_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=900,
        )
        if done.returncode != client_program.MISSING:
            assert done.returncode == 0, done.stderr[-4000:]
            failures = json.loads(done.stdout.splitlines()[-1])
            assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())
            return
    pytest.skip(f"{client} is not installed, see EAAS_CLIENT_PYTHONS: {done.stderr[-300:]}")
