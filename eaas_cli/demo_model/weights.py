"""Random weights whose greedy text neither repeats one token nor hangs on a near tie.

Step 1. Make all weights random except the output layer, scaled so that the experts carry the result.
Step 2. Read random text without the output layer; keep each token's mean final state.
Step 3. Draw a random cycle of words. The output row of a word is the sign pattern of its predecessor's state.

Each word of the cycle then predicts the next one by a wide margin, because the states of different words are
almost orthogonal. Rounding cannot change that prediction; a missing or wrong expert does. Tokens outside the
cycle have no such row: their successors depend on the whole context, so different prompts get different
answers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

__all__ = ["fill_weights"]

# With this gain, a model without its experts gets nine words of ten wrong. The gain is larger if its scores
# are not normalised, and smaller if the architecture scales its experts up.
_EXPERTS_GAIN = {
    "qwen3_moe": 12.0,
    "qwen2_moe": 16.0,
    "mixtral": 12.0,
    "olmoe": 16.0,
    "deepseek_v3": 5.0,
    "gpt_oss": 6.0,
}
_ATTENTION_GAIN = 0.1
_DENSE_GAIN = 0.3
_WEAK_SCALE = 0.02  # so that attention over the prompt decides
_LOGIT_SCALE = 0.3
_WORDS_PER_HIDDEN = 2  # sign patterns of H bits that stay far apart
_READINGS, _CONTEXT = 8, 32


def fill_weights(model: Any, words: list[int], weak: list[int], seed: int) -> None:
    """Overwrite every weight of a float32 demo model; the same seed gives the same weights.

    Args:
        model: Built from one of `architectures`' configs.
        words: Candidate token ids of the cycle.
        weak: Ids of the tokens that are alike in all prompts.
    """
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.from_numpy(_random(rng, name, parameter, model.config.model_type))
            )
            if "embed_tokens" in name:
                parameter[weak] *= _WEAK_SCALE
        states_VH = _mean_states(model, weak, rng)
        # Choose the words whose state depends least on the context.
        words = sorted(words, key=states_VH.norm(dim=-1).tolist().__getitem__, reverse=True)
        words = words[: _WORDS_PER_HIDDEN * model.config.hidden_size]
        cycle = torch.from_numpy(rng.permutation(words))
        head_VH = torch.zeros_like(model.lm_head.weight)
        head_VH[cycle.roll(-1)] = _LOGIT_SCALE * torch.sign(states_VH[cycle]).to(head_VH.dtype)
        model.lm_head.weight.copy_(head_VH)


def _random(
    rng: np.random.Generator, name: str, parameter: torch.Tensor, model_type: str
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Draw the values of a parameter, scaled so that a product has the scale of its input times the gain."""
    shape = tuple(parameter.shape)
    if parameter.dim() == 1:
        return np.full(shape, 1.0 if "norm" in name else 0.0, dtype=np.float32)
    values = rng.standard_normal(shape, dtype=np.float32)
    if "embed_tokens" in name:
        return values
    if name.endswith("bias"):
        return 0.1 * values
    is_transposed = model_type == "gpt_oss" and "experts" in name
    fan_in = shape[-2] if is_transposed else shape[-1]
    return _gain(name, model_type) / math.sqrt(fan_in) * values


def _gain(name: str, model_type: str) -> float:
    if name.endswith("experts.down_proj"):
        return _EXPERTS_GAIN[model_type]
    if "o_proj" in name:
        return _ATTENTION_GAIN
    return _DENSE_GAIN if "down_proj" in name else 1.0


def _mean_states(model: Any, weak: list[int], rng: np.random.Generator) -> torch.Tensor:
    """Compute each token's mean final state in random contexts, less the mean over all: (V, H) float64.

    In float64 the number of threads cannot change the signs.
    """
    vocab = model.config.vocab_size
    ordinary = np.setdiff1d(np.arange(vocab), weak)
    readings = [rng.permutation(ordinary) for _ in range(_READINGS)]
    tokens = np.concatenate(readings)
    ids_BT = torch.from_numpy(tokens[: len(tokens) // _CONTEXT * _CONTEXT].reshape(-1, _CONTEXT))
    model.double()
    states_NH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state.flatten(0, 1)
    model.float()
    states_NH = states_NH / states_NH.norm(dim=-1, keepdim=True)
    states_VH = torch.zeros(vocab, states_NH.shape[1], dtype=torch.float64)
    states_VH.index_add_(0, ids_BT.flatten(), states_NH - states_NH.mean(0))
    return states_VH
