"""A quantised checkpoint answers as transformers does with the same weights dequantised to float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attention_client
from decoding import eager, generate, ragged
from eaas.errors import EaasError
from eaas_cli.local import LocalCluster
from quantized_checkpoint import SCHEMES, quantized_copy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

DEMO = Path(__file__).parents[2] / "examples/demo"
NEW_TOKENS = 24
# Each kernel's number format once in every run, the others at night.
USUAL = ("fp8", "mxfp4", "gptq-desc_act", "ct-int4", "ct-w8")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n not in USUAL)) for n in SCHEMES]
)
def test_tokens_and_logits(
    start_cluster: Callable[..., LocalCluster],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    name: str,
) -> None:
    source = checkpoint("gpt_oss") if name == "mxfp4" else DEMO
    if name in ("ct-int4-zeros", "ct-int8"):
        pytest.skip("compressed-tensors makes no groups of 128 of 64 inputs")
    plain = quantized_copy(source, tmp_path / "model", SCHEMES[name])
    cluster = start_cluster(tmp_path / "model", servers=1, redundancy=1, clients=0)
    expected = eager(plain)
    model = attention_client.load(tmp_path / "model", cluster.monitor_address)
    inputs = ragged(4)
    found_BT, expected_BT = (generate(m, inputs, NEW_TOKENS) for m in (model, expected))
    assert torch.equal(found_BT, expected_BT)
    with torch.no_grad():
        logits, exact = model(**inputs).logits, expected(**inputs).logits
    assert float((logits - exact).norm() / exact.norm()) < 1e-3


def test_quantised_twice_is_refused(
    start_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    from eaas.config import load_config

    quantized_copy(DEMO, tmp_path / "model", SCHEMES["fp8"])
    config = load_config(frontend={"port": 0}, expert_server={"quantization": "int8"})
    with pytest.raises(EaasError, match="the checkpoint is quantised, its experts are fp8"):
        start_cluster(tmp_path / "model", clients=0, config=config)
