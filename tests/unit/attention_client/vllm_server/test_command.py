"""The words and the environment of vLLM's API server. No vLLM is needed."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from attention_client.engines.vllm.settings import EngineSettings, read_settings
from attention_client.vllm_server import command
from attention_client.vllm_server.command import environment, not_quantized, refuse_options, words
from attention_client.vllm_server.settings import EndpointSettings
from eaas.config import AttentionClientConfig
from eaas.errors import ConfigError
from eaas.launcher_pipe import READY_VARIABLE

MODEL = Path("/models/demo")
ENDPOINT = EndpointSettings("127.0.0.1:1", "127.0.0.1", 8000, allowed_hosts=("a", "b"))


def options_of(*given: str) -> dict[str, str]:
    settings = EngineSettings(
        monitor="127.0.0.1:1", client=AttentionClientConfig(transport="grpc", slots=8)
    )
    found = words(MODEL, settings, ("demo",), "127.0.0.1", 8000, given)
    assert found[:2] == ("-m", "vllm.entrypoints.openai.api_server")
    return dict(pairwise(found))


def test_a_user_needs_no_other_words() -> None:
    options = options_of()
    assert options["--model"] == "/models/demo"
    assert options["--load-format"] == "eaas"
    section = read_settings(json.loads(options["--additional-config"]))
    assert (section.monitor, section.client.transport, section.client.slots) == (
        "127.0.0.1:1",
        "grpc",
        8,
    )
    module, _, name = options["--middleware"].rpartition(".")
    assert (module, name) == ("attention_client.vllm_server.middleware", "Endpoint")


def test_the_model_has_its_given_names_unless_vllms_options_have_some() -> None:
    settings = EngineSettings(monitor="m:1")
    found = words(MODEL, settings, ("a", "b", "a"), "h", 1, ())
    at = found.index("--served-model-name")
    assert found[at : at + 4] == ("--served-model-name", "a", "b", "--host")
    # vLLM's own options come last and unchanged.
    given = ("--served-model-name", "other", "--max-model-len", "1024", "--seed=7")
    found = words(MODEL, settings, ("a",), "h", 1, given)
    assert found.count("--served-model-name") == 1
    assert found[-5:] == given


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], ["--hf-overrides", '{"quantization_config": null}']),
        (["--seed=7"], ["--seed=7", "--hf-overrides", '{"quantization_config": null}']),
        (
            ["--hf-overrides", '{"a": 1}', "--seed", "7"],
            ["--seed", "7", "--hf-overrides", '{"a": 1, "quantization_config": null}'],
        ),
        (
            ["--hf_overrides={}", "-q"],
            ["-q", "--hf-overrides", '{"quantization_config": null}'],
        ),
        (
            ["--hf-overrides.a.b", "1"],
            ["--hf-overrides.a.b", "1", "--hf-overrides.quantization_config", "null"],
        ),
    ],
)
def test_vllm_sees_no_quantised_model(given: list[str], wanted: list[str]) -> None:
    """The weights reach it dequantised. The user's own overrides stay."""
    assert not_quantized(given) == wanted


@pytest.mark.parametrize(
    "given", [["--hf-overrides"], ["--hf-overrides", "[1]"], ["--hf-overrides={"]]
)
def test_overrides_that_are_no_object(given: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--hf-overrides: .* is no JSON object"):
        not_quantized(given)


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--enable-eplb", "balancer moves experts"),
        ("--enable_eplb", "balancer moves experts"),
        ("--eplb-config={}", "balancer moves experts"),
        ("--load-format", "sets it"),
        ("--port", "before the --"),
        ("--api-key", "--api-key-file"),
    ],
)
def test_options_of_the_cluster_are_refused(option: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        refuse_options(["--seed", "1", option, "x"])
    refuse_options(["--max-model-len", "1024", "--enable-expert-parallel"])


def test_the_environment_passes_settings_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"PATH": "/bin", READY_VARIABLE: "7"}
    made = environment(given, ENDPOINT, (), patience_s=240.0, on_cpu=False)
    assert READY_VARIABLE not in made
    assert "VLLM_CPU_KVCACHE_SPACE" not in made
    assert made["PATH"] == "/bin"
    for name, value in made.items():
        monkeypatch.setitem(os.environ, name, value)
    assert EndpointSettings.of_environment() == ENDPOINT


BINDS, SPACE, STEP = (
    ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"),
    ("VLLM_CPU_KVCACHE_SPACE",),
    ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",),
)


@pytest.mark.parametrize(
    ("given", "options", "quota", "names", "expected"),
    [
        # A given size of the cache stays.
        ({"VLLM_CPU_KVCACHE_SPACE": "9"}, {}, False, SPACE, ["9"]),
        ({}, {"given": ("--gpu-memory-utilization", "0.5")}, False, SPACE, [None]),
        ({}, {"given": ("--kv_cache_memory_bytes=1000",)}, False, SPACE, [None]),
        ({}, {"on_cpu": False}, False, SPACE, [None]),
        # With a quota vLLM binds no thread to a core.
        ({}, {}, False, BINDS, [None, None]),
        ({}, {}, True, BINDS, ["3", "nobind"]),
        (dict(zip(BINDS, ("5", "0-4"), strict=True)), {}, True, BINDS, ["5", "0-4"]),
        ({}, {"on_cpu": False}, True, BINDS, [None, None]),
        # A step may wait as long as a batch.
        *(({}, {"patience_s": float(s)}, False, STEP, ["300"]) for s in (60, 240)),
        ({}, {"patience_s": 900.0}, False, STEP, ["960"]),
        ({"VLLM_PLUGINS": "other"}, {}, False, ("VLLM_PLUGINS",), ["other,eaas"]),
    ],
)
def test_the_environment(
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    options: dict[str, Any],
    quota: bool,
    names: tuple[str, ...],
    expected: list[str | None],
) -> None:
    monkeypatch.setattr(command, "has_quota", lambda: quota)
    monkeypatch.setattr(command, "usable_cores", lambda: 3)
    usual = {"given": (), "patience_s": 240.0, "on_cpu": True} | options
    made = environment(given, ENDPOINT, usual.pop("given"), **usual)
    assert [made.get(name) for name in names] == expected


@pytest.mark.parametrize(("gib", "space"), [(2, "1"), (24, "3"), (99, "4")])
def test_the_cache_is_a_part_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, gib: int, space: str
) -> None:
    monkeypatch.setattr(command, "free_bytes", lambda: gib << 30)
    made = environment({}, ENDPOINT, (), patience_s=240.0, on_cpu=True)
    assert made["VLLM_CPU_KVCACHE_SPACE"] == space


def test_the_middleware_needs_eaas_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("_EAAS_VLLM_ENDPOINT", raising=False)
    with pytest.raises(ConfigError, match="eaas vllm"):
        EndpointSettings.of_environment()
