"""Names, shapes and dtypes of a checkpoint's tensors as published, from its config.json alone.

E experts, H hidden, I intermediate, N outputs of a linear layer, K its inputs. A linear layer is stored as

    bf16            weight BF16 (N, K)
    fp8             weight F8_E4M3 (N, K), weight_scale_inv (ceil(N / 128), ceil(K / 128)), F32 or BF16
    pack-quantized  weight_packed I32 (N, K / 8), weight_scale BF16 (N, K / 32), weight_shape I64 (2)
    mxfp4           X_blocks U8 (E, N, K / 32, 16), X_scales U8 (E, N, K / 32): all experts in one tensor

with the lower half of a byte, or the lowest bits of an integer, first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

__all__ = ["Draw", "TensorPlan", "plan_tensors"]

_BYTES = {"F32": 4, "I32": 4, "I64": 8, "BF16": 2, "U8": 1, "F8_E4M3": 1}
_OUTPUT_GAIN = 0.25
_BIAS = 0.1


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


class _Row(NamedTuple):
    """A tensor of a layer, before it is known how the checkpoint stores it.

    Attributes:
        name: Name in its layer.
        kind: ones; normal or float32, of root mean square `gain`; or a linear layer (N, K) with a gain: one
            that no checkpoint quantises (plain), one that FP8 ones do (linear), an expert's (expert), or all
            experts' (stacked).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    gain: float = 1.0


