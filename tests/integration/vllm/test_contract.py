"""The contract with vLLM, in vLLM's Python, without a model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_python import NEEDS_VLLM, run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), NEEDS_VLLM]

# vLLM writes to standard output as well.
CODE = """
import json
from attention_client.engines.vllm import contract
from eaas.errors import EaasError

found = {"plain": contract.check()}
module = "vllm.model_executor.layers.fused_moe.routed_experts"
method = f"{module}:RoutedExperts.forward_modular"
broken = {method: ("x", "nonsense"), f"{module}:RoutedExperts.nothing": (), "vllm.nowhere:f": ()}
contract._NAMES = contract._NAMES | broken
found["broken"] = contract.check()

def refusal(call):
    try:
        call()
    except EaasError as error:
        return str(error)
    return ""

found["supported"] = refusal(contract.refuse_unsupported)
contract.version = lambda name: "0.99.1"
found["other version"] = refusal(contract.refuse_unsupported)

from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader

contract.register_load_format()
loader = get_model_loader(LoadConfig(load_format=contract.LOAD_FORMAT))
found["loading"] = refusal(lambda: loader.load_model(vllm_config=None, model_config=None))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run(CODE, 240).splitlines()[-1])
    return document


def test_the_installed_vllm_fits(found: dict[str, Any]) -> None:
    assert found["plain"] == []
    assert found["supported"] == ""


def test_differences_are_named(found: dict[str, Any]) -> None:
    method, name, module = found["broken"]
    assert method.endswith(":RoutedExperts.forward_modular takes no nonsense")
    assert name.endswith(":RoutedExperts.nothing is missing")
    assert module.startswith("vllm.nowhere cannot be imported: ")


@pytest.mark.parametrize("moment", ["other version", "loading"])
def test_another_version_is_refused(found: dict[str, Any], moment: str) -> None:
    assert found[moment].startswith("vLLM 0.99.1 is not supported: ")
    assert "\n" not in found[moment]
