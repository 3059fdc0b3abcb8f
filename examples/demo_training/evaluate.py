"""Evaluation: loss on held-out text, routing by domain, and samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from simulator.routing import total_variation

from .corpus import Corpus
from .sources import DOMAINS

__all__ = ["SAMPLE_PROMPTS", "Evaluation", "evaluate", "sample"]

_SEQUENCES, _LENGTH = 16, 512
SAMPLE_PROMPTS = {
    "code": 'def read_lines(path, encoding="utf-8"):\n    """Return',
    "prose": "And it came to pass in the evening that the men of the city",
    "german": "Mit diesem Befehl können Sie",
    "manual": "DESCRIPTION\n       The function returns a pointer to the",
}


@dataclass(frozen=True)
class Evaluation:
    """Of held-out text, by domain.

    Attributes:
        loss: Nats a token.
        bits: Bits a byte of text.
        apart: Total-variation distance of the experts' loads of two domains, a mean over layers (0 the
            same experts, 1 no expert in common).
        noise: The same for two halves of one domain's text: what is left of it without a difference.
        hottest: A layer's hottest expert over the mean, a mean over layers; by domain.
    """

    loss: dict[str, float]
    bits: dict[str, float]
    apart: dict[tuple[str, str], float]
    noise: dict[str, float]
    hottest: dict[str, float]


@torch.no_grad()
def evaluate(model: Any, tokenizer: Any, corpus: Corpus) -> Evaluation:
    """Read 8,192 held-out tokens of each domain, evenly spread."""
    loss, bits, loads = {}, {}, {}
    for domain in DOMAINS:
        ids = corpus.held_out[domain]
        starts = np.linspace(0, len(ids) - _LENGTH - 1, _SEQUENCES).astype(int)
        rows = [ids[s : s + _LENGTH].astype(np.int64) for s in starts]
        nats, halves = 0.0, []
        for half in (rows[::2], rows[1::2]):
            batch = torch.from_numpy(np.stack(half)).to(model.device)
            out = model(input_ids=batch, labels=batch, use_cache=False, output_router_logits=True)
            logits = out.logits[:, :-1].float().flatten(0, 1)
            picked = batch[:, 1:].flatten()
            nats += float(torch.nn.functional.cross_entropy(logits, picked, reduction="sum"))
            halves.append(_loads(out.router_logits, model.config.num_experts_per_tok))
        loads[domain] = halves
        size = sum(len(tokenizer.decode(row[1:].tolist()).encode()) for row in rows)
        loss[domain] = nats / (len(rows) * (_LENGTH - 1))
        bits[domain] = nats / np.log(2) / size
    total = {domain: sum(halves) for domain, halves in loads.items()}
    apart = {
        (a, b): float(total_variation(total[a], total[b]).mean())
        for i, a in enumerate(DOMAINS)
        for b in DOMAINS[i + 1 :]
    }
    noise = {d: float(total_variation(*halves).mean()) for d, halves in loads.items()}
    hottest = {d: float((x.max(1) / x.mean(1)).mean()) for d, x in total.items()}
    return Evaluation(loss, bits, apart, noise, hottest)


def _loads(router_logits: Any, top_k: int) -> np.ndarray:
    """Tokens of each layer and expert (L, E)."""
    loads = []
    for logits_TE in router_logits:
        chosen = logits_TE.float().topk(top_k, dim=-1).indices.flatten()
        loads.append(torch.bincount(chosen, minlength=logits_TE.shape[1]))
    return torch.stack(loads).double().cpu().numpy()


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompt: str, tokens: int = 60) -> str:
    """A continuation, sampled as `generation_config.json` says, with a fixed seed."""
    torch.manual_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    ids = model.generate(**inputs, max_new_tokens=tokens)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))
