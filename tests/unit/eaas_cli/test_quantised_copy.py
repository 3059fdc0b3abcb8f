"""The tests' quantised copies of checkpoints: transformers reads them, and they are close to the original."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from eaas.checkpoint import quiet_transformers
from quantised_copy import block_fp8_copy, mxfp4_copy, to_block_fp8, to_mxfp4

DEMO = Path(__file__).parents[3] / "examples" / "demo"


def weights(path: Path, quantization: object = None) -> dict[str, torch.Tensor]:
    with quiet_transformers():
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            **({"quantization_config": quantization} if quantization else {}),
        )
    assert not any(report.values()), report
    return dict(model.state_dict())


def error(copy: torch.Tensor, original: torch.Tensor) -> float:
    return float((copy.float() - original.float()).norm() / original.float().norm())


@pytest.mark.parametrize("name", ["demo", "qwen3_moe", "mixtral"])
def test_block_fp8(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = DEMO if name == "demo" else checkpoint(name)
    copy = block_fp8_copy(source, tmp_path / "copy")
    found, original = weights(copy, FineGrainedFP8Config(dequantize=True)), weights(source)
    assert found.keys() == original.keys()
    differ = {key for key in found if not torch.equal(found[key], original[key])}
    linear = {key for key in found if "_proj" in key}
    assert differ == linear
    assert all(0.01 < error(found[key], original[key]) < 0.05 for key in differ)


def test_mxfp4(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("gpt_oss")
    copy = mxfp4_copy(source, tmp_path / "copy")
    found, original = weights(copy, Mxfp4Config(dequantize=True)), weights(source)
    assert found.keys() == original.keys()
    differ = {key for key in found if not torch.equal(found[key], original[key])}
    assert differ == {key for key in found if key.endswith(("gate_up_proj", "down_proj"))}
    assert all(0.05 < error(found[key], original[key]) < 0.2 for key in differ)


def test_block_fp8_of_a_ragged_matrix_with_a_zero_block() -> None:
    weight = torch.randn(200, 300)
    weight[:128, :128] = 0
    codes, scales = to_block_fp8(weight)
    assert (codes.shape, scales.shape) == ((200, 300), (2, 3))
    assert scales[0, 0] == 1
    assert codes[128:, 256:].float().abs().max() == 448
    by_weight = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert error(codes.float() * by_weight, weight) < 0.05


def test_mxfp4_represents_its_own_values_exactly() -> None:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0.0] * 2)
    blocks, exponents = to_mxfp4(torch.stack([values, 8 * values, torch.zeros(32)])[None])
    assert exponents.flatten().tolist() == [127, 130, 127]
    row = [0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x0F] * 2
    assert blocks[0, :, 0].tolist() == [row, row, [0] * 16]