def plan_tensors(config: Mapping[str, Any]) -> Iterator[TensorPlan]:
    """Yield all tensors of the checkpoint that a config.json belongs to, layer after layer."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    layers = config["num_hidden_layers"]

    def embedding(name: str) -> TensorPlan:
        return TensorPlan(name, "BF16", (vocab, hidden), Draw.EMBEDDING)

    def output(name: str, of: str) -> TensorPlan:
        size = 2 / math.sqrt(hidden)
        return TensorPlan(name, "BF16", (vocab, hidden), Draw.OUTPUT, size, embedding=of)

    def stored(name: str, rows: Iterator[_Row]) -> Iterator[TensorPlan]:
        for row in rows:
            yield from _stored(config, row._replace(name=f"{name}.{row.name}"))

    first = "model.embed_tokens.weight"
    yield embedding(first)
    for layer in range(layers):
        yield from stored(f"model.layers.{layer}", _layer(config, layer))
    yield TensorPlan("model.norm.weight", "BF16", (hidden,), Draw.ONES)
    yield output("lm_head.weight", first)
    # Layers that predict a further token (MTP) stand behind the model's own.
    for layer in range(layers, layers + config.get("num_nextn_predict_layers", 0)):
        name = f"model.layers.{layer}"
        yield from stored(name, _layer(config, layer))
        yield embedding(f"{name}.embed_tokens.weight")
        rows = (
            _Row("enorm.weight", "ones", (hidden,)),
            _Row("hnorm.weight", "ones", (hidden,)),
            _Row("eh_proj.weight", "plain", (hidden, 2 * hidden)),
            _Row("shared_head.norm.weight", "ones", (hidden,)),
        )
        yield from stored(name, iter(rows))
        yield output(f"{name}.shared_head.head.weight", f"{name}.embed_tokens.weight")


def _stored(config: Mapping[str, Any], row: _Row) -> Iterator[TensorPlan]:
    """Yield the tensors that hold a row in the checkpoint's format."""
    name, kind, shape, gain = row
    quantization = config.get("quantization_config", {})
    method = quantization.get("quant_method", "bf16")
    size = gain if kind in ("normal", "float32") else gain / math.sqrt(shape[-1])
    if kind == "ones":
        yield TensorPlan(name, "BF16", shape, Draw.ONES)
    elif kind == "expert" and method == "compressed-tensors":
        outputs, inputs = shape
        groups = quantization["config_groups"].values()
        (group,) = (each["weights"]["group_size"] for each in groups)
        scales = (outputs, inputs // group)
        yield TensorPlan(f"{name}_packed", "I32", (outputs, inputs // 8), Draw.INT4, size)
        yield TensorPlan(f"{name}_scale", "BF16", scales, Draw.INT4_SCALE, size)
        yield TensorPlan(f"{name}_shape", "I64", (2,), Draw.SHAPE, values=shape)
    elif kind in ("expert", "linear") and method == "fp8":
        # Qwen's scales are BF16, DeepSeek's and Moonshot's F32.
        dtype = "BF16" if config["model_type"] == "qwen3_moe" else "F32"
        block = quantization["weight_block_size"]
        blocks = tuple(-(-length // side) for length, side in zip(shape, block, strict=True))
        yield TensorPlan(name, "F8_E4M3", shape, Draw.E4M3, size)
        yield TensorPlan(f"{name}_scale_inv", dtype, blocks, Draw.E4M3_SCALE, size)
    elif kind == "stacked" and method == "mxfp4":
        experts, outputs, inputs = shape
        groups = (experts, outputs, inputs // 32)
        yield TensorPlan(f"{name}_blocks", "U8", (*groups, 16), Draw.E2M1, size)
        yield TensorPlan(f"{name}_scales", "U8", groups, Draw.E8M0_SCALE, size)
    elif kind == "stacked":
        experts, outputs, inputs = shape
        yield TensorPlan(name, "BF16", (experts, inputs, outputs), Draw.NORMAL, size)
    else:
        dtype = "F32" if kind == "float32" else "BF16"
        yield TensorPlan(name, dtype, shape, Draw.NORMAL, size)


def _layer(config: Mapping[str, Any], layer: int) -> Iterator[_Row]:
    """Yield the tensors of a decoder layer."""
    hidden, is_deepseek = config["hidden_size"], config["model_type"] == "deepseek_v3"
    yield _Row("input_layernorm.weight", "ones", (hidden,))
    yield from _latent_attention(config) if is_deepseek else _attention(config)
    yield _Row("post_attention_layernorm.weight", "ones", (hidden,))
    if is_deepseek and layer < config["first_k_dense_replace"]:
        yield from _mlp(config, "mlp", config["intermediate_size"])
    elif config["model_type"] == "gpt_oss":
        yield from _stacked_experts(config)
    else:
        yield from _experts(config)


def _attention(config: Mapping[str, Any]) -> Iterator[_Row]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    outputs, kv_outputs = heads * head_dim, config["num_key_value_heads"] * head_dim
    # gpt-oss has only its experts quantised.
    kind = "plain" if config["model_type"] == "gpt_oss" else "linear"
    for part, shape, gain in (
        ("q_proj", (outputs, hidden), 1.0),
        ("k_proj", (kv_outputs, hidden), 1.0),
        ("v_proj", (kv_outputs, hidden), 1.0),
        ("o_proj", (hidden, outputs), _OUTPUT_GAIN),
    ):
        yield _Row(f"self_attn.{part}.weight", kind, shape, gain)
        if config.get("attention_bias"):
            yield _Row(f"self_attn.{part}.bias", "normal", shape[:1], _BIAS)
    if config["model_type"] == "qwen3_moe":
        yield _Row("self_attn.q_norm.weight", "ones", (head_dim,))
        yield _Row("self_attn.k_norm.weight", "ones", (head_dim,))
    if config["model_type"] == "gpt_oss":
        yield _Row("self_attn.sinks", "normal", (heads,))


def _latent_attention(config: Mapping[str, Any]) -> Iterator[_Row]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = (config[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
    for part, kind, shape, gain in (
        ("q_a_proj", "linear", (q_rank, hidden), 1.0),
        ("q_a_layernorm", "ones", (q_rank,), 1.0),
        ("q_b_proj", "linear", (heads * (nope + rope), q_rank), 1.0),
        ("kv_a_proj_with_mqa", "linear", (kv_rank + rope, hidden), 1.0),
        ("kv_a_layernorm", "ones", (kv_rank,), 1.0),
        ("kv_b_proj", "linear", (heads * (nope + value), kv_rank), 1.0),
        ("o_proj", "linear", (hidden, heads * value), _OUTPUT_GAIN),
    ):
        yield _Row(f"self_attn.{part}.weight", kind, shape, gain)


def _experts(config: Mapping[str, Any]) -> Iterator[_Row]:
    """Yield a router, the experts one by one, and the shared expert."""
    hidden, is_mixtral = config["hidden_size"], config["model_type"] == "mixtral"
    is_deepseek = config["model_type"] == "deepseek_v3"
    block = "block_sparse_moe" if is_mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    width = config["intermediate_size" if is_mixtral else "moe_intermediate_size"]
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    experts = next(config[name] for name in names if name in config)
    gain = 1 / config["routed_scaling_factor"] if is_deepseek else 1.0
    yield _Row(f"{block}.gate.weight", "plain", (experts, hidden))
    if is_deepseek:
        yield _Row(f"{block}.gate.e_score_correction_bias", "float32", (experts,), _BIAS)
    for name in (f"{block}.experts.{expert}" for expert in range(experts)):
        yield _Row(f"{name}.{gate}.weight", "expert", (width, hidden))
        yield _Row(f"{name}.{up}.weight", "expert", (width, hidden))
        yield _Row(f"{name}.{down}.weight", "expert", (hidden, width), gain)
    if is_deepseek:
        yield from _mlp(config, "mlp.shared_experts", width * config["n_shared_experts"])


def _stacked_experts(config: Mapping[str, Any]) -> Iterator[_Row]:
    """Yield gpt-oss' router and experts, which are (E, N, K) together."""
    experts, hidden = config["num_local_experts"], config["hidden_size"]
    width = config["intermediate_size"]
    yield _Row("mlp.router.weight", "plain", (experts, hidden))
    yield _Row("mlp.router.bias", "normal", (experts,), _BIAS)
    for part, outputs, inputs in (
        ("gate_up_proj", 2 * width, hidden),
        ("down_proj", hidden, width),
    ):
        yield _Row(f"mlp.experts.{part}", "stacked", (experts, outputs, inputs))
        yield _Row(f"mlp.experts.{part}_bias", "normal", (experts, outputs), _BIAS)


def _mlp(config: Mapping[str, Any], name: str, width: int) -> Iterator[_Row]:
    """Yield a dense layer or a shared expert."""
    hidden = config["hidden_size"]
    # Moonshot quantises only routed experts.
    method = config.get("quantization_config", {}).get("quant_method")
    kind = "plain" if method == "compressed-tensors" else "linear"
    yield _Row(f"{name}.gate_proj.weight", kind, (width, hidden))
    yield _Row(f"{name}.up_proj.weight", kind, (width, hidden))
    yield _Row(f"{name}.down_proj.weight", kind, (hidden, width), _OUTPUT_GAIN)
