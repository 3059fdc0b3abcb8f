"""What `eaas vllm` starts: the words and the environment of vLLM's API server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from attention_client.engines.vllm.contract import LOAD_FORMAT
from attention_client.engines.vllm.lifeline import SUPERVISOR_VARIABLE, supervisor_text
from attention_client.engines.vllm.settings import NOT_QUANTIZED, SECTION, EngineSettings
from attention_client.vllm_server.settings import EndpointSettings
from eaas.cores import has_quota, usable_cores
from eaas.errors import ConfigError
from eaas.free_memory import free_bytes
from eaas.launcher_pipe import LAUNCHER_VARIABLE, READY_VARIABLE

__all__ = ["environment", "not_quantized", "refuse_options", "words"]

_MIDDLEWARE = "attention_client.vllm_server.middleware.Endpoint"
_NAMES = "--served-model-name"
_OVERRIDES = "--hf-overrides"
# Seconds in which running requests may end, as in the embedded engine.
_GRACE_S = 1
_STEP_VARIABLE = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
_LEAST_STEP_S, _STEP_MARGIN_S = 300, 60
_BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_CACHE_OPTIONS = frozenset({"--kv-cache-memory-bytes", "--gpu-memory-utilization"})
_GIB = 1 << 30
# GiB of vLLM's key-value cache on a CPU, at least and at most.
_LEAST_CACHE, _MOST_CACHE = 1, 4
# The default cache takes this part of the free memory, which expert servers need as well.
_CACHE_PART = 8
# Option of vLLM -> what to do instead.
_REFUSED = {
    "--enable-eplb": "the balancer moves experts between servers (`eaas rebalance`)",
    "--eplb-config": "the balancer moves experts between servers (`eaas policy`)",
    "--model": "give the directory as the argument MODEL",
    "--load-format": "`eaas vllm` sets it",
    "--additional-config": "`eaas vllm` sets it; give its settings by --config or EAAS_ variables",
    "--host": "give --host before the --",
    "--port": "give --port before the --",
    "--uds": "the endpoint needs an address: give --host and --port before the --",
    "--api-key": "keys on a command line are visible to all users: give --api-key-file before the --",
}


def refuse_options(options: Sequence[str]) -> None:
    """Check the user's own options of vLLM.

    Raises:
        ConfigError: `eaas vllm` sets one of them, or a cluster has another way for it.
    """
    for name in _option_names(options):
        if name in _REFUSED:
            raise ConfigError(f"vLLM's option {name} is not for `eaas vllm`: {_REFUSED[name]}")


def words(
    model: Path,
    settings: EngineSettings,
    names: Iterable[str],
    host: str,
    port: int,
    options: Sequence[str],
) -> tuple[str, ...]:
    """Arguments of Python that run vLLM's API server as an attention client.

    Args:
        model: Directory of the checkpoint; the API knows it by `names`.
        settings: Section `eaas`.
        names: Names of the model in requests, unless the user's options have some.
        host: Address to listen on.
        port: Port to listen on.
        options: The user's own options of vLLM; they come last.
    """
    section = settings.model_dump(mode="json", exclude_defaults=True)
    named = _NAMES in _option_names(options)
    return (
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *(() if named else (_NAMES, *dict.fromkeys(names))),
        *("--host", host, "--port", str(port)),
        *("--load-format", LOAD_FORMAT, "--additional-config", json.dumps({SECTION: section})),
        *("--middleware", _MIDDLEWARE, "--shutdown-timeout", str(_GRACE_S)),
        "--disable-uvicorn-access-log",
        *options,
    )


def not_quantized(options: Sequence[str]) -> list[str]:
    """Add to the user's options of vLLM that the model is not quantised: its weights are dequantised for it.

    Raises:
        ConfigError: The user's `--hf-overrides` are no JSON object.
    """
    names = _option_names(options)
    if any(name.startswith(f"{_OVERRIDES}.") for name in names):
        return [*options, f"{_OVERRIDES}.quantization_config", "null"]
    rest, given = list(options), "{}"
    for at, option in enumerate(options):
        name, is_joined, value = option.partition("=")
        if name.replace("_", "-") == _OVERRIDES:
            end = at + (1 if is_joined else 2)
            given = value if is_joined else "".join(options[at + 1 : end])
            rest = [*options[:at], *options[end:]]
            break
    try:
        overrides = json.loads(given) | json.loads(NOT_QUANTIZED)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"vLLM's option {_OVERRIDES}: {given!r} is no JSON object") from error
    return [*rest, _OVERRIDES, json.dumps(overrides)]


def environment(
    given: Mapping[str, str],
    endpoint: EndpointSettings,
    options: Sequence[str],
    *,
    patience_s: float,
    on_cpu: bool,
) -> dict[str, str]:
    """Environment of vLLM's API server.

    Args:
        given: Environment of this process.
        endpoint: Settings of the middleware.
        options: The user's own options of vLLM.
        patience_s: Longest wait of a batch for experts.
        on_cpu: vLLM runs on the CPU, where it would take nearly all memory by default.
    """
    # vLLM inherits neither pipe.
    pipes = (LAUNCHER_VARIABLE, READY_VARIABLE)
    made = {name: value for name, value in given.items() if name not in pipes}
    made[SUPERVISOR_VARIABLE] = supervisor_text()
    made |= endpoint.environment()
    made |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # vLLM gives a step up after this time, in which a batch may wait for experts.
    made.setdefault(_STEP_VARIABLE, str(int(max(_LEAST_STEP_S, patience_s + _STEP_MARGIN_S))))
    if on_cpu and has_quota():
        # vLLM would start a thread for each core that it may bind.
        made.setdefault("OMP_NUM_THREADS", str(usable_cores()))
        made.setdefault(_BIND_VARIABLE, "nobind")
    if on_cpu and not _CACHE_OPTIONS.intersection(_option_names(options)):
        made.setdefault(_CACHE_VARIABLE, str(_default_cache()))
    plugins = made.get("VLLM_PLUGINS")
    if plugins and LOAD_FORMAT not in plugins.split(","):
        made["VLLM_PLUGINS"] = f"{plugins},{LOAD_FORMAT}"
    return made


def _option_names(options: Sequence[str]) -> list[str]:
    # vLLM accepts underscores for dashes, and --name=value.
    names = (option.partition("=")[0] for option in options if option.startswith("--"))
    return [name.replace("_", "-") for name in names]


def _default_cache() -> int:
    """GiB of the key-value cache, by the free memory."""
    return min(_MOST_CACHE, max(_LEAST_CACHE, free_bytes() // _CACHE_PART // _GIB))
