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
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

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


def plan_tensors(config: dict[str, Any]) -> Iterator[TensorPlan]:
    """Yield all tensors of the checkpoint that a config.json belongs to, layer after layer."""
    return _Planner(config).plan()


class _Planner:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.type = config["model_type"]
        self.method = config.get("quantization_config", {}).get("quant_method", "bf16")
        self.hidden = config["hidden_size"]
        # Qwen's scales are BF16, DeepSeek's and Moonshot's F32.
        self.scale_dtype = "BF16" if self.type == "qwen3_moe" else "F32"

    def plan(self) -> Iterator[TensorPlan]:
        vocab, layers = self.config["vocab_size"], self.config["num_hidden_layers"]
        yield from self.embedding("model.embed_tokens.weight", vocab)
        for layer in range(layers):
            yield from self.layer(f"model.layers.{layer}", layer)
        yield from self.ones("model.norm.weight", self.hidden)
        yield from self.output("lm_head.weight", vocab, "model.embed_tokens.weight")
        for layer in range(layers, layers + self.config.get("num_nextn_predict_layers", 0)):
            yield from self.prediction_layer(f"model.layers.{layer}", layer, vocab)

    def prediction_layer(self, name: str, layer: int, vocab: int) -> Iterator[TensorPlan]:
        """Yield a layer that predicts a further token (MTP), which stands behind the model's own."""
        hidden = self.hidden
        yield from self.layer(name, layer)
        yield from self.embedding(f"{name}.embed_tokens.weight", vocab)
        yield from self.ones(f"{name}.enorm.weight", hidden)
        yield from self.ones(f"{name}.hnorm.weight", hidden)
        yield from self.matrix(f"{name}.eh_proj.weight", (hidden, 2 * hidden))
        yield from self.ones(f"{name}.shared_head.norm.weight", hidden)
        yield from self.output(
            f"{name}.shared_head.head.weight", vocab, f"{name}.embed_tokens.weight"
        )

    def layer(self, name: str, layer: int) -> Iterator[TensorPlan]:
        yield from self.ones(f"{name}.input_layernorm.weight", self.hidden)
        if self.type == "deepseek_v3":
            yield from self.latent_attention(f"{name}.self_attn")
        else:
            yield from self.attention(f"{name}.self_attn")
        yield from self.ones(f"{name}.post_attention_layernorm.weight", self.hidden)
        match self.type:
            case "deepseek_v3" if layer < self.config["first_k_dense_replace"]:
                yield from self.mlp(f"{name}.mlp", self.config["intermediate_size"])
            case "deepseek_v3":
                yield from self.deepseek_moe(f"{name}.mlp")
            case "gpt_oss":
                yield from self.gpt_oss_moe(f"{name}.mlp")
            case "mixtral":
                yield from self.mixtral_moe(f"{name}.block_sparse_moe")
            case _:
                yield from self.qwen3_moe(f"{name}.mlp")

    def attention(self, name: str) -> Iterator[TensorPlan]:
        config, hidden = self.config, self.hidden
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        # gpt-oss has only its experts quantised.
        linear = self.matrix if self.type == "gpt_oss" else self.linear
        for part, outputs, inputs, gain in (
            ("q_proj", heads * head_dim, hidden, 1.0),
            ("k_proj", kv_heads * head_dim, hidden, 1.0),
            ("v_proj", kv_heads * head_dim, hidden, 1.0),
            ("o_proj", hidden, heads * head_dim, _OUTPUT_GAIN),
        ):
            yield from linear(f"{name}.{part}.weight", (outputs, inputs), gain)
            if config.get("attention_bias"):
                yield from self.normal(f"{name}.{part}.bias", (outputs,), _BIAS)
        if self.type == "qwen3_moe":
            yield from self.ones(f"{name}.q_norm.weight", head_dim)
            yield from self.ones(f"{name}.k_norm.weight", head_dim)
        if self.type == "gpt_oss":
            yield from self.normal(f"{name}.sinks", (heads,), 1.0)

    def latent_attention(self, name: str) -> Iterator[TensorPlan]:
        config, hidden, heads = self.config, self.hidden, self.config["num_attention_heads"]
        q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
        nope, rope, value = (
            config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        yield from self.linear(f"{name}.q_a_proj.weight", (q_rank, hidden))
        yield from self.ones(f"{name}.q_a_layernorm.weight", q_rank)
        yield from self.linear(f"{name}.q_b_proj.weight", (heads * (nope + rope), q_rank))
        yield from self.linear(f"{name}.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden))
        yield from self.ones(f"{name}.kv_a_layernorm.weight", kv_rank)
        yield from self.linear(f"{name}.kv_b_proj.weight", (heads * (nope + value), kv_rank))
        yield from self.linear(f"{name}.o_proj.weight", (hidden, heads * value), _OUTPUT_GAIN)

    def qwen3_moe(self, name: str) -> Iterator[TensorPlan]:
        experts = self.config["num_experts"]
        yield from self.matrix(f"{name}.gate.weight", (experts, self.hidden))
        for expert in range(experts):
            yield from self.expert(f"{name}.experts.{expert}", self.config["moe_intermediate_size"])

    def mixtral_moe(self, name: str) -> Iterator[TensorPlan]:
        experts = self.config["num_local_experts"]
        yield from self.matrix(f"{name}.gate.weight", (experts, self.hidden))
        for expert in range(experts):
            yield from self.expert(
                f"{name}.experts.{expert}", self.config["intermediate_size"], ("w1", "w3", "w2")
            )

    def deepseek_moe(self, name: str) -> Iterator[TensorPlan]:
        config = self.config
        experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
        yield from self.matrix(f"{name}.gate.weight", (experts, self.hidden))
        bias = f"{name}.gate.e_score_correction_bias"
        yield TensorPlan(bias, "F32", (experts,), Draw.NORMAL, _BIAS)
        for expert in range(experts):
            yield from self.expert(
                f"{name}.experts.{expert}", width, gain=1 / config["routed_scaling_factor"]
            )
        yield from self.mlp(f"{name}.shared_experts", width * config["n_shared_experts"])

    def gpt_oss_moe(self, name: str) -> Iterator[TensorPlan]:
        experts, hidden = self.config["num_local_experts"], self.hidden
        width = self.config["intermediate_size"]
        yield from self.matrix(f"{name}.router.weight", (experts, hidden))
        yield from self.normal(f"{name}.router.bias", (experts,), _BIAS)
        for part, outputs, inputs in (
            ("gate_up_proj", 2 * width, hidden),
            ("down_proj", hidden, width),
        ):
            prefix, size = f"{name}.experts.{part}", 1 / math.sqrt(inputs)
            if self.method == "mxfp4":
                groups = (experts, outputs, inputs // 32)
                yield TensorPlan(f"{prefix}_blocks", "U8", (*groups, 16), Draw.E2M1, size)
                yield TensorPlan(f"{prefix}_scales", "U8", groups, Draw.E8M0_SCALE, size)
            else:
                yield from self.normal(prefix, (experts, inputs, outputs), size)
            yield from self.normal(f"{prefix}_bias", (experts, outputs), _BIAS)

    def mlp(self, name: str, width: int) -> Iterator[TensorPlan]:
        """Yield a dense layer or a shared expert."""
        # Moonshot quantises only routed experts.
        linear = self.matrix if self.method == "compressed-tensors" else self.linear
        yield from linear(f"{name}.gate_proj.weight", (width, self.hidden))
        yield from linear(f"{name}.up_proj.weight", (width, self.hidden))
        yield from linear(f"{name}.down_proj.weight", (self.hidden, width), _OUTPUT_GAIN)

    def expert(
        self,
        name: str,
        width: int,
        parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        gain: float = 1.0,
    ) -> Iterator[TensorPlan]:
        gate, up, down = parts
        pack = self.packed if self.method == "compressed-tensors" else self.linear
        yield from pack(f"{name}.{gate}.weight", (width, self.hidden))
        yield from pack(f"{name}.{up}.weight", (width, self.hidden))
        yield from pack(f"{name}.{down}.weight", (self.hidden, width), gain)

    def linear(self, name: str, shape: tuple[int, int], gain: float = 1.0) -> Iterator[TensorPlan]:
        """Yield a linear layer that FP8 checkpoints have quantised."""
        if self.method != "fp8":
            yield from self.matrix(name, shape, gain)
            return
        size = gain / math.sqrt(shape[1])
        block = self.config["quantization_config"]["weight_block_size"]
        blocks = tuple(-(-length // side) for length, side in zip(shape, block, strict=True))
        yield TensorPlan(name, "F8_E4M3", shape, Draw.E4M3, size)
        yield TensorPlan(f"{name}_scale_inv", self.scale_dtype, blocks, Draw.E4M3_SCALE, size)

    def packed(self, name: str, shape: tuple[int, int], gain: float = 1.0) -> Iterator[TensorPlan]:
        """Yield a linear layer in compressed-tensors' pack-quantized format."""
        outputs, inputs = shape
        size = gain / math.sqrt(inputs)
        groups = self.config["quantization_config"]["config_groups"].values()
        (group,) = (each["weights"]["group_size"] for each in groups)
        scales = (outputs, inputs // group)
        yield TensorPlan(f"{name}_packed", "I32", (outputs, inputs // 8), Draw.INT4, size)
        yield TensorPlan(f"{name}_scale", "BF16", scales, Draw.INT4_SCALE, size)
        yield TensorPlan(f"{name}_shape", "I64", (2,), Draw.SHAPE, values=shape)

    def matrix(self, name: str, shape: tuple[int, int], gain: float = 1.0) -> Iterator[TensorPlan]:
        """Yield a linear layer that is never quantised."""
        yield from self.normal(name, shape, gain / math.sqrt(shape[1]))

    def normal(self, name: str, shape: tuple[int, ...], size: float) -> Iterator[TensorPlan]:
        yield TensorPlan(name, "BF16", shape, Draw.NORMAL, size)

    def ones(self, name: str, length: int) -> Iterator[TensorPlan]:
        yield TensorPlan(name, "BF16", (length,), Draw.ONES)

    def embedding(self, name: str, vocab: int) -> Iterator[TensorPlan]:
        yield TensorPlan(name, "BF16", (vocab, self.hidden), Draw.EMBEDDING)

    def output(self, name: str, vocab: int, embedding: str) -> Iterator[TensorPlan]:
        shape, size = (vocab, self.hidden), 2 / math.sqrt(self.hidden)
        yield TensorPlan(name, "BF16", shape, Draw.OUTPUT, size, embedding=embedding)
