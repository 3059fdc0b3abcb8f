"""Names, shapes and dtypes of a checkpoint's tensors as published, from its config.json and transformers.

E experts, H hidden, I intermediate, N outputs of a linear layer, K its inputs. A linear layer is stored as

    bf16            weight BF16 (N, K)
    fp8             weight F8_E4M3 (N, K), weight_scale_inv (ceil(N / 128), ceil(K / 128)), F32 or BF16
    pack-quantized  weight_packed I32 (N, K / 8), weight_scale BF16 (N, K / 32), weight_shape I64 (2)
    mxfp4           X_blocks U8 (E, N, K / 32, 16), X_scales U8 (E, N, K / 32): all experts in one tensor

with the lower half of a byte, or the lowest bits of an integer, first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from eaas.checkpoint.quiet import quiet_transformers

__all__ = ["Draw", "TensorPlan", "plan_tensors"]

_BYTES = {"F32": 4, "I32": 4, "I64": 8, "BF16": 2, "U8": 1, "F8_E4M3": 1}
_OUTPUT_GAIN = 0.25
_BIAS = 0.1
_NEVER_QUANTISED = re.compile(r"\.(gate|router|eh_proj)\.weight$")


class Draw(Enum):
    """How a tensor's values are drawn. `TensorPlan.size` is the root mean square of the weights."""

    NORMAL = auto()
    ONES = auto()
    EMBEDDING = auto()  # normal, but constant in the first dimension of H
    # Normal, but words of the tokenizer win over all other tokens, and none over itself.
    OUTPUT = auto()
    E4M3 = auto()  # codes of normal values
    E4M3_SCALE = auto()
    E2M1 = auto()  # two codes in a byte
    E8M0_SCALE = auto()
    INT4 = auto()  # eight codes in an integer
    INT4_SCALE = auto()
    SHAPE = auto()  # (N, K) itself


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to write.

    Attributes:
        dtype: safetensors' name.
        size: Root mean square of the values; for scales and codes, of the weights.
        values: The values of a `Draw.SHAPE`.
        embedding: Name of the embedding that a `Draw.OUTPUT` belongs to.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    draw: Draw
    size: float = 1.0
    values: tuple[int, ...] = ()
    embedding: str = ""

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return _BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.item_bytes * math.prod(self.shape)


def plan_tensors(config: Mapping[str, Any]) -> Iterator[TensorPlan]:
    """Yield all tensors of the checkpoint that a config.json belongs to, layer after layer."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = _shapes(config)
    # Layers that predict a further token (MTP) stand behind the model's own; transformers has none.
    for layer in range(config["num_hidden_layers"], _layers(config)):
        further = {
            "embed_tokens.weight": (vocab, hidden),
            "enorm.weight": (hidden,),
            "hnorm.weight": (hidden,),
            "eh_proj.weight": (hidden, 2 * hidden),
            "shared_head.norm.weight": (hidden,),
            "shared_head.head.weight": (vocab, hidden),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in further.items()}
    for name, shape in shapes.items():
        yield from _stored(config, name, shape)


def _layers(config: Mapping[str, Any]) -> int:
    further: int = config.get("num_nextn_predict_layers", 0)
    return further + int(config["num_hidden_layers"])


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint that is not quantised, by the names that transformers saves."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    plain["num_hidden_layers"] = _layers(config)
    with torch.device("meta"), quiet_transformers():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**plain))
        weights = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _stored(config: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Iterator[TensorPlan]:
    """Yield the tensors that hold a weight of this shape in the checkpoint's format."""
    quantization = config.get("quantization_config", {})
    method = quantization.get("quant_method")
    hidden, is_stacked = config["hidden_size"], len(shape) == 3
    # Experts that are one tensor have their outputs last.
    outputs, inputs = shape[:0:-1] if is_stacked else (shape[0], shape[-1])
    size = _gain(config, name) / math.sqrt(inputs)
    if name.endswith("norm.weight"):
        yield TensorPlan(name, "BF16", shape, Draw.ONES)
    elif name.endswith("embed_tokens.weight"):
        yield TensorPlan(name, "BF16", shape, Draw.EMBEDDING)
    elif name.endswith("head.weight"):
        layer = name.removesuffix("shared_head.head.weight").replace("lm_head.weight", "model.")
        embedding = f"{layer}embed_tokens.weight"
        size = 2 / math.sqrt(hidden)
        yield TensorPlan(name, "BF16", shape, Draw.OUTPUT, size, embedding=embedding)
    elif name.endswith("bias"):
        dtype = "F32" if name.endswith("e_score_correction_bias") else "BF16"
        yield TensorPlan(name, dtype, shape, Draw.NORMAL, _BIAS)
    elif name.endswith("sinks"):
        yield TensorPlan(name, "BF16", shape, Draw.NORMAL)
    elif method == "compressed-tensors" and ".experts." in name:
        groups = quantization["config_groups"].values()
        (group,) = (each["weights"]["group_size"] for each in groups)
        scales = (outputs, inputs // group)
        yield TensorPlan(f"{name}_packed", "I32", (outputs, inputs // 8), Draw.INT4, size)
        yield TensorPlan(f"{name}_scale", "BF16", scales, Draw.INT4_SCALE, size)
        yield TensorPlan(f"{name}_shape", "I64", (2,), Draw.SHAPE, values=shape)
    elif method == "fp8" and not _NEVER_QUANTISED.search(name):
        # Qwen's scales are BF16, DeepSeek's and Moonshot's F32.
        dtype = "BF16" if config["model_type"] == "qwen3_moe" else "F32"
        block = quantization["weight_block_size"]
        blocks = tuple(-(-length // side) for length, side in zip(shape, block, strict=True))
        yield TensorPlan(name, "F8_E4M3", shape, Draw.E4M3, size)
        yield TensorPlan(f"{name}_scale_inv", dtype, blocks, Draw.E4M3_SCALE, size)
    elif method == "mxfp4" and is_stacked:
        groups_of_32 = (shape[0], outputs, inputs // 32)
        yield TensorPlan(f"{name}_blocks", "U8", (*groups_of_32, 16), Draw.E2M1, size)
        yield TensorPlan(f"{name}_scales", "U8", groups_of_32, Draw.E8M0_SCALE, size)
    else:
        yield TensorPlan(name, "BF16", shape, Draw.NORMAL, size)


def _gain(config: Mapping[str, Any], name: str) -> float:
    """Return the root mean square of a layer's outputs over that of its inputs."""
    if ".experts." in name:
        scaling: float = config.get("routed_scaling_factor", 1.0)
        return 1 / scaling if name.endswith("down_proj.weight") else 1.0
    return _OUTPUT_GAIN if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
