from __future__ import annotations

from typing import Any

import pytest
from transformers import DeepseekV3Config, GptOssConfig, PreTrainedConfig, Qwen3MoeConfig

from eaas_cli.demo_model.write import published_config
from frontend.defaults import context_length

FACTORS = {"short_factor": [1.0] * 64, "long_factor": [1.0] * 64}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "tokens"),
    [
        (None, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 1001}, 1501),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"type": "linear", "factor": 8}, 32768),
        ({"rope_type": "default"}, 4096),
        # Their max_position_embeddings is the extended length.
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512, **LLAMA3},
         4096),
        ({"rope_type": "longrope", "original_max_position_embeddings": 512, **FACTORS}, 4096),
    ],
)  # fmt: skip
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_each_scaling_in_each_spelling(
    spelling: str, rope: dict[str, Any] | None, tokens: int
) -> None:
    fields = {spelling: None if rope is None else dict(rope)}
    config = Qwen3MoeConfig(max_position_embeddings=4096, rope_theta=1e6, head_dim=128, **fields)
    assert context_length(config) == tokens


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("gpt-oss-20b", 131072),
        ("Qwen3-30B-A3B", 40960),
        # As its card says: its length is larger than the original.
        ("Qwen3-30B-A3B with yarn", 131072),
        ("Mixtral-8x7B", 32768),
        ("DeepSeek-V3", 163840),
        ("Kimi-K2-Thinking", 262144),
    ],
)
def test_published_models(name: str, tokens: int) -> None:
    name, _, extended = name.partition(" with ")
    fields = published_config(name) | ({"rope_scaling": YARN} if extended else {})
    kinds: dict[str, type[PreTrainedConfig]] = {
        "gpt_oss": GptOssConfig,
        "deepseek_v3": DeepseekV3Config,
        "kimi_k2": DeepseekV3Config,
    }
    config = kinds.get(fields.pop("model_type"), Qwen3MoeConfig)(**fields)
    assert context_length(config) == tokens


def test_layers_of_several_types() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    config = PreTrainedConfig(
        max_position_embeddings=1024,
        layer_types=["full_attention", "sliding_attention", "no_rope"],
        rope_parameters={"full_attention": yarn, "sliding_attention": plain, "no_rope": None},
    )
    assert context_length(config) == 4096


def test_a_config_without_positions_has_no_limit() -> None:
    assert context_length(PreTrainedConfig()) is None
