"""Published models: the facts of their config.json, as their makers give them (`eaas demo-model --like`).

`published.json` leaves out fields that only training or remote code reads. The ids of special tokens are
those of the demo models' tokenizer, which takes the place of the published one. The makers of Kimi-K2 write
model_type "kimi_k2", for remote code that is DeepSeek-V3's; transformers has no such type.
"""

from __future__ import annotations

import json
from copy import deepcopy
from importlib.resources import files
from typing import Any

from eaas.errors import ConfigError
from eaas_cli.demo_model.tokenizer import BOS_ID, EOS_ID, PAD_ID

__all__ = ["PUBLISHED", "published_config"]

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (files(__package__) / "published.json").read_text("utf-8")
)


def published_config(name: str, layers: int | None = None) -> dict[str, Any]:
    """Return the config.json of a published model.

    Args:
        layers: Take only the first decoder layers, without layers that predict further tokens. None: all.

    Raises:
        ConfigError: The name is unknown, or the model has not so many layers, or those have no experts.
    """
    if name not in PUBLISHED:
        raise ConfigError(f"like {name!r} is unknown: choose one of {', '.join(PUBLISHED)}")
    config = deepcopy(PUBLISHED[name])
    if layers is not None:
        least, most = config.get("first_k_dense_replace", 0) + 1, config["num_hidden_layers"]
        if not least <= layers <= most:
            raise ConfigError(f"layers {layers}: choose {least} to {most} for {name}")
        if layers < most:
            config |= {"num_hidden_layers": layers} | dict.fromkeys(
                config.keys() & {"num_nextn_predict_layers"}, 0
            )
    config |= {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    # The lists with entries for each layer.
    each = range(config["num_hidden_layers"])
    if config["model_type"] == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[layer % 2] for layer in each]
    if config["model_type"] == "qwen3_moe" and "quantization_config" in config:
        config["quantization_config"]["modules_to_not_convert"] = ["lm_head"] + [
            f"model.layers.{layer}.{part}"
            for layer in each
            for part in ("input_layernorm", "mlp.gate", "post_attention_layernorm")
        ]
    return config
