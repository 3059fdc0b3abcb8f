"""vLLM's environment, in which tests run vLLM: `make setup-vllm` makes it, or EAAS_VLLM_PYTHON names it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from helper_process import output_of

__all__ = ["NEEDS_VLLM", "PYTHON", "ROOT", "environment", "generate", "run"]

ROOT = Path(__file__).parents[2]
_VARIABLE = "EAAS_VLLM_PYTHON"
# Removed, because `eaas` refuses unknown variables of that form.
_given = os.environ.pop(_VARIABLE, None)
PYTHON = Path(_given or ROOT / ".venv-vllm/bin/python")
# A set-up that failed leaves an environment without vLLM; the stamp is its last file.
NEEDS_VLLM = pytest.mark.skipif(
    not (PYTHON if _given else ROOT / ".venv-vllm/.serving").is_file(),
    reason=f"no vLLM: `make setup-vllm`, or set {_VARIABLE}",
)
# Starting vLLM takes about a minute, of which most is its imports.
_GENERATE_S = 400.0
_END_S = 10.0


def environment() -> dict[str, str]:
    """The environment of a process of vLLM's Python."""
    # Another environment's entry points may be those of another directory.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def run(code: str, timeout_s: float = 100.0) -> str:
    """Run code in vLLM's Python; return its output."""
    return output_of(PYTHON, "-c", code, timeout_s=timeout_s, env=environment(), cwd=ROOT)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End vLLM's processes, which outlive a killed one.

    The resource tracker ignores SIGTERM. It ends after the others, and removes their shared memory.
    """
    deadline = time.monotonic() + _END_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def generate(
    model: Path,
    prompts: list[list[int]],
    tokens: int,
    directory: Path,
    monitor: str | None = None,
    **engine: Any,
) -> tuple[list[list[int]], int]:
    """Generate greedily with vLLM.

    Args:
        prompts: Token ids of each prompt.
        tokens: New tokens of each prompt.
        directory: An existing directory, for the log.
        monitor: Address of the cluster that has the experts; None: vLLM has them.
        engine: Further arguments of `vllm.LLM`.

    Returns:
        New tokens of each prompt; resident bytes of vLLM's largest process.
    """
    engine = {
        "dtype": "float32",
        "enforce_eager": True,
        "gpu_memory_utilization": 0.4,
        "max_model_len": 512,
    } | engine
    if monitor is not None:
        engine |= {"load_format": "eaas", "additional_config": {"eaas": {"monitor": monitor}}}
    asked = {
        "model": str(model),
        "engine": engine,
        "prompts": [{"prompt_token_ids": ids} for ids in prompts],
        "max_tokens": tokens,
    }
    which = "remote" if monitor else "local"
    answer, log = directory / f"{which}.json", directory / f"{which}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [PYTHON, Path(__file__).with_name("vllm_generate.py"), answer],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        process.communicate(json.dumps(asked).encode(), _GENERATE_S)
        assert process.returncode == 0, log.read_text()[-8000:]
    finally:
        _end_group(process)
    document = json.loads(answer.read_text())
    return document["tokens"], document["rss"]
