"""Records a routing trace of a checkpoint while it answers prompts.

Routers run in this process (as in an attention client), so they choose the same experts whether the experts
run here or on a cluster's servers. transformers calls each layer's experts module with the experts chosen
for each token (`attention_client.engines.transformers.model`), and a hook in front of each module counts
them. One forward pass is one iteration: first a batch's prompts, then one token of each sequence at a time.
Padding and finished sequences are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from attention_client import load
from attention_client.engines.transformers.live_rows import LiveRows
from attention_client.layer_call.turns import micro_batch_tokens
from eaas.checkpoint import Checkpoint, quiet_transformers
from eaas.errors import CheckpointError, ConfigError, MissingShardError
from eaas.hub_cache import model_name
from eaas.log import one_line
from simulator.traces.trace import Trace, checked_counts

__all__ = ["PROMPTS", "read_prompts", "record_trace"]

# The fastest experts implementation of transformers on a CPU.
_IMPLEMENTATION = "grouped_mm"
PROMPTS = (
    "Explain to a child why the sky is blue.",
    "def quicksort(items):",
    "Translate into French: the train leaves at noon.",
    "A farmer has 17 sheep, and all but 9 run away. How many are left?",
    "Write the first lines of a story about a lighthouse.",
    "List the planets in order of their distance from the sun.",
    "SELECT name, COUNT(*) FROM orders",
    "What are the side effects of aspirin?",
)


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read prompts, the non-empty lines of a text file. Raises ConfigError if there are none."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--prompts {path} cannot be read ({error}): give a text file, one prompt a line"
        ) from error
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise ConfigError(f"--prompts {path} holds no prompt: give one a line")
    return prompts


def record_trace(
    model_path: Path,
    prompts: Sequence[str] = PROMPTS,
    *,
    batch: int = 8,
    max_tokens: int = 32,
    temperature: float = 0.0,
    endpoint: str | None = None,
    progress: Callable[[float], None] = lambda _part: None,
) -> Trace:
    """Answer prompts and record the routers' choices as a trace, for `eaas trace record`.

    Args:
        model_path: Directory of a Hugging Face MoE checkpoint; the whole model must fit into memory, unless a
            cluster has its experts.
        temperature: 0: greedy decoding; above 0: tokens are drawn with a fixed seed.
        endpoint: URL of the endpoint, or host:port of the monitor, of a cluster that computes the experts.
            None: this process computes them.
        progress: Called with the part done, 0 to 1.

    Raises:
        CheckpointError: The checkpoint cannot be used (see its subclasses).
        ClusterError: No cluster that serves this checkpoint answers at the endpoint.
    """
    checkpoint = Checkpoint.open(model_path)
    shape = checkpoint.shape
    tokenizer = _load_tokenizer(checkpoint.path)
    model = _load_whole(checkpoint.path) if endpoint is None else load(model_path, endpoint)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.generation_config = _decoding(
        model.generation_config, temperature, tokenizer.pad_token_id
    )
    recorder = _Recorder(model, shape.layer_names, shape.num_experts)
    for begin in range(0, len(prompts), batch):
        inputs = tokenizer(
            list(prompts[begin : begin + batch]), return_tensors="pt", padding=True
        ).to(model.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(begin)
            model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=max_tokens,
            )
        progress(min(1.0, (begin + batch) / len(prompts)))
    notes = {
        "model": model_name(model_path.resolve()),
        "model_type": shape.model_type,
        "top_k": shape.top_k,
        "prompts": len(prompts),
        "batch": batch,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "experts": "in this process" if endpoint is None else "in a cluster",
    }
    return Trace(checked_counts(np.array(recorder.counts_ILE), model_path), notes)


def _load_tokenizer(path: Path) -> Any:
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(path, local_files_only=True, padding_side="left")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} has no tokenizer that can be used ({one_line(error)}): complete the download"
        ) from error


def _load_whole(path: Path) -> Any:
    with quiet_transformers():
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            local_files_only=True,
            dtype="auto",
            experts_implementation=_IMPLEMENTATION,
            output_loading_info=True,
        )
    if report["missing_keys"]:
        # transformers would fill missing weights with random numbers.
        names = ", ".join(sorted(report["missing_keys"])[:3])
        raise MissingShardError(f"{path} lacks tensors, among them {names}: complete the download")
    return model.eval().requires_grad_(False)


def _decoding(stored: GenerationConfig, temperature: float, pad_id: int) -> GenerationConfig:
    """Make settings to generate with: greedy, or sampling from all tokens; the model's end tokens stay."""
    sampling = {"temperature": temperature, "top_k": 0} if temperature > 0 else {}
    return GenerationConfig(
        do_sample=temperature > 0,
        bos_token_id=stored.bos_token_id,
        eos_token_id=stored.eos_token_id,
        pad_token_id=pad_id,
        **sampling,
    )


class _Recorder:
    """Hooks on a model's experts modules that count the routers' choices.

    Attributes:
        counts_ILE: A list of int64 (L, E), one for each forward pass.
    """

    def __init__(self, model: Any, layer_names: Sequence[str], experts: int) -> None:
        self.counts_ILE: list[npt.NDArray[np.int64]] = []
        self._rows = LiveRows()
        self._rows.attach(model)
        model.register_forward_pre_hook(
            lambda *_: self.counts_ILE.append(np.zeros((len(layer_names), experts), np.int64))
        )
        for layer, name in enumerate(layer_names):
            model.get_submodule(name).register_forward_pre_hook(
                self._counter(layer), with_kwargs=True
            )

    def _counter(self, layer: int) -> Callable[..., None]:
        def count(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids_TK: torch.Tensor = args[1] if len(args) > 1 else kwargs["top_k_index"]
            # With overlap, a batch passes the layers in two halves.
            wanted_T = self._rows.wanted(ids_TK.shape[0], micro_batch_tokens())
            if wanted_T is not None:
                ids_TK = ids_TK[wanted_T]
            counts_E = self.counts_ILE[-1][layer]
            counts_E += np.bincount(ids_TK.flatten().cpu().numpy(), minlength=len(counts_E))

        return count
