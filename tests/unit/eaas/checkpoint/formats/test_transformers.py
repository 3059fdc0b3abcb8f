"""transformers dequantises the tests' quantised checkpoints to the weights that the tests expect."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from eaas.checkpoint import Checkpoint, quiet_transformers
from quantized_checkpoint import SCHEMES, quantized_copy

DEMO = Path(__file__).parents[5] / "examples" / "demo"


def weights(path: Path, quantization: object = None) -> dict[str, torch.Tensor]:
    options = {"quantization_config": quantization} if quantization else {}
    with quiet_transformers():
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, output_loading_info=True, **options
        )
    assert not any(report.values()), report
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        pytest.param("fp8", FineGrainedFP8Config(dequantize=True), marks=pytest.mark.nightly),
        ("mxfp4", Mxfp4Config(dequantize=True)),
    ],
)
def test_transformers_reads_the_same(
    checkpoint: Callable[..., Path], tmp_path: Path, name: str, reader: object
) -> None:
    source = checkpoint("gpt_oss") if name == "mxfp4" else DEMO
    plain = quantized_copy(source, tmp_path / "copy", SCHEMES[name])
    ours = Checkpoint.open(tmp_path / "copy")
    expected = weights(plain)
    found = weights(tmp_path / "copy", reader)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-9)
    for key in ours.other_keys():
        torch.testing.assert_close(ours.slice(key)[...], expected[key], rtol=1e-5, atol=1e-7)
