"""How well a router dry-run knows what a request will load, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from attention_client.cluster import Cluster
from attention_client.dry_run import RouterDryRun
from attention_client.model import load_model
from attention_client.scheduler.predictor import Predictor, correlation
from eaas.bench.baseline import LocalExperts

__all__ = ["bench_predict", "domain_prompts"]

Counts = npt.NDArray[np.float64]

_DOMAINS, _DOMAIN_TOKENS = 8, 24


def domain_prompts(vocabulary: int, prompts: int, tokens: int) -> list[list[int]]:
    """Prompts of a few domains, each with some tokens of its own that are as frequent as words are (Zipf)."""
    rng = np.random.default_rng([vocabulary, tokens])
    least = min(16, vocabulary - 1)  # below are often special ones
    domain_DT = rng.integers(least, vocabulary, (_DOMAINS, _DOMAIN_TOKENS))
    chance_T = 1 / np.arange(1, _DOMAIN_TOKENS + 1)
    chance_T /= chance_T.sum()
    return [
        rng.choice(domain_DT[number % _DOMAINS], tokens, p=chance_T).tolist()
        for number in range(prompts)
    ]


def bench_predict(
    model_path: Path,
    prompts: Callable[[int], Sequence[Sequence[int]]],
    output_tokens: int,
    threads: int,
    done: Callable[[], None],
) -> dict[str, Any]:
    """Compare predicted loads with true ones, with all of the model in this process.

    Args:
        model_path: Checkpoint.
        prompts: From the size of its vocabulary to prompts, two at least.
        output_tokens: Of each answer; decoding is greedy.
        threads: Of the experts' kernel and of torch.
        done: Called after each prompt.

    Returns:
        JSON: for each MoE layer, means over prompts of the correlation of a dry-run with what prefill sees of
        the prompt (`prompt`) and with what decoding loads (`answer`), and of what prefill sees with what
        decoding loads (`seen`: what correcting can come to); each also for the deviation of a request from
        the mean one, which is what tells requests apart (`..._own`). And microseconds per prompt token of the
        dry-run of all layers, of a prediction from a known prefix, and of prefill.

    Raises:
        CheckpointError: Nothing that can be served.
    """
    torch.set_num_threads(threads)
    experts = LocalExperts(model_path, threads)
    shape = experts.checkpoint.shape
    model = load_model(experts.checkpoint, cast("Cluster", experts))
    dry_run = RouterDryRun(model, shape.num_layers)
    given = prompts(model.config.get_text_config().vocab_size)
    predictor = Predictor(dry_run, dry_run.layers, shape.num_experts, shape.top_k)
    sizes = (shape.num_layers, shape.num_experts)
    dry, prompt, answer = (np.zeros((len(given), *sizes)) for _ in range(3))
    seconds = {"dry_run": 0.0, "known_prefix": 0.0, "prefill": 0.0}
    for number, tokens in enumerate(given):
        begin = time.perf_counter()
        ids_LTK = dry_run(tokens)
        seconds["dry_run"] += time.perf_counter() - begin
        predictor.predict(tokens)
        begin = time.perf_counter()
        predictor.predict(tokens)
        seconds["known_prefix"] += time.perf_counter() - begin
        seen_LTK, prefill_s = _run(model, dry_run, tokens, output_tokens)
        seconds["prefill"] += prefill_s
        dry[number] = _load(ids_LTK, shape.num_experts)
        prompt[number] = _load(seen_LTK[:, : len(tokens)], shape.num_experts)
        answer[number] = _load(seen_LTK[:, len(tokens) :], shape.num_experts)
        done()
    total = sum(map(len, given))
    pairs = {"prompt": (dry, prompt), "answer": (dry, answer), "seen": (prompt, answer)}
    rows = [
        {"layer": layer}
        | {
            f"{name}{kind}": _mean_correlation(a_NLE[:, layer], b_NLE[:, layer], bool(kind))
            for name, (a_NLE, b_NLE) in pairs.items()
            for kind in ("", "_own")
        }
        for layer in range(shape.num_layers)
    ]
    return {
        "model": model_path.name,
        "prompts": len(given),
        "prompt_tokens": total,
        "output_tokens": output_tokens,
        "layers": rows,
        "us_per_token": {name: round(1e6 * spent / total, 2) for name, spent in seconds.items()},
    }


def _run(
    model: Any, dry_run: RouterDryRun, tokens: Sequence[int], output_tokens: int
) -> tuple[npt.NDArray[np.int64], float]:
    """The experts of prompt and answer, and the time of prefill."""
    prompt_1T = torch.tensor([tokens])
    with torch.inference_mode():
        begin = time.perf_counter()
        model(input_ids=prompt_1T, use_cache=False)
        prefill_s = time.perf_counter() - begin
        whole_1T = model.generate(
            prompt_1T,
            attention_mask=torch.ones_like(prompt_1T),
            max_new_tokens=output_tokens,
            min_new_tokens=output_tokens,
            do_sample=False,
        )
        # A token's experts depend on what was before it only: one pass shows what decoding did.
        with dry_run.tap.watching(dry_run.layers) as seen:
            model(input_ids=whole_1T, use_cache=False)
    seen_LTK = seen.ids_LTK()
    assert seen_LTK is not None
    return seen_LTK, prefill_s


def _load(ids_LTK: npt.NDArray[Any], experts: int) -> Counts:
    """Pairs per token, (L, E)."""
    rows = [np.bincount(ids_TK.ravel(), minlength=experts) for ids_TK in ids_LTK]
    load_LE: Counts = np.array(rows) / ids_LTK.shape[1]
    return load_LE


def _mean_correlation(a_NE: Counts, b_NE: Counts, own: bool) -> float:
    if own:
        a_NE, b_NE = a_NE - a_NE.mean(axis=0), b_NE - b_NE.mean(axis=0)
    found = [correlation(a_E, b_E) for a_E, b_E in zip(a_NE, b_NE, strict=True)]
    return round(float(np.mean(found)), 3)
