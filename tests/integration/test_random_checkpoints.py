"""Checkpoints with random settings and layouts answer as transformers does with the dequantised weights."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from decoding import answers, eager, greedy
from eaas.errors import EaasError
from eaas_cli.demo_model import ARCHITECTURES
from eaas_cli.demo_model.tokenizer import BOS_ID, EOS_ID, PAD_ID, build_tokenizer
from eaas_cli.local import LocalCluster
from quantized_checkpoint import SCHEMES, quantized_copy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

# Sequences grow past the context that rotary frequencies are scaled from.
_ORIGINAL, LONGEST = 48, 160
_VOCABULARY = 320
_NO_SECTION = "belongs to a quantised weight, and neither .* tells its format"


@dataclass(frozen=True)
class RandomCheckpoint:
    """What a seed says about a checkpoint.

    Attributes:
        config: Fields of transformers' config.
        layout: Name in `SCHEMES`; None: not quantised.
        dtype: Of what is not quantised.
        shards: Most bytes of a file of weights.
        is_old: config.json has the names of fields that transformers had before version 5.
        is_mixed: Experts are stored in bfloat16, the other weights in `dtype`.
        refusal: Part of the message with which it is refused; None: it is served.
    """

    seed: int
    config: dict[str, Any]
    layout: str | None
    dtype: torch.dtype
    shards: int
    is_old: bool
    is_mixed: bool
    refusal: str | None

    @classmethod
    def drawn(cls, seed: int) -> RandomCheckpoint:
        """Draw the settings."""
        dice = random.Random(seed)
        arch = ARCHITECTURES[seed % len(ARCHITECTURES)]
        layouts = [name for name in SCHEMES if name != "mxfp4"] if arch != "gpt_oss" else ["mxfp4"]
        layout = dice.choice(layouts) if dice.random() < 0.6 else None
        dtypes = [torch.float32, torch.float32, torch.float16]
        return cls(
            seed,
            _config(arch, dice, is_quantised=layout is not None),
            layout,
            dtype=dice.choice(dtypes if layout else [*dtypes, torch.float64]),
            shards=dice.choice((20_000, 10**9)),
            is_old=dice.random() < 0.4,
            is_mixed=layout is None and dice.random() < 0.3,
            refusal=_NO_SECTION if layout and dice.random() < 0.1 else None,
        )

    def write(self, directory: Path) -> tuple[Path, Path]:
        """Write the checkpoint; return it, and one with the same weights in float32."""
        plain, path = directory / "plain", directory / "model"
        self._write_plain(plain)
        if self.layout is not None:
            scheme = SCHEMES[self.layout]
            plain = quantized_copy(plain, path, scheme, self.dtype)
            if self.refusal is not None and scheme.file != "config.json":
                (path / scheme.file).unlink()
        else:
            self._write_converted(plain, path)
        _edit(path / "config.json", self._describe)
        return path, plain

    def _write_plain(self, path: Path) -> None:
        fields = dict(self.config)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        dice = torch.Generator().manual_seed(self.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                _fill(name, tensor, dice)
        model.save_pretrained(path, max_shard_size=self.shards)
        arch = self.config["model_type"]
        build_tokenizer(_VOCABULARY, 4096, arch).save_pretrained(path, save_jinja_files=False)
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))

    def _write_converted(self, plain: Path, path: Path) -> None:
        path.mkdir()
        for file in plain.iterdir():
            if file.suffix != ".safetensors":
                (path / file.name).write_bytes(file.read_bytes())
                continue
            tensors = {
                name: tensor.to(
                    torch.bfloat16 if self.is_mixed and ".experts." in name else self.dtype
                )
                for name, tensor in load_file(file).items()
            }
            save_file(tensors, path / file.name, {"format": "pt"})

    def _describe(self, config: dict[str, Any]) -> None:
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        if self.refusal is not None:
            config.pop("quantization_config", None)
        if self.is_old:
            rope = config.pop("rope_parameters")
            config["rope_theta"] = rope.pop("rope_theta")
            rope["type"] = rope.pop("rope_type")
            # Without one, gpt-oss has YaRN.
            is_default = rope["type"] == "default" and config["model_type"] != "gpt_oss"
            config["rope_scaling"] = None if is_default else rope
            config["torch_dtype"] = config.pop("dtype")


def _edit(file: Path, change: Any) -> None:
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def _fill(name: str, tensor: torch.Tensor, dice: torch.Generator) -> None:
    """Fill with numbers that float16 and bfloat16 hold exactly."""
    if "inv_freq" in name or not tensor.is_floating_point():
        return
    noise = torch.randn(tensor.shape, generator=dice)
    if tensor.dim() > 1 and not name.endswith("_bias"):
        noise *= 1.5 / tensor.shape[-1] ** 0.5
    elif "norm" in name:
        noise = 1 + 0.2 * noise
    else:
        noise *= 0.3
    tensor.copy_(noise.half().bfloat16())


def _config(arch: str, dice: random.Random, *, is_quantised: bool) -> dict[str, Any]:
    heads = dice.choice((2, 4))
    head_dim = dice.choice((64, 128)) if is_quantised else dice.choice((8, 16, 32))
    # Kernels of codes read groups of 32 or 128 inputs.
    hidden = dice.choice((128, 256)) if is_quantised else dice.choice((32, 48, 80, 144))
    width = dice.choice((128, 256)) if is_quantised else dice.choice((16, 24, 40))
    layers = dice.randint(2, 4)
    experts = dice.choice((4, 6, 8, 12))
    top_k = dice.randint(1, 4)
    fields: dict[str, Any] = {
        "model_type": arch,
        "vocab_size": _VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": dice.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "num_experts_per_tok": top_k,
        "rms_norm_eps": dice.choice((1e-5, 1e-6)),
        "hidden_act": dice.choice(("silu", "silu", "gelu", "gelu_pytorch_tanh", "relu")),
        "tie_word_embeddings": dice.random() < 0.3,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    fields |= _own_fields(arch, dice, fields, head_dim, width, experts, is_quantised)
    if arch in ("qwen3_moe", "qwen2_moe") and dice.random() < 0.4:
        fields |= {"decoder_sparse_step": 2} if dice.random() < 0.5 else {"mlp_only_layers": [0]}
    head_dim = fields.get("qk_rope_head_dim") or fields.get("head_dim") or hidden // heads
    return fields | _positions(head_dim, dice)


def _own_fields(
    arch: str,
    dice: random.Random,
    common: dict[str, Any],
    head_dim: int,
    width: int,
    experts: int,
    is_quantised: bool,
) -> dict[str, Any]:
    """Fields of one architecture."""
    names = ("num_attention_heads", "num_hidden_layers", "num_experts_per_tok")
    heads, layers, top_k = (common[name] for name in names)
    window = dice.choice((5, 16, 33))
    match arch:
        case "qwen3_moe":
            return {
                "head_dim": head_dim,
                "num_experts": experts,
                "intermediate_size": 2 * width,
                "moe_intermediate_size": width,
                "norm_topk_prob": dice.random() < 0.5,
                "attention_bias": dice.random() < 0.5,
                "use_sliding_window": dice.random() < 0.3,
                "sliding_window": window,
            }
        case "qwen2_moe":
            return {
                "num_experts": experts,
                "intermediate_size": 2 * width,
                "moe_intermediate_size": width,
                "shared_expert_intermediate_size": dice.choice((1, 2)) * width,
                "norm_topk_prob": dice.random() < 0.5,
                "qkv_bias": dice.random() < 0.5,
                "use_sliding_window": dice.random() < 0.5,
                "sliding_window": window,
                "max_window_layers": dice.randint(0, layers),
            }
        case "mixtral":
            return {
                "head_dim": head_dim,
                "num_local_experts": experts,
                "intermediate_size": width,
                "sliding_window": dice.choice((None, window)),
            }
        case "olmoe":
            return {
                "num_experts": experts,
                "intermediate_size": width,
                "norm_topk_prob": dice.random() < 0.5,
                "attention_bias": dice.random() < 0.5,
                "clip_qkv": dice.choice((None, 1.5)),
            }
        case "deepseek_v3":
            groups = dice.choice([g for g in (1, 2, 4) if experts % g == 0 and experts >= 2 * g])
            return {
                "num_key_value_heads": heads,
                "n_routed_experts": experts,
                "n_shared_experts": dice.choice((1, 2)),
                "first_k_dense_replace": dice.randint(0, layers - 1),
                "intermediate_size": 2 * width,
                "moe_intermediate_size": width,
                "n_group": groups,
                "topk_group": max(
                    dice.randint(1, groups),
                    -(-top_k // (experts // groups)),
                ),
                "norm_topk_prob": dice.random() < 0.5,
                "routed_scaling_factor": dice.choice((1.0, 2.5)),
                "q_lora_rank": None if dice.random() < 0.3 else 128 if is_quantised else 24,
                "kv_lora_rank": 128 if is_quantised else 20,
                "qk_rope_head_dim": dice.choice((8, 16)),
                "qk_nope_head_dim": dice.choice((8, 16)),
                "v_head_dim": 128 // heads if is_quantised else dice.choice((8, 24)),
                "rope_interleave": dice.random() < 0.7,
                "attention_bias": dice.random() < 0.5,
            }
        case "gpt_oss":
            kinds = ("sliding_attention", "full_attention")
            return {
                "head_dim": head_dim,
                "num_local_experts": experts,
                "intermediate_size": width,
                "sliding_window": window,
                "layer_types": [dice.choice(kinds) for _ in range(layers)],
                "attention_bias": dice.random() < 0.7,
                "hidden_act": "silu",
                "swiglu_limit": dice.choice((7.0, 1.0)),
                "swiglu_alpha": dice.choice((1.702, 1.0)),
            }
    raise ValueError(arch)


def _positions(head_dim: int, dice: random.Random) -> dict[str, Any]:
    kind = dice.choice(("default", "linear", "dynamic", "yarn", "llama3", "longrope"))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": dice.choice((1e4, 1e6))}
    longest = 512
    if kind != "default":
        rope["factor"] = 4.0
    match kind:
        case "dynamic":
            longest = _ORIGINAL
        case "yarn":
            rope["original_max_position_embeddings"] = _ORIGINAL
            longest = dice.choice((_ORIGINAL, 4 * _ORIGINAL))
        case "llama3":
            rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            rope["original_max_position_embeddings"] = _ORIGINAL
        case "longrope":
            rope |= {
                "short_factor": [dice.uniform(1, 1.5) for _ in range(head_dim // 2)],
                "long_factor": [dice.uniform(1, 4) for _ in range(head_dim // 2)],
                "original_max_position_embeddings": _ORIGINAL,
            }
            longest = 4 * _ORIGINAL
    return {"max_position_embeddings": longest, "rope_parameters": rope}


SEEDS = 300
# Each architecture, and each format that has a kernel: no codes, fp8, gptq-desc_act, ct-w8, ct-int4, mxfp4.
QUICK = {42, 25, 32, 3, 10, 11}
FIRST = int(os.environ.get("FIRST_CHECKPOINT", "0"))
# Of the quick seeds, and of the others.
FEW, MANY, TOKENS = 8, 16, 12


def alone(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers, whose frequencies remember longer sequences until a short one comes."""
    with torch.no_grad():
        model(torch.tensor([prompt[:1]]))
    return greedy(model, prompt, TOKENS)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.nightly] * (seed not in QUICK))
        for seed in range(FIRST, FIRST + SEEDS)
    ],
)
def test_random_checkpoint(
    start_cluster: Callable[..., LocalCluster],
    tmp_path: Path,
    seed: int,
) -> None:
    """Requests of mixed lengths at once, twice, in a cache that holds about three of them."""
    drawn = RandomCheckpoint.drawn(seed)
    print(drawn)
    path, plain = drawn.write(tmp_path)
    dice = random.Random(seed)
    prompts = [
        [dice.randrange(6, 300) for _ in range(dice.randint(1, LONGEST - TOKENS))]
        for _ in range(FEW if seed in QUICK else MANY)
    ]
    client = {"max_batch_tokens": 32, "cache_blocks": 8}
    if drawn.refusal is not None:
        with pytest.raises(EaasError, match=drawn.refusal) as refused:
            start_cluster(path, client=client)
        assert "\n" not in str(refused.value)
        return
    cluster = start_cluster(path, client=client)
    model, tokenizer = eager(plain), AutoTokenizer.from_pretrained(path)
    expected = [tokenizer.decode(alone(model, prompt)) for prompt in prompts]
    for _ in range(2):
        found = answers(cluster.endpoint, prompts, TOKENS, skip_special_tokens=False)
        assert found == expected
